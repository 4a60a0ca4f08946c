"""How a program starts from its configuration: alone, as the jobs of a sweep, or again.

A program gets a validated dataclass and its run directory. Whatever is wrong with a configuration
is one line and exit code 2; a job of a sweep that fails does not stop the others.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mhaprune.run.config import CONF_DIR, Schema, validate
from mhaprune.run.exits import plain_exits
from mhaprune.run.measuring import OthersAtWork
from mhaprune.run.mistakes import one_line
from mhaprune.tables.files import write_atomically, write_json
from mhaprune.tables.manifest import split_command


def run_program(
    task: Callable[[Schema, Path], None],
    schema: type[Schema],
    config_name: str,
    after_job: Callable[[Path], object] = lambda directory: None,
) -> None:
    """Start a program: `task(config, run_directory)`, once or, with `-m`, for each job.

    In a sweep, a job that fails leaves `failed.json` and the others run; `after_job(run_directory)`
    follows each job, failed or not. The configuration files of a sweep are copied when it starts.

    `resume=RUN_DIR` goes on with the configuration that the run was started with. For exit codes
    see `plain_exits`; in a sweep, Hydra first says which job failed, and the other jobs run.
    """

    def run(config: Mapping[str, Any]) -> None:
        sys.argv = command  # a job in another process has that process's, and the manifest asks
        directory = Path(HydraConfig.get().runtime.output_dir)
        if HydraConfig.get().mode is RunMode.RUN:
            with plain_exits(directory), suppress(OthersAtWork):
                task(validate(config, schema), directory)
            return
        with job_of_sweep(directory, after_job):
            valid = validate(in_group(config, directory.parent.name), schema)
            check_siblings(config["failure"], directory)
            with suppress(OthersAtWork):
                task(valid, shared_directory(config, directory))

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise to us instead of printing and exiting
    with plain_exits():
        started, arguments = split_command(sys.argv)
        resumed = [argument for argument in arguments if argument.startswith("resume=")]
        if resumed:
            directory = resumed_directory(resumed[0].removeprefix("resume="), arguments)
            saved = OmegaConf.load(directory / ".hydra" / "config.yaml")
            assert isinstance(saved, DictConfig)
            if "shard" in saved:
                saved.shard = {"count": 1, "index": 0}  # what is left is left to this job alone
            sweep = directory.resolve().parent
            in_sweep = (sweep / "multirun.yaml").exists()
            own = in_group(saved, sweep.name) if in_sweep else saved
            with plain_exits(directory):
                task(validate(own, schema), directory)
        else:
            refuse_used_directory(arguments)
            arguments, conf = with_shards(arguments), CONF_DIR
            command = [*started, *arguments]
            if is_sweep(arguments):
                conf, arguments = keep_conf(arguments, Path("runs") / ".conf")
            sys.argv = [" ".join(started), *arguments]  # from where Hydra reads them
            start = hydra.main(version_base="1.3", config_path=str(conf), config_name=config_name)
            start(run)()


@contextmanager
def job_of_sweep(directory: Path, after_job: Callable[[Path], object]) -> Iterator[None]:
    """Keep a note of a job's failure in its directory, for the index and for the other jobs."""
    failure = directory / "failed.json"
    failure.unlink(missing_ok=True)
    try:
        yield
    except SystemExit:  # no failure: the scheduler stops the job and will start it again
        raise
    except BaseException as error:
        write_json(failure, {"error": one_line(error)})
        raise
    finally:
        after_job(directory)


def in_group(config: Mapping[str, Any], sweep: str) -> Mapping[str, Any]:
    """Put the W&B run into its sweep's group, unless the configuration names another."""
    if config["tracker"]["group"] is not None:
        return config
    grouped = OmegaConf.merge(config, {"tracker": {"group": sweep}})
    assert isinstance(grouped, DictConfig)
    return grouped


def check_siblings(failure: str, directory: Path) -> None:
    """Raise ValueError where `failure=stop` and another job of the sweep has failed.

    What failed before the sweep was launched, in the same directory, does not count.
    """
    launch = directory.parent / "multirun.yaml"
    launched = launch.stat().st_mtime_ns if launch.exists() else 0
    failed = sorted(
        path.parent.name
        for path in directory.parent.glob("*/failed.json")
        if path.stat().st_mtime_ns >= launched
    )
    if failure == "stop" and failed:
        raise ValueError(f"not started: job {failed[0]} failed, and failure=stop")


