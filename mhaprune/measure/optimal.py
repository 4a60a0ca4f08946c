"""Optimal ablation: for each head the constant that, put in place of its output, hurts least.

    c_h = argmin over c of L(z_h <- c), each head by itself, all others intact

Li and Janson 2024, arXiv 2409.09951. Found by gradient descent on calibration text.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.measure.baselines import mean_z, rms_z
from mhaprune.measure.leave_one_out import as_arrays, assemble, measure, plan
from mhaprune.measure.perplexity import target_nats, window_batch
from mhaprune.model.architectures import head_shape
from mhaprune.model.gating import gate_heads, gates_of
from mhaprune.model.heads import Head
from mhaprune.scores.estimate import rows_for_gradients
from mhaprune.text.windows import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNING_RATE = 0.1  # of the constants in units of each head's root mean square


def optimal_z(
    model: "PreTrainedModel",
    ids: Int[Tensor, "token"],
    windows: Sequence[Window],
    heads: Sequence[Head],
    *,
    steps: int,
    rows_per_batch: int,
    engine: Literal["replay", "gating"] = "gating",
    advance: Callable[[int], object] = lambda rows: None,
) -> Float[Tensor, "layer head d_head"]:
    """Return each head's optimal constant on the windows; its mean for heads not asked for.

    Starts from the mean over the windows. A step takes the next window, once for each head, by Adam
    with a falling rate. What is returned for a head is the best on all windows of: the constant
    found, the mean, zero. `advance` is told the rows done, `steps` for each head in all.
    """
    mean = mean_z(model, ids, windows, rows_per_batch)
    scale = rms_z(model, ids, windows, rows_per_batch)[..., None].clamp(min=1e-6)
    moved = torch.zeros_like(mean, requires_grad=True)
    optimizer = torch.optim.Adam([moved], lr=LEARNING_RATE, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    longest = max(window.num_inputs for window in windows)
    rows = rows_for_gradients(model, longest, rows_per_batch)
    for step in range(steps):
        optimizer.zero_grad()
        batch = window_batch(ids, [windows[step % len(windows)]])
        for first in range(0, len(heads), rows):
            some = heads[first : first + rows]
            _loss(model, *batch, some, mean + scale * moved).backward(inputs=[moved])
            advance(len(some))
        optimizer.step()
        schedule.step()
    found = (mean + scale * moved).detach()
    return _best(model, ids, windows, heads, [found, mean, 0 * mean], rows_per_batch, engine)


def _loss(
    model: "PreTrainedModel",
    inputs: Int[Tensor, "one pos"],
    targets: Int[Tensor, "one pos"],
    heads: Sequence[Head],
    constants: Float[Tensor, "layer head d_head"],
) -> Float[Tensor, ""]:
    """Return the nats per token of one window, summed over a row for each head that is ablated."""
    shape, device = head_shape(model), model.device
    gate = gates_of([(head,) for head in heads], shape)
    inputs, targets = (batch.expand(len(heads), -1).to(device) for batch in (inputs, targets))
    with torch.enable_grad(), gate_heads(model, gate.to(device), constants.to(device)):
        nats = target_nats(model(inputs, use_cache=False).logits, targets)
        return nats.sum() / (targets[0] >= 0).sum()


def _best(
    model: "PreTrainedModel",
    ids: Int[Tensor, "token"],
    windows: Sequence[Window],
    heads: Sequence[Head],
    candidates: Sequence[Float[Tensor, "layer head d_head"]],
    rows_per_batch: int,
    engine: Literal["replay", "gating"],
) -> Float[Tensor, "layer head d_head"]:
    """Choose for each head, on all windows, the candidate that hurts least."""
    units = plan(heads, range(len(windows)), 4)
    totals = []
    for constants in candidates:
        found = measure(model, ids, windows, units, constants, rows_per_batch, engine)
        totals.append(assemble(as_arrays(found), heads, len(windows))[1].sum(1))
    chosen = candidates[1].clone()
    for head, best in zip(heads, np.argmin(totals, axis=0), strict=True):
        chosen[head.layer, head.head] = candidates[best][head.layer, head.head]
    return chosen
