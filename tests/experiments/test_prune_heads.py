"""Pruning from its arguments to its files, on the demo model."""

import csv
import json
import sys
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from experiments import prune_heads as program
from mhaprune.measure.perplexity import row_nats
from mhaprune.run.config import PruneHeadsConfig, validate
from mhaprune.run.launch import run_program
from mhaprune.run.prepare import prepare
from mhaprune.text.sample import window_batch

SMALL = [
    *("heads=[L0H*,L3H*]", "dataset.num_stories=60", "evaluation.context_length=64"),
    *("evaluation.max_windows=8", "evaluation.calibration_windows=4", "evaluation.resamples=200"),
    *("evaluation.rows_per_batch=16", "pruning.random_orders=2", "pruning.step=8"),
]
COLUMNS = "ordering direction num_removed nats_per_token perplexity ci_low ci_high".split()
FILES = {
    *("curve.csv", "curves.png", "manifest.json", "measurements.jsonl", "report.html"),
    "summary.json",
}
ALONE = ["~pruning.orderings.activation_norm", "~pruning.orderings.gradient"]
NAMED = ["leave_one_out", "gradient", "activation_norm"]
RANDOM = ["random_0", "random_1"]
PARAMETERS_OF_A_HEAD = 3 * 16 * (128 + 1) + 16 * 128
KV_BYTES_OF_A_HEAD = 2 * 16 * 4
Run = Callable[..., Path]


def start(patch: pytest.MonkeyPatch, place: Path, *arguments: str) -> None:
    """Run the program in `place`."""
    patch.setenv("COLUMNS", "80")
    patch.setenv("HYDRA_FULL_ERROR", "1")
    patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    patch.chdir(place)
    patch.setattr(sys, "argv", ["prune_heads.py", *arguments])
    run_program(program.prune_heads, PruneHeadsConfig, "prune_heads")


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run lies in `run`, and in `dense` its model without 8 heads."""
    place = tmp_path_factory.mktemp("pruned")
    wanted = ("form=dense", "dir=dense", "num_heads=8", "ordering=leave_one_out")
    with pytest.MonkeyPatch.context() as patch:
        export = [f"export.{each}" for each in wanted]
        start(patch, place, *SMALL, *export, "tracker=none", f"hydra.run.dir={place}/run")
    return place


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the program with these arguments; the run directory is `tmp_path / name`."""

    def run(*arguments: str, name: str = "run", tracker: str = "none") -> Path:
        own = [f"hydra.run.dir={tmp_path / name}", f"tracker={tracker}"]
        start(monkeypatch, tmp_path, *SMALL, *arguments, *own)
        return tmp_path / name

    return run


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# ---- a run