def with_shards(arguments: Sequence[str]) -> list[str]:
    """Return a sweep's arguments with a job for each shard where only their number is given."""
    counts = [x.partition("=")[2] for x in arguments if x.startswith("shard.count=")]
    given = any(argument.startswith("shard.index=") for argument in arguments)
    if given or len(counts) != 1 or not counts[0].isdigit() or not is_sweep(arguments):
        return list(arguments)
    at = arguments.index(f"shard.count={counts[0]}") + 1  # Hydra wants its overrides in one piece
    return [*arguments[:at], f"shard.index=range({counts[0]})", *arguments[at:]]


def is_sweep(arguments: Sequence[str]) -> bool:
    return not {"-m", "--multirun"}.isdisjoint(arguments)


def shared_directory(config: Mapping[str, Any], directory: Path) -> Path:
    """Return where a sweep's job works: its own directory, or the one that its shards share.

    That lies beside the jobs' own, is named after the configuration without `shard.index`, and gets
    that configuration, so that it is a run like any other.
    """
    if "shard" not in config or config["shard"]["count"] == 1:
        return directory
    whole = OmegaConf.merge(config, {"shard": {"index": 0}})
    text = OmegaConf.to_yaml(whole, resolve=True)
    name = directory.name.partition("_")[2]
    place = directory.with_name(f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    (place / ".hydra").mkdir(parents=True, exist_ok=True)
    for file in ("config.yaml", "hydra.yaml"):
        content = text if file == "config.yaml" else (directory / ".hydra" / file).read_text()
        write_atomically(place / ".hydra" / file, content)
    return place


def keep_conf(arguments: Sequence[str], into: Path) -> tuple[Path, list[str]]:
    """Copy all configuration files of a sweep; return where they are, and arguments saying so.

    `--config-dir`, Hydra's option for the user's own files, then names the copy of these.
    """
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--config-dir", "-cd", type=Path)
    own, others = options.parse_known_args(arguments)
    conf = snapshot(CONF_DIR, into)
    if own.config_dir is None or not own.config_dir.is_dir():  # the latter Hydra complains about
        return conf, list(arguments)
    return conf, ["--config-dir", str(snapshot(own.config_dir, into)), *others]


def snapshot(conf: Path, into: Path) -> Path:
    """Copy the configuration files to a directory named after their content, and return it.

    The jobs of a sweep read them when they start, which may be hours after the launch: whoever
    edits a file in between means the next sweep.
    """
    files = {path.relative_to(conf): path.read_bytes() for path in sorted(conf.rglob("*.yaml"))}
    name = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
    place = into.resolve() / name
    if not place.exists():
        temporary = place.with_name(f".{name}.{os.getpid()}.tmp")
        temporary.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            (temporary / path).write_bytes(content)
        with suppress(OSError):  # another launch was faster
            temporary.rename(place)
    return place


def resumed_directory(value: str, arguments: list[str]) -> Path:
    """Return the run to resume; ValueError where there is none, or where more is asked."""
    others = [argument for argument in arguments if not argument.startswith("resume=")]
    if others:
        raise ValueError(
            f"resume takes the configuration of the run it resumes; leave out {' '.join(others)}"
        )
    directory = Path(value)
    if not (directory / ".hydra" / "config.yaml").is_file():
        raise ValueError(f"resume={value}: no run there (no {value}/.hydra/config.yaml)")
    return directory


def refuse_used_directory(arguments: list[str]) -> None:
    """Raise ValueError where the run directory asked for already holds a run."""
    if any(argument.startswith("shard.index=") for argument in arguments):
        return  # jobs that share the directory
    for argument in arguments:
        value = argument.removeprefix("hydra.run.dir=")
        if value != argument and (Path(value) / "manifest.json").exists():
            raise ValueError(
                f"{value} already holds a run; go on with it by resume={value}, or choose another "
                f"directory"
            )
