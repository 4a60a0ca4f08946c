"""A sweep by each of Hydra's launchers: a run for each job, and one that fails stops no other."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from mhaprune.run.config import CONF_DIR
from mhaprune.run.mistakes import one_line

ROOT = CONF_DIR.parent
PACKAGES = {
    "basic": "hydra-core",
    "cores": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "ray": "hydra-ray-launcher",
}
# Two stories are too few windows for adaptive measuring, which shows when W&B is told already.
JOBS = ("0_demo_stories_zero", "1_demo_stories_zero", "2_demo_stories_zero")
TOO_SHORT, *LONG_ENOUGH = JOBS
ARGUMENTS = [
    *("dataset.num_stories=1,20,21", "evaluation.sampling=adaptive", "evaluation.max_windows=9"),
    *("evaluation.context_length=32", "heads=[L0H0]", "roles.windows=0", "tracker=offline"),
]
WHY = "adaptive measuring takes at least 8 windows, got "


@dataclass(frozen=True)
class Sweep:
    """The directory of a sweep of three jobs, what it was asked, and how it ended."""

    directory: Path
    arguments: list[str]
    exit_code: int
    errors: str


def has(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def sweep_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sweep]:
    """Sweep by a launcher, once."""

    @cache
    def sweep(launcher: str) -> Sweep:
        place = tmp_path_factory.mktemp(launcher)
        arguments = ["-m", *ARGUMENTS, f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        done = subprocess.run(
            [sys.executable, str(ROOT / "experiments" / "rank_heads.py"), *arguments],
            cwd=place,
            env=kept | {"HOME": str(place), "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return Sweep(place / "sweep", arguments, done.returncode, done.stderr)

    return sweep


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name == "basic" else pytest.mark.slow) for name in PACKAGES
    ]
)
def sweep(request: pytest.FixtureRequest, sweep_by: Callable[[str], Sweep]) -> Sweep:
    if not has(PACKAGES[request.param]):
        pytest.skip(f"{PACKAGES[request.param]} is not installed")
    return sweep_by(request.param)


def wandb_records(run: Path) -> list[dict[str, Any]]:
    """What a run's only W&B file says."""
    [file] = run.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- three jobs, of which the first fails


def test_the_jobs_beside_one_that_fails_end_with_the_effects_that_were_asked_for(sweep, sweep_by):
    for name in LONG_ENOUGH:
        with (sweep.directory / name / "effects.csv").open(newline="") as file:
            [row] = csv.DictReader(file)
        assert [row[key] for key in ("layer", "head", "num_windows")] == ["0", "0", "9"]
    found = [
        [(each.directory / name / "effects.csv").read_bytes() for name in LONG_ENOUGH]
        for each in (sweep, sweep_by("basic"))
    ]
    assert found[0] == found[1]


def test_a_job_that_fails_says_why_in_one_line_and_the_sweep_ends_with_an_error(sweep):
    assert sweep.exit_code == 2
    failures = list(sweep.directory.glob("*/failed.json"))
    assert failures == [sweep.directory / TOO_SHORT / "failed.json"]
    why = json.loads(failures[0].read_text())["error"]
    assert why.startswith(WHY)
    assert f"error: {why}" in sweep.errors.splitlines()
    assert not (sweep.directory / TOO_SHORT / "effects.csv").exists()


def test_each_job_is_a_w_and_b_run_of_one_group_and_the_one_that_failed_is_marked(sweep):
    ended = {}
    for name in JOBS:
        records = wandb_records(sweep.directory / name)
        [run] = [record["run"] for record in records if record["type"] == "run"]
        [end] = [record["exit"] for record in records if record["type"] == "exit"]
        assert (run["run_group"], run["display_name"]) == ("sweep", name)
        ended[name] = end.get("exit_code", 0)  # a zero need not be written
    assert ended == {TOO_SHORT: 1, **dict.fromkeys(LONG_ENOUGH, 0)}


def test_the_index_shows_which_jobs_finished_and_why_one_did_not(sweep):
    page = (sweep.directory / "index.html").read_text()
    assert f"failed: {WHY}" in page
    for name in LONG_ENOUGH:
        assert f"{name}/report.html" in page
    assert f"{TOO_SHORT}/report.html" not in page
    assert "not finished" not in page


def test_the_manifest_says_how_the_sweep_was_started_not_what_the_launcher_started(sweep):
    for name in LONG_ENOUGH:
        command = json.loads((sweep.directory / name / "manifest.json").read_text())["command"]
        assert Path(command[0]).name == "rank_heads.py"
        assert command[1:] == sweep.arguments


# ---- settings


def launcher_settings(name: str) -> DictConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        made = compose("rank_heads", [f"hydra/launcher={name}"], return_hydra_config=True)
    return made.hydra.launcher


@pytest.mark.skipif(not has(PACKAGES["submitit_local"]), reason="submitit is not installed")
def test_on_slurm_a_job_that_runs_out_of_time_is_queued_again_and_keeps_to_its_cores():
    settings = launcher_settings("slurm")
    assert settings._target_.endswith(".SlurmLauncher")
    assert settings.max_num_timeout > 0
    assert settings.setup == ["export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"]
    assert settings.cpus_per_task == 4
    unresolved = OmegaConf.to_container(settings)
    assert isinstance(unresolved, dict)
    assert unresolved["submitit_folder"] == "${hydra.sweep.dir}/.submitit"


@pytest.mark.skipif(not has(PACKAGES["cores"]), reason="joblib is not installed")
def test_on_cores_there_is_a_job_for_each():
    settings = launcher_settings("cores")
    assert settings._target_.endswith(".JoblibLauncher")
    assert settings.n_jobs == -1


@pytest.mark.skipif(not has(PACKAGES["ray"]), reason="ray is not installed")
def test_a_ray_cluster_is_joined_without_the_memory_setting_that_it_would_refuse():
    settings = launcher_settings("ray_cluster")
    assert settings._target_.endswith(".RayLauncher")
    assert settings.ray.init == {"address": "auto", "object_store_memory": None}
    assert settings.ray.remote == {"num_cpus": 1}


def test_every_ready_made_setting_is_one_of_those_tested():
    names = {path.stem for path in (CONF_DIR / "hydra" / "launcher").glob("*.yaml")}
    assert names == {"cores", "slurm", "ray_cluster"}


@pytest.mark.parametrize(
    ("launcher", "extra"),
    [
        ("joblib", "joblib"),
        ("submitit_local", "slurm"),
        ("submitit_slurm", "slurm"),
        ("ray", "ray"),
    ],
)
def test_a_launcher_that_is_not_installed_says_what_to_install(launcher, extra):
    error = MissingConfigException(
        f"In 'hydra/launcher/some': Could not load 'hydra/launcher/{launcher}'.\n\nConfig search",
        missing_cfg_file=f"hydra/launcher/{launcher}",
    )
    assert one_line(error) == (
        f"hydra/launcher={launcher} is not installed; get it by "
        f"pip install -c constraints.txt -e '.[{extra}]'"
    )


def test_a_launcher_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(MissingConfigException) as missing:
        launcher_settings("slurn")
    line = one_line(missing.value)
    assert re.fullmatch(r"hydra/launcher=slurn is not one of basic, .*\bslurm\b.*", line)
