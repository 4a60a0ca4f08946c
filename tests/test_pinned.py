"""What was made before the library was divided into rooms is read, resumed and reproduced after."""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mhaprune.model.heads import select_heads
from mhaprune.review.report import write_report
from mhaprune.run.comparing import compare_runs
from mhaprune.run.config import CONF_DIR, RankHeadsConfig, validate
from mhaprune.run.prepare import prepare
from mhaprune.run.reproducing import reproduce
from mhaprune.run.syncing import sync_run
from tests.programs import resume
from tests.tiny import measure_losses

FIXTURES = Path(__file__).parent / "fixtures"
PROGRAMS = {
    "exhaustive": "rank_heads",
    "adaptive": "rank_heads",
    "optimal": "rank_heads",
    "prune": "prune_heads",
    "compare": "compare_scores",
}
TIMES = ("seconds",)
# Sums in another order, on another processor, move a float64 this much.
ROUNDING = 1e-9


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, in the directory that they were started in."""
    shutil.copytree(FIXTURES / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def values(path: Path) -> Any:
    """What a file says: numbers as numbers, times left out."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with path.open(newline="") as file:
        return [
            {name: number(cell) for name, cell in row.items() if name not in TIMES}
            for row in csv.DictReader(file)
        ]


def number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def differences(old: Any, new: Any, rounding: float, place: str = "") -> Iterator[str]:
    """Where two values differ by more than rounding, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new):
            yield f"{place}: {list(old)} -> {list(new)}"
        for name in old.keys() & new.keys():
            yield from differences(old[name], new[name], rounding, f"{place}.{name}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{place}: {len(old)} -> {len(new)} entries"
        for n, pair in enumerate(zip(old, new, strict=False)):
            yield from differences(*pair, rounding, f"{place}[{n}]")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > rounding * max(1.0, abs(old)):
            yield f"{place}: {old!r} -> {new!r}"
    elif old != new:
        yield f"{place}: {old!r} -> {new!r}"


def tables(directory: Path) -> list[str]:
    return sorted(path.name for path in [*directory.glob("*.csv"), directory / "summary.json"])


@pytest.mark.parametrize("run", ["exhaustive", "adaptive", "optimal"])
def test_a_finished_run_is_resumed_without_measuring_and_gives_the_same_tables(runs, run):
    old = {name: values(runs / run / name) for name in tables(runs / run)}
    measured = (runs / run / "measurements.jsonl").read_bytes()
    for name in old:
        (runs / run / name).unlink()
    resume(PROGRAMS[run], runs / run)
    assert (runs / run / "measurements.jsonl").read_bytes() == measured  # every key was known
    new = {name: values(runs / run / name) for name in tables(runs / run)}
    # roles are measured again, in float32
    loose = {"roles.csv": 1e-4}
    for name in old:
        assert list(differences(old[name], new[name], loose.get(name, ROUNDING), name)) == []
    assert set(old) == set(new)


@pytest.mark.parametrize("run", ["prune", "compare"])
def test_curves_and_scores_are_measured_under_the_same_keys(runs, run):
    old = {name: values(runs / run / name) for name in tables(runs / run)}
    measured = (runs / run / "measurements.jsonl").read_bytes()
    resume(PROGRAMS[run], runs / run)
    assert (runs / run / "measurements.jsonl").read_bytes() == measured
    for name in sorted(set(old) - {"scores.csv", "agreement.csv", "summary.json"}):
        assert list(differences(old[name], values(runs / run / name), ROUNDING, name)) == []
    # scores are computed again, in float32: rounding may differ, and with it a rank
    if run == "compare":
        new = values(runs / run / "scores.csv")
        assert list(differences(ordered(old["scores.csv"]), ordered(new), 1e-4, "scores")) == []


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["score"], row["layer"], row["head"]))


def test_a_shard_half_done_measures_only_the_other_half(runs):
    before = (runs / "shard" / "measurements.jsonl").read_text().splitlines()
    resume("rank_heads", runs / "shard")
    lines = (runs / "shard" / "measurements.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before
    records = [json.loads(line) for line in lines]
    assert {record["context"] for record in records} == {"d824d1337920f1b3"}
    keys = [(record["layer"], tuple(record["windows"])) for record in records]
    assert len(keys) == len(set(keys)) == 9  # three blocks of windows: intact, layers 0 and 2
    assert len(values(runs / "shard" / "effects.csv")) == 9


@pytest.mark.parametrize("run", PROGRAMS)
def test_a_page_draws_the_same_numbers(runs, run):
    text = write_report(runs / run).read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    drawn = json.loads(data[1])
    drawn.pop("viewer", None)
    assert drawn == values(FIXTURES / "pages" / f"{run}.json")


def test_runs_are_compared(runs):
    [comparison] = compare_runs([runs / "exhaustive", runs / "adaptive"])
    assert comparison.num_common == 9
    assert comparison.spearman == 1.0
    assert comparison.differences == (
        "evaluation.sampling: exhaustive -> adaptive",
        "roles.repeats: 2 -> 8",
        "roles.windows: 2 -> 0",
    )


@pytest.mark.parametrize("run", ["exhaustive", "prune"])
@pytest.mark.usefixtures("tracked")
def test_a_run_is_synced(runs, run):
    said = []
    assert sync_run(runs / run, "offline", said.append)
    [line] = said
    assert line.startswith("W&B: the run is in ")


@pytest.mark.parametrize("run", ["optimal", "prune"])
def test_a_run_is_reproduced_from_nothing(runs, run):
    said = []
    assert reproduce(runs / run, None, said.append)
    assert said[-1] == "The results agree"


@pytest.mark.parametrize("kind", ["zero", "mean", "resample", "optimal"])
@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_effects_of_the_demo_model_are_what_they_were(tmp_path, kind, engine):
    overrides = [
        *("dataset.num_stories=60", "evaluation.context_length=64", "evaluation.max_windows=4"),
        *("evaluation.calibration_windows=4", "evaluation.rows_per_batch=8", "tracker=none"),
        *("model.dtype=float64", "model.device=cpu", f"ablation={kind}"),
        *(["ablation.steps=4"] if kind == "optimal" else []),
        f"evaluation.engine={engine}",
    ]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config = validate(compose("rank_heads", overrides), RankHeadsConfig)
    prepared, heads = prepare(config), select_heads(["L*H*"], 4, 8)
    losses = measure_losses(prepared, heads, config, tmp_path)
    effects = (losses.ablated_nats - losses.intact_nats).sum(1) / prepared.sample.num_tokens.sum()
    golden = values(FIXTURES / "effects.json")[kind]
    assert list(golden) == [str(head) for head in heads]
    np.testing.assert_allclose(effects, list(golden.values()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("program", ["rank_heads", "prune_heads", "compare_scores", "head_atlas"])
def test_the_configuration_is_what_it_was(program):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        shown = OmegaConf.to_yaml(compose(program))
    assert shown == (FIXTURES / "config" / f"{program}.yaml").read_text().rstrip("\n") + "\n"
