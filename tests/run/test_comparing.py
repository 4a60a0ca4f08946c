"""Comparing runs, on files made by hand: every number is worked out in the test."""

import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mhaprune.model.heads import Head
from mhaprune.run.comparing import (
    RULE,
    compare_runs,
    disagreements,
    largest_difference,
    print_comparisons,
    what_differs,
)
from mhaprune.run.manifest import manifest
from mhaprune.tables.csv_files import read_effects, write_effects, write_rows
from mhaprune.tables.rows import HeadEffect, HeadScore

HEADS = [Head(0, 0), Head(0, 1), Head(1, 0), Head(1, 1), Head(2, 0)]
FIRST = [0.50, 0.30, 0.20, 0.02, -0.01]
OTHER = [0.50, 0.20, 0.30, -0.03, 0.02]  # two neighbours change places, twice
VERDICTS = ["critical", "critical", "useful", "undetermined", "redundant"]
PROTOCOL = {
    "context_length": 16,
    "stride": 16,
    "num_windows": 4,
    "num_tokens": 99,
    "num_scored": 64,
}


def row(head: Head, effect: float, verdict: str, width: float) -> HeadEffect:
    """The effect of a head with an interval of `width` nats to either side."""
    return HeadEffect(
        layer=head.layer,
        head=head.head,
        effect_nats=effect,
        ci_low=effect - width,
        ci_high=effect + width,
        ppl_ablated=5.0,
        delta_ppl=effect,
        verdict=verdict,
        rank=1,
        delta_ppl_low=effect,
        delta_ppl_high=effect,
        standard_error=width / 2,
        num_windows=4,
    )


def rows(effects: Sequence[float], verdicts: Sequence[str], width: float) -> list[HeadEffect]:
    return [row(*each, width) for each in zip(HEADS, effects, verdicts, strict=True)]


