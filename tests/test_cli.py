"""`mhaprune COMMAND ...`: what it does with finished runs, its exit codes, mistakes in one line."""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from experiments import rank_heads
from mhaprune import cli
from mhaprune.review.report import rerun_command
from mhaprune.run import reproducing, syncing
from mhaprune.run.config import CONF_DIR, RankHeadsConfig
from mhaprune.run.launch import run_program
from mhaprune.tables.files import write_json
from mhaprune.tables.manifest import PROGRAMS, program_of
from tests.tiny import make_place

SWEEP = [
    *("model=local", "model.path=model", "model.device=cpu", "dataset=text"),
    *("dataset.path=stories.txt", "evaluation.context_length=16", "evaluation.max_windows=4"),
    *("evaluation.resamples=100", "evaluation.calibration_windows=2", "heads=[L0H*]"),
    *("roles.windows=0", "tracker=none", "hydra.sweep.dir=sweep", "ablation=zero,mean"),
]
ZERO, MEAN = "0_local_text_zero", "1_local_text_mean"
Command = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two runs."""
    place = make_place(tmp_path_factory.mktemp("place"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.chdir(place)
        patch.setattr(sys, "argv", ["rank_heads.py", "-m", *SWEEP])
        run_program(rank_heads.rank_heads, RankHeadsConfig, "rank_heads")
    return place / "sweep"


@pytest.fixture
def sweep(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sweep in the working directory, without pages."""
    monkeypatch.chdir(tmp_path)
    ignored = shutil.ignore_patterns("report.html", "index.html")
    return Path(shutil.copytree(swept, "sweep", ignore=ignored))


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command; return its exit code and what it printed to stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> tuple[int, list[str], list[str]]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        output, errors = capfd.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, output.splitlines(), errors.splitlines()

    return command


def unfinish(run: Path) -> None:
    """Make of a finished run one that was resumed and is at it."""
    manifest = json.loads((run / "manifest.json").read_text())
    write_json(run / "manifest.json", manifest | {"finished_utc": None})


# ---- report


def test_report_writes_the_pages_of_the_runs_that_are_named(sweep, command, swept):
    runs = [sweep / MEAN, sweep / ZERO]
    pages = [f"Page: {run}/report.html" for run in runs]
    assert command("report", *map(str, runs)) == (0, pages, [])
    for run in runs:
        own = (swept / run.name / "report.html").read_bytes()
        assert (run / "report.html").read_bytes() == own
    assert not (sweep / "index.html").exists()


def test_report_of_a_sweep_writes_its_pages_and_its_index(sweep, command):
    code, lines, errors = command("report", "sweep")
    assert (code, errors) == (0, [])
    assert lines == [
        f"Page: sweep/{ZERO}/report.html",
        f"Page: sweep/{MEAN}/report.html",
        "Index: sweep/index.html",
    ]
    assert all(Path(line.split(": ")[1]).read_text().startswith("<!doctype") for line in lines)


def test_report_of_a_sweep_with_a_job_that_failed_leaves_that_one_out(sweep, command):
    for name in ("manifest.json", "summary.json"):
        (sweep / ZERO / name).unlink()
    write_json(sweep / ZERO / "failed.json", {"error": "no memory"})
    code, lines, _ = command("report", "sweep")
    assert (code, lines) == (0, [f"Page: sweep/{MEAN}/report.html", "Index: sweep/index.html"])
    assert "failed: no memory" in (sweep / "index.html").read_text()


def test_report_of_a_sweep_leaves_out_a_run_that_goes_on(sweep, command):
    unfinish(sweep / ZERO)
    code, lines, _ = command("report", "sweep")
    assert (code, lines) == (0, [f"Page: sweep/{MEAN}/report.html", "Index: sweep/index.html"])


# ---- compare


