"""How many heads can go: orders of removal, the pruning curve and what it says.

A pruning curve is the loss on evaluation text against how many heads of an order are ablated. Its
order comes from calibration text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from mhaprune.model.heads import Head, HeadSet
from mhaprune.stats.effects import Effects, paired_effects

Direction = Literal["least", "most"]
INCREASES = {"1pct": 0.01, "5pct": 0.05, "10pct": 0.10}


@dataclass(frozen=True)
class Curve:
    """Perplexity along an order of removal.

    `order` lists the heads that go, first to last; point n of the curve has `num_removed[n]` of
    them ablated. `increase_*` is the interval of perplexity over intact perplexity, less 1: paired
    window by window, so it does not contain the spread of the intact perplexity.
    """

    ordering: str
    direction: Direction
    order: HeadSet
    num_removed: Int[np.ndarray, "point"]
    nats_per_token: Float[np.ndarray, "point"]
    increase: Float[np.ndarray, "point"]
    increase_low: Float[np.ndarray, "point"]
    increase_high: Float[np.ndarray, "point"]
    ppl_intact: float

    def removable(self, increase: float) -> int:
        """Return how many heads can go at an increase of perplexity such as 0.05.

        The largest number on the curve up to which every interval ends below the increase: a later
        dip does not count.
        """
        under = self.increase_high < increase
        return int(self.num_removed[under.cumprod().astype(bool)].max(initial=0))

    @property
    def area(self) -> float | None:
        """Return the mean loss added along the way, in nats per token, by the trapezoid rule.

        Over the numbers of heads removed, from none to all of the order: smaller is better for
        "least", larger for "most". None for a curve that ends before all have gone, whose area
        would compare with no other's.
        """
        if self.num_removed[-1] < len(self.order):
            return None
        added = np.log1p(self.increase)
        return float(np.trapezoid(added, self.num_removed) / max(1, self.num_removed[-1]))


@dataclass(frozen=True)
class Order:
    """Heads in the order in which they go."""

    ordering: str
    direction: Direction
    heads: HeadSet


def removal_order(
    values: Float[np.ndarray, "head"],
    heads: Sequence[Head],
    direction: Direction,
    min_per_layer: int = 0,
) -> HeadSet:
    """Return the heads in the order in which they go; of equal values the earlier head first.

    With `min_per_layer`, heads whose removal would leave fewer of `heads` in their layer stay.
    """
    signed = values if direction == "least" else -values
    return keep_some([heads[n] for n in np.argsort(signed, kind="stable")], heads, min_per_layer)


def keep_some(order: Sequence[Head], heads: Sequence[Head], min_per_layer: int) -> HeadSet:
    """Return the order without the heads that go last from a layer, so many as have to stay."""
    left = {head.layer: sum(other.layer == head.layer for other in heads) for head in heads}
    kept = []
    for head in order:
        if left[head.layer] > min_per_layer:
            left[head.layer] -= 1
            kept.append(head)
    return tuple(kept)


def rescored_order(
    score: Callable[[HeadSet, HeadSet], Float[np.ndarray, "left"]],
    heads: Sequence[Head],
    direction: Direction,
    every: int,
    min_per_layer: int = 0,
) -> HeadSet:
    """Return an order whose scores are taken again after every `every` heads that went.

    `score(gone, left)` gives the values of the heads left while the others are ablated. With the
    measured effect and `every` = 1 this is greedy backward elimination.
    """
    gone: list[Head] = []
    while True:
        left = tuple(head for head in heads if head not in gone)
        values = score(tuple(gone), left) if left else np.empty(0)
        signed = values if direction == "least" else -values
        ranked = [left[n] for n in np.argsort(signed, kind="stable")]
        allowed = keep_some([*gone, *ranked], heads, min_per_layer)[len(gone) :]
        if not allowed:
            return tuple(gone)
        gone += allowed[:every]


def point_counts(num_heads: int, step: int | None) -> list[int]:
    """Return at which numbers of removed heads to measure: every `step`, and all of them.

    Without a step, such that there are about 32 points.
    """
    step = step or max(1, round(num_heads / 32))
    return sorted({*range(0, num_heads + 1, step), num_heads})


def make_curve(
    order: Order,
    num_removed: Sequence[int],
    intact_nats: Float[np.ndarray, "window"],
    ablated_nats: Float[np.ndarray, "point window"],
    num_tokens: Int[np.ndarray, "window"],
    blocks: Int[np.ndarray, "window"],
    *,
    confidence: float,
    num_resamples: int,
    seed: int,
) -> Curve:
    """Turn total nats per window into a curve; the intervals are those of `paired_effects`."""
    effects = paired_effects(
        intact_nats,
        ablated_nats,
        num_tokens,
        blocks,
        confidence=confidence,
        num_resamples=num_resamples,
        seed=seed,
    )
    return Curve(
        ordering=order.ordering,
        direction=order.direction,
        order=order.heads,
        num_removed=np.array(num_removed),
        nats_per_token=ablated_nats.sum(1) / num_tokens.sum(),
        increase=np.expm1(effects.effect_nats),
        increase_low=np.expm1(effects.ci_low),
        increase_high=np.expm1(effects.ci_high),
        ppl_intact=effects.ppl_intact,
    )


def pairs_within(heads: Sequence[Head], budget: int) -> list[HeadSet]:
    """Return all pairs of the first heads, of as many as give at most `budget` pairs."""
    count = 0
    while count < len(heads) and (count + 1) * count // 2 <= budget:
        count += 1
    return [tuple(sorted(pair)) for pair in combinations(heads[:count], 2)]


def interaction_effects(
    joint_nats: Float[np.ndarray, "variant window"],
    single_nats: Float[np.ndarray, "head window"],
    members: Sequence[Sequence[int]],
    intact_nats: Float[np.ndarray, "window"],
    num_tokens: Int[np.ndarray, "window"],
    blocks: Int[np.ndarray, "window"],
    *,
    confidence: float,
    num_resamples: int,
    seed: int,
) -> Effects:
    """Return interaction = effect of the set - sum of its heads' single effects, as `Effects`.

    `members[n]` are the rows in `single_nats` of the heads of set n. Above 0: the heads stand in
    for each other, and removing them together costs more than the parts; below 0: they do the same
    harm or good, and the second adds less. Paired window by window.
    """
    single = single_nats - intact_nats
    parts = np.array([single[list(rows)].sum(0) for rows in members])
    return paired_effects(
        intact_nats,
        joint_nats - parts,
        num_tokens,
        blocks,
        confidence=confidence,
        num_resamples=num_resamples,
        seed=seed,
    )
