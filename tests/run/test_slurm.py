"""On a real Slurm: shards that are preempted or run out of time lose nothing and repeat nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mhaprune.measure.leave_one_out import plan
from mhaprune.model.heads import select_heads
from mhaprune.run.config import CONF_DIR

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = CONF_DIR.parent
SCRIPT = ROOT / "scripts" / "local_slurm.sh"
NUM_SHARDS, NUM_WINDOWS, WINDOWS_PER_UNIT = 4, 160, 4
PREEMPTED, OUT_OF_TIME, LEFT_ALONE = (0, 1), 2, 3
WORK = [
    *(f"evaluation.max_windows={NUM_WINDOWS}", f"evaluation.windows_per_unit={WINDOWS_PER_UNIT}"),
    *("evaluation.resamples=200", "roles.windows=0", "tracker=none"),
]
UNITS = [
    (unit.layer, list(unit.windows))
    for unit in plan(select_heads(["L*H*"], 4, 8), range(NUM_WINDOWS), WINDOWS_PER_UNIT)
]
Environment = dict[str, str]


def environment_of(place: Path) -> Environment:
    ours = {"LOCAL_SLURM_DIR": str(place), "SLURM_CONF": str(place / "slurm.conf")}
    return {**os.environ, **ours, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def may_start() -> None:
    """Skip where there is no Slurm, or where we may not start it."""
    programs = [*("munged", "slurmctld", "slurmd"), *("sinfo", "srun", "sbatch")]
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in programs if not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm cluster")


@pytest.fixture(scope="module")
def cluster(may_start: None) -> Iterator[Environment]:
    """A cluster with two processors, to be reached with this environment."""
    if find_spec("submitit") is None:
        pytest.skip("hydra-submitit-launcher is not installed")
    # Not below pytest's own directory, which others than its owner may not enter: munge minds.
    place = Path(tempfile.gettempdir()) / f"mhaprune_slurm_{os.getpid()}"
    environment = environment_of(place)
    try:
        subprocess.run([SCRIPT, "up"], env=environment, check=True, timeout=120)
        yield environment
    finally:
        if place.exists():
            subprocess.run([SCRIPT, "down"], env=environment, check=True, timeout=120)


def until(what: str, is_so: Callable[[], object], process: subprocess.Popen[Any]) -> None:
    """Wait for it, five minutes at most, while the process runs."""
    end = time.monotonic() + 300
    while not is_so():
        assert process.poll() is None, f"the sweep ended before {what}"
        assert time.monotonic() < end, f"no {what} after five minutes"
        time.sleep(0.1)


# ---- a sweep of four shards, of which three are stopped while they measure


@dataclass(frozen=True)
class Sweep:
    """How a sharded run ended, with the directory of an unsharded one beside it."""

    whole: Path
    directory: Path
    exit_code: int
    restarts: dict[int, int]

    @property
    def shared(self) -> Path:
        """Where the shards work together."""
        [store] = self.directory.glob("*/measurements.jsonl")
        return store.parent

    def log(self, shard: int) -> str:
        """What a shard printed, in all its attempts."""
        [log] = self.directory.glob(f".submitit/*_{shard}_0_log.out")
        return log.read_text()


def records_in(directory: Path) -> list[dict[str, Any]]:
    """Every whole line of the measurements of the run below this directory, if there is one yet."""
    contents = [path.read_text() for path in directory.glob("*/measurements.jsonl")]
    lines = [line for content in contents for line in content.splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def shard_of(record: dict[str, Any]) -> int:
    return UNITS.index((record["layer"], record["windows"])) * NUM_SHARDS // len(UNITS)


def restarts(environment: Environment) -> dict[int, int]:
    """How often each shard was queued again."""
    command = ["scontrol", "show", "jobs", "--oneliner"]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    pattern = r"ArrayTaskId=(\d+) .* Restarts=(\d+)"
    found = (re.search(pattern, line) for line in shown.stdout.splitlines())
    return {int(match[1]): int(match[2]) for match in found if match}


def array_id(directory: Path) -> str:
    [name] = {path.name.partition("_")[0] for path in directory.glob(".submitit/*_0_log.out")}
    return name


@pytest.fixture(scope="module")
def sweep(cluster: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """Let an urgent job push two shards aside, and tell a third that its time is up."""
    place = tmp_path_factory.mktemp("sweep")
    program = [sys.executable, str(ROOT / "experiments" / "rank_heads.py")]
    options: dict[str, Any] = {"cwd": place, "env": cluster}
    subprocess.run([*program, *WORK, "hydra.run.dir=whole"], **options, check=True, timeout=600)
    launcher = ["hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1"]
    shards = [f"shard.count={NUM_SHARDS}", *launcher, "hydra.sweep.dir=sweep"]
    process = subprocess.Popen([*program, "-m", *WORK, *shards], **options)
    directory = place / "sweep"

    def measured(*shards: int) -> bool:
        counts = Counter(shard_of(record) for record in records_in(directory))
        return all(counts[shard] >= 2 for shard in shards)

    try:
        until("measurements of two shards", lambda: measured(*PREEMPTED), process)
        urgent = ["sbatch", "--partition=urgent", "--cpus-per-task=2", "--output=/dev/null"]
        subprocess.run([*urgent, "--wrap=true"], **options, check=True)
        until("measurements of a third", lambda: measured(OUT_OF_TIME), process)
        # What Slurm sends a while before a job's time is up.
        task = f"{array_id(directory)}_{OUT_OF_TIME}"
        subprocess.run(["scancel", "--signal=USR2", task], **options, check=True)
        exit_code = process.wait(timeout=600)
    finally:
        process.kill()
    yield Sweep(place / "whole", directory, exit_code, restarts(cluster))


def test_the_shards_that_were_stopped_were_queued_again_by_slurm(sweep):
    assert sweep.restarts == {**dict.fromkeys(PREEMPTED, 1), OUT_OF_TIME: 1, LEFT_ALONE: 0}
    for shard, again in sweep.restarts.items():
        assert sweep.log(shard).count(f"Shard {shard} of {NUM_SHARDS}") == 1 + again


def test_the_sweep_ends_well_with_the_bytes_of_an_unsharded_run(sweep):
    assert sweep.exit_code == 0
    assert list(sweep.directory.glob("*/failed.json")) == []
    for name in ("effects.csv", "summary.json"):
        assert (sweep.shared / name).read_bytes() == (sweep.whole / name).read_bytes()


def test_every_unit_of_work_is_recorded_once(sweep):
    recorded = [(record["layer"], record["windows"]) for record in records_in(sweep.directory)]
    assert sorted(recorded, key=str) == sorted(UNITS, key=str)
    content = (sweep.shared / "measurements.jsonl").read_text()
    assert content.count("\n") == len(UNITS)  # nothing torn either


def test_a_shard_that_comes_back_skips_what_it_had_measured(sweep):
    share = len(UNITS) // NUM_SHARDS
    pattern = rf"(\d+) of {share} units of work are measured already, and skipped"
    for shard in (*PREEMPTED, OUT_OF_TIME):
        [skipped] = re.findall(pattern, sweep.log(shard))
        assert 2 <= int(skipped) < share
    assert re.findall(pattern, sweep.log(LEFT_ALONE)) == []


# ---- the script


def test_a_command_is_run_with_an_idle_cluster_that_is_gone_afterwards(may_start, tmp_path):
    place = Path(tempfile.gettempdir()) / f"mhaprune_slurm_run_{os.getpid()}"
    command = "sinfo --noheader --format=%T; srun true && echo $SLURM_CONF; exit 3"
    done = subprocess.run(
        [SCRIPT, "run", "bash", "-c", command],
        env=environment_of(place),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3
    *states, conf = done.stdout.split()
    assert set(states) == {"idle"}
    assert conf.startswith(str(place)) and conf.endswith("/slurm.conf")
    assert not Path(conf).parent.exists()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(str(Path(conf).parent).encode() in command for command in commands)


def test_what_is_not_there_cannot_be_taken_down(tmp_path):
    environment = environment_of(tmp_path / "nothing")
    done = subprocess.run([SCRIPT, "down"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"local_slurm: no cluster in {tmp_path}/nothing\n"
