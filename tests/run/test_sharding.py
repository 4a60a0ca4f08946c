"""A run that is shared out: every unit measured once, and the files of a run that was not."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import rank_heads as program
from mhaprune.measure import measurer as measurer_module
from mhaprune.measure.leave_one_out import Unit, plan
from mhaprune.measure.measurer import Measurer, Place, share_of
from mhaprune.measure.progress import Progress
from mhaprune.measure.store import MeasurementStore
from mhaprune.measure.subject import Subject
from mhaprune.model.heads import Head
from mhaprune.review.index import refresh_index
from mhaprune.run.config import RankHeadsConfig
from mhaprune.run.launch import run_program
from mhaprune.run.measuring import OthersAtWork
from mhaprune.run.prepare import Prepared, prepare
from tests.tiny import make_config, make_place, measure_losses

RESULTS = ("effects.csv", "summary.json", "roles.csv", "by_role.csv", "attention.npz")
SAME = (*RESULTS, "heatmap.png")
ROLES = ["roles.windows=1", "roles.repeats=1", "roles.period=16"]
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture
def run(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the program on the tiny model, 6 windows in blocks of 2: 9 units of work."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    small = [
        *("model=local", f"model.path={place}/model", "model.device=cpu", "dataset=text"),
        *(f"dataset.path={place}/stories.txt", "evaluation.context_length=16"),
        *("evaluation.max_windows=6", "evaluation.windows_per_unit=2", "evaluation.resamples=100"),
        *(*ROLES, "tracker=none"),
    ]

    def run(*arguments: str, name: str | None = "run", fixed: bool = True) -> Path:
        own = [f"hydra.run.dir={name}"] if name else []
        flags = ["-m"] * ("-m" in arguments)
        others = [argument for argument in arguments if argument != "-m"]
        argv = ["rank_heads.py", *flags, *(small if fixed else []), *others, *own]
        monkeypatch.setattr(sys, "argv", argv)
        run_program(program.rank_heads, RankHeadsConfig, "rank_heads", refresh_index)
        return tmp_path / (name or "")

    return run


NUM_UNITS = 3 * (1 + 2)


def units_in(directory: Path) -> Counter[tuple[Any, ...]]:
    """How often each unit stands in the store."""
    lines = (directory / "measurements.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return Counter(
        (each["context"], each["ablation"], each["layer"], *each["heads"], *each["windows"])
        for each in records
    )


def finished_utc(directory: Path) -> str | None:
    return json.loads((directory / "manifest.json").read_text())["finished_utc"]


def results(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in SAME}


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()}


# ---- the shares

UNITS = [Unit(n, (0,), (0,)) for n in range(40)]


def measured_share(units: list[Unit], shard: tuple[int, int]) -> tuple[list[Unit], int]:
    """What a shard measures of units that nobody has measured, and how many it says are left."""
    measurer = object.__new__(Measurer)
    measured: list[Unit] = []

    class Store(MeasurementStore):
        def completed(self, key: str) -> dict[Any, Any]:
            return dict.fromkeys(unit.stored("zero") for unit in measured)

    place = Place(object.__new__(Store), "", "zero")
    parts: dict[str, Any] = {"place": place, "known": {}}
    parts |= {"progress": Progress(), "losses": measured.extend}
    vars(measurer).update(parts)
    left = measurer.measure_share(share_of(units, *shard), units)
    return measured, left


@given(st.integers(1, 40), st.integers(1, 60))
def test_the_shares_are_disjoint_cover_all_and_differ_by_one_at_most(num_units: int, count: int):
    units = UNITS[:num_units]
    shares, left = zip(
        *(measured_share(units, (index, count)) for index in range(count)), strict=True
    )
    assert [unit for share in shares for unit in share] == units
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert list(left) == [num_units - size for size in sizes]


# ---- one after the other


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_shards_one_after_the_other_leave_what_one_run_leaves(run, tmp_path, capsys, order):
    whole = run(name="whole")
    shared = tmp_path / "run"
    for number, index in enumerate(order, start=1):
        assert (finished_utc(shared) if number > 1 else None) is None
        capsys.readouterr()
        run("shard.count=3", f"shard.index={index}")
        assert len(units_in(shared)) == 3 * number
        lines = capsys.readouterr().out.splitlines()
        assert f"Shard {index} of 3, together in {shared}" in lines
        if number < 3:
            assert names_in(shared) == {"manifest.json", "measurements.jsonl"}
            assert lines[-1].startswith(f"This shard is done; {9 - 3 * number} units of work are")
    assert units_in(shared) == units_in(whole)
    assert set(units_in(shared).values()) == {1}
    assert results(shared) == results(whole)
    assert names_in(shared) == names_in(whole)
    assert finished_utc(shared)


def test_more_shards_than_units_leave_what_one_run_leaves(run):
    arguments = ["heads=[L0H*]", "evaluation.windows_per_unit=6"]
    whole = run(*arguments, name="whole")
    *_, shared = [run(*arguments, "shard.count=3", f"shard.index={index}") for index in range(3)]
    assert sum(units_in(shared).values()) == 2
    assert results(shared) == results(whole)


def test_a_missing_shard_leaves_no_final_files_and_resuming_measures_what_is_left(
    run, capsys, monkeypatch
):
    whole = run(name="whole")
    _, shared = [run("shard.count=3", f"shard.index={index}") for index in (0, 2)]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "This shard is done; 3 units of work are left to other jobs, and the last of them writes "
        "the files"
    )
    assert names_in(shared) == {"manifest.json", "measurements.jsonl"}
    assert len(units_in(shared)) == 6 and finished_utc(shared) is None
    asked: list[Unit] = []
    measure = measurer_module.measure

    def noting(subject: Subject, units: list[Unit]):
        asked.extend(units)
        return measure(subject, units)

    monkeypatch.setattr(measurer_module, "measure", noting)
    run(f"resume={shared}", name=None, fixed=False)
    heads = [Head(layer, head) for layer in range(2) for head in range(4)]
    assert asked == plan(heads, range(6), 2)[3:6]
    assert units_in(shared) == units_in(whole)
    assert results(shared) == results(whole)
    assert finished_utc(shared)


def test_a_shard_that_runs_again_measures_nothing_and_changes_no_number(run, monkeypatch):
    _, shared = [run("shard.count=2", f"shard.index={index}") for index in (0, 1)]
    before = results(shared) | {"m": (shared / "measurements.jsonl").read_bytes()}
    monkeypatch.setattr(
        measurer_module,
        "measure",
        lambda subject, units: pytest.fail("measured") if units else iter(()),
    )
    again = run("shard.count=2", "shard.index=0")
    assert results(again) | {"m": (again / "measurements.jsonl").read_bytes()} == before
    assert finished_utc(again)


def test_a_sweep_s_shards_of_two_ablations_are_two_runs_like_any_other(run, tmp_path):
    run("-m", "shard.count=2", "ablation=zero,mean", "hydra.sweep.dir=sweep", name=None)
    runs = {path.name.split("_")[2]: path for path in (tmp_path / "sweep").glob("local_text_*")}
    for ablation, shared in sorted(runs.items()):
        whole = run(f"ablation={ablation}", name=f"whole_{ablation}")
        assert results(shared) == results(whole)
        assert set(units_in(shared).values()) == {1}
    assert runs.keys() == {"zero", "mean"}
    jobs = list((tmp_path / "sweep").glob("[0-9]_*"))
    assert len(jobs) == 4
    assert not [path for job in jobs for path in job.iterdir() if path.name != ".hydra"]
    page = (tmp_path / "sweep" / "index.html").read_text()
    assert all(f'"name":"{shared.name}"' in page for shared in runs.values())
    assert not any(f'"name":"{job.name}"' in page for job in jobs)


# ---- measuring a share, by itself


@pytest.fixture
def prepared(place: Path) -> Prepared:
    return prepare(make_config(place))


def test_what_others_measured_meanwhile_counts(prepared, place, tmp_path):
    """The store is read anew after the share is done."""
    config, heads = make_config(place), [Head(0, 0), Head(1, 2)]

    class Meanwhile:
        """A view that lets the other job measure once this one has read the store."""

        def show(self, progress: Progress) -> None:
            if not others:
                others.append(True)
                other_share(tmp_path, shard=(1, 2))

        def say(self, line: str) -> None:
            """Nothing to say."""

    def other_share(directory: Path, shard: tuple[int, int]) -> None:
        with pytest.raises(OthersAtWork) as left:
            measure_losses(prepared, heads, config, directory, shard=shard)
        assert left.value.num_units == 3

    others: list[bool] = []
    losses = measure_losses(prepared, heads, config, tmp_path, Meanwhile(), shard=(0, 2))
    whole = measure_losses(prepared, heads, config, place)
    assert others and (losses.intact_nats == whole.intact_nats).all()
    assert (losses.ablated_nats == whole.ablated_nats).all()
    assert len(MeasurementStore(tmp_path / "measurements.jsonl").read()) == 6


# ---- what cannot be shared out


@pytest.mark.parametrize("choice", ["evaluation=adaptive", "score=gradient"])
@pytest.mark.parametrize("sweep", [False, True])
def test_what_cannot_be_shared_out_is_refused_in_one_line(run, capfd, tmp_path, choice, sweep):
    flag = ["-m", "hydra.sweep.dir=sweep"] if sweep else []
    with pytest.raises(SystemExit) as stop:
        run(choice, "shard.count=2", "evaluation.max_windows=8", *flag)
    assert stop.value.code == 2
    *jobs, line = capfd.readouterr().err.splitlines()
    assert line == (
        "error: shard.count: only score=leave_one_out with exhaustive sampling can be shared out"
    )
    assert all(job.startswith("Error executing job with overrides: ") for job in jobs)
    assert not list(tmp_path.rglob("measurements.jsonl"))


# ---- all at once, in processes of their own

DEMO = [
    *("model=demo", "dataset.num_stories=60", "evaluation.context_length=32", "tracker=none"),
    *("evaluation.max_windows=16", "evaluation.windows_per_unit=2", "evaluation.resamples=100"),
    *("heads=[L0H*,L3H1,L3H2]", *ROLES),
]


def test_two_processes_at_once_leave_what_one_run_leaves(run, tmp_path):
    def start(index: int) -> subprocess.Popen[str]:
        own = [f"shard.index={index}", "hydra.sweep.dir=sweep", f"hydra.sweep.subdir={index}_job"]
        return subprocess.Popen(
            [sys.executable, program.__file__, "-m", *DEMO, "shard.count=2", *own],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    processes = [start(index) for index in range(2)]
    whole = run(*DEMO, name="whole", fixed=False)
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 2, said
    [shared] = (tmp_path / "sweep").glob("job_*")
    assert results(shared) == results(whole)
    assert units_in(shared) == units_in(whole)
    assert set(units_in(shared).values()) == {1}
    assert sum(units_in(shared).values()) == 8 * 3
    assert finished_utc(shared)
    assert names_in(shared) == names_in(whole)
    done = [output.splitlines()[-1] for output, _ in said]
    assert any(line == f"Page: {shared}/report.html" for line in done)
    others = [line for line in done if not line.startswith("Page: ")]
    assert all(line.startswith("This shard is done; ") for line in others)
