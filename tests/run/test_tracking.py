"""What W&B gets is what the files say, and trouble with W&B stops nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from mhaprune.run.tracking import Tracker, track


@dataclass(frozen=True)
class Effect:
    """Two of the columns that a head has, and a verdict."""

    layer: int
    head: int
    effect_nats: float
    verdict: str


ROWS = [Effect(4, 11, 0.1 + 0.2, "critical"), Effect(0, 3, -1e-17, "redundant")]
SUMMARY = {"baseline/perplexity": 29.5, "heads/num_redundant": 1, "protocol": "context 256"}
API_KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def real_wandb() -> Iterator[None]:
    import wandb

    yield
    wandb.teardown()


def open_track(directory: Path, say: Callable[[str], None], mode: Any = "offline", **more: Any):
    arguments: dict[str, Any] = {
        "project": "mhaprune",
        "name": "gpt2/zero: seed 0",
        "group": "a-sweep",
        "job_type": "rank_heads",
        "tags": ["demo"],
        "config": {"model": {"name": "gpt2"}, "tolerance_nats": 0.001},
    }
    return track(mode, directory=directory, say=say, **{**arguments, **more})


def log_results(tracker: Tracker, directory: Path, **changes: Any) -> None:
    heatmap = directory / "heatmap.png"
    matplotlib.image.imsave(heatmap, np.zeros((4, 6)))
    files = [directory / name for name in ("effects.csv", "summary.json")]
    for file in files:
        file.write_text(f"the content of {file.name}")
    shown = {"tables": {"heads": changes.pop("rows", ROWS)}, "pictures": {"heatmap": heatmap}}
    arguments = {"summary": SUMMARY, "files": files, **shown}
    hashes = {"weights_hash": "aa11", "tokens_hash": "bb22"}
    tracker.log_results(**{**arguments, **hashes, **changes})


def records_in(sync_file: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(sync_file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def bodies(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def merged(records: list[dict[str, Any]], kind: str, part: str) -> dict[str, Any]:
    return {name: value for body in bodies(records, kind) for name, value in body[part].items()}


# ---- real offline runs


@pytest.mark.usefixtures("real_wandb")
def test_an_offline_run_holds_config_summary_table_heatmap_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    directory, said = tmp_path / "run", []
    directory.mkdir()
    with open_track(directory, said.append) as tracker:
        tracker.log_progress({"progress/heads_done": 12})
        log_results(tracker, directory)
        sync_file = tracker.sync_file
    assert said == []
    assert capfd.readouterr() == ("", "")
    assert sync_file is not None and sync_file.is_relative_to(directory / "wandb")

    records = records_in(sync_file)
    run = bodies(records, "run")[0]
    assert run["project"] == "mhaprune" and run["display_name"] == "gpt2/zero: seed 0"
    assert (run["run_group"], run["job_type"], run["tags"]) == ("a-sweep", "rank_heads", ["demo"])
    config = run["config"]["update"]
    assert config["model"] == {"name": "gpt2"} and config["tolerance_nats"] == 0.001
    assert SUMMARY.items() <= merged(records, "summary", "update").items()
    assert [h["item"].get("progress/heads_done") for h in bodies(records, "history")] == [12, None]
    assert bodies(records, "exit")[0].get("exit_code", 0) == 0  # a zero is not written

    media = sync_file.parent / "files" / "media"
    (table,) = media.rglob("heads*.table.json")
    assert json.loads(table.read_text())["columns"] == [
        *("name", "layer", "head", "effect_nats", "verdict")
    ]
    assert json.loads(table.read_text())["data"] == [
        ["L4H11", 4, 11, 0.30000000000000004, "critical"],
        ["L0H3", 0, 3, -1e-17, "redundant"],
    ]
    (image,) = media.rglob("heatmap*.png")
    assert image.read_bytes() == (directory / "heatmap.png").read_bytes()

    (ranking,) = [a for a in bodies(records, "artifact") if a["type"] == "ranking"]
    assert ranking["name"] == "gpt2-zero--seed-0"
    assert json.loads(ranking["metadata"]) == {"weights_hash": "aa11", "tokens_hash": "bb22"}
    staged = {each["path"]: Path(each["local_path"]) for each in ranking["manifest"]["contents"]}
    assert set(staged) == {"effects.csv", "summary.json"}
    assert staged["effects.csv"].read_text() == "the content of effects.csv"
    assert all(path.is_relative_to(directory / "wandb") for path in staged.values())
    for file in filter(Path.is_file, directory.rglob("*")):
        assert API_KEY.encode() not in file.read_bytes()


@pytest.mark.usefixtures("real_wandb")
def test_a_failed_run_is_closed_as_failed_and_its_exception_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    sync_file = None
    with (
        pytest.raises(KeyboardInterrupt),
        open_track(tmp_path, said.append) as tracker,
    ):
        sync_file = tracker.sync_file
        raise KeyboardInterrupt
    assert said == [] and sync_file is not None
    assert bodies(records_in(sync_file), "exit")[0]["exit_code"] == 1


# ---- stand-ins for wandb


class FakeRun:
    """Notes what it is told; `broken` names the methods that fail."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.broken, self.name, self.disabled, self.offline = broken, "run", False, False
        self.used: list[tuple[str, str, dict[str, str]]] = []
        self.exit_codes: list[int] = []
        self.summary: dict[str, object] = {}
        self.logged: list[dict[str, object]] = []

    def _break(self, method: str) -> None:
        if method in self.broken:
            raise ConnectionError(f"{method}:\nno route to host")

    def log(self, values: dict[str, object]) -> None:
        self._break("log")
        self.logged.append(values)

    def log_artifact(self, artifact: object) -> None:
        self._break("log_artifact")

    def use_artifact(self, artifact: object) -> None:
        self._break("use_artifact")
        self.used.append(artifact.made_of)  # pyright: ignore[reportAttributeAccessIssue]

    def finish(self, exit_code: int) -> None:
        self._break("finish")
        self.exit_codes.append(exit_code)


