"""Leave-one-out, measured only as long as a head's verdict is open.

All windows get a prediction of every head's effect (`prediction`), and a random few a measurement.
At each look the intervals are drawn again (`control_variates`). Heads that they settle are left as
they are, and so are heads too close to a threshold to be settled by all windows; the others are
measured on twice as many windows, until the windows end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from mhaprune.measure.leave_one_out import Unit, assemble, plan
from mhaprune.measure.subject import Subject
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


@dataclass(frozen=True)
class Stopping:
    """When a head's verdict counts as settled, and how it is looked for.

    Windows are measured in blocks of `windows_per_unit`; `tolerance_nats` and `critical_nats` are
    the thresholds of `stats.effects.verdicts`.
    """

    windows_per_unit: int = 4
    confidence: float = 0.95
    tolerance_nats: float = 0.01
    critical_nats: float = 0.05


def measure_until_settled(
    subject: Subject,
    intact_nats: Float[np.ndarray, "window"],
    predicted_nats: Float[np.ndarray, "head window"],
    blocks: Int[np.ndarray, "window"],
    stopping: Stopping,
    obtain: Obtain,
) -> Iterator[Look]:
    """Yield a look after each round of measuring, until no head is open or all windows are used.

    `intact_nats` and `predicted_nats` cover all windows (`prediction.predict`), so that the intact
    model is not measured again. `blocks` are the units of sampling. Which windows come first is a
    random order from the subject's seed, the same for all heads. ValueError below 8 windows.
    """
    heads, num_tokens = subject.heads, subject.sample.num_tokens
    order = np.random.default_rng(subject.seed).permutation(len(intact_nats)).tolist()
    thresholds = stopping.tolerance_nats, stopping.critical_nats
    results: dict[Unit, Float[np.ndarray, "variant window"]] = {}
    open_heads, seen = list(heads), 0
    for size in look_sizes(len(order)):
        units = plan(open_heads, order[seen:size], stopping.windows_per_unit)
        results |= obtain([unit for unit in units if unit.layer is not None])
        seen = size
        _, ablated = assemble(results, heads, len(order))
        effects, regression = regression_effects(
            intact_nats, ablated, predicted_nats, num_tokens, blocks, confidence=stopping.confidence
        )
        settled = is_settled(effects, *thresholds)
        chance = chance_of_verdict(effects, regression, len(order), *thresholds)
        hard = ~settled & (chance < LEAST_CHANCE)
        open_heads = [head for head, done in zip(heads, settled | hard, strict=True) if not done]
        most_rows = len(open_heads) * (len(order) - seen)
        yield Look(size, ablated, settled, hard, most_rows)
        if not open_heads:
            return
