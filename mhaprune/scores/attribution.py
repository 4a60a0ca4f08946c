"""Attribution: the effect of every head's ablation to first order, from one backward pass.

With a gate on each head, `z <- gate * z + (1 - gate) * baseline`, the loss changes on the way from
gate 1 to gate 0 by about -dL/dgate = sum (baseline - z) . dL/dz. Attribution patching: Nanda 2023;
Syed, Rager, Conmy 2023, arXiv 2310.10348.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.measure.baselines import Ablation
from mhaprune.measure.leave_one_out import Unit
from mhaprune.model.architectures import head_shape
from mhaprune.scores.estimate import (
    Estimate,
    Subject,
    estimate_rates,
    loss_and_slope,
    rows_for_gradients,
    slopes,
)
from mhaprune.text.windows import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attribution(subject: Subject) -> Estimate:
    """Return the predicted effect of each head, signed, in nats per token."""
    _, slope = slopes(subject)
    return estimate_rates(subject, -slope, forward_equivalents=3)


def predict(
    model: "PreTrainedModel",
    ids: Int[Tensor, "token"],
    windows: Sequence[Window],
    units: Iterable[Unit],
    ablation: Ablation,
    rows_per_batch: int,
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Yield each unit with the predicted effects of its heads, or the loss for the intact one.

    Total nats per window in float64; the arguments are those of `leave_one_out.measure`. At most
    `rows_per_batch` windows go through the model at once, fewer where the backward pass needs much.
    """
    shape = head_shape(model)
    for numbers, group in groupby(units, key=lambda unit: unit.windows):
        block = list(group)
        asked = [unit.layer for unit in block if unit.layer is not None]
        lowest_layer = min(asked, default=shape.num_layers - 1)
        longest = max(windows[number].num_inputs for number in numbers)
        rows = rows_for_gradients(model, longest, rows_per_batch, lowest_layer)
        parts = []
        for first in range(0, len(numbers), rows):
            some = numbers[first : first + rows]
            gate = torch.ones(len(some), shape.num_layers, shape.num_heads)
            parts.append(loss_and_slope(model, ids, windows, some, ablation, gate, lowest_layer))
        losses, slope = (torch.cat(part) for part in zip(*parts, strict=True))
        effects = -slope.permute(1, 2, 0)
        for unit in block:
            chosen = losses[None] if unit.layer is None else effects[unit.layer][list(unit.heads)]
            yield unit, chosen
