"""Orders of removal and pruning curves, by hand."""

from collections.abc import Sequence
from itertools import combinations
from math import exp, expm1

import numpy as np
import pytest
from scipy import stats

from mhaprune.model.heads import Head
from mhaprune.prune.curves import (
    Curve,
    Order,
    interaction_effects,
    keep_some,
    make_curve,
    pairs_within,
    point_counts,
    removal_order,
    rescored_order,
)

HEADS = tuple(Head(layer, head) for layer in range(2) for head in range(3))
VALUES = np.array([0.3, -0.1, 0.3, 0.0, 0.5, -0.1])
INTERVALS = {"confidence": 0.95, "num_resamples": 200, "seed": 0}
NUM_WINDOWS, TOKENS = 4, 10
INTACT = np.full(NUM_WINDOWS, 2.0 * TOKENS)  # 2 nats per token
SAMPLE = np.full(NUM_WINDOWS, TOKENS), np.arange(NUM_WINDOWS)


def numbers(order: Sequence[Head]) -> list[int]:
    return [HEADS.index(head) for head in order]


# ---- orders


@pytest.mark.parametrize(
    ("direction", "min_per_layer", "expected"),
    [
        ("least", 0, [1, 5, 3, 0, 2, 4]),
        ("least", 1, [1, 5, 3, 0]),
        ("least", 2, [1, 5]),
        ("least", 3, []),
        ("most", 0, [4, 0, 2, 3, 1, 5]),
        ("most", 1, [4, 0, 2, 3]),
        ("most", 2, [4, 0]),
    ],
)
def test_heads_go_by_value_the_earlier_of_equal_ones_first(direction, min_per_layer, expected):
    assert numbers(removal_order(VALUES, HEADS, direction, min_per_layer)) == expected


def test_only_the_heads_asked_for_count_for_what_a_layer_keeps():
    order = (Head(1, 0), Head(0, 1), Head(0, 0))
    assert keep_some(order, order, 0) == order
    assert keep_some(order, order, 1) == (Head(0, 1),)
    assert keep_some(order, order, 2) == ()


def brute_force(loss, sign: int) -> list[int]:
    """Greedy elimination: whatever leaves the smallest (largest) loss of the whole set goes."""
    gone: list[int] = []
    while len(gone) < len(HEADS):
        left = [n for n in range(len(HEADS)) if n not in gone]
        gone.append(min(left, key=lambda n: sign * loss({*gone, n})))
    return gone


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
@pytest.mark.parametrize(("direction", "sign"), [("least", 1), ("most", -1)])
def test_measured_anew_after_each_head_an_order_is_greedy_elimination(direction, sign, seed):
    generator = np.random.default_rng(seed)
    single = generator.normal(size=6)
    together = {pair: generator.normal() for pair in combinations(range(6), 2)}

    def loss(off: set[int]) -> float:
        return single[list(off)].sum() + sum(together[p] for p in together if off.issuperset(p))

    def score(gone, left):
        before = set(numbers(gone))
        return np.array([loss({*before, n}) - loss(before) for n in numbers(left)])

    found = numbers(rescored_order(score, HEADS, direction, every=1))
    assert found == brute_force(loss, sign)
    assert found != numbers(removal_order(single, HEADS, direction))


def test_the_score_is_asked_after_every_two_heads_with_those_gone_and_those_left():
    asked = []

    def score(gone, left):
        asked.append((numbers(gone), numbers(left)))
        values = np.array(numbers(left), dtype=float)
        return -values if gone else values

    assert numbers(rescored_order(score, HEADS, "least", every=2)) == [0, 1, 5, 4, 3, 2]
    assert asked == [
        ([], [0, 1, 2, 3, 4, 5]),
        ([0, 1], [2, 3, 4, 5]),
        ([0, 1, 5, 4], [2, 3]),
    ]


@pytest.mark.parametrize(("direction", "by_number"), [("least", 1), ("most", -1)])
@pytest.mark.parametrize("every", [1, 2, 3, 9])
@pytest.mark.parametrize(("least", "expected"), [(1, [0, 1, 3, 4]), (2, [0, 3]), (3, [])])
def test_a_layer_keeps_its_heads_when_scores_are_taken_anew(
    direction, by_number, every, least, expected
):
    def score(gone, left):
        return by_number * np.array(numbers(left), dtype=float)

    assert numbers(rescored_order(score, HEADS, direction, every, least)) == expected


def test_without_heads_there_is_no_order_and_no_score_is_asked_for():
    assert rescored_order(lambda gone, left: pytest.fail("asked"), (), "least", every=1) == ()


# ---- curves


@pytest.mark.parametrize(
    ("num_heads", "step", "expected"),
    [
        (5, None, [0, 1, 2, 3, 4, 5]),
        (0, None, [0]),
        (8, 3, [0, 3, 6, 8]),
        (10, 5, [0, 5, 10]),
        (3, 8, [0, 3]),
        (32, None, list(range(33))),
        (144, None, list(range(0, 145, 4))),
        (600, None, [*range(0, 600, 19), 600]),
    ],
)
def test_points_lie_step_by_step_about_32_of_them_and_the_last_is_all_heads(
    num_heads, step, expected
):
    assert point_counts(num_heads, step) == expected


def curve_of(added_nats: Sequence[float], num_removed: Sequence[int]) -> Curve:
    """A curve whose windows all agree: its intervals are points."""
    ablated = INTACT + TOKENS * np.array(added_nats)[:, None]
    order = tuple(Head(0, n) for n in range(num_removed[-1]))
    return make_curve(
        Order("a", "least", order), num_removed, INTACT, ablated, *SAMPLE, **INTERVALS
    )


