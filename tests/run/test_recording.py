"""What a run leaves and in which order: its files first, and W&B is told of them last."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import rank_heads as program
from mhaprune.measure.progress import Progress
from mhaprune.review.progress import Terminal
from mhaprune.run import recording
from mhaprune.run.config import MeasureConfig, RankHeadsConfig, ShardConfig
from mhaprune.run.launch import run_program
from mhaprune.run.measuring import OthersAtWork
from mhaprune.run.prepare import Prepared, keep_manifest, prepare
from mhaprune.run.recording import Recording, is_shared, recorded
from mhaprune.run.tracking import Tracker
from mhaprune.tables.files import only_one
from mhaprune.tables.manifest import is_finished
from tests.tiny import make_config, make_place

SUMMARY = {"baseline/perplexity": 6.0}
Told = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Path], Sequence[Path]]


@dataclass
class Spy(Tracker):
    """A tracker that notes what it is told, and what was in the directory by then."""

    told: list[Told] = field(default_factory=list)
    there: list[set[str]] = field(default_factory=list)
    error: Exception | None = None

    def log_results(self, *results: Any, **hashes: str) -> None:
        self.told.append(results)
        self.hashes = hashes
        self.there.append(names_in(self.directory))
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def prepared(place: Path) -> Prepared:
    return prepare(make_config(place))


@pytest.fixture
def config(place: Path) -> RankHeadsConfig:
    return make_config(place)


def recording_by(
    spy: Spy, config: RankHeadsConfig, prepared: Prepared, directory: Path
) -> Recording:
    """A recording that shows its progress nowhere."""
    return Recording(config, prepared, directory, spy, Terminal(Console()), Progress())


@pytest.fixture
def made(config: RankHeadsConfig, prepared: Prepared, tmp_path: Path) -> Recording:
    """A recording in an empty directory, with a spy for a tracker."""
    return recording_by(Spy(tmp_path, print), config, prepared, tmp_path)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".finishing"}


def read(directory: Path, name: str = "manifest.json") -> dict[str, Any]:
    return json.loads((directory / name).read_text())


def spy_of(made: Recording) -> Spy:
    assert isinstance(made.tracker, Spy)
    return made.tracker


# ---- the end of a run

LAST = {"summary.json", "manifest.json", "report.html"}


def test_all_files_are_there_before_w_and_b_is_told(made, tmp_path):
    made.finish(SUMMARY, {})
    assert spy_of(made).there == [LAST]
    assert names_in(tmp_path) == LAST
    assert read(tmp_path, "summary.json") == SUMMARY


def test_a_tracker_that_raises_leaves_all_files_of_a_finished_run(made, tmp_path):
    spy_of(made).error = RuntimeError("the network is down")
    with pytest.raises(RuntimeError, match="the network is down"):
        made.finish(SUMMARY, {})
    assert names_in(tmp_path) == LAST
    assert is_finished(tmp_path)
    assert read(tmp_path, "summary.json") == SUMMARY
    assert "</html>" in (tmp_path / "report.html").read_text()


def test_w_and_b_gets_the_rows_and_the_pictures_and_files_of_the_directory(
    made, prepared, tmp_path
):
    for name in ("b.png", "a.png", "y.csv", "x.csv", "measurements.jsonl"):
        (tmp_path / name).touch()
    rows = [{"layer": 0, "head": 1}]
    made.finish(SUMMARY, {"heads": rows, "roles": []})
    [(summary, tables, pictures, files)] = spy_of(made).told
    assert (summary, tables) == (SUMMARY, {"heads": rows})
    assert pictures == {name: tmp_path / f"{name}.png" for name in ("a", "b")}
    assert list(pictures) == ["a", "b"]
    assert [path.name for path in files] == [
        *("x.csv", "y.csv", "summary.json", "manifest.json", "report.html")
    ]
    assert spy_of(made).hashes == {
        "weights_hash": prepared.loaded.weights_hash,
        "tokens_hash": prepared.sample.tokens.hash,
    }


def test_the_manifest_is_finished_after_the_summary_and_before_the_page(
    made, tmp_path, monkeypatch
):
    keep_manifest(tmp_path, made.config, made.prepared, finished=False)
    assert read(tmp_path)["finished_utc"] is None
    seen: list[tuple[str, set[str], bool]] = []

    def watch(name: str) -> None:
        original: Callable[..., Any] = getattr(recording, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.append((name, names_in(tmp_path), is_finished(tmp_path)))
            return original(*arguments, **options)

        monkeypatch.setattr(recording, name, watched)

    for name in ("write_json", "keep_manifest", "write_report"):
        watch(name)
    made.finish(SUMMARY, {})
    assert seen == [
        ("write_json", {"manifest.json"}, False),
        ("keep_manifest", {"manifest.json", "summary.json"}, False),
        ("write_report", {"manifest.json", "summary.json"}, True),
    ]


def test_a_summary_that_cannot_be_written_leaves_the_run_unfinished(made, tmp_path):
    keep_manifest(tmp_path, made.config, made.prepared, finished=False)
    with pytest.raises(ValueError, match="expected finite numbers only"):
        made.finish({"baseline/perplexity": float("nan")}, {})
    assert not is_finished(tmp_path)
    assert (names_in(tmp_path), spy_of(made).told) == ({"manifest.json"}, [])


def test_a_run_that_is_not_shared_is_finished_anew_and_a_shared_one_is_not(made, tmp_path):
    made.finish(SUMMARY, {})
    made.finish({"baseline/perplexity": 7.0}, {})
    assert read(tmp_path, "summary.json") == {"baseline/perplexity": 7.0}
    shared = replace(made, config=share(made.config))
    shared.finish({"baseline/perplexity": 8.0}, {})
    assert read(tmp_path, "summary.json") == {"baseline/perplexity": 7.0}
    assert len(spy_of(made).told) == 2


def share(config: Any, count: int = 2) -> RankHeadsConfig:
    return replace(config, shard=ShardConfig(count, 0))


def test_a_shard_that_comes_when_all_is_done_leaves_the_run_finished(made, tmp_path, prepared):
    shared = share(made.config)
    replace(made, config=shared).finish(SUMMARY, {})
    manifest = (tmp_path / "manifest.json").read_bytes()
    with recorded("rank_heads", shared, prepared, tmp_path, Console()) as late:
        assert is_finished(tmp_path)  # others may be reading it
        late.finish(SUMMARY, {})
    assert (tmp_path / "manifest.json").read_bytes() == manifest


def test_only_a_ranking_in_several_shards_is_shared(config):
    assert not is_shared(config)
    assert is_shared(share(config))
    others = {name: getattr(config, name) for name in "model dataset evaluation ablation".split()}
    assert not is_shared(MeasureConfig(**others, tracker=config.tracker))


# ---- several at once


def in_threads(count: int, work: Callable[[], object]) -> None:
    """Do the work in so many threads that start at the same moment."""
    start = threading.Barrier(count)

    def begin() -> None:
        start.wait()
        work()

    threads = [threading.Thread(target=begin) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_shards_that_finish_at_the_same_moment_finish_the_run_once(
    config, prepared, tmp_path, monkeypatch
):
    written: list[Path] = []
    write_json = recording.write_json
    monkeypatch.setattr(
        recording, "write_json", lambda path, obj: (written.append(path), write_json(path, obj))
    )
    spy = Spy(tmp_path, print)
    keep_manifest(tmp_path, share(config), prepared, finished=False)
    made = recording_by(spy, share(config), prepared, tmp_path)
    in_threads(4, lambda: made.finish(SUMMARY, {}))
    assert written == [tmp_path / "summary.json"]
    assert (len(spy.told), spy.there) == (1, [LAST])
    assert {path.name for path in tmp_path.iterdir()} == LAST


def test_one_at_a_time_is_let_in(tmp_path):
    inside, most = 0, []

    def enter() -> None:
        nonlocal inside
        with only_one(tmp_path / "lock"):
            inside += 1
            most.append(inside)
            threading.Event().wait(0.02)
            inside -= 1

    in_threads(2, enter)
    assert most == [1, 1]
    assert not (tmp_path / "lock").exists()


def test_whoever_fails_or_dies_inside_lets_the_next_one_in(tmp_path):
    with pytest.raises(ValueError, match="inside"), only_one(tmp_path / "lock"):
        raise ValueError("inside")
    code = "import filelock, os; lock = filelock.FileLock('lock'); lock.acquire(); os._exit(1)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 1
    with only_one(tmp_path / "lock"):
        pass
    assert not (tmp_path / "lock").exists()


# ---- around a run


@pytest.fixture
def tracks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note how W&B runs begin, and whether they ended well."""
    begun: list[dict[str, Any]] = []

    @contextmanager
    def track(**options: Any) -> Iterator[Tracker]:
        begun.append(options)
        try:
            yield Tracker(options["directory"], options["say"])
        except BaseException as error:
            options["failed"] = repr(error)
            raise

    monkeypatch.setattr(recording, "track", track)
    return begun