def use_fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    def artifact(name: str, type: str, metadata: dict[str, str]) -> SimpleNamespace:
        return SimpleNamespace(add_file=lambda path, name: None, made_of=(name, type, metadata))

    fake = SimpleNamespace(
        init=init,
        Settings=SimpleNamespace,
        Table=SimpleNamespace,
        Image=lambda path: path,
        Artifact=artifact,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)


@pytest.mark.parametrize("method", ["log", "use_artifact", "log_artifact", "finish"])
def test_each_trouble_after_the_start_is_told_in_one_line_and_the_program_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    run, said = FakeRun(broken=(method,)), []
    use_fake_wandb(monkeypatch, lambda **_: run)
    with open_track(tmp_path, said.append) as tracker:
        log_results(tracker, tmp_path)
    trouble = "the run was not closed" if method == "finish" else "the results were not logged"
    assert said == [
        f"W&B: {trouble} ({method}: no route to host). "
        f"The files in {tmp_path} are complete without it; "
        f"mhaprune sync {tmp_path} shows them there later."
    ]
    assert run.exit_codes == ([] if method == "finish" else [0])


def test_progress_that_cannot_be_logged_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    use_fake_wandb(monkeypatch, lambda **_: FakeRun(broken=("log",)))
    with open_track(tmp_path, said.append) as tracker:
        for num_done in range(3):
            tracker.log_progress({"progress/heads_done": num_done})
    assert len(said) == 1 and said[0].startswith("W&B: progress was not logged (")


def test_the_lineage_of_a_ranking_leads_to_model_and_text_by_their_hashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    online, offline = FakeRun(), FakeRun()
    offline.offline = True
    for run in (online, offline):
        use_fake_wandb(monkeypatch, lambda run=run, **_: run)
        with open_track(tmp_path, print) as tracker:
            log_results(tracker, tmp_path, weights_hash="a" * 64, tokens_hash="b" * 64)
    assert online.used == [
        ("model-" + "a" * 16, "model", {"weights_hash": "a" * 64}),
        ("text-" + "b" * 16, "text", {"tokens_hash": "b" * 64}),
    ]
    assert offline.used == []  # W&B refuses


