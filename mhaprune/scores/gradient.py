"""Gradient importance: how steeply the loss depends on a head's gate, whatever the direction.

    value_h = E_x |dL_x / dgate_h| = E_x |(z_h - baseline_h) . dL_x/dz_h|

Michel, Levy, Neubig 2019, arXiv 1905.10650, section 4.1, with zero as baseline.
"""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float

from mhaprune.measure.gradients import loss_and_slope
from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, batches, estimate_rates, slopes


def gradient(
    subject: Subject,
    *,
    absolute: Literal["example", "token"] = "example",
    normalization: Literal["none", "layer", "global"] = "none",
) -> Estimate:
    """Return the mean absolute slope of the loss by each head's gate, in nats per token.

    `absolute`: "example" takes the absolute value of a window's slope, "token" that of the slope at
    each position, summed over the window. `normalization` divides by the l2 norm of the layer's
    values (as in the paper's code) or of all: the first destroys comparison across layers.
    """
    nats = abs(slopes(subject)[1]) if absolute == "example" else _slopes_at_tokens(subject)
    estimate = estimate_rates(subject, nats, forward_equivalents=3)
    if normalization == "none":
        return estimate
    axis = 1 if normalization == "layer" else None
    norm = np.sqrt(np.nansum(estimate.value**2, axis=axis, keepdims=True))
    norm = np.where(norm > 0, norm, 1.0)
    error = estimate.standard_error
    return Estimate(estimate.value / norm, None if error is None else error / norm, 3)


def _slopes_at_tokens(subject: Subject) -> Float[np.ndarray, "layer head window"]:
    shape, parts = subject.shape, []
    for numbers in batches(subject):
        length = subject.sample.longest(numbers)
        gate = torch.ones(len(numbers), length, shape.num_layers, shape.num_heads)
        _, slope = loss_and_slope(subject, numbers, gate)
        parts.append(slope.abs().sum(1).permute(1, 2, 0).numpy())
    return np.concatenate(parts, -1)