def test_a_run_begins_with_its_protocol_and_an_unfinished_manifest(
    config, prepared, tmp_path, capsys, tracks, monkeypatch
):
    monkeypatch.setenv("HOME", str(Path(config.model.path).parent))
    console = Console(width=80)
    with recorded("rank_heads", config, prepared, tmp_path, console) as made:
        assert capsys.readouterr().out == f"Protocol: {prepared.protocol}\n"
        assert read(tmp_path)["finished_utc"] is None
        assert (made.config, made.directory) == (config, tmp_path)
    [options] = tracks
    assert (options["mode"], options["project"], options["job_type"]) == (
        *("none", "mhaprune", "rank_heads"),
    )
    assert options["config"]["model"]["path"] == "~/model"  # no home directory in W&B
    assert "failed" not in options
    assert not is_finished(tmp_path)


def test_a_run_that_raises_is_a_failed_run_in_w_and_b(config, prepared, tmp_path, tracks):
    run = recorded("rank_heads", config, prepared, tmp_path, Console())
    with pytest.raises(ValueError, match="no memory"), run:
        raise ValueError("no memory")
    assert tracks[0]["failed"] == "ValueError('no memory')"


def test_work_left_to_others_is_said_and_no_failure_in_w_and_b(
    config, prepared, tmp_path, tracks, capsys
):
    run = recorded("rank_heads", share(config, 3), prepared, tmp_path, Console(width=80))
    with pytest.raises(OthersAtWork) as left, run:
        raise OthersAtWork(5)
    assert left.value.num_units == 5
    assert "failed" not in tracks[0]
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"Shard 0 of 3, together in {tmp_path}",
        "This shard is done; 5 units of work are left to other jobs, and the last of them writes "
        "the files",
    ]


@pytest.mark.usefixtures("tracked")
def test_a_shard_that_leaves_work_ends_with_exit_code_0_in_w_and_b(place, tmp_path, monkeypatch):
    arguments = [
        *("model=local", f"model.path={place}/model", "model.device=cpu", "dataset=text"),
        *(f"dataset.path={place}/stories.txt", "evaluation.context_length=16", "heads=[L0H*]"),
        *("evaluation.max_windows=4", "shard.count=2", "shard.index=1", "tracker=offline"),
    ]
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["rank_heads.py", *arguments, f"hydra.run.dir={tmp_path}/r"])
    run_program(program.rank_heads, RankHeadsConfig, "rank_heads")
    [file] = tmp_path.glob("r/wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    [closed] = [record["exit"] for record in records if record["type"] == "exit"]
    assert closed.get("exit_code", 0) == 0  # a zero is not written
    assert not is_finished(tmp_path / "r")