def test_compare_sets_each_run_beside_the_first(sweep, command):
    code, lines, errors = command("compare", f"sweep/{ZERO}", f"sweep/{ZERO}", f"sweep/{MEAN}")
    assert (code, errors) == (0, [])
    found = {name: [line.rstrip() for line in lines if line.startswith(name)] for name in NAMED}
    assert found["other"] == [f"other{' ' * 15}sweep/{name}" for name in (ZERO, MEAN)]
    assert found["rank agreement"][0].endswith(" Spearman 1.000, Kendall 1.000")
    assert found["what differs"][0].endswith("  nothing that is recorded")
    assert found["what differs"][1].endswith("  ablation.kind: zero -> mean")


NAMED = ("other", "rank agreement", "what differs")


# ---- reproduce


@pytest.mark.parametrize(("agrees", "code"), [(True, 0), (False, 1)])
def test_reproduce_ends_with_1_where_the_numbers_are_not_the_same(
    command, monkeypatch, agrees, code
):
    asked: list[Any] = []

    def reproduce(run: Path, out: Path | None, say: Callable[[str], object]) -> bool:
        asked.append((run, out))
        say("it [b]said[/b] so")
        return agrees

    monkeypatch.setattr(reproducing, "reproduce", reproduce)
    assert command("reproduce", "a/run") == (code, ["it [b]said[/b] so"], [])
    assert command("reproduce", "a/run", "--out", "new")[0] == code
    assert asked == [(Path("a/run"), None), (Path("a/run"), Path("new"))]


# ---- sync


@pytest.mark.usefixtures("tracked")
def test_sync_offline_leaves_a_run_for_wandb_in_each_directory(sweep, command):
    code, lines, errors = command("sync", "--offline", f"sweep/{ZERO}", f"sweep/{MEAN}")
    assert (code, errors) == (0, [])
    for line, name in zip(lines, (ZERO, MEAN), strict=True):
        [place] = (sweep.resolve() / name).glob("wandb/offline-run-*")
        assert line == f"W&B: the run is in {place}; upload it by: wandb sync {place}"


def test_sync_goes_on_after_a_run_that_was_not_taken_and_ends_with_1(command, monkeypatch):
    asked: list[Any] = []

    def sync_run(run: Path, mode: str, say: Callable[[str], object]) -> bool:
        asked.append((run, mode))
        return run.name != "a"

    monkeypatch.setattr(syncing, "sync_run", sync_run)
    assert command("sync", "a", "b") == (1, [], [])
    assert asked == [(Path("a"), "online"), (Path("b"), "online")]
    assert command("sync", "--offline", "b") == (0, [], [])
    assert asked[2:] == [(Path("b"), "offline")]


# ---- mistakes


@pytest.mark.parametrize("name", ["report", "reproduce", "sync"])
@pytest.mark.parametrize("place", ["nowhere", "."])
def test_what_is_no_run_is_one_line_and_exit_code_2(sweep, command, monkeypatch, name, place):
    (sweep / "empty").mkdir()
    monkeypatch.chdir(sweep / "empty")
    code, lines, [error] = command(name, place)
    assert (code, lines) == (2, [])
    where = Path(place).resolve() if name in ("reproduce", "sync") else Path(place)
    assert error == f"error: {where} is not the directory of a run: it has no manifest.json"


@pytest.mark.parametrize("name", ["report", "reproduce", "sync", "compare"])
def test_a_run_that_is_not_finished_is_one_line_and_exit_code_2(sweep, command, name):
    unfinish(sweep / ZERO)
    run = str(sweep.resolve() / ZERO)
    code, lines, [error] = command(name, run, *([run] if name == "compare" else []))
    assert (code, lines) == (2, [])
    assert error == f"error: the run in {run} is not finished; go on with resume={run}"


def test_a_comparison_of_one_is_one_line_and_exit_code_2(sweep, command):
    code, lines, errors = command("compare", f"sweep/{ZERO}")
    assert (code, lines) == (2, [])
    assert errors == ["error: comparing takes at least two run directories, got 1"]


@pytest.mark.parametrize("arguments", [[], ["nope"], ["report"], ["reproduce", "a", "b"]])
def test_a_command_line_that_is_none_ends_with_the_usage_and_exit_code_2(command, arguments):
    code, lines, errors = command(*arguments)
    assert (code, lines) == (2, [])
    assert errors[0].startswith("usage: mhaprune")
    assert "error: " in errors[-1]


