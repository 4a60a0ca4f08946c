"""The summary of pruning curves says which heads can go; rows of curve.csv are its points."""

from typing import Any

import numpy as np
import pytest

from mhaprune.prune.curves import Curve, Order, make_curve
from mhaprune.prune.summary import curve_points, removable_rows, summarize
from tests.subjects import HEADS


def curve(ordering: str, added_nats: list[float], direction: Any = "least") -> Curve:
    """A curve of 2 heads at 1 nat per token, whose intervals are points."""
    intact, tokens = np.full(4, 10.0), np.full(4, 10)
    ablated = intact + 10 * np.array(added_nats)[:, None]
    intervals = {"confidence": 0.95, "num_resamples": 200, "seed": 0}
    points = list(range(len(added_nats)))
    return make_curve(
        *(Order(ordering, direction, HEADS[: len(points) - 1]), points, intact, ablated),
        *(tokens, np.arange(4)),
        **intervals,
    )


CURVES = [
    curve("fisher", [0.0, 0.02, 0.064]),
    curve("fisher", [0.0, 0.2, 0.4], "most"),
    curve("random_0", [0.0, 0.005, 0.2]),
    curve("random_1", [0.0, 0.5, 0.96]),
]


def test_the_summary_has_each_order_at_each_increase_and_the_areas():
    summary = summarize(CURVES)
    assert summary.pop("baseline/perplexity") == pytest.approx(np.e)
    assert summary.pop("pruning/smallest_area") == pytest.approx(0.026)
    best = [summary.pop(f"pruning/most_heads_at_{name}") for name in ("1pct", "5pct", "10pct")]
    assert best == [0, 1, 2]
    areas = [summary.pop(f"area_nats_{direction}_first") for direction in ("least", "most")]
    assert areas[0] == pytest.approx({"fisher": 0.026, "random_0": 0.0525, "random_1": 0.49})
    assert areas[1] == pytest.approx({"fisher": 0.2})
    assert summary == {
        "heads_removed_at_1pct": {"fisher": 0, "random_0": 1, "random_1": 0},
        "heads_removed_at_5pct": {"fisher": 1, "random_0": 1, "random_1": 0},
        "heads_removed_at_10pct": {"fisher": 2, "random_0": 1, "random_1": 0},
    }


def test_a_curve_that_ends_early_has_no_area():
    short = make_curve(
        *(Order("fisher_healed", "least", HEADS[:4]), [0, 1, 2], np.full(4, 10.0)),
        *(np.full((3, 4), 10.0), np.full(4, 10), np.arange(4)),
        **{"confidence": 0.95, "num_resamples": 200, "seed": 0},
    )
    assert short.area is None
    assert summarize([*CURVES, short])["area_nats_least_first"].keys() == {
        *("fisher", "random_0", "random_1")
    }
    assert removable_rows(summarize([CURVES[0], short]))[1] == (
        "fisher_healed",
        ["2", "2", "2"],
        "",
    )


def test_random_orders_are_shown_as_ranges():
    assert removable_rows(summarize(CURVES)) == [
        ("fisher", ["0", "1", "2"], "0.03"),
        ("2 random", ["0 to 1", "0 to 1", "0 to 1"], "0.05 to 0.49"),
    ]
    assert removable_rows(summarize(CURVES[:2])) == [("fisher", ["0", "1", "2"], "0.03")]


def test_a_row_of_the_file_is_a_point_with_its_perplexity_and_interval():
    points = curve_points(CURVES[:2])
    assert [(row.ordering, row.direction, row.num_removed) for row in points] == [
        *(("fisher", "least", 0), ("fisher", "least", 1), ("fisher", "least", 2)),
        *(("fisher", "most", 0), ("fisher", "most", 1), ("fisher", "most", 2)),
    ]
    for row, nats in zip(points, [1, 1.02, 1.064, 1, 1.2, 1.4], strict=True):
        assert row.nats_per_token == pytest.approx(nats)
        for value in (row.perplexity, row.ci_low, row.ci_high):
            assert value == pytest.approx(np.exp(nats))
