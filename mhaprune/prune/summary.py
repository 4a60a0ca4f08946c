"""Pruning curves -> the rows of curve.csv, the headline numbers, and what can go by each order."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mhaprune.prune.curves import INCREASES, Curve
from mhaprune.tables.rows import CurvePoint


def curve_points(curves: Sequence[Curve]) -> list[CurvePoint]:
    """Return the curves as rows of curve.csv."""
    return [
        CurvePoint(
            ordering=curve.ordering,
            direction=curve.direction,
            num_removed=int(count),
            nats_per_token=float(curve.nats_per_token[n]),
            perplexity=float(np.exp(curve.nats_per_token[n])),
            ci_low=float(curve.ppl_intact * (1 + curve.increase_low[n])),
            ci_high=float(curve.ppl_intact * (1 + curve.increase_high[n])),
        )
        for curve in curves
        for n, count in enumerate(curve.num_removed)
    ]


def summarize(curves: Sequence[Curve]) -> dict[str, float | dict[str, float]]:
    """Return the headline numbers by ordering: heads that can go, and areas under the curves.

    A healed curve, which is measured at a few points only, has no area. Flat keys hold the best of
    the orders that are not random, for sweeps to go by.
    """
    least = [curve for curve in curves if curve.direction == "least"]
    most = [curve for curve in curves if curve.direction == "most"]
    named = [curve for curve in least if not is_random(curve.ordering)]
    areas = [curve.area for curve in named if curve.area is not None]
    return {
        "baseline/perplexity": curves[0].ppl_intact,
        **{
            f"pruning/most_heads_at_{name}": max(curve.removable(increase) for curve in named)
            for name, increase in INCREASES.items()
            if named
        },
        **({"pruning/smallest_area": min(areas)} if areas else {}),
        **{
            f"heads_removed_at_{name}": {
                curve.ordering: curve.removable(increase) for curve in least
            }
            for name, increase in INCREASES.items()
        },
        "area_nats_least_first": {c.ordering: c.area for c in least if c.area is not None},
        "area_nats_most_first": {c.ordering: c.area for c in most if c.area is not None},
    }


def removable_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str], str]]:
    """Return for each order what can go at +1%, +5%, +10%, and the area; random ones as ranges.

    From what `summarize` made; no rows from a summary of something else.
    """
    counts = [summary.get(f"heads_removed_at_{increase}", {}) for increase in INCREASES]
    areas = summary.get("area_nats_least_first", {})
    rows = [
        (
            name,
            [str(count[name]) for count in counts],
            f"{areas[name]:.2f}" if name in areas else "",
        )
        for name in counts[0]
        if not is_random(name)
    ]
    random = [name for name in counts[0] if is_random(name)]
    if random:
        chances = [[count[name] for name in random] for count in counts]
        area = [areas[name] for name in random if name in areas]
        rows.append(
            (
                f"{len(random)} random",
                [f"{min(chance)} to {max(chance)}" for chance in chances],
                f"{min(area):.2f} to {max(area):.2f}" if area else "",
            )
        )
    return rows


def is_random(ordering: str) -> bool:
    return ordering.startswith("random_")
