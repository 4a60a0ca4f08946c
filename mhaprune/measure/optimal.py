"""Optimal ablation: for each head the constant that, put in place of its output, hurts least.

    c_h = argmin over c of L(z_h <- c), each head by itself, all others intact

Li and Janson 2024, arXiv 2409.09951. Found by gradient descent on calibration text.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mhaprune.measure.baselines import mean_z, rms_z
from mhaprune.measure.gradients import rows_for_gradients
from mhaprune.measure.leave_one_out import as_arrays, assemble, measure, plan
from mhaprune.measure.perplexity import target_nats
from mhaprune.measure.progress import Progress
from mhaprune.measure.subject import Subject
from mhaprune.model.gating import gate_heads, gates_of
from mhaprune.model.heads import Head

LEARNING_RATE = 0.1  # of the constants in units of each head's root mean square


def optimal_z(
    subject: Subject, *, steps: int, progress: Progress | None = None
) -> Float[Tensor, "layer head d_head"]:
    """Return the optimal constant of each of the subject's heads; its mean for the others.

    The sample is of calibration text; the subject's own ablation is not looked at. Starts from the
    mean over the windows. A step takes the next window, once for each head, by Adam with a falling
    rate. What is returned for a head is the best on all windows of: the constant found, the mean,
    zero. `progress` is told the rows done, `steps` for each head in all.
    """
    progress = progress or Progress()
    progress.begin("prepare", steps * len(subject.heads))
    sample, heads = subject.sample, subject.heads
    mean = mean_z(subject.model, sample, subject.rows_per_batch)
    scale = rms_z(subject.model, sample, subject.rows_per_batch)[..., None].clamp(min=1e-6)
    moved = torch.zeros_like(mean, requires_grad=True)
    optimizer = torch.optim.Adam([moved], lr=LEARNING_RATE, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    rows = rows_for_gradients(subject, sample.longest())
    for step in range(steps):
        optimizer.zero_grad()
        number = step % len(sample.windows)
        for first in range(0, len(heads), rows):
            some = heads[first : first + rows]
            _loss(subject, number, some, mean + scale * moved).backward(inputs=[moved])
            progress.advance(len(some))
        optimizer.step()
        schedule.step()
    found = (mean + scale * moved).detach()
    return _best(subject, [found, mean, 0 * mean])


def _loss(
    subject: Subject,
    number: int,
    heads: Sequence[Head],
    constants: Float[Tensor, "layer head d_head"],
) -> Float[Tensor, ""]:
    """Return the nats per token of one window, summed over a row for each head that is ablated."""
    model, device = subject.model, subject.model.device
    gate = gates_of([(head,) for head in heads], subject.shape)
    batch = subject.sample.batch([number])
    inputs, targets = (part.expand(len(heads), -1).to(device) for part in batch)
    with torch.enable_grad(), gate_heads(model, gate.to(device), constants.to(device)):
        nats = target_nats(model(inputs, use_cache=False).logits, targets)
        return nats.sum() / (targets[0] >= 0).sum()


def _best(
    subject: Subject, candidates: Sequence[Float[Tensor, "layer head d_head"]]
) -> Float[Tensor, "layer head d_head"]:
    """Choose for each head, on all windows, the candidate that hurts least; else the second."""
    heads, num_windows = subject.heads, len(subject.sample.windows)
    units = plan(heads, range(num_windows), 4)
    totals = []
    for constants in candidates:
        found = as_arrays(measure(replace(subject, ablation=constants), units))
        totals.append(assemble(found, heads, num_windows)[1].sum(1))
    chosen = candidates[1].clone()
    for head, best in zip(heads, np.argmin(totals, axis=0), strict=True):
        chosen[head.layer, head.head] = candidates[best][head.layer, head.head]
    return chosen
