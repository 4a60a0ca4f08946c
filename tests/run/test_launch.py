"""How a sweep runs: its failures, its configuration files, its W&B group and its shards."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mhaprune.run import launch
from mhaprune.run.config import CONF_DIR, RankHeadsConfig
from mhaprune.run.launch import check_siblings, run_program, snapshot, with_shards
from mhaprune.run.measuring import OthersAtWork

QUIET = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled", "hydra.sweep.dir=s"]
Task = Callable[[RankHeadsConfig, Path], None]
Seen = list[tuple[RankHeadsConfig, Path]]


def nothing(config: RankHeadsConfig, directory: Path) -> None:
    """A job that does nothing."""


class Launched:
    """Programs that only note what they were given, and what followed each of their jobs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.seen: Seen = []
        self.followed: list[Path] = []

    def __call__(self, *arguments: str, task: Task = nothing) -> Seen:
        self.seen.clear()
        self.followed.clear()

        def noting(config: RankHeadsConfig, directory: Path) -> None:
            self.seen.append((config, directory))
            task(config, directory)

        self.patch.setattr(sys, "argv", ["program", *arguments])
        run_program(noting, RankHeadsConfig, "rank_heads", self.followed.append)
        return list(self.seen)

    @property
    def seeds(self) -> list[int]:
        return [config.seed for config, _ in self.seen]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    return Launched(monkeypatch)


