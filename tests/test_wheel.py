"""The wheel, installed without the checkout: programs, their configuration, and runs again."""

import html
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mhaprune.tables.manifest import PROGRAMS, program_of, read_manifest

ROOT = Path(__file__).parents[1]
SMALL = [
    *("dataset.num_stories=30", "evaluation.context_length=32", "evaluation.max_windows=4"),
    *("evaluation.resamples=100", "heads=[L0H0,L1H1]", "roles.windows=0", "tracker=none"),
]
NEEDED = 77  # of setuptools, as in pyproject.toml


def run(*command: str | Path, place: Path) -> str:
    """Run a command where only what is installed can be imported; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(directory: str) -> set[str]:
    """The files of a directory of the checkout, less what Python leaves there."""
    paths = [path for path in (ROOT / directory).rglob("*") if path.is_file()]
    return {str(x.relative_to(ROOT)) for x in paths if x.suffix != ".pyc"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy of the checkout, which stays as it is."""
    if int(setuptools.__version__.split(".")[0]) < NEEDED:
        pytest.skip(f"setuptools {setuptools.__version__} is older than {NEEDED}")
    place = tmp_path_factory.mktemp("wheel")
    for name in [*tracked("mhaprune"), *tracked("conf"), "pyproject.toml", "README.md", "LICENSE"]:
        copy = place / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", place]
    run(sys.executable, "-m", "pip", "wheel", *options, place / "source", place=place)
    [built] = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `mhaprune` of an environment into which the wheel alone was installed.

    It sees the libraries of the environment that runs the tests, but not what is editable in it.
    """
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place, place=place)
    python = place / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, place=place)
    [packages] = place.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import mhaprune; print(mhaprune.__file__)", place=place)
    assert Path(where.strip()) == packages / "mhaprune" / "__init__.py"
    return place / "bin" / "mhaprune"


@pytest.fixture(scope="module")
def ranked(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was empty until `mhaprune rank` ran in it."""
    place = tmp_path_factory.mktemp("ranked")
    run(installed, "rank", *SMALL, place=place)
    return place


def test_the_wheel_holds_the_whole_library_and_every_configuration(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    conf = {f"mhaprune/{name}" for name in tracked("conf")}
    assert names == tracked("mhaprune") | conf
    assert "mhaprune/conf/hydra/launcher/slurm.yaml" in names


def test_rank_runs_in_an_empty_folder_and_notes_how_it_was_started(ranked):
    [run_directory] = ranked.glob("runs/rank_heads/*_demo_stories_zero")
    manifest = read_manifest(run_directory)
    assert manifest["command"] == ["mhaprune", "rank", *SMALL]
    assert program_of(manifest) == "rank_heads"
    assert len((run_directory / "effects.csv").read_text().splitlines()) == 3
    page = (run_directory / "report.html").read_text()
    started = f"<code>mhaprune rank {' '.join(SMALL[:4])} 'heads=[L0H0,L1H1]'"
    assert started in html.unescape(page)


@pytest.fixture(scope="module")
def said(installed: Path, ranked: Path) -> dict[str, str]:
    """What `mhaprune` says to several command lines, in one interpreter: torch takes seconds."""
    own = ranked / "mine" / "evaluation" / "coarse.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("defaults: [default]\nconfidence: 0.5\n")
    [run_directory] = ranked.glob("runs/rank_heads/*_demo_stories_zero")
    commands = {
        **{
            command: [command, "seed=3", "--cfg", "job"] for command in ("scores", "prune", "atlas")
        },
        "rank": ["rank", "--config-dir", "mine", "evaluation=coarse", "--cfg", "job"],
        "reproduce": ["reproduce", str(run_directory), "--out", "again"],
    }
    printed = run(installed.with_name("python"), "-c", MANY, json.dumps(commands), place=ranked)
    parts = printed.split("=== ")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


MANY = """
import json, sys
from mhaprune.cli import main
for name, arguments in json.loads(sys.argv[1]).items():
    print("===", name)
    try:
        main(arguments)
    except SystemExit as stop:
        assert stop.code == 0, name
"""


def test_a_run_of_the_wheel_can_be_reproduced(said):
    lines = said["reproduce"].splitlines()
    assert lines[-1] == "The results agree"
    assert "identical: effects.csv" in lines


@pytest.mark.parametrize("command", ["scores", "prune", "atlas"])
def test_a_program_has_the_configuration_that_it_has_in_the_checkout(said, command):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        expected = OmegaConf.to_yaml(compose(PROGRAMS[command], ["seed=3"]))
    assert "seed: 3" in expected
    assert said[command].strip() == expected.strip()


def test_a_group_of_the_users_own_is_taken_from_the_config_dir(said):
    assert yaml.safe_load(said["rank"])["evaluation"]["confidence"] == 0.5
