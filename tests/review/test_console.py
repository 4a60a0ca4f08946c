"""The ranking in the terminal says what was measured, in lines that fit."""

import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from mhaprune.measure.progress import Progress
from mhaprune.review.console import (
    print_agreement,
    print_files,
    print_heads_by_role,
    print_ranking,
    print_removable,
    print_savings,
    print_scores,
    say,
)
from mhaprune.review.progress import Terminal
from mhaprune.tables.rows import HeadEffect, HeadScore, Saving, ScoreAgreement


def effect(
    layer: int, head: int, effect_nats: float, verdict: str, rank: int, **changes: float
) -> HeadEffect:
    interval = {"ci_low": -0.25, "ci_high": 0.125, "delta_ppl": 1.5, "num_windows": 64} | changes
    others = ("ppl_ablated", "delta_ppl_low", "delta_ppl_high", "standard_error")
    numbers: dict[str, Any] = dict.fromkeys(others, 0.0) | interval
    return HeadEffect(layer, head, effect_nats, verdict=verdict, rank=rank, **numbers)


CRITICAL = effect(
    *(11, 10, 9.87654, "critical", 1), ci_low=9.12345, ci_high=12.34567, delta_ppl=1234567.8926
)
ROWS = [
    effect(3, 0, 0.0011, "redundant", 9),
    effect(1, 7, -0.0004, "redundant", 11),
    effect(0, 2, 0.0007, "redundant", 10),
    CRITICAL,
    effect(5, 5, 0.5, "critical", 2),
    effect(2, 1, 0.015, "useful", 3),
    effect(2, 2, 0.014, "useful", 4),
    effect(2, 3, 0.013, "useful", 5),
    effect(2, 4, 0.012, "undetermined", 6),
    effect(2, 5, 0.011, "undetermined", 7),
    effect(2, 6, 0.010, "undetermined", 8),
    effect(4, 4, -0.03, "harmful", 12),
]


def printed(rows: list[HeadEffect], confidence: float = 0.95, count: int = 10) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        print_ranking(console, rows, confidence, count)
    return [line.rstrip() for line in capture.get().splitlines()]


def sections(lines: list[str]) -> dict[str, list[list[str]]]:
    """Title -> the cells of its rows."""
    found = {}
    for number, line in enumerate(lines):
        if line.startswith("Most"):
            end = lines.index("", number)
            found[line] = [row.split() for row in lines[number + 2 : end]]
    return found


def test_every_number_of_a_head_is_on_its_line():
    lines = printed(ROWS)
    assert lines[2].split() == [
        *("1", "L11H10", "+9.8765"),
        *("[+9.1235,", "+12.3457]"),  # rich would take a bracket for markup
        *("+1234567.893", "critical"),
    ]


def test_no_line_is_longer_than_80_columns_cut_or_wrapped():
    lines = printed(ROWS)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    # two tables of title, heading and rows, each with an empty line, and the counts
    assert len(lines) == (2 + 10 + 1) + (2 + 3 + 1) + 1


def test_the_most_important_heads_come_by_rank_and_no_more_than_asked_for():
    by_rank = [cells[0] for cells in sections(printed(ROWS))["Most important heads"]]
    assert by_rank == [str(rank) for rank in range(1, 11)]
    first = [cells[1] for cells in sections(printed(ROWS, count=2))["Most important heads"]]
    assert first == ["L11H10", "L5H5"]


def test_the_most_redundant_heads_are_those_with_that_verdict_smallest_effect_first():
    redundant = [cells[1] for cells in sections(printed(ROWS))["Most redundant heads"]]
    assert redundant == ["L1H7", "L0H2", "L3H0"]


def test_without_a_redundant_head_there_is_no_table_of_them():
    assert list(sections(printed([CRITICAL]))) == ["Most important heads"]


def test_the_last_line_counts_the_verdicts():
    assert printed(ROWS)[-1] == (
        "12 heads: 2 critical, 3 useful, 3 redundant, 1 harmful, 3 undetermined"
    )
    assert printed([CRITICAL])[-1] == "1 heads: 1 critical"


