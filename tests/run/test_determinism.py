"""One seed, one result: two runs write the same bytes, and another seed changes what is random."""

import csv
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from experiments import compare_scores, head_atlas, prune_heads, rank_heads
from mhaprune.run import scoring
from mhaprune.run.config import (
    CompareScoresConfig,
    HeadAtlasConfig,
    PruneHeadsConfig,
    RankHeadsConfig,
)
from mhaprune.run.launch import run_program
from mhaprune.stats.agreement import rank_agreement

PROGRAMS = {
    "rank_heads": (rank_heads.rank_heads, RankHeadsConfig),
    "compare_scores": (compare_scores.compare_scores, CompareScoresConfig),
    "prune_heads": (prune_heads.prune_heads, PruneHeadsConfig),
    "head_atlas": (head_atlas.head_atlas, HeadAtlasConfig),
}
SMALL = [
    *("evaluation.context_length=32", "evaluation.max_windows=8", "dataset.num_stories=40"),
    "tracker=none",
]
MEASURED = [
    *("heads=[L0H*]", "evaluation.calibration_windows=4", "evaluation.resamples=200", *SMALL),
]
RANKED = ["roles.windows=2", "roles.repeats=2", *MEASURED]
BOOTSTRAPPED = "evaluation.max_windows=16"  # fewer have intervals without anything random
CASES = {
    "resample": ("rank_heads", [*RANKED, "ablation=resample"]),
    "optimal": ("rank_heads", [*RANKED, "ablation=optimal", "ablation.steps=2", BOOTSTRAPPED]),
    "adaptive": ("rank_heads", [*RANKED, "evaluation=adaptive", "evaluation.max_windows=24"]),
    "scores": (
        "compare_scores",
        [
            *MEASURED,
            "~scores",
            "+scores={gradient: {}, learned_gates: {steps: 3, lambdas: [0.01]}, shapley: {}, "
            "random: {}}",
        ],
    ),
    "pruning": (
        "prune_heads",
        [
            *MEASURED,
            *("pruning.random_orders=2", "pruning.step=4", "pruning.pairs=3", "savings=true"),
            *("heal.steps=2", "heal.windows_per_step=2", "~pruning.orderings.activation_norm"),
        ],
    ),
    "atlas": ("head_atlas", [*SMALL, "roles.windows=2", "roles.repeats=2"]),
}
OF_THE_CLOCK = {
    "agreement.csv": ("seconds",),
    "savings.csv": ("prefill_tokens_per_second", "decode_tokens_per_second"),
}
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make a run of a case, once for each seed and copy; its directory is `run` in a new place."""
    places: dict[tuple[str, int, int], Path] = {}

    def made(case: str, seed: int = 0, copy: int = 0) -> Path:
        key = case, seed, copy
        if key not in places:
            places[key] = tmp_path_factory.mktemp(case)
            with pytest.MonkeyPatch.context() as patch:
                start(patch, places[key], case, seed)
        return places[key] / "run"

    return made


def start(patch: pytest.MonkeyPatch, place: Path, case: str, seed: int) -> None:
    few_resamples = partial(rank_agreement, num_resamples=40)
    patch.setattr(scoring, "rank_agreement", few_resamples)  # a thousand take seconds
    patch.setenv("COLUMNS", "80")
    patch.setenv("HYDRA_FULL_ERROR", "1")
    patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    patch.chdir(place)
    program, arguments = CASES[case]
    own = [f"seed={seed}", "hydra.run.dir=run"]
    patch.setattr(sys, "argv", [f"{program}.py", *arguments, *own])
    task, schema = PROGRAMS[program]
    run_program(task, schema, program)


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- one seed


def clock_cells(path: Path) -> list[str]:
    """What a CSV file says about speed."""
    columns = OF_THE_CLOCK[path.name]
    return [row[name] for row in rows_in(path) for name in columns] if path.exists() else []


def without_clock(path: Path) -> bytes:
    """The content of a file but for what depends on when the run was, and on how fast."""
    content = path.read_bytes()
    if path.suffix in (".csv", ".html"):
        for name in OF_THE_CLOCK:
            for cell in clock_cells(path.with_name(name)):
                content = content.replace(cell.encode(), b"")
    if path.suffix == ".html":
        about = rb", [\d-]+ [\d:]+ UTC<|<dd>[0-9a-f]{40}\b.*?<"  # when, and from which commit
        content = re.sub(about, b"", content)
    return content


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.name: without_clock(path)
        for path in directory.iterdir()
        if path.is_file() and path.name != "manifest.json"
    }


@pytest.mark.parametrize("case", CASES)
def test_two_runs_of_one_seed_write_the_same_bytes(made, case):
    first, second = files(made(case)), files(made(case, copy=1))
    assert first.keys() == second.keys() and len(first) >= 4
    assert [name for name in first if first[name] != second[name]] == []


# ---- another seed


def column(path: Path, name: str, **where: str) -> list[str]:
    """A column of the rows that have these cells, in the order of the file."""
    rows = [row for row in rows_in(path) if all(row[key] == where[key] for key in where)]
    assert rows
    return [row[name] for row in rows]


def by_head(path: Path, name: str, **where: str) -> dict[str, str]:
    heads = zip(column(path, "layer", **where), column(path, "head", **where), strict=True)
    return dict(zip((" ".join(one) for one in heads), column(path, name, **where), strict=True))


def test_another_seed_takes_other_donors_and_leaves_the_intact_loss_alone(made):
    first, other = (made("resample", seed) for seed in (0, 1))
    effects = [by_head(directory / "effects.csv", "effect_nats") for directory in (first, other)]
    assert all(effects[0][head] != effects[1][head] for head in effects[0])
    summaries = [json.loads((path / "summary.json").read_text()) for path in (first, other)]
    assert len({summary["baseline/nats_per_token"] for summary in summaries}) == 1


def test_another_seed_does_not_move_the_effect_of_an_optimal_constant(made):
    first, other = (made("optimal", seed) / "effects.csv" for seed in (0, 1))
    assert by_head(first, "effect_nats") == by_head(other, "effect_nats")
    assert by_head(first, "ci_low") != by_head(other, "ci_low")  # by bootstrap


@pytest.mark.parametrize("score", ["learned_gates", "shapley", "random"])
def test_another_seed_changes_the_scores_that_are_random(made, score):
    first, other = (made("scores", seed) / "scores.csv" for seed in (0, 1))
    assert by_head(first, "value", score=score) != by_head(other, "value", score=score)


def test_another_seed_does_not_change_the_scores_that_are_not_random(made):
    first, other = (made("scores", seed) / "scores.csv" for seed in (0, 1))
    assert by_head(first, "value", score="gradient") == by_head(other, "value", score="gradient")


def test_another_seed_makes_other_random_orders_and_heals_on_other_windows(made):
    first, other = (made("pruning", seed) / "curve.csv" for seed in (0, 1))

    def changed(ordering: str) -> bool:
        nats = [column(path, "nats_per_token", ordering=ordering) for path in (first, other)]
        return nats[0] != nats[1]

    assert changed("random_0") or changed("random_1")
    [healed] = {name for name in column(first, "ordering") if name.endswith("_healed")}
    assert changed(healed)
    assert not changed("leave_one_out") and not changed("gradient")


def test_another_seed_draws_other_random_tokens_for_the_roles(made):
    first, other = (made("atlas", seed) / "roles.csv" for seed in (0, 1))
    assert by_head(first, "induction") != by_head(other, "induction")
    assert by_head(first, "previous_token") == by_head(other, "previous_token")
    sentences = [path.with_name("attention.npz").read_bytes() for path in (first, other)]
    assert sentences[0] == sentences[1]
