"""Leave-one-out, measured only as long as a head's verdict is open.

All windows get a prediction of every head's effect (`attribution`), and a random few a measurement.
At each look the intervals are drawn again (`control_variates`). Heads that they settle are left as
they are, and so are heads too close to a threshold to be settled by all windows; the others are
measured on twice as many windows, until the windows end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from mhaprune.measure.leave_one_out import Unit, as_arrays, assemble, measure, plan
from mhaprune.model.heads import Head
from mhaprune.scores.attribution import predict
from mhaprune.scores.estimate import Estimate, Subject, spread
from mhaprune.stats.control_variates import (
    LEAST_CHANCE,
    chance_of_verdict,
    is_settled,
    look_sizes,
    regression_effects,
)

# Measures units, or looks up what they gave: total nats of each variant on each window.
Obtain = Callable[[Sequence[Unit]], Mapping[Unit, Float[np.ndarray, "variant window"]]]


@dataclass(frozen=True)
class Look:
    """What is known once the open heads were measured on `num_windows` windows.

    `ablated_nats` is NaN where a head was not measured.
    `settled` heads have their verdict, `out_of_reach` ones will hardly get one on this text.
    `most_rows` is how many more windows go through the model if all open heads stay open.
    """

    num_windows: int
    ablated_nats: Float[np.ndarray, "head window"]
    settled: Bool[np.ndarray, "head"]
    out_of_reach: Bool[np.ndarray, "head"]
    most_rows: int


def measure_until_settled(
    heads: Sequence[Head],
    intact_nats: Float[np.ndarray, "window"],
    predicted_nats: Float[np.ndarray, "head window"],
    num_tokens: Int[np.ndarray, "window"],
    blocks: Int[np.ndarray, "window"],
    obtain: Obtain,
    *,
    windows_per_unit: int,
    confidence: float,
    tolerance_nats: float,
    critical_nats: float,
    seed: int,
) -> Iterator[Look]:
    """Yield a look after each round of measuring, until no head is open or all windows are used.

    `intact_nats` and `predicted_nats` cover all windows (`attribution.predict`), so that the intact
    model is not measured again. Which windows come first is a random order from `seed`, the same
    for all heads. ValueError below 8 windows.
    """
    order = np.random.default_rng(seed).permutation(len(intact_nats)).tolist()
    results: dict[Unit, Float[np.ndarray, "variant window"]] = {}
    open_heads, seen = list(heads), 0
    for size in look_sizes(len(order)):
        units = plan(open_heads, order[seen:size], windows_per_unit)
        results |= obtain([unit for unit in units if unit.layer is not None])
        seen = size
        _, ablated = assemble(results, heads, len(order))
        effects, regression = regression_effects(
            intact_nats, ablated, predicted_nats, num_tokens, blocks, confidence=confidence
        )
        thresholds = tolerance_nats, critical_nats
        settled = is_settled(effects, *thresholds)
        chance = chance_of_verdict(effects, regression, len(order), *thresholds)
        hard = ~settled & (chance < LEAST_CHANCE)
        open_heads = [head for head, done in zip(heads, settled | hard, strict=True) if not done]
        most_rows = len(open_heads) * (len(order) - seen)
        yield Look(size, ablated, settled, hard, most_rows)
        if not open_heads:
            return


def leave_one_out_adaptively(
    subject: Subject,
    *,
    windows_per_unit: int = 4,
    confidence: float = 0.95,
    tolerance_nats: float = 0.01,
    critical_nats: float = 0.05,
) -> Estimate:
    """Return each head's effect in nats per token, measured until its verdict is settled.

    Windows count as independent of each other.
    """
    question = subject.model, subject.ids, subject.windows
    all_windows = range(len(subject.windows))
    predictions = predict(
        *(*question, plan(subject.heads, all_windows, windows_per_unit)),
        *(subject.ablation, subject.rows_per_batch),
    )
    intact, predicted = assemble(as_arrays(predictions), subject.heads, len(all_windows))

    def obtain(units: Sequence[Unit]) -> dict[Unit, Float[np.ndarray, "..."]]:
        return as_arrays(
            measure(*question, units, subject.ablation, subject.rows_per_batch, subject.engine)
        )

    looks = measure_until_settled(
        *(subject.heads, intact, predicted, subject.num_tokens, np.array(all_windows), obtain),
        windows_per_unit=windows_per_unit,
        confidence=confidence,
        tolerance_nats=tolerance_nats,
        critical_nats=critical_nats,
        seed=subject.seed,
    )
    *_, last = looks
    effects, regression = regression_effects(
        *(intact, last.ablated_nats, predicted, subject.num_tokens),
        *(np.array(all_windows),),
        confidence=confidence,
    )
    measured = int(regression.num_windows.sum())
    return Estimate(
        spread(subject, effects.effect_nats[:, None], fill=np.nan)[..., 0],
        spread(subject, effects.standard_error[:, None], fill=np.nan)[..., 0],
        forward_equivalents=3 + measured / len(all_windows),
    )