@pytest.mark.parametrize(
    ("confidence", "heading"),
    [(0.95, "95% interval"), (0.9, "90% interval"), (0.995, "99.5% interval")],
)
def test_the_heading_says_how_confident_the_interval_is(confidence, heading):
    lines = printed(ROWS, confidence=confidence)
    headings = [line for line in lines if "interval" in line]
    assert [re.split(r" {2,}", line) for line in headings] == [
        ["rank", "head", "nats/token", heading, "perplexity", "verdict"]
    ] * 2
    assert lines.index(headings[0]) == lines.index("Most important heads") + 1


def test_a_line_is_said_as_it_is():
    console = Console(width=80, force_terminal=True)
    line = f"[bold]Protocol[/]: context [1024], {'x' * 90} 'a' :smile:"
    with console.capture() as capture:
        say(console, line)
    assert capture.get() == line + "\n"


def last_progress(*phases: tuple[int, list[int]]) -> tuple[str, int]:
    """What a bar says after phases of so many rows of which some went: description, percentage."""
    console = Console(width=80, force_terminal=True)
    terminal = Terminal(console)
    progress = Progress([terminal])
    with console.capture() as capture, terminal.bar("4 heads"):
        for rows, done in phases:
            progress.begin("measure", rows)
            for each in done:
                progress.advance(each)
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capture.get())
    description, percent = re.findall(r"([^\r\n━]+?) [━╸╺ ]+ +(\d+)%", plain)[-1]
    return description, int(percent)


def test_progress_adds_up_what_was_done():
    assert last_progress((4, [1, 2])) == ("4 heads", 75)
    assert last_progress((4, [])) == ("4 heads", 0)
    assert last_progress((1, [1]), (4, [1, 1])) == ("4 heads", 60)  # one before 4 were left
    assert last_progress((2, [2]), (2, [1, 1])) == ("4 heads", 100)


@pytest.mark.parametrize(("left", "shown"), [(1, " 80%"), (4, " 50%"), (0, "100%")])
def test_progress_is_told_anew_how_much_is_left(left, shown):
    console = Console(width=80, force_terminal=True)
    terminal = Terminal(console)
    progress = Progress([terminal])
    with console.capture() as capture, terminal.bar("4 heads"):
        progress.begin("measure", 10)
        progress.advance(1)
        progress.advance(3)
        progress.look(heads_done=0, heads_settled=0, rows_left=left)
    assert capture.get().count(shown) >= 1
    assert " 40%" not in capture.get()


ADAPTIVE = [replace(row, correlation=-0.876, num_windows=1234) for row in ROWS]


def test_of_heads_measured_adaptively_windows_and_correlation_are_shown_instead():
    lines = printed(ADAPTIVE)
    header = "rank head nats/token 95% interval windows corr. verdict".split()
    assert lines[1].split() == header
    assert lines[2].split() == [
        *("1", "L11H10", "+9.8765"),
        *("[+9.1235,", "+12.3457]"),
        *("1234", "-0.88", "critical"),
    ]
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(printed(ROWS))


def test_a_correlation_of_zero_is_a_correlation():
    lines = printed([replace(CRITICAL, correlation=0.0)])
    assert lines[2].split()[-3:] == ["64", "0.00", "critical"]


def test_the_files_of_a_run_are_named(tmp_path):
    for name in ("summary.json", "effects.csv"):
        (tmp_path / name).touch()
    (tmp_path / "wandb").mkdir()
    console = Console(width=80)
    with console.capture() as capture:
        print_files(console, tmp_path)
    assert capture.get() == f"Files in {tmp_path}: effects.csv, summary.json\n"


# ---- scores


def printed_scores(rows: list[HeadScore], count: int = 10) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        print_scores(console, rows, count)
    return [line.rstrip() for line in capture.get().splitlines()]


SCORES = [
    HeadScore("integrated_gradients", 11, 11, 12345.678, 0.012345),
    HeadScore("integrated_gradients", 0, 2, 1.0, None),
    HeadScore("integrated_gradients", 3, 10, -1.23456e-7, 2.5e-9),
]


def test_the_heads_that_score_highest_come_in_the_order_of_the_rows():
    assert [line.split() for line in printed_scores(SCORES)] == [
        "Highest by integrated_gradients, of 3 heads".split(),
        ["rank", "head", "score", "standard", "error"],
        ["1", "L11H11", "+1.235e+04", "0.012"],
        ["2", "L0H2", "+1"],
        ["3", "L3H10", "-1.235e-07", "2.5e-09"],
        [],
    ]


