"""The dashboard is built without key and network, and names only what the programs really log."""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import compare_scores, head_atlas, prune_heads, rank_heads
from mhaprune.run import scoring, syncing, tracking
from mhaprune.run.config import (
    CONF_DIR,
    CompareScoresConfig,
    HeadAtlasConfig,
    PruneHeadsConfig,
    RankHeadsConfig,
)
from mhaprune.run.launch import run_program
from mhaprune.run.tracking import Tracker
from mhaprune.stats.agreement import rank_agreement
from scripts import wandb_workspace

pytest.importorskip("wandb_workspaces", reason="pip install wandb-workspaces")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydantic's, at import

SMALL = [
    *("dataset.num_stories=20", "evaluation.context_length=32", "evaluation.max_windows=4"),
    *("evaluation.calibration_windows=4", "evaluation.resamples=100"),
]
FEW = "heads=[L0H0,L0H1,L3H2]"
ROLES = ["roles.windows=1", "roles.repeats=1", "roles.period=16"]
ADAPTIVE = [FEW, *ROLES, "evaluation=adaptive", "evaluation.max_windows=16"]
SCORES = [
    FEW,
    *("scores.integrated_gradients.steps=2", "scores.learned_gates.steps=1"),
    "scores.learned_gates.lambdas=[0.01]",
]
ALL_ORDERS = [FEW, "pruning.random_orders=0", "pruning.pairs=1", "savings=true"]
HEALED = [
    FEW,
    *("~pruning.orderings.activation_norm", "~pruning.orderings.gradient", "heal.steps=1"),
    *("pruning.random_orders=0", "pruning.directions=[least]", "heal.windows_per_step=1"),
]
RUNS: list[tuple[Any, type[Any], list[str]]] = [
    (rank_heads, RankHeadsConfig, [FEW, *ROLES]),
    (rank_heads, RankHeadsConfig, ADAPTIVE),
    (rank_heads, RankHeadsConfig, [FEW, *ROLES, "score=activation_norm"]),
    (head_atlas, HeadAtlasConfig, ROLES),
    (compare_scores, CompareScoresConfig, SCORES),
    (prune_heads, PruneHeadsConfig, ALL_ORDERS),
    (prune_heads, PruneHeadsConfig, HEALED),
]

ORDERS = ("leave_one_out", "gradient", "activation_norm")
COMPARED = (*ORDERS, "fisher", "attribution", "integrated_gradients", "shapley", "learned_gates")
NUMBERS = [
    *("baseline/bits_per_byte", "baseline/perplexity", "baseline/perplexity_high"),
    *("baseline/perplexity_low", "heads/num_critical", "heads/num_harmful", "heads/num_measured"),
    *("heads/num_redundant", "heads/num_undetermined", "heads/num_useful"),
    "heads/share_of_windows",
    *(f"compare/{score}/spearman" for score in (*COMPARED, "random")),
    *(
        f"{name}.{order}"
        for name in ("area_nats_least_first", "heads_removed_at_5pct")
        for order in ORDERS
    ),
]


