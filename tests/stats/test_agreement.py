"""Agreement of scores with effects by arithmetic, and intervals that hold what they should."""

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mhaprune.stats.agreement import Agreement, rank_agreement, reliability

EFFECTS = np.array([0.5, -0.25, 0.125, 0.0, 1.0, -0.5, 0.25, 0.75])
NUM_TOKENS = np.array([3, 5, 2, 6])  # windows


def agree(score: Any, effects: Any = EFFECTS, top_k: int = 4, **options: Any) -> Agreement:
    """Compare with heads whose effect is the same in every window, so that only heads vary."""
    delta_nats = np.outer(effects, NUM_TOKENS)
    options = {"num_resamples": 100} | options
    return rank_agreement(
        np.asarray(score, dtype=float), delta_nats, NUM_TOKENS, np.arange(4), top_k=top_k, **options
    )


# ---- values


def test_the_same_order_agrees_entirely_whatever_the_scale():
    found = agree(np.exp(3 * EFFECTS))
    assert (found.spearman, found.kendall, found.top_k_overlap) == pytest.approx((1, 1, 1))
    assert (found.ci_low, found.ci_high) == pytest.approx((1, 1))


def test_the_reversed_order_disagrees_entirely_and_shares_no_head_of_the_upper_half():
    found = agree(-EFFECTS)
    assert (found.spearman, found.kendall, found.top_k_overlap) == pytest.approx((-1, -1, 0))
    assert found.sign_agreement == 1 / 8  # of the head that has no effect


def test_ties_share_their_mean_rank():
    """Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: rho = 4.5 / sqrt(4.5 * 5), tau-b = 5 / sqrt(5 * 6)."""
    found = agree([0, 7, 7, 9], [-1.0, 0.0, 0.5, 3.0], top_k=1)
    assert found.spearman == pytest.approx(np.sqrt(0.9))
    assert found.kendall == pytest.approx(np.sqrt(5 / 6))
    assert found.top_k_overlap == 1


def test_one_swap_by_hand():
    """Of ranks 1, 2, 3, 4 the first two swapped: rho = 1 - 6 * 2 / (4 * 15), tau = (5 - 1) / 6."""
    found = agree([2, 1, 3, 4], [1.0, 2.0, 3.0, 4.0], top_k=3)
    assert found.spearman == pytest.approx(0.8)
    assert found.kendall == pytest.approx(2 / 3)
    assert found.top_k_overlap == pytest.approx(2 / 3)


def test_effects_are_totals_over_tokens_and_not_means_over_windows():
    """Totals 6, 5, 4 over 4 tokens; by the mean rate of the windows, 1, 1.17 and 1.33."""
    delta_nats, num_tokens = np.array([[0.0, 6.0], [1.0, 4.0], [2.0, 2.0]]), np.array([1, 3])
    assert (np.diff((delta_nats / num_tokens).mean(1)) > 0).all()
    arguments = np.array([3.0, 2.0, 1.0]), delta_nats, num_tokens, np.arange(2)
    assert rank_agreement(*arguments, top_k=1, num_resamples=10).spearman == pytest.approx(1)


@pytest.mark.parametrize("constant_side", ["score", "effects"])
def test_where_all_heads_are_equal_there_is_no_agreement(constant_side):
    constant = np.full(8, 0.25)
    found = agree(constant) if constant_side == "score" else agree(EFFECTS, constant)
    assert (found.spearman, found.ci_low, found.ci_high) == (0, 0, 0)
    assert (found.kendall, found.kendall_low, found.kendall_high) == (0, 0, 0)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ([1, -1, 1, 0, 1, -1, 1, 1], 1),  # 0 goes with what is not above 0
        ([1, 0, 1, -1, 1, 0, 1, 1], 1),
        ([1, 1, 1, 1, 1, 1, 1, 1], 5 / 8),  # an unsigned score says that all heads are useful
        ([-1, 1, -1, 1, -1, 1, -1, -1], 0),
    ],
)
def test_signs_agree_where_both_are_above_0_or_both_are_not(score, expected):
    assert agree(score).sign_agreement == expected


@pytest.mark.parametrize(("top_k", "overlap"), [(1, 0), (2, 0.5), (4, 0.5), (8, 1)])
def test_the_overlap_is_the_share_of_the_top_heads_that_are_found(top_k, overlap):
    """The order by effect is 4, 7, 0, 6, 2, 3, 1, 5; that by score 7, 2, 1, 4, 3, 0, 6, 5."""
    score = [1, 4, 5, 2, 3.5, 0, 0.5, 6]
    assert agree(score, top_k=top_k).top_k_overlap == overlap


# ---- intervals


