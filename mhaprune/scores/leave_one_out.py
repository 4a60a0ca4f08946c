"""Leave-one-out: the loss with one head ablated, head by head, on the same windows as without.

effect = loss(head ablated) - loss(intact), paired window by window; positive means that the head
was useful. Michel, Levy, Neubig 2019, arXiv 1905.10650.

The work is cut into units, each one layer's heads on a block of windows. A unit's result depends on
nothing but the unit, so that runs can stop, resume and be shared out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.architectures import head_shape
from mhaprune.baselines import donor_z
from mhaprune.gating import gate_heads
from mhaprune.heads import Head
from mhaprune.perplexity import row_nats, window_batch
from mhaprune.windows import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Unit:
    """Heads of one layer on some windows; `layer` None, with no heads, is the intact model."""

    layer: int | None
    heads: tuple[int, ...]
    windows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """How many windows the model runs for it: the measure of its cost."""
        return max(1, len(self.heads)) * len(self.windows)


@dataclass(frozen=True)
class Donors:
    """Calibration windows whose z stands in for a head's: window w's donor is `windows[w % n]`."""

    ids: Int[Tensor, "token"]
    windows: tuple[Window, ...]


Ablation = Float[Tensor, "layer head d_head"] | Donors | None


def plan(heads: Iterable[Head], num_windows: int, windows_per_unit: int) -> list[Unit]:
    """Cut the measurement into units: each block of windows, intact first, then by layer."""
    layers = [
        (layer, tuple(head.head for head in group))
        for layer, group in groupby(sorted(heads), key=lambda head: head.layer)
    ]
    units = []
    for first in range(0, num_windows, windows_per_unit):
        block = tuple(range(first, min(first + windows_per_unit, num_windows)))
        units.append(Unit(None, (), block))
        units += [Unit(layer, numbers, block) for layer, numbers in layers]
    return units


def measure(
    model: "PreTrainedModel",
    ids: Int[Tensor, "token"],
    windows: Sequence[Window],
    units: Iterable[Unit],
    ablation: Ablation,
    rows_per_batch: int,
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Yield each unit with its losses: total nats of each head's ablation on each window, float64.

    The intact unit has one variant. `ablation` is None for zero, a constant for each head, or the
    donors of a resample ablation. At most `rows_per_batch` windows go through the model at once
    (but always a whole block for one head).
    """
    for unit in units:
        inputs, targets = window_batch(ids, [windows[index] for index in unit.windows])
        if unit.layer is None:
            yield unit, row_nats(model, inputs, targets)[None]
            continue
        baseline = _layer_baseline(model, unit, inputs, ablation)
        heads_per_batch = max(1, rows_per_batch // len(inputs))
        parts = [
            _measure_heads(model, inputs, targets, unit.layer, heads, baseline)
            for heads in torch.tensor(unit.heads).split(heads_per_batch)
        ]
        yield unit, torch.cat(parts)


def _measure_heads(
    model: "PreTrainedModel",
    inputs: Int[Tensor, "window pos"],
    targets: Int[Tensor, "window pos"],
    layer: int,
    heads: Int[Tensor, "head"],
    baseline: Float[Tensor, "..."] | None,
) -> Float[Tensor, "head window"]:
    """Ablate several heads of a layer in one forward pass: rows are (head, window) pairs."""
    shape = head_shape(model)
    gate = torch.ones(len(heads), shape.num_layers, shape.num_heads)
    gate[torch.arange(len(heads)), layer, heads] = 0
    gate = gate.repeat_interleave(len(inputs), 0).to(model.device)
    replacement = None
    if baseline is not None:
        if baseline.ndim == 4:
            baseline = baseline.repeat(len(heads), 1, 1, 1)
        replacement = [torch.zeros(()) if n != layer else baseline for n in range(shape.num_layers)]
    rows, row_targets = inputs.repeat(len(heads), 1), targets.repeat(len(heads), 1)
    with gate_heads(model, gate, replacement):
        return row_nats(model, rows, row_targets).view(len(heads), len(inputs))


def _layer_baseline(
    model: "PreTrainedModel", unit: Unit, inputs: Int[Tensor, "window pos"], ablation: Ablation
) -> Float[Tensor, "..."] | None:
    assert unit.layer is not None
    if not isinstance(ablation, Donors):
        return None if ablation is None else ablation[unit.layer]
    chosen = [ablation.windows[index % len(ablation.windows)] for index in unit.windows]
    length, shortest = inputs.shape[1], min(window.num_inputs for window in chosen)
    if shortest < length:
        raise ValueError(
            f"resample ablation needs donor windows of at least {length} input tokens, "
            f"got one of {shortest}; leave the shorter calibration windows out"
        )
    donors, _ = window_batch(ablation.ids, chosen)
    return donor_z(model, donors[:, :length], unit.layer)