@dataclass
class Shown:
    """The names of what a program logs, and the results themselves, run by run."""

    numbers: set[str] = field(default_factory=set)
    progress: set[str] = field(default_factory=set)
    steps: list[dict[str, Any]] = field(default_factory=list)
    tables: set[str] = field(default_factory=set)
    pictures: set[str] = field(default_factory=set)
    settings: set[str] = field(default_factory=set)
    results: list[tuple[Any, ...]] = field(default_factory=list)

    def note_progress(self, values: Mapping[str, object]) -> None:
        self.progress |= set(values)
        self.steps.append(dict(values))

    def note_results(
        self, summary: Mapping[str, Any], tables: Any, pictures: Any, files: Any, **hashes: str
    ) -> None:
        self.numbers |= {name for name, value in leaves(summary) if not isinstance(value, str)}
        self.tables |= set(tables)
        self.pictures |= set(pictures)
        as_shown = {name: tracking._table(rows) for name, rows in tables.items()}
        self.results.append((summary, as_shown, pictures, set(files), hashes))


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """What is not a dict, with its path, as W&B names it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """By program: what all of its `RUNS` log, noted where they would tell W&B; their files stay."""
    found: dict[str, Shown] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setenv("MHAPRUNE_TRACEBACK", "1")
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        few = partial(rank_agreement, num_resamples=20)
        patch.setattr(scoring, "rank_agreement", few)  # a thousand take seconds
        for number, (program, schema, arguments) in enumerate(RUNS):
            name = program.__name__.rpartition(".")[2]
            noted = found.setdefault(name, Shown())
            patch.setattr(Tracker, "log_progress", noted.note_progress)
            patch.setattr(Tracker, "log_results", noted.note_results)
            directory = tmp_path_factory.mktemp(f"run{number}") / "run"
            own = ["tracker=none", f"hydra.run.dir={directory}"]
            patch.setattr(sys, "argv", [f"{name}.py", *SMALL, *arguments, *own])
            run_program(getattr(program, name), schema, name)
            config = json.loads((directory / "manifest.json").read_text())["config"]
            noted.settings |= {key for key, _ in leaves(config)}
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no settings from outside."""
    for variable in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def dashboard(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Write the dashboard where no socket connects, and read it."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)

    def dashboard(*arguments: str) -> dict[str, Any]:
        file = tmp_path / "dashboard.json"
        assert wandb_workspace.main(["--json", str(file), *arguments]) == 0
        return json.loads(file.read_text())

    return dashboard


def panels_in(written: dict[str, Any]) -> list[dict[str, Any]]:
    sections = written["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def named_by(panel: dict[str, Any]) -> set[tuple[str, str]]:
    """What a panel shows, as kind and name."""
    config = panel["config"]
    match panel["viewType"]:
        case "Bar Chart":
            return {("numbers", name) for name in config["metrics"]}
        case "Run History Line Plot":
            return {("progress", name) for name in config["metrics"]}
        case "Media Browser":
            return {("pictures", name) for name in config["mediaKeys"]}
        case "Weave":
            return {("tables", config["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"])}
        case "Scatter Plot":
            return set(map(named_at, (config["xAxis"], config["yAxis"])))
        case "Parallel Coordinates Plot":
            return {named_at(column["accessor"]) for column in config["columns"]}
        case other:
            raise ValueError(f"a panel that this test does not know: {other}")


def named_at(accessor: str) -> tuple[str, str]:
    """The kind and name of "summary:a/b" or "config:a.value.b", as W&B writes what it plots."""
    place, name = accessor.split(":", 1)
    if place == "summary":
        return "numbers", name
    assert place == "config"
    return "settings", name.replace(".value", "", 1)


@pytest.fixture
def named(dashboard: Callable[..., dict[str, Any]]) -> dict[str, set[str]]:
    """By kind: all names in the dashboard."""
    found: dict[str, set[str]] = {}
    for kind, name in {pair for panel in panels_in(dashboard()) for pair in named_by(panel)}:
        found.setdefault(kind, set()).add(name)
    return found


def logged(shown: dict[str, Shown], kind: str) -> set[str]:
    return {name for each in shown.values() for name in getattr(each, kind)}


@pytest.mark.parametrize("kind", ["numbers", "settings"])
def test_every_number_and_setting_in_the_dashboard_is_one_that_a_program_logs(named, shown, kind):
    assert named[kind] - logged(shown, kind) == set()


@pytest.mark.parametrize("kind", ["tables", "pictures"])
def test_the_tables_and_pictures_in_the_dashboard_are_those_that_programs_log(named, shown, kind):
    assert named[kind] == logged(shown, kind)


def test_the_dashboard_shows_five_kinds_of_things(named):
    """Numbers are those of `NUMBERS`; tables and pictures all that programs log (above)."""
    assert named.keys() == {"numbers", "settings", "tables", "pictures", "progress"}
    assert named["numbers"] == set(NUMBERS)
    assert named["settings"] == {
        *("ablation.kind", "dataset.name", "evaluation.tolerance_nats", "model.name")
    }
    assert named["progress"] == {"heads/done", "heads/settled"}


def test_the_progress_in_the_dashboard_is_what_programs_that_measure_heads_log(named, shown):
    assert {name: each.progress for name, each in shown.items()} == {
        "rank_heads": named["progress"],
        "compare_scores": {"heads/done"},
        **{name: set() for name in ("head_atlas", "prune_heads")},
    }


def test_a_run_of_three_heads_logs_that_three_are_done(shown):
    """Exhaustive, adaptive and by a score: each run's last number is all of them."""
    done = [values["heads/done"] for values in shown["rank_heads"].steps if "heads/done" in values]
    ends = [number for number, after in zip(done, [*done[1:], 0], strict=True) if after <= number]
    assert ends == [3, 3, 3]
    settled = [v["heads/settled"] for v in shown["rank_heads"].steps if "heads/settled" in v]
    assert settled and settled == sorted(settled) and settled[-1] <= 3


def test_what_sync_shows_of_each_run_is_what_its_program_showed(shown, monkeypatch):
    @contextmanager
    def track(*_: object, directory: Path, say: Callable[[str], None], **__: object):
        yield Tracker(directory, say)

    monkeypatch.setattr(syncing, "track", track)
    for each in shown.values():
        again = Shown()
        monkeypatch.setattr(Tracker, "log_results", again.note_results)
        for _, _, _, files, _ in each.results:
            directory = next(iter(files)).parent
            assert syncing.sync_run(directory, "offline", lambda line: None)
        assert again.results == each.results
    assert sum(len(each.results) for each in shown.values()) == len(RUNS)


@pytest.mark.parametrize("path", sorted((CONF_DIR / "wandb").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_metric_of_each_sweep_is_a_number_that_its_program_logs(path, shown):
    said = yaml.safe_load(path.read_text())
    assert said["metric"]["name"] in shown[Path(said["program"]).stem].numbers


def test_the_dashboard_has_a_section_for_each_question_and_groups_runs_by_their_group(dashboard):
    written = dashboard("--project", "our-heads")
    assert (written["project"], written["name"]) == ("our-heads", "Attention heads")
    sections = written["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [
        *("Heads", "Verdicts", "Intact model", "Pruning", "Agreement of scores", "Sweeps"),
        "Progress",
    ]
    assert all(section["isOpen"] for section in sections)
    grouped = [panel["config"].get("groupBy") for panel in panels_in(written)]
    assert set(grouped) == {None, "group"}
    verdicts = sections[1]["panels"][0]["config"]["metrics"]
    assert verdicts == [
        f"heads/num_{verdict}"
        for verdict in ("critical", "useful", "redundant", "harmful", "undetermined")
    ]


@pytest.mark.parametrize("missing", ["a key", "a team", "the package"])
def test_what_is_missing_is_told_in_one_line_with_exit_code_2(alone, monkeypatch, capsys, missing):
    arguments = [] if missing == "a team" else ["--entity", "team"]
    if missing == "the package":
        monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert wandb_workspace.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    told = {
        "a key": "nobody is logged in to W&B; run `wandb login`, or set WANDB_API_KEY",
        "a team": "expected --entity TEAM to save it for, or --json FILE",
        "the package": "wandb-workspaces is not installed; pip install wandb-workspaces",
    }
    assert output.err == f"error: {told[missing]}\n"


@pytest.mark.parametrize("fails", [False, True])
def test_a_dashboard_is_saved_for_whoever_is_logged_in(alone, monkeypatch, capsys, fails):
    import wandb
    from wandb_workspaces.workspaces import Workspace, internal

    saved: list[Any] = []

    def upsert(view: Any) -> dict[str, Any]:
        if fails:
            raise ConnectionError("no route\nto host")
        saved.append((view.entity, view.project, view.display_name))
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "abc"}}}

    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(internal, "upsert_view2", upsert)
    monkeypatch.setattr(Workspace, "url", "https://place")
    code = wandb_workspace.main(["--entity", "team", "--project", "heads"])
    if fails:
        told = "error: W&B did not save the dashboard: no route to host\n"
        assert (code, capsys.readouterr().err) == (2, told)
    else:
        assert (code, saved) == (0, [("team", "heads", "Attention heads")])
        assert capsys.readouterr().out == "Dashboard at https://place\n"
