"""What replaces an ablated head's output z: its mean, or another window's z, on calibration text.

(Zero needs no baseline: `gate_heads(..., baseline=None)`.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.model.architectures import head_shape
from mhaprune.model.gating import captured_z
from mhaprune.text.sample import Sample, window_batch
from mhaprune.text.windows import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Donors:
    """Calibration windows whose z stands in for a head's: window w's donor is `windows[w % n]`."""

    ids: Int[Tensor, "token"]
    windows: tuple[Window, ...]


# What replaces an ablated head's z: zero, a constant for each head, or the z of donor windows.
Ablation = Float[Tensor, "layer head d_head"] | Donors | None


def mean_z(
    model: "PreTrainedModel", sample: Sample, rows_per_batch: int
) -> Float[Tensor, "layer head d_head"]:
    """Return each head's z averaged over every input position of the windows, summed in float64."""
    return _average(model, sample, rows_per_batch, lambda z: z)


def rms_z(
    model: "PreTrainedModel", sample: Sample, rows_per_batch: int
) -> Float[Tensor, "layer head"]:
    """Return the root mean square of each head's z over positions and dimensions."""
    return _average(model, sample, rows_per_batch, torch.square).mean(-1).sqrt()


@torch.no_grad()
def _average(
    model: "PreTrainedModel",
    sample: Sample,
    rows_per_batch: int,
    function: Callable[[Tensor], Tensor],
) -> Float[Tensor, "layer head d_head"]:
    shape = head_shape(model)
    sums = torch.zeros(shape.num_layers, shape.num_heads, shape.d_head, dtype=torch.float64)
    lengths = torch.tensor([window.num_inputs for window in sample.windows])
    numbers = range(len(sample.windows))
    for first in numbers[::rows_per_batch]:
        some = numbers[first : first + rows_per_batch]
        inputs, _ = sample.batch(some)
        is_input = torch.arange(inputs.shape[1]) < lengths[list(some), None]
        with captured_z(model) as captured:
            model.base_model(inputs.to(model.device), use_cache=False)
        for layer, z in enumerate(captured):
            sums[layer] += function(z.cpu()[is_input]).sum(0, dtype=torch.float64)
    return (sums / int(lengths.sum())).float()


@torch.no_grad()
def donor_z(
    model: "PreTrainedModel", inputs: Int[Tensor, "row pos"], layer: int
) -> Float[Tensor, "row pos head d_head"]:
    """Return one layer's z on other windows, position by position, as a resample baseline."""
    with captured_z(model) as captured:
        model.base_model(inputs.to(model.device), use_cache=False)
    return captured[layer]


def donor_inputs(donors: Donors, numbers: Sequence[int], length: int) -> Int[Tensor, "window pos"]:
    """Return the inputs of the donor of each window, cut to the windows' length."""
    chosen = [donors.windows[number % len(donors.windows)] for number in numbers]
    shortest = min(window.num_inputs for window in chosen)
    if shortest < length:
        raise ValueError(
            f"resample ablation needs donor windows of at least {length} input tokens, "
            f"got one of {shortest}; leave the shorter calibration windows out"
        )
    inputs, _ = window_batch(donors.ids, chosen)
    return inputs[:, :length]
