"""The effect of every head's ablation to first order, from one backward pass.

With a gate on each head, `z <- gate * z + (1 - gate) * baseline`, the loss changes on the way from
gate 1 to gate 0 by about -dL/dgate = sum (baseline - z) . dL/dz. Attribution patching: Nanda 2023;
Syed, Rager, Conmy 2023, arXiv 2310.10348.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from mhaprune.measure.gradients import loss_and_slope, rows_for_gradients
from mhaprune.measure.leave_one_out import Unit, num_rows
from mhaprune.measure.subject import Subject

PASSES_OF_A_PREDICTION = 3  # what a forward and backward pass cost, in forward passes


def prediction_rows(units: Iterable[Unit]) -> int:
    """Return what predicting these units costs, in rows: one pass back gives all heads at once."""
    intact = [unit for unit in units if unit.layer is None]
    return PASSES_OF_A_PREDICTION * num_rows(intact)


def predict(
    subject: Subject, units: Iterable[Unit]
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Yield each unit with the predicted effects of its heads, or the loss for the intact one.

    Total nats per window in float64. At most `subject.rows_per_batch` windows go through the model
    at once, fewer where the backward pass needs much.
    """
    shape = subject.shape
    for numbers, group in groupby(units, key=lambda unit: unit.windows):
        block = list(group)
        asked = [unit.layer for unit in block if unit.layer is not None]
        lowest_layer = min(asked, default=shape.num_layers - 1)
        rows = rows_for_gradients(subject, subject.sample.longest(numbers), lowest_layer)
        parts = []
        for first in range(0, len(numbers), rows):
            some = numbers[first : first + rows]
            gate = torch.ones(len(some), shape.num_layers, shape.num_heads)
            parts.append(loss_and_slope(subject, some, gate, lowest_layer))
        losses, slope = (torch.cat(part) for part in zip(*parts, strict=True))
        effects = -slope.permute(1, 2, 0)
        for unit in block:
            chosen = losses[None] if unit.layer is None else effects[unit.layer][list(unit.heads)]
            yield unit, chosen
