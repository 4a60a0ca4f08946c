"""The loss and its gradient by the gates of heads: one pass forward and one back."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mhaprune.measure.baselines import Donors, donor_inputs
from mhaprune.measure.perplexity import target_nats
from mhaprune.measure.subject import Subject
from mhaprune.model.gating import captured_z, gate_heads
from mhaprune.model.kernels import fast_linears, swapped

NUMBERS_AT_ONCE = 2**29  # kept for the backward pass: 2 GiB in float32
_WIDTHS = 34  # of the model, kept by each block: streams, q, k, v, z, both sides of the MLP


def rows_for_gradients(subject: Subject, length: int, lowest_layer: int = 0) -> int:
    """Return how many windows may go forward and backward at once: `rows_per_batch` at most.

    Nothing is kept of the layers below the lowest that is gated.
    """
    shape = subject.shape
    kept = _WIDTHS * (shape.num_layers - lowest_layer) * shape.num_heads * shape.d_head
    kept += 2 * subject.model.config.get_text_config().vocab_size
    return max(1, min(subject.rows_per_batch, NUMBERS_AT_ONCE // (length * kept)))


def loss_and_slope(
    subject: Subject, numbers: Sequence[int], gate: Float[Tensor, "..."], lowest_layer: int = 0
) -> tuple[Float[Tensor, "window"], Float[Tensor, "..."]]:
    """Return the loss of windows `numbers` with heads gated, and its gradient by the gate.

    `gate` is `window layer head` or, for a slope at each position, `window pos layer head`. Layers
    below the lowest are not gated, and have a gradient of zero. Total nats; both are float64 on the
    CPU. No gradient is left in the model.
    """
    model = subject.model
    inputs, targets = subject.sample.batch(numbers)
    baseline = baseline_of(subject, numbers, inputs.shape[1])
    leaf = gate.to(model.device, model.dtype).detach().requires_grad_(True)
    linears = swapped(fast_linears(model))
    with linears, torch.enable_grad(), gate_heads(model, leaf, baseline, lowest_layer):
        logits = model(inputs.to(model.device), use_cache=False).logits
        nats = target_nats(logits, targets.to(model.device))
        (slope,) = torch.autograd.grad(nats.sum(), leaf)
    return nats.detach().cpu(), slope.double().cpu()


def baseline_of(
    subject: Subject, numbers: Sequence[int], length: int
) -> Float[Tensor, "layer head d_head"] | list[Tensor] | None:
    """Return what `gate_heads` takes as baseline: constants, or z of the windows' donors."""
    if not isinstance(subject.ablation, Donors):
        return subject.ablation
    donors, model = donor_inputs(subject.ablation, numbers, length), subject.model
    with torch.no_grad(), captured_z(model) as z:
        model.base_model(donors.to(model.device), use_cache=False)
    return z