def test_a_curve_says_loss_and_increase_at_each_point():
    curve = curve_of([0.0, 0.25, -0.125], [0, 3, 5])
    assert (curve.ordering, curve.direction, len(curve.order)) == ("a", "least", 5)
    assert curve.num_removed.tolist() == [0, 3, 5]
    assert curve.nats_per_token.tolist() == [2, 2.25, 1.875]
    assert curve.ppl_intact == pytest.approx(exp(2))
    expected = [0, expm1(0.25), expm1(-0.125)]
    for increase in (curve.increase, curve.increase_low, curve.increase_high):
        assert increase.tolist() == pytest.approx(expected)


def test_the_interval_is_that_of_the_paired_differences():
    """Of few windows with equal tokens: Student's t of the mean difference."""
    deltas = np.array([1.0, 2.0, 4.0, -1.0])
    intact = INTACT + np.array(
        [5.0, -5.0, 3.0, 0.0]
    )  # the spread of the windows themselves is paired away
    curve = make_curve(
        *(Order("a", "most", (Head(0, 0),)), [1], intact, (intact + deltas)[None]),
        *SAMPLE,
        **INTERVALS,
    )
    mean = deltas.mean() / TOKENS
    reach = stats.t.ppf(0.975, 3) * deltas.std(ddof=1) / 2 / TOKENS
    assert curve.increase.tolist() == pytest.approx([expm1(mean)])
    assert curve.increase_low.tolist() == pytest.approx([expm1(mean - reach)])
    assert curve.increase_high.tolist() == pytest.approx([expm1(mean + reach)])


@pytest.mark.parametrize(("increase", "count"), [(0.01, 2), (0.05, 6), (0.10, 6), (1.0, 8)])
def test_heads_can_go_up_to_the_first_point_above_a_later_dip_does_not_count(increase, count):
    curve = curve_of([0.0, 0.005, 0.02, 0.004, 0.2], [0, 2, 4, 6, 8])
    assert curve.removable(increase) == count


def test_no_head_can_go_where_the_first_point_is_above():
    assert curve_of([0.2, 0.0], [1, 2]).removable(0.05) == 0


def test_what_counts_is_the_upper_end_of_the_interval():
    wide = np.array([-6.0, 6.0, -6.0, 6.0])
    ablated = np.stack([INTACT, INTACT + wide])
    order = Order("a", "least", (Head(0, 0),))
    curve = make_curve(order, [0, 1], INTACT, ablated, *SAMPLE, **INTERVALS)
    assert curve.increase[1] == pytest.approx(0)
    assert curve.removable(0.10) == 0


@pytest.mark.parametrize("num_removed", [[0, 1, 2, 3, 4], [0, 1, 4], [0, 4]])
def test_the_area_under_a_straight_line_is_its_middle(num_removed):
    curve = curve_of([0.1 * count for count in num_removed], num_removed)
    assert curve.area == pytest.approx(0.2)


def test_an_order_without_heads_has_no_area_and_nothing_to_remove():
    curve = curve_of([0.0], [0])
    assert (curve.area, curve.removable(0.05)) == (0, 0)


# ---- sets


@pytest.mark.parametrize(
    ("budget", "count"), [(0, 0), (1, 2), (2, 2), (3, 3), (5, 3), (6, 4), (99, 4)]
)
def test_pairs_are_all_those_of_the_first_heads_that_the_budget_has_room_for(budget, count):
    heads = [Head(1, 0), Head(0, 1), Head(0, 0), Head(1, 1)]
    found = pairs_within(heads, budget)
    assert {frozenset(pair) for pair in found} == set(
        map(frozenset, combinations(heads[:count], 2))
    )
    assert len(found) == count * (count - 1) // 2
    assert all(one < other for one, other in found)


@pytest.mark.parametrize(
    ("single", "joint", "expected"),
    [
        ([0.1, 0.3], 0.4, 0.0),  # they add up
        ([0.0, 0.0], 0.3, 0.3),  # each stands in for the other
        ([0.2, 0.2], 0.2, -0.2),  # both carry the same
        ([-0.1, 0.1], 0.25, 0.25),
    ],
)
def test_an_interaction_is_the_joint_effect_less_the_single_ones(single, joint, expected):
    singles = INTACT + TOKENS * np.array([9.0, *single])[:, None]
    joints = (INTACT + TOKENS * joint)[None]
    found = interaction_effects(joints, singles, [[1, 2]], INTACT, *SAMPLE, **INTERVALS)
    for values in (found.effect_nats, found.ci_low, found.ci_high):
        assert values.tolist() == pytest.approx([expected])


def test_sets_of_any_size_are_compared_window_by_window():
    generator = np.random.default_rng(0)
    singles = INTACT + generator.normal(size=(3, NUM_WINDOWS))
    parts = singles - INTACT
    excess = np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 8.0]])
    joints = INTACT + np.stack([parts.sum(0), parts[[2, 0]].sum(0)]) + excess
    found = interaction_effects(joints, singles, [[0, 1, 2], [2, 0]], INTACT, *SAMPLE, **INTERVALS)
    assert found.effect_nats.tolist() == pytest.approx([0.25, 0.2])
    errors = excess.std(1, ddof=1) / 2 / TOKENS
    assert found.standard_error.tolist() == pytest.approx(errors.tolist())
