"""Scores of a run's heads: mistakes, rows and files, halves of a text, and what to conclude."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mhaprune.measure.baselines import Donors
from mhaprune.measure.progress import Progress
from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import HeadShape
from mhaprune.model.heads import Head, select_heads
from mhaprune.review.progress import Terminal
from mhaprune.run.config import ScoreConfig
from mhaprune.run.measuring import make_subject
from mhaprune.run.prepare import Prepared, prepare
from mhaprune.run.recording import Recording
from mhaprune.run.scoring import (
    Scored,
    agreement_row,
    check_scores,
    compute_score,
    conclude,
    on_calibration_text,
    score_and_rank,
    score_rows,
    write_scores,
)
from mhaprune.run.tracking import Tracker
from mhaprune.scores.catalogue import SCORES
from mhaprune.scores.estimate import Estimate
from mhaprune.tables.csv_files import read_rows
from mhaprune.tables.rows import HeadScore, ScoreAgreement
from mhaprune.text.sample import Sample
from mhaprune.text.windows import Window
from tests.tiny import make_config, make_place, subject_of

ALL_HEADS = select_heads(["L*H*"], 2, 4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def prepared(place: Path) -> Prepared:
    """6 windows to evaluate and 5 to calibrate."""
    return prepare(make_config(place, calibration_windows=5))


# ---- names and options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grad", {}, f"score 'grad' is not one of {', '.join(SCORES)}"),
        (
            "gradient",
            {"steps": 3},
            "score gradient has no option 'steps'; it has absolute, normalization",
        ),
        ("fisher", {"subject": 1}, "score fisher has no option 'subject'; it has none"),
        ("random", {"seed": 1}, "score random has no option 'seed'; it has none"),
        (
            "gradient",
            {"absolute": "exampel"},
            "score gradient: expected one of example, token for its option absolute, got 'exampel'",
        ),
        (
            "shapley",
            {"pairs_per_window": 0},
            "score shapley: expected a whole number above 0 for its option pairs_per_window, got 0",
        ),
        (
            "integrated_gradients",
            {"steps": 1.5},
            "score integrated_gradients: expected a whole number above 0 for its option steps, "
            "got 1.5",
        ),
        (
            "learned_gates",
            {"lambdas": [0.1, -1]},
            "score learned_gates: expected a list of numbers above 0 for its option lambdas, "
            "got [0.1, -1]",
        ),
        (
            "adaptive",
            {"confidence": "high"},
            "score adaptive: expected a number above 0 for its option confidence, got 'high'",
        ),
    ],
)
def test_a_score_or_an_option_that_cannot_be_is_answered_by_those_that_can(name, options, message):
    with pytest.raises(ValueError) as error:
        check_scores({"fisher": {}, name: options})
    assert str(error.value) == message


WHOLE, NUMBER, NUMBERS = [1, 7], [1, 7, 0.5], [[1], [0.1, 2]]
ACCEPTED: dict[str, dict[str, list[Any]]] = {  # score -> option -> those of VALUES that it takes
    "leave_one_out": {"windows_per_unit": WHOLE},
    "adaptive": {
        "windows_per_unit": WHOLE,
        **dict.fromkeys(("confidence", "tolerance_nats", "critical_nats"), NUMBER),
    },
    "gradient": {"absolute": ["example", "token"], "normalization": ["none", "layer", "global"]},
    "fisher": {},
    "attribution": {},
    "integrated_gradients": {"steps": WHOLE},
    "shapley": {"pairs_per_window": WHOLE},
    "learned_gates": {"steps": WHOLE, "lambdas": NUMBERS, "windows_per_step": WHOLE},
    "activation_norm": {},
    "random": {},
}
WORDS = ["example", "token", "none", "layer", "global", "1"]
VALUES = [1, 7, 0.5, 0, -1, -0.5, [1], [0.1, 2], [], [0], [1, "1"], True, None, *WORDS]


def is_accepted(name: str, option: str, value: Any) -> bool:
    try:
        check_scores({"fisher": {}, name: {option: value}})
    except ValueError as error:
        assert str(error).startswith(f"score {name}")
        return False
    return True


@pytest.mark.parametrize("name", SCORES)
def test_every_score_takes_the_options_of_its_own_and_of_each_the_values_that_it_can_be(name):
    options = sorted({option for each in ACCEPTED.values() for option in each})
    taken = {
        option: [value for value in VALUES if is_accepted(name, option, value)]
        for option in options
    }
    assert {option: values for option, values in taken.items() if values} == ACCEPTED[name]
    check_scores({name: {option: values[0] for option, values in ACCEPTED[name].items()}})
    assert list(SCORES) == list(ACCEPTED)


# ---- the text that is scored


def fields_of(subject: Subject) -> list[Any]:
    """What a subject consists of; arrays, models and samples by identity."""
    values = [getattr(subject, each.name) for each in fields(subject)]
    known = (tuple, int, str, HeadShape)
    return [value if isinstance(value, known) else id(value) for value in values]


def test_a_subject_is_the_evaluation_text_and_then_the_calibration_text(prepared, place):
    config = replace(make_config(place, "mean", rows_per_batch=3), seed=7)
    subject = subject_of(prepared, ALL_HEADS[:3], config)
    assert subject.sample.ids is prepared.sample.tokens.ids
    assert (subject.sample.windows, subject.heads) == (
        prepared.sample.windows,
        tuple(ALL_HEADS[:3]),
    )
    assert (subject.rows_per_batch, subject.engine, subject.seed) == (3, "replay", 7)
    moved = on_calibration_text(subject, prepared.calibration)
    assert moved.sample.ids is prepared.calibration.ids
    assert moved.sample.windows == prepared.calibration.windows
    assert moved.ablation is subject.ablation
    assert subject.ablation is not None
    assert fields_of(replace(moved, sample=subject.sample)) == fields_of(subject)


@pytest.mark.parametrize("num_windows", [1, 3])
def test_fewer_than_4_calibration_windows_are_refused(place, num_windows):
    config = make_config(place, calibration_windows=num_windows)
    few = prepare(config)
    with pytest.raises(ValueError) as error:
        on_calibration_text(subject_of(few, ALL_HEADS, config), few.calibration)
    assert str(error.value) == (
        f"comparing scores takes at least 4 calibration windows, got {num_windows}; raise "
        f"evaluation.calibration_windows or use a longer calibration text"
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Subject]:
    """The subjects that the score "note" is computed of."""
    subjects: list[Subject] = []

    def note(subject: Subject, *, value: float = 0.5) -> Estimate:
        subjects.append(subject)
        return Estimate(np.full((2, 4), value + len(subjects)), None, 3.0)

    monkeypatch.setitem(SCORES, "note", note)
    return subjects


def calibrated(prepared: Prepared, place: Path, ablation: str) -> Subject:
    config = make_config(place, ablation, calibration_windows=5)
    return on_calibration_text(subject_of(prepared, ALL_HEADS, config), prepared.calibration)


def test_a_score_is_computed_of_all_windows_and_of_every_other_one(prepared, place, seen):
    subject = calibrated(prepared, place, "zero")
    scored = compute_score("note", {"value": 0.25}, subject)
    whole, even, odd = seen
    assert whole is subject
    assert (even.sample.windows, odd.sample.windows) == (
        subject.sample.windows[::2],
        subject.sample.windows[1::2],
    )
    assert len({one.seed for one in seen}) == 3
    assert even.sample.tokens is odd.sample.tokens is subject.sample.tokens
    assert fields_of(replace(even, sample=subject.sample, seed=0)) == fields_of(subject)
    values = [one.value[0, 0] for one in (scored.whole, *scored.halves)]
    assert values == [1.25, 2.25, 3.25]
    assert (scored.name, scored.seconds >= 0) == ("note", True)


def test_no_window_is_its_own_donor_nor_in_the_halves(prepared, place, seen):
    compute_score("note", {}, calibrated(prepared, place, "resample"))
    assert [len(subject.sample.windows) for subject in seen] == [5, 3, 2]
    for subject in seen:
        donors = subject.ablation
        assert isinstance(donors, Donors) and donors.ids is subject.sample.ids
        assert set(donors.windows) == set(subject.sample.windows)
        for number, window in enumerate(subject.sample.windows):
            assert donors.windows[number % len(donors.windows)] != window


def test_a_random_score_does_not_agree_with_itself(prepared, place):
    subject = calibrated(prepared, place, "zero")
    scored = compute_score("random", {}, subject)
    first, second = (half.at(ALL_HEADS) for half in scored.halves)
    assert (first != second).any() and (scored.whole.at(ALL_HEADS) != first).any()
    again = compute_score("random", {}, subject)
    np.testing.assert_array_equal(again.halves[0].value, scored.halves[0].value)


# ---- rows and files

FISHER = Estimate(
    np.array([[0.5, 2.0, np.nan, np.nan], [0.25, 1.0, np.nan, np.nan]]),
    np.array([[0.125, 0.25, np.nan, np.nan], [0.5, 1.0, np.nan, np.nan]]),
    3.0,
)
RANDOM = Estimate(np.array([[-1.0, 0.0, 1.0, 2.0], [0.0, 0.5, 7.0, 7.0]]), None, 0.0)
SOME = [Head(1, 0), Head(0, 1), Head(1, 1), Head(0, 0)]


def test_rows_come_in_the_order_of_the_heads():
    assert score_rows("fisher", FISHER, SOME) == [
        HeadScore("fisher", 1, 0, 0.25, 0.5),
        HeadScore("fisher", 0, 1, 2.0, 0.25),
        HeadScore("fisher", 1, 1, 1.0, 1.0),
        HeadScore("fisher", 0, 0, 0.5, 0.125),
    ]
    assert score_rows("random", RANDOM, SOME)[0] == HeadScore("random", 1, 0, 0.0, None)


def test_scores_are_written_score_by_score_the_most_important_head_first(tmp_path):
    rows = write_scores(tmp_path, {"random": RANDOM, "fisher": FISHER}, SOME, "a title")
    assert (tmp_path / "scores.csv").read_text() == (
        "score,layer,head,value,standard_error\n"
        "random,1,1,0.5,\n"
        "random,1,0,0.0,\n"  # of equals, the head that was named first
        "random,0,1,0.0,\n"
        "random,0,0,-1.0,\n"
        "fisher,0,1,2.0,0.25\n"
        "fisher,1,1,1.0,1.0\n"
        "fisher,0,0,0.5,0.125\n"
        "fisher,1,0,0.25,0.5\n"
    )
    assert read_rows(tmp_path / "scores.csv", HeadScore) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["scores.csv"]


def test_a_single_score_has_a_heatmap(tmp_path):
    write_scores(tmp_path, {"fisher": FISHER}, SOME, "a title")
    assert {path.name for path in tmp_path.iterdir()} == {"scores.csv", "heatmap.png"}
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_ranking_by_an_estimate_gives_summary_rows_and_what_prints_them(prepared, place, tmp_path):
    config = replace(make_config(place), score=ScoreConfig("gradient", {"absolute": "example"}))
    console = Console(width=80)
    with console.capture() as capture:
        terminal = Terminal(console)
        recording = Recording(
            *(config, prepared, tmp_path, Tracker(tmp_path, print), terminal),
            Progress([terminal]),
        )
        subject = make_subject(prepared, ALL_HEADS, config)
        summary, tables, show = score_and_rank(recording, subject, config)
        show()
    rows = tables["heads"]
    assert summary == {
        "score/name": "gradient",
        "score/forward_equivalents": 3,
        "heads/num_measured": 8,
    }
    expected = SCORES["gradient"](subject_of(prepared, ALL_HEADS, config)).value
    assert [row.value for row in rows] == sorted(expected.ravel().tolist(), reverse=True)
    assert all(row.value == expected[row.layer, row.head] for row in rows)
    assert read_rows(tmp_path / "scores.csv", HeadScore) == rows
    assert f"L{rows[0].layer}H{rows[0].head}" in capture.get()


# ---- agreement


def test_a_score_is_judged_by_the_effects_of_the_heads(place, prepared):
    config = make_config(place, confidence=0.9)
    value = np.arange(8.0).reshape(2, 4)
    halves = (Estimate(value, None, 1.0), Estimate(value[::-1] + 0.0, None, 1.0))
    scored = Scored("fisher", Estimate(value, None, 3), halves, 2.5)
    # Six windows that score one token each, every one a block of its own.
    windows = tuple(Window(number, number + 2, number + 1) for number in range(6))
    sample = Sample.of(prepared.sample.ids, windows)
    subject = Subject(prepared.loaded.model, sample, tuple(reversed(ALL_HEADS)))
    delta_nats = np.arange(8.0)[::-1, None] * np.ones(6)
    row = agreement_row(scored, subject, delta_nats, config.evaluation, top_k=2)
    assert (row.score, row.forward_equivalents, row.seconds) == ("fisher", 3, 2.5)
    assert (row.spearman, row.kendall, row.top_k_overlap) == pytest.approx((1, 1, 1))
    assert row.sign_agreement == 1
    # Ranks 1..4, 5..8 against 5..8, 1..4: rho = 1 - 6 * 8 * 16 / (8 * 63)
    assert row.reliability == pytest.approx(1 - 6 * 8 * 16 / (8 * 63))
    assert row.ci_high == pytest.approx(1)


def judged(score: str, spearman: float, low: float, passes: float) -> ScoreAgreement:
    rest: dict[str, Any] = dict.fromkeys(
        ["kendall", "top_k_overlap", "sign_agreement", "reliability", "seconds"], 0.5
    )
    return ScoreAgreement(
        *(score, spearman, low, spearman + 0.05),
        **rest,
        forward_equivalents=passes,
        kendall_low=0.0,
        kendall_high=1.0,
    )


CHEAP = judged("fisher", 0.5, 0.25, 3.0)
CHEAPER = judged("activation_norm", 0.25, 0.125, 1.0)
BETTER = judged("shapley", 0.75, 0.625, 66.0)
WORSE = judged("learned_gates", 0.25, 0.125, 720.0)
NO_USE = judged("gradient", 0.25, -0.01, 3.0)
LUCKY = judged("random", 0.9, 0.8, 0.0)
MEASURED = judged("leave_one_out", 0.9, 0.85, 33.0)
IN_PART = judged("adaptive", 0.875, 0.8, 20.25)

AT_A_GLANCE = "At a glance use fisher (Spearman 0.50 [0.25, 0.55], 3 passes)"
WITH_TIME = "ith more time shapley (Spearman 0.75 [0.62, 0.80], 66 passes)"
TO_BE_SURE = "o be sure measure: leave_one_out (Spearman 0.90 [0.85, 0.95], 33 passes)"
NONE = "No estimate agrees with the measured effects beyond chance"


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([MEASURED, CHEAP, BETTER, LUCKY], f"{AT_A_GLANCE}; w{WITH_TIME}; t{TO_BE_SURE}"),
        ([LUCKY, WORSE, CHEAPER, CHEAP, NO_USE, MEASURED], f"{AT_A_GLANCE}; t{TO_BE_SURE}"),
        ([BETTER, NO_USE, MEASURED], f"W{WITH_TIME}; t{TO_BE_SURE}"),
        ([NO_USE, LUCKY, MEASURED], f"{NONE}; t{TO_BE_SURE}"),
        ([CHEAP, BETTER], f"{AT_A_GLANCE}; w{WITH_TIME}"),
        ([CHEAP, CHEAPER], AT_A_GLANCE),
        ([LUCKY, NO_USE], NONE),
        ([IN_PART, MEASURED, NO_USE], f"{NONE}; t{TO_BE_SURE}"),
        ([IN_PART, CHEAP], f"{AT_A_GLANCE}; to be sure measure: adaptive (Spearman 0.88 [0.80, "),
    ],
    ids=[
        *("cheap and better", "cheap is best", "only dear", "none useful", "nothing measured"),
        *("only cheap", "none at all", "two measured", "measured in part"),
    ],
)
def test_the_conclusion_names_what_to_use_when(rows, line):
    found = conclude(rows)
    assert found.startswith(line) and "\n" not in found
    assert IN_PART in rows or found == line


@pytest.mark.parametrize(("passes", "cheap"), [(5.0, True), (5.5, False)])
def test_five_passes_are_cheap(passes, cheap):
    assert conclude([replace(CHEAP, forward_equivalents=passes)]).startswith("At a") == cheap
