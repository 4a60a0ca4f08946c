"""The comparison of scores from its arguments to its files, on the demo model."""

import csv
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from experiments import compare_scores as program
from mhaprune.run import scoring
from mhaprune.run.config import CompareScoresConfig
from mhaprune.run.launch import run_program
from mhaprune.scores.catalogue import SCORES
from mhaprune.stats.agreement import rank_agreement

SMALL = [
    *("heads=[L0H*]", "evaluation.context_length=32"),
    *("evaluation.max_windows=8", "evaluation.calibration_windows=4"),
    *("scores.integrated_gradients.steps=2", "scores.learned_gates.steps=3"),
    "scores.learned_gates.lambdas=[0.01,0.1]",
]
COMPARED = [name for name in SCORES if name != "adaptive"]
SCORES_CSV = "score layer head value standard_error".split()
AGREEMENT_CSV = (
    "score spearman ci_low ci_high kendall top_k_overlap sign_agreement reliability "
    "forward_equivalents seconds"
).split()
FILES = {
    *("agreement.csv", "cost.png", "manifest.json", "measurements.jsonl", "scatter.png"),
    *("report.html", "scores.csv", "summary.json"),
}
Run = Callable[..., Path]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the program with these arguments; the run directory is `tmp_path / name`."""
    few_resamples = partial(rank_agreement, num_resamples=40)
    monkeypatch.setattr(scoring, "rank_agreement", few_resamples)  # a thousand take seconds
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, name: str = "run", tracker: str = "none") -> Path:
        own = [f"hydra.run.dir={tmp_path / name}", f"tracker={tracker}"]
        monkeypatch.setattr(sys, "argv", ["compare_scores.py", *SMALL, *arguments, *own])
        run_program(program.compare_scores, CompareScoresConfig, "compare_scores")
        return tmp_path / name

    return run


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.usefixtures("tracked")
def test_a_comparison_leaves_its_files_and_says_what_it_concludes(run, capsys):
    directory = run(tracker="offline")
    assert {path.name for path in directory.iterdir() if path.is_file()} == FILES
    for name in ("scatter.png", "cost.png"):
        assert (directory / name).read_bytes().startswith(b"\x89PNG\r\n")

    scores, agreement = (rows_in(directory / f"{name}.csv") for name in ("scores", "agreement"))
    assert list(scores[0]) == SCORES_CSV
    assert list(agreement[0])[: len(AGREEMENT_CSV)] == AGREEMENT_CSV
    in_order = "leave_one_out gradient fisher attribution integrated_gradients shapley".split()
    in_order += "learned_gates activation_norm random".split()
    assert [row["score"] for row in agreement] == in_order
    assert [row["score"] for row in scores] == [name for name in in_order for _ in range(8)]
    assert set(in_order) == set(COMPARED)
    for name in in_order:
        of_score = [row for row in scores if row["score"] == name]
        values = [float(row["value"]) for row in of_score]
        assert values == sorted(values, reverse=True)
        assert sorted((row["layer"], row["head"]) for row in of_score) == [
            ("0", str(head)) for head in range(8)
        ]
    passes = {row["score"]: float(row["forward_equivalents"]) for row in agreement}
    assert (passes["leave_one_out"], passes["gradient"], passes["random"]) == (1 + 8, 3, 0)

    summary = summary_in(directory)
    assert summary.keys() == {
        *("compare/conclusion", "compare/num_heads"),
        *(f"compare/{name}/spearman" for name in in_order),
    }
    assert summary["compare/num_heads"] == 8
    for row in agreement:
        assert summary[f"compare/{row['score']}/spearman"] == float(row["spearman"])
    assert json.loads((directory / "manifest.json").read_text())["finished_utc"]

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("Protocol: stories, ")
    table = lines.index("Agreement with the measured effect")
    header = "score Spearman 95% interval top k signs self passes s".split()
    assert lines[table + 1].split() == header
    best_first = sorted(agreement, key=lambda row: -float(row["spearman"]))
    assert [line.split()[0] for line in lines[table + 2 : table + 11]] == [
        row["score"] for row in best_first
    ]
    assert max(map(len, lines[table : table + 11])) <= 80
    assert summary["compare/conclusion"] in lines
    assert lines[-2] == f"Files in {directory}: {', '.join(sorted(FILES))}"
    assert lines[-1] == f"Page: {directory}/report.html"

    tables = directory.glob("wandb/offline-run-*/files/media/table/*.table.json")
    shown = {path.name.split("_")[0]: json.loads(path.read_text()) for path in tables}
    assert shown["agreement"]["columns"] == list(agreement[0])
    assert shown["scores"]["columns"] == ["name", *SCORES_CSV]
    assert [len(shown[name]["data"]) for name in ("agreement", "scores")] == [9, 72]


def test_the_agreement_is_that_of_calibration_scores_with_evaluation_effects(run):
    """Of the measured effect on both texts, its rank correlation."""
    measured = ["~scores", "+scores={leave_one_out: {}}"]
    directory = run(*measured, "top_k=3", "evaluation.windows_per_unit=8")
    [row] = rows_in(directory / "agreement.csv")
    kept = (directory / "measurements.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in kept]
    intact, ablated = (
        np.array(next(line for line in lines if line["layer"] == layer)["total_nats"])
        for layer in (None, 0)
    )
    effects = (ablated - intact).sum(1)
    of_head = {int(r["head"]): float(r["value"]) for r in rows_in(directory / "scores.csv")}
    scores = np.array([of_head[head] for head in range(8)])
    assert float(row["spearman"]) == pytest.approx(stats.spearmanr(scores, effects)[0])
    both = {*np.argsort(-scores)[:3]} & {*np.argsort(-effects)[:3]}
    assert float(row["top_k_overlap"]) == pytest.approx(len(both) / 3)
    assert not np.allclose(scores, effects / (8 * 32))  # not the same text


@pytest.mark.parametrize("ablation", ["mean", "resample", "optimal"])
def test_scores_are_compared_against_every_ablation(run, ablation):
    few = ["~scores", "+scores={gradient: {}, attribution: {}, shapley: {}}"]
    few += ["heads=[L0H0,L1H1,L3H3]", "evaluation.max_windows=4"]
    directory = run(*few, f"ablation={ablation}", *(["ablation.steps=2"] * (ablation == "optimal")))
    assert [row["score"] for row in rows_in(directory / "agreement.csv")] == [
        *("gradient", "attribution", "shapley")
    ]


def test_two_comparisons_give_the_same_scores_without_those_that_are_left_out(run):
    left_out = ["leave_one_out", "gradient", "fisher", "attribution", "activation_norm"]
    without = [f"~scores.{name}" for name in left_out]
    without += ["heads=[L0H0,L1H1,L2H2,L3H3]", "scores.learned_gates.steps=2"]
    without += ["evaluation.max_windows=4"]
    first, second = (run(*without, name=name) for name in ("a", "b"))
    assert (first / "scores.csv").read_bytes() == (second / "scores.csv").read_bytes()
    agreements = [rows_in(directory / "agreement.csv") for directory in (first, second)]
    for rows in agreements:
        assert {row["score"] for row in rows} == {*COMPARED} - {*left_out}
        assert all(float(row.pop("seconds")) >= 0 for row in rows)
    assert agreements[0] == agreements[1]
    assert {row["score"] for row in rows_in(first / "scores.csv")} == {*COMPARED} - {*left_out}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["+scores.nope={}"], "score 'nope' is not one of leave_one_out, adaptive, gradient, "),
        (["+scores.fisher.n=1"], "score fisher has no option 'n'; it has none"),
        (["evaluation=adaptive"], "scores are judged by exhaustive measuring; use evaluation="),
        (["~scores"], "no scores to compare; give at least one, such as +scores.fisher={}"),
        (["evaluation.calibration_windows=3"], "comparing scores takes at least 4 calibration "),
        (["heads=[L0H0,L0H1]"], "agreement takes at least 3 heads, got 2"),
        (["top_k=9"], "top_k must be from 1 to the 8 heads, got 9"),
        (["heads=[L9H0]"], "layer in 'L9H0' is out of range: this model has 0 to 3, got 9"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(run, capfd, tmp_path, arguments, line):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    [error] = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "measurements.jsonl").exists()
