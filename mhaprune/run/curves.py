"""Orders of removal from a run's texts, their pruning curves, and heads removed together."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from mhaprune.measure.baselines import Donors
from mhaprune.measure.head_sets import plan_sets, set_losses
from mhaprune.measure.measurer import Measurer
from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import HeadShape
from mhaprune.model.gating import gate_heads, gates_of
from mhaprune.model.heads import Head, HeadSet, select_heads
from mhaprune.prune.curves import (
    Curve,
    Direction,
    Order,
    interaction_effects,
    make_curve,
    pairs_within,
    point_counts,
    removal_order,
    rescored_order,
)
from mhaprune.prune.summary import curve_points, is_random
from mhaprune.review.pictures import Line, pair_heatmap, pruning_curves, save_png
from mhaprune.run.config import MeasureConfig, PruneHeadsConfig
from mhaprune.run.prepare import Prepared
from mhaprune.run.pruning_config import OrderingConfig
from mhaprune.scores.catalogue import SCORES
from mhaprune.stats.effects import paired_effects
from mhaprune.tables.csv_files import read_effects, read_rows, write_rows
from mhaprune.tables.manifest import read_manifest
from mhaprune.tables.rows import CurvePoint, HeadScore, Interaction


class Intervals(TypedDict):
    """How intervals are made."""

    confidence: float
    num_resamples: int
    seed: int


def make_orders(
    config: PruneHeadsConfig, prepared: Prepared, subject: Subject, say: Callable[[str], object]
) -> list[Order]:
    """Return the orders that the configuration names, and the random ones.

    Raises ValueError for what does not fit together, before any score is taken.
    """
    pruning, heads = config.pruning, subject.heads
    directions: list[Direction] = [d for d in ("least", "most") if d in pruning.directions]
    check_orderings(pruning.orderings, subject)
    orders = []
    if pruning.ranking is not None:
        values = saved_values(Path(pruning.ranking), prepared, heads, pruning.same_text, say)
        for direction in directions:
            order = removal_order(values, heads, direction, pruning.min_per_layer)
            orders.append(Order("ranking", direction, order))
    for name, ordering in pruning.orderings.items():
        for direction in directions:
            orders.append(Order(name, direction, order_by(subject, ordering, direction, config)))
        say(f"order {name}: done")
    generator = np.random.default_rng(config.seed)
    for number in range(pruning.random_orders):
        values = generator.permutation(len(heads)).astype(np.float64)
        order = removal_order(values, heads, "least", pruning.min_per_layer)
        orders.append(Order(f"random_{number}", "least", order))
    return orders


def check_orderings(orderings: dict[str, OrderingConfig], subject: Subject) -> None:
    """Raise ValueError for rescoring with an ablation that has a baseline for each window."""
    for name, ordering in orderings.items():
        if ordering.rescore_every and isinstance(subject.ablation, Donors):
            raise ValueError(
                f"pruning.orderings.{name}: taking a score again with heads already ablated works "
                f"for ablation=zero, mean and optimal, not for resample"
            )


def order_by(
    subject: Subject, ordering: OrderingConfig, direction: Direction, config: PruneHeadsConfig
) -> HeadSet:
    """Return the order of a score, taken once or, with `rescore_every`, again and again."""
    score, least = SCORES[ordering.score], config.pruning.min_per_layer
    if ordering.rescore_every is None:
        values = score(subject, **ordering.options).at(subject.heads)
        return removal_order(values, subject.heads, direction, least)

    def again(gone: HeadSet, left: HeadSet) -> Float[np.ndarray, "left"]:
        assert not isinstance(subject.ablation, Donors)
        [gate] = gates_of([gone], subject.shape)
        gated = gate_heads(subject.model, gate.to(subject.model.device), subject.ablation)
        with gated if gone else nullcontext():
            return score(replace(subject, heads=left), **ordering.options).at(left)

    return rescored_order(again, subject.heads, direction, ordering.rescore_every, least)


def saved_values(
    run: Path,
    prepared: Prepared,
    heads: Sequence[Head],
    same_text: bool,
    say: Callable[[str], object],
) -> Float[np.ndarray, "head"]:
    """Return the heads' effects, or scores, from the files of a finished run of rank_heads.

    Raises ValueError where the run is of another model, lacks a head, or was measured on the text
    that the curve is measured on, unless `same_text` allows it.
    """
    saved = read_manifest(run)
    if saved["weights_hash"] != prepared.loaded.weights_hash:
        raise ValueError(f"pruning.ranking={run} is of another model (its weights hash differs)")
    if saved["tokens_hash"] == prepared.sample.tokens.hash:
        if not same_text:
            raise ValueError(
                f"pruning.ranking={run} was measured on this very text, so its curve would look "
                f"too good; rank on another text, or say pruning.same_text=true"
            )
        say(f"Note: {run} was measured on this very text; its curve is optimistic")
    if (run / "effects.csv").exists():
        found = {
            Head(row.layer, row.head): row.effect_nats for row in read_effects(run / "effects.csv")
        }
    else:
        rows = read_rows(run / "scores.csv", HeadScore)
        found = {Head(row.layer, row.head): row.value for row in rows}
    missing = [str(head) for head in heads if head not in found]
    if missing:
        raise ValueError(f"pruning.ranking={run} has no value for {', '.join(missing[:5])}")
    return np.array([found[head] for head in heads])


def measure_curves(
    orders: Sequence[Order], measurer: Measurer, config: PruneHeadsConfig
) -> list[Curve]:
    """Measure every order's curve on the evaluation text."""
    counts = [point_counts(len(order.heads), config.pruning.step) for order in orders]
    sets = [
        order.heads[:count] for order, some in zip(orders, counts, strict=True) for count in some
    ]
    losses = losses_of(measurer, [(), *sets], config.evaluation.windows_per_unit)
    intact, rest = losses[0], losses[1:]
    sample, curves, first = measurer.subject.sample, [], 0
    for order, some in zip(orders, counts, strict=True):
        curves.append(
            make_curve(
                order,
                some,
                intact,
                rest[first : first + len(some)],
                sample.num_tokens,
                sample.blocks,
                **intervals(config),
            )
        )
        first += len(some)
    return curves