def test_no_more_heads_are_printed_than_asked_for_but_all_are_counted():
    many = SCORES * 5
    assert len(printed_scores(many)) == 2 + 10 + 1
    lines = printed_scores(many, count=1)
    assert len(lines) == 2 + 1 + 1
    assert lines[0].endswith("of 15 heads")
    assert max(map(len, printed_scores(many))) <= 80


def agreement(score: str, spearman: float, **changes: float) -> ScoreAgreement:
    numbers = {
        "ci_low": -0.5,
        "ci_high": 0.75,
        "kendall": 0.25,
        "top_k_overlap": 1.0,
        "sign_agreement": 0.625,
        "reliability": -0.25,
        "forward_equivalents": 12345.0,
        "seconds": 1234.56,
        "kendall_low": -1.0,
        "kendall_high": 1.0,
    }
    return ScoreAgreement(score, spearman, **numbers | changes)


AGREEMENTS = [
    agreement("random", -0.125),
    agreement("integrated_gradients", -0.004, ci_low=-1.0, ci_high=-0.99),
    agreement("leave_one_out", 0.96875, top_k_overlap=1 / 3, forward_equivalents=33.4),
]


def printed_agreement(rows: list[ScoreAgreement], confidence: float = 0.95) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        print_agreement(console, rows, confidence)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_scores_are_listed_by_their_agreement_best_first_with_all_numbers():
    title, header, *lines, end = printed_agreement(AGREEMENTS)
    assert title == "Agreement with the measured effect"
    assert header.split() == "score Spearman 95% interval top k signs self passes s".split()
    assert [line.split() for line in lines] == [
        ["leave_one_out", "0.97", "[-0.50,", "0.75]", "33%", "62%", "-0.25", "33", "1234.6"],
        [
            *("integrated_gradients", "-0.00", "[-1.00,", "-0.99]"),
            *("100%", "62%", "-0.25", "12345", "1234.6"),
        ],
        ["random", "-0.12", "[-0.50,", "0.75]", "100%", "62%", "-0.25", "12345", "1234.6"],
    ]
    assert end == ""


@pytest.mark.parametrize("confidence", [0.95, 0.995])
def test_a_line_of_a_score_fits_into_80_columns_neither_cut_nor_wrapped(confidence):
    lines = printed_agreement(AGREEMENTS, confidence)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert len(lines) == 2 + 3 + 1
    assert f"{100 * confidence:g}% interval" in lines[1]


# ---- pruning

REMOVABLE = [
    ("leave_one_out_iterative_healed", ["1200", "1200", "1200"], "123.45"),
    ("fisher", ["0", "4", "12"], "0.25"),
    ("10 random", ["0 to 0", "0 to 1", "1024 to 1200"], "0.50 to 123.45"),
]
SAVINGS = [
    Saving(0, 1_557_611_200, 614_400, 123_456.7, 1234.4),
    Saving(1200, 9, 0, 0.6, 12.0),
]


def printed_by(show) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        show(console)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    return lines


def test_what_can_go_is_a_line_for_each_order_in_80_columns():
    title, header, *lines, end = printed_by(lambda console: print_removable(console, REMOVABLE))
    assert title == "Heads that can go at more perplexity"
    assert header.split() == "order +1% +5% +10% area".split()
    assert [line.split() for line in lines] == [
        [*name.split(), *" ".join(counts).split(), *area.split()]
        for name, counts, area in REMOVABLE
    ]
    assert end == ""


def test_what_removing_heads_buys_is_a_line_for_each_model_in_80_columns():
    title, header, *lines, end = printed_by(lambda console: print_savings(console, SAVINGS))
    assert title == "What removing heads buys"
    assert header.split("  ")[0] == "heads removed"
    assert [line.split() for line in lines] == [
        ["0", "1,557,611,200", "614,400", "123,457", "1,234"],
        ["1200", "9", "0", "1", "12"],
    ]
    assert end == ""


def test_of_many_heads_with_a_role_the_first_are_named_and_the_others_counted(capsys):
    heads = {"sink": [f"L{n}H0" for n in range(11)], "induction": ["L5H5"], "current token": []}
    print_heads_by_role(Console(width=80), heads)
    assert capsys.readouterr().out.splitlines() == [
        "sink: L0H0, L1H0, L2H0, L3H0, L4H0, L5H0, L6H0, L7H0 and 3 more",
        "induction: L5H5",
        "current token: no head",
        "",
    ]