def test_help_names_every_command_in_a_line_and_every_command_has_its_own(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, lines, errors = command("--help")
    assert (code, errors) == (0, [])
    assert lines[0] == "usage: mhaprune [-h] [-V] COMMAND ..."
    listed = [line.split()[0] for line in lines if line.startswith("    ")]
    assert listed == [*cli.PROGRAMS, *cli.COMMANDS]
    for name in cli.COMMANDS:
        assert command(name, "--help")[1][0].startswith(f"usage: mhaprune {name} [-h]")


def test_the_console_script_of_the_package_is_this_one(monkeypatch, capfd):
    """Started without arguments of its own, it takes those of the command line."""
    project = tomllib.loads((CONF_DIR.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mhaprune": "mhaprune.cli:main"}
    main = EntryPoint("mhaprune", project["scripts"]["mhaprune"], "console_scripts").load()
    monkeypatch.setattr(sys, "argv", ["mhaprune", "report", "nowhere"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capfd.readouterr() == (
        *("", "error: nowhere is not the directory of a run: it has no manifest.json\n"),
    )


# ---- what a command imports


SLOW = ["torch", "transformers", "matplotlib", "wandb", "hydra", "datasets"]
IMPORTED = """
import sys
from mhaprune.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert stop.code == 0
print(*(name for name in {slow} if name in sys.modules))
"""


def imported_by(*arguments: str, slow: Sequence[str] = SLOW) -> str:
    """Which of the slow libraries a command imports, in a fresh interpreter."""
    program = IMPORTED.format(slow=list(slow))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.usefixtures("sweep")
def test_looking_at_finished_runs_takes_no_torch():
    runs = [f"sweep/{ZERO}", f"sweep/{MEAN}"]
    assert imported_by("compare", *runs) == ""
    assert imported_by("--help", slow=[*SLOW, "scipy.stats"]) == ""


@pytest.mark.usefixtures("sweep")
def test_writing_a_page_takes_no_torch():
    assert imported_by("report", f"sweep/{ZERO}", slow=[*SLOW, "scipy.stats"]) == ""


@pytest.mark.parametrize(
    "imports",
    [
        "import mhaprune; early = set(sys.modules); import transformers",
        "import mhaprune; early = set(sys.modules); from transformers.models import auto",
        "import importlib.util as util, mhaprune; early = set(sys.modules); "
        "util.find_spec('transformers'); import transformers",
        "early = set(); import transformers; import mhaprune",
    ],
)
def test_transformers_knows_our_models_in_either_order_of_imports(imports):
    program = f"""
import sys
{imports}
from transformers import AutoConfig
assert not early & {{*{SLOW}}}
config = AutoConfig.for_model("mhaprune_gpt2")
print(type(config).__module__, sum("AfterTransf" in type(x).__name__ for x in sys.meta_path))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "mhaprune.prune.modeling_pruned 0\n", done.stderr


# ---- the command of a run


@pytest.mark.parametrize(
    ("command", "program", "again"),
    [
        (["mhaprune", "rank", "a=b c"], "rank_heads", "mhaprune rank 'a=b c'"),
        (["mhaprune", "scores"], "compare_scores", "mhaprune scores"),
        (["experiments/prune_heads.py", "a"], "prune_heads", "python experiments/prune_heads.py a"),
        (["/x/head_atlas.py"], "head_atlas", "python experiments/head_atlas.py"),
    ],
)
def test_a_run_is_named_and_run_again_by_the_command_it_was_started_with(command, program, again):
    assert program_of({"command": command}) == program
    assert rerun_command({"command": command}) == again


def test_every_program_is_a_command():
    assert list(cli.PROGRAMS) == list(PROGRAMS)
    for command, (module, _) in cli.PROGRAMS.items():
        source = (CONF_DIR.parent / "mhaprune" / "run" / f"{module}.py").read_text()
        assert f"def {PROGRAMS[command]}(" in source