def correlated(rng: np.random.Generator, rho: float, num_heads: int) -> tuple[Any, Any]:
    """Scores and effects of heads drawn from a bivariate normal."""
    score, other = rng.normal(size=(2, num_heads))
    return score, rho * score + np.sqrt(1 - rho**2) * other


def test_intervals_hold_their_value_and_narrow_with_more_heads():
    rng = np.random.default_rng(0)
    widths = []
    for num_heads in (20, 80, 320):
        found = agree(*correlated(rng, 0.6, num_heads), num_resamples=200)
        assert found.ci_low < found.spearman < found.ci_high
        assert found.kendall_low < found.kendall < found.kendall_high
        widths.append(found.ci_high - found.ci_low)
    assert widths[1] < 0.7 * widths[0] and widths[2] < 0.7 * widths[1]


def test_intervals_widen_with_the_confidence():
    score, effects = correlated(np.random.default_rng(1), 0.6, 40)
    half, most = (
        agree(score, effects, confidence=level, num_resamples=400) for level in (0.5, 0.99)
    )
    assert most.ci_low < half.ci_low < half.ci_high < most.ci_high
    assert (half.spearman, half.kendall) == (most.spearman, most.kendall)


def test_effects_that_vary_from_window_to_window_widen_them():
    rng = np.random.default_rng(2)
    score, effects = correlated(rng, 0.95, 60)
    num_tokens, blocks = np.full(12, 10), np.arange(12)
    noise = 40 * rng.normal(size=(60, 12))
    noise -= noise.mean(1, keepdims=True)  # leaves the effects as they are
    steady, noisy = (
        rank_agreement(
            score, 10 * effects[:, None] + each, num_tokens, blocks, top_k=5, num_resamples=200
        )
        for each in (0 * noise, noise)
    )
    assert noisy.spearman == pytest.approx(steady.spearman)
    assert noisy.ci_high - noisy.ci_low > 1.3 * (steady.ci_high - steady.ci_low)


def test_the_seed_decides_the_resamples_and_nothing_else_does():
    score, effects = correlated(np.random.default_rng(3), 0.5, 30)
    first, again, other = (agree(score, effects, seed=seed) for seed in (5, 5, 6))
    assert astuple(first) == astuple(again)
    assert (first.ci_low, first.ci_high) != (other.ci_low, other.ci_high)
    assert (first.spearman, first.top_k_overlap) == (other.spearman, other.top_k_overlap)


def test_95_percent_intervals_hold_the_population_value_about_95_times_in_100(monkeypatch):
    """Of a bivariate normal, rho_S = 6/pi arcsin(rho/2)."""
    monkeypatch.setattr(stats, "kendalltau", lambda a, b: (0.0, 1.0))  # slow, and not asked for
    rng, truth = np.random.default_rng(4), 6 / np.pi * np.arcsin(0.6 / 2)
    num_tokens, blocks = np.ones(2, dtype=int), np.arange(2)
    covered = 0
    for draw in range(150):
        score, effects = correlated(rng, 0.6, 60)
        delta_nats = np.stack([effects, effects], 1)
        found = rank_agreement(
            *(score, delta_nats, num_tokens, blocks), top_k=5, num_resamples=60, seed=draw
        )
        covered += found.ci_low <= truth <= found.ci_high
    assert 0.88 <= covered / 150 <= 0.99


# ---- mistakes


@pytest.mark.parametrize("num_heads", [1, 2])
def test_fewer_than_3_heads_are_refused(num_heads):
    with pytest.raises(ValueError, match=f"^agreement takes at least 3 heads, got {num_heads}$"):
        agree(EFFECTS[:num_heads], EFFECTS[:num_heads], top_k=1)
    assert agree(EFFECTS[:3], EFFECTS[:3], top_k=3).spearman == pytest.approx(1)


@pytest.mark.parametrize("top_k", [0, 9])
def test_a_top_that_is_not_among_the_heads_is_refused(top_k):
    with pytest.raises(ValueError, match=f"^top_k must be from 1 to the 8 heads, got {top_k}$"):
        agree(EFFECTS, top_k=top_k)


# ---- a score and itself


def test_reliability_is_that_of_the_whole_text_by_spearman_and_brown():
    """rho = 0.8 between halves: 2 * 0.8 / 1.8."""
    halves = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 1.0, 3.0, 4.0])
    assert reliability(*halves) == pytest.approx(1.6 / 1.8)
    assert reliability(halves[0], halves[0]) == pytest.approx(1)


def test_a_score_whose_halves_disagree_or_say_nothing_is_not_made_more_of():
    first = np.array([1.0, 2.0, 3.0, 4.0])
    assert reliability(first, np.array([3.0, 4.0, 2.0, 1.0])) == pytest.approx(-0.8)
    assert reliability(first, -first) == pytest.approx(-1)
    assert reliability(first, np.ones(4)) == 0
