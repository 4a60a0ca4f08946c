"""What every score is given, and what it returns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.measure.baselines import Ablation, Donors, donor_inputs
from mhaprune.measure.perplexity import target_nats, window_batch
from mhaprune.model.architectures import HeadShape, head_shape
from mhaprune.model.gating import captured_z, gate_heads
from mhaprune.model.heads import Head
from mhaprune.model.kernels import fast_linears, swapped
from mhaprune.text.windows import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUMBERS_AT_ONCE = 2**29  # kept for the backward pass: 2 GiB in float32
_WIDTHS = 34  # of the model, kept by each block: streams, q, k, v, z, both sides of the MLP


@dataclass(frozen=True)
class Subject:
    """The heads that are scored, of a model, on windows of a text, against an ablation.

    At most `rows_per_batch` windows go through the model at once. `seed` is that of everything
    random.
    """

    model: "PreTrainedModel"
    ids: Int[Tensor, "token"]
    windows: tuple[Window, ...]
    heads: tuple[Head, ...]
    ablation: Ablation = None
    rows_per_batch: int = 16
    engine: Literal["replay", "gating"] = "gating"
    seed: int = 0

    @property
    def shape(self) -> HeadShape:
        return head_shape(self.model)

    @property
    def num_tokens(self) -> Int[np.ndarray, "window"]:
        """Scored tokens of each window."""
        return np.array([window.num_scored for window in self.windows])


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
    tokens = subject.num_tokens if tokens is None else tokens
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
    longest = max(window.num_inputs for window in subject.windows)
    rows = rows_for_gradients(subject.model, longest, subject.rows_per_batch)
    numbers = range(len(subject.windows))
    yield from (list(numbers[first : first + rows]) for first in numbers[::rows])


def rows_for_gradients(
    model: "PreTrainedModel", length: int, rows_per_batch: int, lowest_layer: int = 0
) -> int:
    """Return how many windows may go forward and backward at once: `rows_per_batch` at most.

    Nothing is kept of the layers below the lowest that is gated.
    """
    shape = head_shape(model)
    kept = _WIDTHS * (shape.num_layers - lowest_layer) * shape.num_heads * shape.d_head
    kept += 2 * model.config.get_text_config().vocab_size
    return max(1, min(rows_per_batch, NUMBERS_AT_ONCE // (length * kept)))


def loss_and_slope(
    model: "PreTrainedModel",
    ids: Int[Tensor, "token"],
    windows: Sequence[Window],
    numbers: Sequence[int],
    ablation: Ablation,
    gate: Float[Tensor, "..."],
    lowest_layer: int = 0,
) -> tuple[Float[Tensor, "window"], Float[Tensor, "..."]]:
    """Return the loss of windows `numbers` with heads gated, and its gradient by the gate.

    `gate` is `window layer head` or, for a slope at each position, `window pos layer head`. Layers
    below the lowest are not gated, and have a gradient of zero. Total nats; both are float64 on the
    CPU. No gradient is left in the model.
    """
    inputs, targets = window_batch(ids, [windows[number] for number in numbers])
    baseline = baseline_of(model, ablation, numbers, inputs.shape[1])
    leaf = gate.to(model.device, model.dtype).detach().requires_grad_(True)
    linears = swapped(fast_linears(model))
    with linears, torch.enable_grad(), gate_heads(model, leaf, baseline, lowest_layer):
        logits = model(inputs.to(model.device), use_cache=False).logits
        nats = target_nats(logits, targets.to(model.device))
        (slope,) = torch.autograd.grad(nats.sum(), leaf)
    return nats.detach().cpu(), slope.double().cpu()


def baseline_of(
    model: "PreTrainedModel", ablation: Ablation, numbers: Sequence[int], length: int
) -> Float[Tensor, "layer head d_head"] | list[Tensor] | None:
    """Return what `gate_heads` takes as baseline: constants, or z of the windows' donors."""
    if not isinstance(ablation, Donors):
        return ablation
    donors = donor_inputs(ablation, numbers, length)
    with torch.no_grad(), captured_z(model) as z:
        model.base_model(donors.to(model.device), use_cache=False)
    return z


def slopes(
    subject: Subject, level: float = 1.0
) -> tuple[Float[np.ndarray, "window"], Float[np.ndarray, "layer head window"]]:
    """Return each window's loss with all gates at `level`, and its gradient by each head's gate."""
    shape = subject.shape
    losses, gradients = [], []
    for numbers in batches(subject):
        gate = torch.full((len(numbers), shape.num_layers, shape.num_heads), level)
        nats, slope = loss_and_slope(
            subject.model, subject.ids, subject.windows, numbers, subject.ablation, gate
        )
        losses.append(nats.numpy())
        gradients.append(slope.numpy().transpose(1, 2, 0))
    return np.concatenate(losses), np.concatenate(gradients, -1)
