"""Learned gates: hard-concrete gates trained to close, at a price on each open one.

    minimise  L(gates) + lambda * sum over heads P(gate > 0)

with gates drawn from the hard-concrete distribution (Louizos, Welling, Kingma 2018, arXiv
1712.01312), stretched to (-0.1, 1.1) at temperature 0.33, as Voita et al. 2019, arXiv 1905.09418,
did for heads. lambda is in nats per token: roughly, a head stays open if closing it costs more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mhaprune.measure.gradients import loss_and_slope, rows_for_gradients
from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, only

TEMPERATURE, LOW, HIGH = 0.33, -0.1, 1.1
LAMBDAS = (0.003, 0.01, 0.03, 0.1)
_START = 2.0  # log alpha: gates begin open
_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class GateSweep:
    """The probability that each head's gate is open, for each price lambda.

    Training that worked leaves probabilities near 0 and 1; a histogram in the middle says that it
    was too short or lambda too small.
    """

    lambdas: tuple[float, ...]
    open_probability: Float[np.ndarray, "price layer head"]


def learned_gates(
    subject: Subject,
    *,
    steps: int = 60,
    lambdas: Sequence[float] = LAMBDAS,
    windows_per_step: int = 16,
) -> Estimate:
    """Return the mean over the prices of the probability that a head's gate stays open."""
    options = {"steps": steps, "lambdas": lambdas, "windows_per_step": windows_per_step}
    sweep = train_gates(subject, **options)
    value = sweep.open_probability.mean(0)
    chunks = _chunks(subject, windows_per_step)
    num_rows = sum(len(chunks[step % len(chunks)]) for step in range(steps)) * len(sweep.lambdas)
    return Estimate(only(subject, value), None, 3 * num_rows / len(subject.sample.windows))


def train_gates(
    subject: Subject,
    *,
    steps: int = 60,
    lambdas: Sequence[float] = LAMBDAS,
    windows_per_step: int = 16,
) -> GateSweep:
    """Train gates for each price in turn, from the lowest on, each starting where the last ended.

    A step takes the next `windows_per_step` windows, however few of them fit into memory at once,
    and draws one gate per window and head. Heads that were not asked for stay open. Raises
    ValueError unless the prices are positive and there is at least one step.
    """
    prices = tuple(sorted(lambdas))
    if not prices or prices[0] <= 0 or steps < 1:
        raise ValueError(f"expected positive lambdas and steps, got {lambdas} and {steps}")
    shape = subject.shape
    generator = torch.Generator().manual_seed(subject.seed)
    players = torch.zeros(shape.num_layers, shape.num_heads, dtype=torch.bool)
    for head in subject.heads:
        players[head.layer, head.head] = True
    log_alpha = torch.full(players.shape, _START, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_alpha], lr=_LEARNING_RATE)
    chunks, found = _chunks(subject, windows_per_step), []
    for price in prices:
        for step in range(steps):
            numbers = chunks[step % len(chunks)]
            noise = torch.rand(len(numbers), *players.shape, generator=generator).double()
            gate = torch.where(players, _hard_concrete(log_alpha, noise), 1.0)
            # The loss is linear in the gates as far as its gradient goes.
            loss = (gate * _slopes_per_token(subject, numbers, gate.detach())).sum()
            loss = loss + price * open_probability(log_alpha)[players].sum()
            optimizer.zero_grad()
            loss.backward(inputs=[log_alpha])
            optimizer.step()
        found.append(torch.where(players, open_probability(log_alpha), 1.0).detach().numpy())
    return GateSweep(prices, np.stack(found))


def open_probability(log_alpha: Float[Tensor, "layer head"]) -> Float[Tensor, "layer head"]:
    """Return P(gate > 0) = sigmoid(log alpha - temperature * log(-low / high))."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def _hard_concrete(
    log_alpha: Float[Tensor, "layer head"], noise: Float[Tensor, "window layer head"]
) -> Float[Tensor, "window layer head"]:
    """Turn uniform noise into gates between 0 and 1 that reach both ends."""
    noise = noise.clamp(1e-6, 1 - 1e-6)
    soft = torch.sigmoid((noise.log() - (1 - noise).log() + log_alpha) / TEMPERATURE)
    return (soft * (HIGH - LOW) + LOW).clamp(0, 1)


def _chunks(subject: Subject, windows_per_step: int) -> list[range]:
    """Cut the numbers of the windows into those of each step."""
    numbers = range(len(subject.sample.windows))
    return [numbers[first : first + windows_per_step] for first in numbers[::windows_per_step]]


def _slopes_per_token(
    subject: Subject, numbers: Sequence[int], gate: Float[Tensor, "window layer head"]
) -> Float[Tensor, "window layer head"]:
    """Return the gradient by the gates of the windows' loss in nats per token."""
    rows = rows_for_gradients(subject, subject.sample.longest(numbers))
    slopes = [
        loss_and_slope(subject, some, some_gate)[1]
        for first in range(0, len(numbers), rows)
        for some, some_gate in [(numbers[first : first + rows], gate[first : first + rows])]
    ]
    return torch.cat(slopes) / int(subject.sample.num_tokens[list(numbers)].sum())