def test_one_reason_is_told_once_though_it_spoils_both_the_results_and_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And W&B is ended, so that the next run does not look for its process that is gone."""

    class LostRun(FakeRun):
        def _break(self, method: str) -> None:
            raise ConnectionResetError("Connection lost")

    said: list[str] = []
    ended: list[bool] = []
    use_fake_wandb(monkeypatch, lambda **_: LostRun())
    monkeypatch.setattr(sys.modules["wandb"], "teardown", lambda: ended.append(True), raising=False)
    with open_track(tmp_path, said.append) as tracker:
        log_results(tracker, tmp_path)
    assert len(said) == 1 and said[0].startswith("W&B: the results were not logged (Connection lo")
    assert ended == [True]


def test_a_failure_to_close_does_not_hide_why_the_program_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    use_fake_wandb(monkeypatch, lambda **_: FakeRun(broken=("finish",)))
    with pytest.raises(ZeroDivisionError), open_track(tmp_path, said.append):
        _ = 1 / 0
    assert len(said) == 1


@pytest.mark.parametrize("why", ["bad key", "not logged in", "not installed", "NaN in config"])
def test_a_run_that_cannot_start_is_told_in_one_line_and_not_tracked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    def init(**_: Any) -> FakeRun:
        if why == "bad key":
            raise PermissionError("API key verification failed")
        run = FakeRun()
        run.disabled = True
        return run

    use_fake_wandb(monkeypatch, init)
    if why == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    config = {"a": {"b": float("nan")}} if why == "NaN in config" else {}
    said: list[str] = []
    with open_track(tmp_path, said.append, mode="online", config=config) as tracker:
        tracker.log_progress({"progress/heads_done": 1})
        log_results(tracker, tmp_path)
        assert tracker.sync_file is None
    expected = {
        "bad key": "API key verification failed",
        "not logged in": "nobody logged in",
        "not installed": "wandb",
        "NaN in config": "expected a finite number for b, got nan",
    }
    assert len(said) == 1 and "\n" not in said[0] and expected[why] in said[0]
    assert said[0].startswith("W&B: this run is not tracked (")
    assert said[0].endswith(
        f"The files in {tmp_path} are complete without it; "
        f"mhaprune sync {tmp_path} shows them there later."
    )


def test_tracker_none_does_nothing_and_does_not_import_wandb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # any import of it fails
    said: list[str] = []
    with open_track(tmp_path / "run", said.append, mode="none") as tracker:
        tracker.log_progress({"progress/heads_done": 1})
        tracker.log_results({}, {}, {}, [], weights_hash="", tokens_hash="")
        assert tracker.run is None and tracker.sync_file is None
    assert said == [] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"summary": {"a": float("inf")}}, "expected a finite number for a, got inf"),
        ({"summary": {"a": np.float32("nan")}}, "expected a finite number for a, got nan"),
        ({"rows": [Effect(0, 0, float("nan"), "")]}, "finite number for effect_nats, got nan"),
        ({"rows": []}, "expected at least one row for each table, got none"),
        ({"rows": [ROWS[0], {"layer": 0, "head": 0}]}, "expected the columns"),
    ],
)
def test_what_w_and_b_would_publish_wrongly_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    run, said = FakeRun(), []
    use_fake_wandb(monkeypatch, lambda **_: run)
    with open_track(tmp_path, said.append) as tracker:
        log_results(tracker, tmp_path, **change)
    assert len(said) == 1 and reason in said[0]
    assert (run.summary, run.logged, run.exit_codes) == ({}, [], [0])


def test_rows_may_be_dicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, said = FakeRun(), []
    use_fake_wandb(monkeypatch, lambda **_: run)
    with open_track(tmp_path, said.append) as tracker:
        log_results(tracker, tmp_path, rows=[{"layer": 2, "head": 5, "rank": 1}])
    table: Any = run.logged[0]["heads"]
    assert (table.columns, table.data) == (["name", "layer", "head", "rank"], [["L2H5", 2, 5, 1]])
    assert said == []


def test_a_table_that_is_not_of_heads_has_its_own_columns_only(monkeypatch, tmp_path) -> None:
    run, said = FakeRun(), []
    use_fake_wandb(monkeypatch, lambda **_: run)
    with open_track(tmp_path, said.append) as tracker:
        log_results(tracker, tmp_path, rows=[{"score": "fisher", "spearman": 0.5}])
    table: Any = run.logged[0]["heads"]
    assert (table.columns, table.data) == (["score", "spearman"], [["fisher", 0.5]])
    assert said == []


@pytest.mark.parametrize("chosen", [None, "/chosen/by/the/user"])
def test_staged_copies_go_to_the_run_unless_the_user_chose_and_the_environment_is_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None
) -> None:
    if chosen:
        monkeypatch.setenv("WANDB_DATA_DIR", chosen)
    use_fake_wandb(monkeypatch, lambda **_: FakeRun())
    with open_track(tmp_path, print):
        assert os.environ["WANDB_DATA_DIR"] == (chosen or str(tmp_path / "wandb"))
    assert os.environ.get("WANDB_DATA_DIR") == chosen