def chosen_sets(config: PruneHeadsConfig, shape: HeadShape) -> list[HeadSet]:
    """Return the sets of heads that the configuration names; ValueError for heads that are not."""
    return [
        tuple(select_heads(patterns, shape.num_layers, shape.num_heads))
        for patterns in config.pruning.sets
    ]


def measure_interactions(
    config: PruneHeadsConfig, order: HeadSet, measurer: Measurer
) -> list[Interaction]:
    """Compare the joint effects of sets of heads with the sums of their single effects.

    The sets are those configured, and all pairs of the heads that go first within the budget.
    """
    chosen = chosen_sets(config, measurer.subject.shape)
    sets = list(dict.fromkeys([*chosen, *pairs_within(order, config.pruning.pairs)]))
    if not sets:
        return []
    singles = sorted({head for one in sets for head in one})
    per_unit = config.evaluation.windows_per_unit
    losses = losses_of(measurer, [(), *((head,) for head in singles), *sets], per_unit)
    intact, single, joint = losses[0], losses[1 : 1 + len(singles)], losses[1 + len(singles) :]
    tokens, blocks = measurer.subject.sample.num_tokens, measurer.subject.sample.blocks
    members = [[singles.index(head) for head in one] for one in sets]
    how = intervals(config)
    found = interaction_effects(joint, single, members, intact, tokens, blocks, **how)
    alone = paired_effects(intact, single, tokens, blocks, **how)
    together = paired_effects(intact, joint, tokens, blocks, **how)
    tolerance = config.evaluation.tolerance_nats
    redundant = (alone.ci_low >= -tolerance) & (alone.ci_high <= tolerance)
    return [
        Interaction(
            heads=" ".join(map(str, one)),
            joint_nats=float(together.effect_nats[n]),
            sum_nats=float(alone.effect_nats[members[n]].sum()),
            interaction_nats=float(found.effect_nats[n]),
            ci_low=float(found.ci_low[n]),
            ci_high=float(found.ci_high[n]),
            redundant_alone=bool(redundant[members[n]].all()),
            needed_together=bool(together.ci_low[n] > tolerance),
        )
        for n, one in enumerate(sets)
    ]


def losses_of(
    measurer: Measurer, sets: Sequence[HeadSet], windows_per_unit: int
) -> Float[np.ndarray, "variant window"]:
    """Return the total nats of each set on each window, measured or from the run's store."""
    num_windows = measurer.num_windows
    units = plan_sets(sets, num_windows, windows_per_unit)
    measurer.progress.begin("prune", sum(unit.num_rows for unit in units))
    return set_losses(measurer.sets(units), sets, num_windows)


def draw_curves(curves: Sequence[Curve], title: str) -> Figure:
    """Draw the curves, the random ones as a band."""
    lines = {
        random: [
            Line(
                label=curve.ordering,
                style="-" if curve.direction == "least" else "--",
                num_removed=curve.num_removed.tolist(),
                perplexity=np.exp(curve.nats_per_token).tolist(),
                low=(curve.ppl_intact * (1 + curve.increase_low)).tolist(),
                high=(curve.ppl_intact * (1 + curve.increase_high)).tolist(),
            )
            for curve in curves
            if is_random(curve.ordering) == random
        ]
        for random in (False, True)
    }
    return pruning_curves(lines[False], lines[True], curves[0].ppl_intact, title)


def write_curves(
    directory: Path, curves: Sequence[Curve], together: Sequence[Interaction], title: str
) -> None:
    """Write curve.csv, interactions.csv if there are any, and their pictures."""
    write_rows(directory / "curve.csv", CurvePoint, curve_points(curves))
    save_png(draw_curves(curves, title), directory / "curves.png")
    if together:
        write_rows(directory / "interactions.csv", Interaction, together)
        if (pairs := draw_pairs(together, title)) is not None:
            save_png(pairs, directory / "pairs.png")


def draw_pairs(rows: Sequence[Interaction], title: str) -> Figure | None:
    """Draw the interactions of the sets that are pairs; None if there are none."""
    pairs = {tuple(row.heads.split()): row.interaction_nats for row in rows}
    pairs = {pair: nats for pair, nats in pairs.items() if len(pair) == 2}
    names = sorted({name for pair in pairs for name in pair}, key=Head.parse)
    if not names:
        return None
    grid = np.full((len(names), len(names)), np.nan)
    for (one, other), nats in pairs.items():
        grid[names.index(one), names.index(other)] = nats
        grid[names.index(other), names.index(one)] = nats
    return pair_heatmap(names, grid, title)


def intervals(config: MeasureConfig) -> Intervals:
    """Return how the configuration wants intervals to be made."""
    evaluation = config.evaluation
    return {
        "confidence": evaluation.confidence,
        "num_resamples": evaluation.resamples,
        "seed": config.seed,
    }