def test_a_run_leaves_its_files_and_the_curve_has_its_columns(pruned):
    assert {path.name for path in (pruned / "run").iterdir() if path.is_file()} == FILES
    assert (pruned / "run" / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert list(rows_in(pruned / "run" / "curve.csv")[0]) == COLUMNS
    assert read(pruned / "run" / "manifest.json")["finished_utc"]


def test_each_order_has_its_points_in_each_direction_and_chance_in_one(pruned):
    rows = rows_in(pruned / "run" / "curve.csv")
    orders = [(name, direction) for name in NAMED for direction in ("least", "most")]
    orders += [(name, "least") for name in RANDOM]
    assert [(row["ordering"], row["direction"], row["num_removed"]) for row in rows] == [
        (*order, count) for order in orders for count in ("0", "8", "16")
    ]


def test_every_curve_begins_at_the_intact_model_and_ends_without_all_heads(pruned):
    rows = rows_in(pruned / "run" / "curve.csv")
    intact = read(pruned / "run" / "summary.json")["baseline/perplexity"]
    for row in rows:
        perplexity, low, high = (float(row[name]) for name in COLUMNS[-3:])
        assert perplexity == pytest.approx(exp(float(row["nats_per_token"])))
        assert low <= perplexity * (1 + 1e-12) and perplexity <= high * (1 + 1e-12)
        if row["num_removed"] == "0":
            assert (perplexity, low, high) == pytest.approx((intact, intact, intact))
    ends = {float(row["perplexity"]) for row in rows if row["num_removed"] == "16"}
    assert len(ends) == 1
    assert ends.pop() > 1.5 * intact


def test_the_summary_says_how_many_heads_can_go_by_each_order(pruned):
    summary = read(pruned / "run" / "summary.json")
    counts = [f"heads_removed_at_{increase}" for increase in ("1pct", "5pct", "10pct")]
    areas = ["area_nats_least_first", "area_nats_most_first"]
    best = [f"pruning/most_heads_at_{increase}" for increase in ("1pct", "5pct", "10pct")]
    flat = {"baseline/perplexity", "pruning/smallest_area", *best}
    assert summary.keys() == {*flat, *counts, *areas}
    for name, count in zip(best, counts, strict=True):
        assert summary[name] == max(summary[count][order] for order in NAMED)
    least = summary["area_nats_least_first"]
    assert summary["pruning/smallest_area"] == min(least[order] for order in NAMED)
    for key in counts:
        assert summary[key].keys() == {*NAMED, *RANDOM}
        assert {*summary[key].values()} <= {0, 8, 16}
    assert [set(summary[key]) for key in areas] == [{*NAMED, *RANDOM}, {*NAMED}]
    rows = rows_in(pruned / "run" / "curve.csv")
    for key, increase in zip(counts, (0.01, 0.05, 0.10), strict=True):
        for name in NAMED:
            under = [
                float(row["ci_high"]) < summary["baseline/perplexity"] * (1 + increase)
                for row in rows
                if (row["ordering"], row["direction"]) == (name, "least")
            ]
            assert summary[key][name] == 8 * (
                0 if not under[0] else [*under, False].index(False) - 1
            )


def test_the_exported_model_loads_and_loses_what_the_curve_says(pruned):
    """The dense form is a GPT-2, so that it loads here without its own code."""
    config = validate(read(pruned / "run" / "manifest.json")["config"], PruneHeadsConfig)
    prepared = prepare(config)
    model = AutoModelForCausalLM.from_pretrained(pruned / "dense").eval()
    assert type(model).__name__ == "GPT2LMHeadModel"
    nats = row_nats(model, *window_batch(prepared.sample.tokens.ids, prepared.sample.windows)).sum()
    [row] = [
        row
        for row in rows_in(pruned / "run" / "curve.csv")
        if [row[name] for name in COLUMNS[:3]] == ["leave_one_out", "least", "8"]
    ]
    found = float(nats) / int(prepared.sample.num_tokens.sum())
    assert found == pytest.approx(float(row["nats_per_token"]), abs=1e-5)
    manifest = read(pruned / "dense" / "manifest.json")
    assert manifest["ordering"] == "leave_one_out"
    assert len(set(manifest["removed_heads"])) == 8
    assert {name[:2] for name in manifest["removed_heads"]} <= {"L0", "L3"}
    card = (pruned / "dense" / "README.md").read_text()
    assert "without 8 of its 32 attention heads" in card


def test_another_run_and_a_resumed_one_give_the_same_bytes(pruned, run, monkeypatch, tmp_path):
    directory = run()
    names = ("curve.csv", "summary.json", "curves.png", "measurements.jsonl")
    before = {name: (directory / name).read_bytes() for name in names}
    assert before["curve.csv"] == (pruned / "run" / "curve.csv").read_bytes()
    for name in ("summary.json", "curve.csv"):
        (directory / name).unlink()
    start(monkeypatch, tmp_path, f"resume={directory}")
    assert {name: (directory / name).read_bytes() for name in names} == before


@pytest.mark.usefixtures("tracked")
def test_pairs_savings_and_healing_are_looked_at_and_shown_as_well(run, capsys, tmp_path):
    wanted = ["pruning.pairs=3", "savings=true", "heal.steps=2", "heal.windows_per_step=4"]
    export = ["export.dir=compact", "export.num_heads=8"]
    directory = run(*wanted, *export, *ALONE, tracker="offline")
    assert {path.name for path in directory.iterdir() if path.is_file()} == FILES | {
        *("interactions.csv", "pairs.png", "savings.csv")
    }
    for picture in ("curves.png", "pairs.png"):
        assert (directory / picture).read_bytes().startswith(b"\x89PNG\r\n")

    pairs = rows_in(directory / "interactions.csv")
    names = {name for row in pairs for name in row["heads"].split()}
    assert len(pairs) == len(names) == 3
    for row in pairs:
        joint, parts = float(row["joint_nats"]), float(row["sum_nats"])
        assert float(row["interaction_nats"]) == pytest.approx(joint - parts, abs=1e-12)

    savings = rows_in(directory / "savings.csv")
    sizes = [tuple(int(row[name]) for name in list(row)[:3]) for row in savings]
    assert [count for count, _, _ in sizes] == [0, 2, 5, 8]  # 10, 30 and 50% of 16
    for count, parameters, num_bytes in sizes:
        assert parameters == sizes[0][1] - count * PARAMETERS_OF_A_HEAD
        assert num_bytes == (32 - count) * KV_BYTES_OF_A_HEAD

    curve = rows_in(directory / "curve.csv")
    healed = [row for row in curve if row["ordering"].endswith("_healed")]
    assert [row["num_removed"] for row in healed] == ["0", "2", "5", "8"]
    assert {row["ordering"] for row in healed} == {"leave_one_out_healed"}
    summary = read(directory / "summary.json")
    least = {"leave_one_out", "leave_one_out_healed", *RANDOM}
    assert summary["heads_removed_at_5pct"].keys() == least
    assert summary["area_nats_least_first"].keys() == least - {"leave_one_out_healed"}
    manifest = read(tmp_path / "compact" / "manifest.json")
    assert len(manifest["removed_heads"]) == 8
    said = f"2 steps on calibration text; perplexity now {float(healed[-1]['perplexity']):.4g}"
    assert manifest["healed"] == said  # the same heads, steps and seed as the curve's last point
    assert f"- Healed by {said}\n" in (tmp_path / "compact" / "README.md").read_text()
    assert read(tmp_path / "compact" / "config.json")["model_type"] == "mhaprune_gpt2"

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines.index("What removing heads buys") < lines.index(
        "Heads that can go at more perplexity"
    )
    tables = directory.glob("wandb/offline-run-*/files/media/table/*.table.json")
    shown = {path.name.split("_")[0]: read(path) for path in tables}
    assert {name: len(table["data"]) for name, table in shown.items()} == {
        "curve": len(curve),
        "interactions": 3,
        "savings": 4,
    }


def test_a_saved_ranking_of_another_text_is_an_order_too(run, pruned, tmp_path):
    entries = read(pruned / "run" / "manifest.json") | {"tokens_hash": "other"}
    ranked = tmp_path / "ranked"
    ranked.mkdir()
    (ranked / "manifest.json").write_text(json.dumps(entries))
    rows = [f"a,{layer},{head},{head - layer},\n" for layer in (0, 3) for head in range(8)]
    (ranked / "scores.csv").write_text("score,layer,head,value,standard_error\n" + "".join(rows))
    directory = run(f"pruning.ranking={ranked}", *ALONE)
    found = [row for row in rows_in(directory / "curve.csv") if row["ordering"] == "ranking"]
    assert [(row["direction"], row["num_removed"]) for row in found] == [
        (direction, count) for direction in ("least", "most") for count in ("0", "8", "16")
    ]


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["export.dir=x"], "export.dir needs either export.num_heads or export.max_increase"),
        (["export.dir=occupied", "export.num_heads=1"], "occupied exists and is not an empty dir"),
        (
            ["export.dir=x", "export.num_heads=1", "ablation=resample"],
            "export.dir: a model cannot keep resampled heads; use ablation=zero, mean or optimal",
        ),
        (
            ["export.dir=x", "export.num_heads=1", "export.ordering=nope"],
            "export.ordering=nope is not one of leave_one_out, gradient, activation_norm",
        ),
        (
            ["ablation=resample", "pruning.orderings.gradient.rescore_every=4"],
            "pruning.orderings.gradient: taking a score again with heads already ablated works for",
        ),
        (["pruning.ranking=nowhere"], "nowhere is not the directory of a run: it has no manifest"),
        (["pruning.orderings.gradient.score=nope"], "score 'nope' is not one of leave_one_out, "),
        (["+pruning.orderings.gradient.options.n=1"], "score gradient has no option 'n'; it has "),
        (["pruning.sets=[[L9H0]]"], "layer in 'L9H0' is out of range: this model has 0 to 3"),
        (["+pruning.orderings.random_1.score=fisher"], "pruning.orderings.random_1: ranking, ran"),
        (["+pruning.orderings.a_healed.score=fisher"], "pruning.orderings.a_healed: ranking, ran"),
        (["evaluation.calibration_windows=3"], "comparing scores takes at least 4 calibration win"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2_before_anything_is_measured(
    run, capfd, tmp_path, arguments, line
):
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "file").touch()
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    [error] = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}")
    assert not (tmp_path / "run" / "measurements.jsonl").exists()
    assert [path.name for path in (tmp_path / "occupied").iterdir()] == ["file"]


def test_more_heads_than_can_go_are_not_exported_but_the_curves_are_kept(run, capfd, tmp_path):
    with pytest.raises(SystemExit) as stop:
        run("export.dir=x", "export.num_heads=17", *ALONE)
    assert stop.value.code == 2
    line = "error: export.num_heads=17 is more than the 16 heads that can go"
    assert capfd.readouterr().err.splitlines() == [line]
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "run" / "curve.csv").exists()