def make_manifest(**changes: Any) -> dict[str, Any]:
    """The manifest of a finished run on one machine, with some entries replaced."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    config = {
        "model": {"name": "demo"},
        "evaluation": {"max_windows": 4},
        "ablation": {"kind": "zero"},
        "heads": ["L*H*"],
        "tracker": {"mode": "none"},
    }
    entries = manifest(
        config=config,
        command=["rank_heads.py"],
        seed=0,
        device="cpu",
        dtype="float32",
        weights_hash="a" * 64,
        tokens_hash="b" * 64,
        calibration_hash="c" * 64,
        protocol=PROTOCOL,
        started=moment,
        finished=moment,
    )
    return entries | {"git_commit": "d" * 40, "git_dirty": False} | changes


def make_run(
    directory: Path,
    effects: Sequence[float] = FIRST,
    verdicts: Sequence[str] = VERDICTS,
    width: float = 0.06,
    **changes: Any,
) -> Path:
    directory.mkdir()
    write_effects(directory / "effects.csv", rows(effects, verdicts, width))
    (directory / "manifest.json").write_text(json.dumps(make_manifest(**changes)))
    return directory


def make_scored_run(directory: Path, values: Sequence[float], *names: str) -> Path:
    directory.mkdir()
    scores = [
        HeadScore(name, head.layer, head.head, value, None)
        for name in names
        for head, value in zip(HEADS, values, strict=True)
    ]
    write_rows(directory / "scores.csv", HeadScore, scores)
    (directory / "manifest.json").write_text(json.dumps(make_manifest()))
    return directory


def printed(*directories: Path) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_comparisons(console, compare_runs(directories))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rank_agreement_is_that_of_two_swaps_among_five_heads(tmp_path):
    [comparison] = compare_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", OTHER)])
    assert comparison.num_common == 5
    assert comparison.spearman == pytest.approx(1 - 6 * 4 / (5 * 24))  # 1 - 6 sum d^2 / n(n^2-1)
    assert comparison.kendall == pytest.approx((8 - 2) / 10)


def test_heads_that_only_one_run_has_do_not_count(tmp_path):
    first = make_run(tmp_path / "a")
    other = make_run(tmp_path / "b", OTHER)
    kept = [each for each in read_effects(other / "effects.csv") if each.layer > 0]
    write_effects(other / "effects.csv", kept)
    [comparison] = compare_runs([first, other])
    assert comparison.num_common == 3
    assert [str(pair.head) for pair in comparison.pairs] == ["L1H0", "L1H1", "L2H0"]
    assert comparison.spearman == pytest.approx(1 - 6 * 2 / (3 * 8))


def test_a_run_whose_heads_are_all_equal_has_no_order_to_agree_with(tmp_path):
    [comparison] = compare_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", [0.1] * 5)])
    assert (comparison.spearman, comparison.kendall) == (0.0, 0.0)


def test_every_run_is_compared_with_the_first(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", OTHER), make_run(tmp_path / "c")]
    comparisons = compare_runs(runs)
    assert [(each.first.name, each.other.name) for each in comparisons] == [("a", "b"), ("a", "c")]
    assert [each.spearman for each in comparisons] == pytest.approx([0.8, 1.0])


def test_the_largest_difference_counts_either_way(tmp_path):
    other = [0.50, 0.31, 0.13, 0.02, -0.01]
    [comparison] = compare_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", other)])
    largest = largest_difference(comparison.pairs)
    assert largest.head == Head(1, 0)
    assert largest.difference_nats == pytest.approx(-0.07)


def test_intervals_that_touch_overlap_and_those_apart_do_not():
    first = rows([0.5, 0.25, 0.0, 0.0, 0.0], VERDICTS, 0.125)
    touching = rows([0.75, 0.0, 0.0, 0.0, 0.0], VERDICTS, 0.125)
    assert disagreements(first, touching) == []
    apart = rows([0.5, 0.5625, 0.0, 0.0, -0.375], VERDICTS, 0.125)
    assert disagreements(first, apart) == [
        "L0H1: intervals do not overlap: +0.2500 [+0.1250, +0.3750] -> +0.5625 [+0.4375, +0.6875]",
        "L2H0: intervals do not overlap: +0.0000 [-0.1250, +0.1250] -> -0.3750 [-0.5000, -0.2500]",
    ]


@pytest.mark.parametrize(
    ("first", "other", "contradict"),
    [
        ("critical", "redundant", True),
        ("useful", "harmful", True),
        ("redundant", "useful", True),
        ("harmful", "critical", True),
        ("critical", "useful", False),
        ("redundant", "harmful", False),
        ("useful", "undetermined", False),
        ("undetermined", "redundant", False),
        ("critical", "critical", False),
    ],
)
def test_a_needed_head_and_one_that_is_not_contradict_each_other(first, other, contradict):
    lines = disagreements(
        rows(FIRST, [first, *VERDICTS[1:]], 0.1), rows(FIRST, [other, *VERDICTS[1:]], 0.1)
    )
    expected = [f"L0H0: verdicts contradict: {first} -> {other}"] if contradict else []
    assert lines == expected


def test_a_head_that_one_run_lacks_disagrees():
    assert disagreements(rows(FIRST, VERDICTS, 0.1), rows(FIRST, VERDICTS, 0.1)[1:]) == [
        "L0H0: in one of the runs only"
    ]


def test_what_differs_is_named_and_only_that():
    first = make_manifest()
    other = make_manifest(
        config=first["config"]
        | {"ablation": {"kind": "mean"}, "seed": 3, "tracker": {"mode": "online"}},
        weights_hash="e" * 64,
        versions=first["versions"] | {"torch": "1.0"},
        device="cuda:0",
        git_commit=None,
        command=["rank_heads.py", "ablation=mean"],
        finished_utc="2027-01-01T00:00:00+00:00",
        protocol=PROTOCOL | {"num_windows": 3},
    )
    assert what_differs(first, first) == ()
    assert what_differs(first, other) == (
        "ablation.kind: zero -> mean",
        "weights_hash: aaaaaaaaaaaa -> eeeeeeeeeeee",
        "num_windows: 4 -> 3",
        f"versions.torch: {first['versions']['torch']} -> 1.0",
        "device: cpu -> cuda:0",
        "git_commit: dddddddddddd -> null",
        "seed: absent -> 3",
    )


def test_runs_by_another_score_are_compared_by_rank_agreement_only(tmp_path):
    first = make_run(tmp_path / "a")
    scored = make_scored_run(tmp_path / "b", [50.0, 20.0, 30.0, -3.0, 2.0], "fisher")
    [comparison] = compare_runs([first, scored])
    assert comparison.spearman == pytest.approx(0.8)
    assert comparison.pairs == ()
    shown = printed(first, scored)
    assert "effects             not compared: a run is ranked by another score" in shown
    assert RULE.split(".")[0] not in shown


def test_a_comparison_is_printed_within_80_columns(tmp_path):
    long = tmp_path / ("long_" * 20)
    other = make_run(
        long,
        [0.50, 0.60, 0.20, 0.02, -0.01],
        ["critical", "redundant", "useful", "undetermined", "undetermined"],
        device="cuda:0",
    )
    lines = [line.rstrip() for line in printed(make_run(tmp_path / "a"), other).splitlines()]
    assert max(map(len, lines)) <= 80
    start = lines.index("heads in common     5")
    assert lines[start + 1 : start + 8] == [
        "rank agreement      Spearman 0.900, Kendall 0.800",
        "largest difference  0.3 nats/token (L0H1: +0.3000 -> +0.6000)",
        "intervals           apart: L0H1",
        "verdicts            2 of 5 changed; contradicting: L0H1",
        "                    L0H1: critical -> redundant",
        "                    L2H0: redundant -> undetermined",
        "what differs        device: cpu -> cuda:0",
    ]
    assert " ".join(lines[start + 9 :]) == RULE


def test_equal_runs_are_said_to_be_equal(tmp_path):
    shown = printed(make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[lines.index("heads in common     5") + 1 :][:5] == [
        "rank agreement      Spearman 1.000, Kendall 1.000",
        "largest difference  0 nats/token (L0H0: +0.5000 -> +0.5000)",
        "intervals           all 5 overlap",
        "verdicts            0 of 5 changed",
        "what differs        nothing that is recorded",
    ]


def test_what_cannot_be_compared_is_refused_in_one_line_that_names_it(tmp_path):
    first = make_run(tmp_path / "first")
    with pytest.raises(ValueError, match="takes at least two run directories, got 1"):
        compare_runs([first])
    with pytest.raises(ValueError, match="nowhere is not the directory of a run"):
        compare_runs([first, tmp_path / "nowhere"])
    unfinished = make_run(tmp_path / "unfinished", finished_utc=None)
    with pytest.raises(ValueError, match=r"the run in .*unfinished is not finished"):
        compare_runs([first, unfinished])
    pruned = make_run(tmp_path / "pruned")
    (pruned / "effects.csv").unlink()
    with pytest.raises(ValueError, match=r"pruned is not a run of rank_heads: it has neither"):
        compare_runs([first, pruned])
    several = make_scored_run(tmp_path / "several", FIRST, "fisher", "gradient")
    with pytest.raises(ValueError, match=r"its scores\.csv holds fisher, gradient"):
        compare_runs([first, several])
    few = make_run(tmp_path / "few")
    write_effects(few / "effects.csv", rows(FIRST, VERDICTS, 0.1)[:2])
    with pytest.raises(ValueError, match=r"first and .*few have 2 heads in common; rank"):
        compare_runs([first, few])
