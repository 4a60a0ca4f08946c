"""Adaptive leave-one-out as a score: measured only as long as a verdict is open."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mhaprune.measure.adaptive import Stopping, measure_until_settled
from mhaprune.measure.leave_one_out import Unit, as_arrays, assemble, measure, plan
from mhaprune.measure.prediction import PASSES_OF_A_PREDICTION, predict
from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, spread
from mhaprune.stats.control_variates import regression_effects


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
    num_windows = len(subject.sample.windows)
    predictions = predict(subject, plan(subject.heads, range(num_windows), windows_per_unit))
    intact, predicted = assemble(as_arrays(predictions), subject.heads, num_windows)

    def obtain(units: Sequence[Unit]) -> dict[Unit, Float[np.ndarray, "..."]]:
        return as_arrays(measure(subject, units))

    stopping = Stopping(windows_per_unit, confidence, tolerance_nats, critical_nats)
    windows = np.arange(num_windows)
    *_, last = measure_until_settled(subject, intact, predicted, windows, stopping, obtain)
    num_tokens, ablated = subject.sample.num_tokens, last.ablated_nats
    effects, regression = regression_effects(
        intact, ablated, predicted, num_tokens, windows, confidence=confidence
    )
    measured = int(regression.num_windows.sum())
    return Estimate(
        spread(subject, effects.effect_nats[:, None], fill=np.nan)[..., 0],
        spread(subject, effects.standard_error[:, None], fill=np.nan)[..., 0],
        forward_equivalents=PASSES_OF_A_PREDICTION + measured / num_windows,
    )