@pytest.fixture
def fails(run: Launched, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Launch a sweep that fails; return what it printed to stderr."""

    def fails(*arguments: str, task: Task = nothing, code: int = 2) -> list[str]:
        with pytest.raises(SystemExit) as stop:
            run("-m", *arguments, *QUIET, task=task)
        assert stop.value.code == code
        return capfd.readouterr().err.splitlines()

    return fails


def failures(place: Path) -> dict[str, str]:
    """What failed below a sweep's directory: the number of the job -> why."""
    return {
        path.parent.name.split("_")[0]: json.loads(path.read_text())["error"]
        for path in sorted(place.glob("*/failed.json"))
    }


def seed_2_fails(config: RankHeadsConfig, directory: Path) -> None:
    if config.seed == 2:
        raise ValueError("no memory\nmore of it")


# ---- failures

NOT_A_NUMBER = "seed: Value 'x' of type 'str' could not be converted to Integer"


@pytest.mark.parametrize(
    ("second", "why"), [("x", NOT_A_NUMBER), ("2", "no memory")], ids=["config", "task"]
)
def test_a_failure_is_noted_and_the_next_job_runs(run, fails, tmp_path, second, why):
    lines = fails(f"seed=1,{second},3", task=seed_2_fails)
    assert lines[0].startswith("Error executing job with overrides: ")
    assert lines[-1] == f"error: {why}"
    assert [seed for seed in run.seeds if seed != 2] == [1, 3]
    assert failures(tmp_path / "s") == {"1": why}


@pytest.mark.parametrize(
    ("second", "why"), [("x", NOT_A_NUMBER), ("2", "no memory")], ids=["config", "task"]
)
def test_with_failure_stop_no_job_starts_after_one_that_failed(run, fails, tmp_path, second, why):
    lines = fails(f"seed=1,{second},3", "failure=stop", task=seed_2_fails)
    assert lines[-1] == f"error: {why}"
    assert [seed for seed in run.seeds if seed != 2] == [1]
    assert failures(tmp_path / "s") == {
        "1": why,
        "2": "not started: job 1_demo_stories_zero failed, and failure=stop",
    }


@pytest.mark.parametrize("failure", ["continue", "stop"])
def test_something_follows_each_job_failed_or_not(run, fails, tmp_path, failure):
    fails("seed=1,x,3", f"failure={failure}")
    assert [path.relative_to(tmp_path / "s").name[0] for path in run.followed] == ["0", "1", "2"]


def test_an_interrupted_job_is_noted_as_such(run, tmp_path, capfd):
    def interrupt(config: RankHeadsConfig, directory: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run("-m", "seed=1,2", *QUIET, task=interrupt)
    assert stop.value.code == 130
    assert failures(tmp_path / "s") == {"0": "KeyboardInterrupt"}
    assert run.seeds == [1]


def test_a_job_that_runs_again_and_ends_well_is_no_failure_any_more(run, fails, tmp_path):
    fails("seed=1,2,3", task=seed_2_fails)
    assert failures(tmp_path / "s") == {"1": "no memory"}
    run("-m", "seed=1,2,3", *QUIET)
    assert run.seeds == [1, 2, 3]
    assert failures(tmp_path / "s") == {}


def test_a_sweep_that_stopped_can_be_launched_again_in_its_directory(run, fails, tmp_path):
    fails("seed=1,2,3", "failure=stop", task=seed_2_fails)
    run("-m", "seed=1,2,3", "failure=stop", *QUIET)
    assert run.seeds == [1, 2, 3]
    assert failures(tmp_path / "s") == {}


def test_only_failure_stop_minds_the_other_jobs(tmp_path):
    for name in ("0_a", "1_b"):
        (tmp_path / name).mkdir()
    check_siblings("stop", tmp_path / "1_b")
    (tmp_path / "0_a" / "failed.json").write_text("{}")
    check_siblings("continue", tmp_path / "1_b")
    with pytest.raises(ValueError, match=r"^not started: job 0_a failed, and failure=stop$"):
        check_siblings("stop", tmp_path / "1_b")


def test_the_note_of_a_failure_is_whole_or_not_there(fails, tmp_path, monkeypatch):
    def torn(path: Path, *content: Any, **options: Any) -> int:
        path.touch()
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", torn)
    fails("seed=x")
    for path in tmp_path.glob("s/*/failed.json"):
        assert json.loads(path.read_text())["error"] == NOT_A_NUMBER


def test_work_that_is_left_to_others_is_no_failure(run, tmp_path):
    def leave(config: RankHeadsConfig, directory: Path) -> None:
        raise OthersAtWork(3)

    run("-m", "seed=1,2", *QUIET, task=leave)
    assert (run.seeds, failures(tmp_path / "s")) == ([1, 2], {})
    run("hydra.run.dir=r", *QUIET, task=leave)
    assert len(run.followed) == 0  # nothing follows a run that is no job of a sweep


# ---- the configuration files of a sweep


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the configuration files, to be edited."""
    conf = Path(shutil.copytree(CONF_DIR, tmp_path / "conf"))
    monkeypatch.setattr(launch, "CONF_DIR", conf)
    return conf


def test_what_is_edited_while_a_sweep_runs_is_for_the_next_one(run, conf):
    file = conf / "evaluation" / "default.yaml"

    def edit(config: RankHeadsConfig, directory: Path) -> None:
        file.write_text(file.read_text().replace("confidence: 0.95", "confidence: 0.9"))

    def confidences(seen: Seen) -> list[float]:
        return [config.evaluation.confidence for config, _ in seen]

    assert confidences(run("-m", "seed=1,2", *QUIET, task=edit)) == [0.95, 0.95]
    assert "confidence: 0.9 " in file.read_text() or "confidence: 0.9\n" in file.read_text()
    assert confidences(run("-m", "seed=1,2", *QUIET)) == [0.9, 0.9]
    assert confidences(run("hydra.run.dir=r", *QUIET)) == [0.9]


def test_a_snapshot_holds_the_files_to_the_byte_and_is_made_once(conf, tmp_path):
    first = snapshot(conf, tmp_path / "snapshots")
    names = {path.relative_to(conf) for path in conf.rglob("*.yaml")}
    assert {path.relative_to(first) for path in first.rglob("*") if path.is_file()} == names
    assert all((first / name).read_bytes() == (conf / name).read_bytes() for name in names)
    changed = [path.stat().st_mtime_ns for path in sorted(first.rglob("*"))]
    assert snapshot(conf, tmp_path / "snapshots") == first
    assert [path.stat().st_mtime_ns for path in sorted(first.rglob("*"))] == changed
    (conf / "model" / "new.yaml").write_text("name: new\n")
    assert snapshot(conf, tmp_path / "snapshots") != first
    assert len(list((tmp_path / "snapshots").iterdir())) == 2


def test_a_sweep_reads_copies_of_the_users_own_files_too(run, tmp_path):
    file = tmp_path / "own" / "evaluation" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("defaults: [default]\nconfidence: 0.8\n")

    def edit(config: RankHeadsConfig, directory: Path) -> None:
        file.write_text(file.read_text().replace("0.8", "0.7"))
        seen.append(list(sys.argv))

    def confidences(*arguments: str, task: Task = nothing) -> list[float]:
        return [config.evaluation.confidence for config, _ in run(*arguments, *QUIET, task=task)]

    seen: list[list[str]] = []
    sweep = ["-m", "seed=1,2", "evaluation=mine"]
    assert confidences("--config-dir", "own", *sweep, task=edit) == [0.8, 0.8]
    assert seen == [["program", "--config-dir", "own", *sweep, *QUIET]] * 2
    assert confidences("--config-dir=own", *sweep) == [0.7, 0.7]
    assert confidences("-cd", "own", "evaluation=mine", "hydra.run.dir=r") == [0.7]


def test_a_program_of_the_command_line_notes_how_it_was_started(monkeypatch, tmp_path, capfd):
    def interrupt(config: RankHeadsConfig, directory: Path) -> None:
        seen.append(list(sys.argv))
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    seen: list[list[str]] = []
    command = ["mhaprune", "rank", "seed=1", "hydra.run.dir=a r"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        run_program(interrupt, RankHeadsConfig, "rank_heads")
    assert seen == [command]
    line = f"go on with: mhaprune rank 'resume={tmp_path}/a r'\n"
    assert capfd.readouterr().err.endswith(line)


def test_a_program_that_is_no_sweep_makes_no_snapshot(run, tmp_path):
    run("hydra.run.dir=r", *QUIET)
    assert not (tmp_path / "runs").exists()
    run("--multirun", "seed=1,2", *QUIET)
    assert [path.parent.name for path in (tmp_path / "runs").glob("*/*")] == [".conf"]


# ---- the W&B group


def test_the_runs_of_a_sweep_are_a_group_called_after_its_directory(run):
    groups = [config.tracker.group for config, _ in run("-m", "seed=1,2", *QUIET)]
    assert groups == ["s", "s"]
    named = run("-m", "seed=1,2", "tracker.group=mine", *QUIET)
    assert [config.tracker.group for config, _ in named] == ["mine", "mine"]
    [(alone, _)] = run("hydra.run.dir=r", *QUIET)
    assert alone.tracker.group is None


def test_a_job_that_is_resumed_stays_in_its_group(run):
    [(_, directory)] = run("-m", "seed=1", *QUIET)
    [(config, _)] = run(f"resume={directory}")
    assert config.tracker.group == "s"


# ---- shards


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_gets_a_job_for_each_shard(flag):
    asked = ["seed=1", flag, "shard.count=4"]
    assert sorted(with_shards(asked)) == sorted([*asked, "shard.index=range(4)"])


def test_the_flag_of_a_sweep_may_come_last(run):
    seen = run("shard.count=2", *QUIET, "-m")
    assert [config.shard.index for config, _ in seen] == [0, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["shard.count=4"],
        ["-m", "seed=1,2"],
        ["-m", "shard.count=4", "shard.index=1,2"],
        ["-m", "shard.count=2,4"],
        ["-m", "shard.count=x"],
    ],
    ids=" ".join,
)
def test_other_arguments_are_left_as_they_are(arguments):
    assert with_shards(arguments) == arguments


@given(st.integers(1, 99))
def test_the_shards_of_a_sweep_are_all_of_them(count: int):
    *_, added = with_shards(["-m", f"shard.count={count}"])
    assert added == f"shard.index=range({count})"


def test_the_shards_of_a_configuration_share_a_directory_beside_their_own(run, tmp_path):
    seen = run("-m", "shard.count=2", "seed=1,2", *QUIET)
    found = [(config.seed, config.shard.index, directory) for config, directory in seen]
    assert sorted(each[:2] for each in found) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    places = {seed: {place for s, _, place in found if s == seed} for seed in (1, 2)}
    assert [len(place) for place in places.values()] == [1, 1]
    [first], [second] = places.values()
    assert first != second and first.parent == second.parent == tmp_path / "s"
    assert first.name.startswith("demo_stories_zero_")
    assert len(list((tmp_path / "s").glob("[0-3]_demo_stories_zero"))) == 4
    for seed, [place] in places.items():
        saved = OmegaConf.load(place / ".hydra" / "config.yaml")
        assert (saved.seed, saved.shard) == (seed, {"count": 2, "index": 0})
        names = {path.name for path in (place / ".hydra").iterdir()}
        assert names == {"config.yaml", "hydra.yaml"}


def test_one_shard_is_none(run, tmp_path):
    [(config, directory)] = run("-m", "shard.count=1", *QUIET)
    assert (config.shard.count, directory) == (1, tmp_path / "s" / "0_demo_stories_zero")


def test_a_resumed_shard_is_the_whole_run(run):
    [_, (config, directory)] = run("-m", "shard.count=2", "seed=4", *QUIET)
    assert (config.shard.count, config.shard.index) == (2, 1)
    [(whole, again)] = run(f"resume={directory}")
    assert (whole.shard.count, whole.shard.index, whole.seed) == (1, 0, 4)
    assert again == directory


def test_shards_may_share_a_run_directory_that_others_may_not(run, capfd, tmp_path):
    [(_, directory)] = run("hydra.run.dir=r", *QUIET)
    (directory / "manifest.json").touch()
    run("hydra.run.dir=r", "shard.count=2", "shard.index=1", *QUIET)
    with pytest.raises(SystemExit) as stop:
        run("hydra.run.dir=r", "shard.count=2", *QUIET)
    assert stop.value.code == 2
    assert capfd.readouterr().err.startswith("error: r already holds a run; go on with it by ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["shard.count=2", "shard.index=2"], "shard.index=2 must lie from 0 to 1"),
        (["shard.index=1"], "shard.index=1 must lie from 0 to 0"),
        (["shard.count=0"], "shard.count=0 must be at least 1"),
        (["shard.count=2", "score=fisher"], SHARED := "shard.count: only score=leave_one_out with"),
        (["shard.count=2", "evaluation=adaptive"], SHARED),
        (["failure=later"], "failure=later is not one of continue, stop"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(run, capfd, arguments, line):
    with pytest.raises(SystemExit) as stop:
        run(*arguments, "hydra.run.dir=r", *QUIET)
    assert stop.value.code == 2
    [error] = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}")
    assert run.seen == []
