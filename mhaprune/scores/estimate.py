"""What every score is given, and what it returns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int

from mhaprune.measure.gradients import loss_and_slope, rows_for_gradients
from mhaprune.measure.subject import Subject
from mhaprune.model.heads import Head

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Estimate:
    """A score of every head, larger for a more important one.

    `value[layer, head]` is NaN for heads that were not asked for. `standard_error`, where the
    method has one, is that over windows. `forward_equivalents` is the cost: how many forward passes
    over all windows the method's passes amount to, a backward pass counting two.
    """

    value: Float[np.ndarray, "layer head"]
    standard_error: Float[np.ndarray, "layer head"] | None
    forward_equivalents: int | float

    def at(self, heads: Sequence[Head]) -> Float[np.ndarray, "chosen"]:
        """Return the values of these heads, in their order."""
        return np.array([self.value[head.layer, head.head] for head in heads])


def estimate_rates(
    subject: Subject,
    nats: Float[np.ndarray, "layer head window"],
    forward_equivalents: int | float,
    tokens: Int[np.ndarray, "window"] | None = None,
) -> Estimate:
    """Turn totals per window into nats per token: value = sum / tokens, as a ratio estimator.

    `tokens` are the scored tokens of each window, unless totals are over something else.
    se = sqrt(n/(n-1) * sum over windows (total - value * tokens)^2) / tokens (Cochran 1977, ch. 6).
    """
    tokens = subject.sample.num_tokens if tokens is None else tokens
    value = nats.sum(-1) / tokens.sum()
    residual = nats - value[..., None] * tokens
    n = len(tokens)
    scale = n / (n - 1) if n > 1 else np.nan
    error = np.sqrt(scale * (residual**2).sum(-1)) / tokens.sum()
    return Estimate(
        only(subject, value), only(subject, error) if n > 1 else None, forward_equivalents
    )


def spread(
    subject: Subject, by_head: Float[np.ndarray, "chosen window"], fill: float = 0.0
) -> Float[np.ndarray, "layer head window"]:
    """Arrange rows for the heads that were asked for by layer and head; `fill` elsewhere."""
    shape = subject.shape
    made = np.full((shape.num_layers, shape.num_heads, by_head.shape[1]), fill)
    for head, row in zip(subject.heads, by_head, strict=True):
        made[head.layer, head.head] = row
    return made


def only(
    subject: Subject, values: Float[np.ndarray, "layer head"]
) -> Float[np.ndarray, "layer head"]:
    """Return the values of the heads that were asked for, NaN for the others."""
    chosen = np.full(values.shape, np.nan)
    for head in subject.heads:
        chosen[head.layer, head.head] = values[head.layer, head.head]
    return chosen


def batches(subject: Subject) -> Iterator[list[int]]:
    """Cut the numbers of the windows into batches that a backward pass has room for."""
    rows = rows_for_gradients(subject, subject.sample.longest())
    numbers = range(len(subject.sample.windows))
    yield from (list(numbers[first : first + rows]) for first in numbers[::rows])


def slopes(
    subject: Subject, level: float = 1.0
) -> tuple[Float[np.ndarray, "window"], Float[np.ndarray, "layer head window"]]:
    """Return each window's loss with all gates at `level`, and its gradient by each head's gate."""
    shape = subject.shape
    losses, gradients = [], []
    for numbers in batches(subject):
        gate = torch.full((len(numbers), shape.num_layers, shape.num_heads), level)
        nats, slope = loss_and_slope(subject, numbers, gate)
        losses.append(nats.numpy())
        gradients.append(slope.numpy().transpose(1, 2, 0))
    return np.concatenate(losses), np.concatenate(gradients, -1)
