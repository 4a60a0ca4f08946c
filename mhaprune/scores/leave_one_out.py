"""Leave-one-out: the loss with one head ablated, head by head, on the same windows as without.

effect = loss(head ablated) - loss(intact), paired window by window; positive means that the head
was useful. Michel, Levy, Neubig 2019, arXiv 1905.10650.

The work is cut into units, each one layer's heads on a block of windows. A unit's result depends on
nothing but the unit, so that runs can stop, resume and be shared out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.architectures import head_shape
from mhaprune.baselines import donor_z
from mhaprune.gating import gate_heads
from mhaprune.heads import Head
from mhaprune.perplexity import row_nats, window_batch
from mhaprune.replay import LayerBaseline, Roll, replay
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
    engine: Literal["replay", "gating"] = "gating",
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Yield each unit with its losses: total nats of each head's ablation on each window, float64.

    The intact unit has one variant. `ablation` is None for zero, a constant for each head, or the
    donors of a resample ablation. At most `rows_per_batch` windows go through the model at once
    (but always a whole block for one head). Both engines give the same numbers up to rounding;
    `replay` is the fast one, for the architectures that it knows (`architectures.can_replay`).
    """
    measure_block = {"replay": _replay_block, "gating": _gate_block}[engine]
    for numbers, block in groupby(units, key=lambda unit: unit.windows):
        inputs, targets = window_batch(ids, [windows[number] for number in numbers])
        donors = None
        if isinstance(ablation, Donors):
            donors = _donor_inputs(ablation, numbers, inputs.shape[1])
        constants = None if isinstance(ablation, Donors) else ablation
        yield from measure_block(
            model, inputs, targets, tuple(block), constants, donors, rows_per_batch
        )


def _replay_block(
    model: "PreTrainedModel",
    inputs: Int[Tensor, "window pos"],
    targets: Int[Tensor, "window pos"],
    units: Sequence[Unit],
    constants: Float[Tensor, "layer head d_head"] | None,
    donors: Int[Tensor, "window pos"] | None,
    rows_per_batch: int,
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Measure units of the same windows, at most one of a layer."""
    unit_of = {unit.layer: unit for unit in units}
    assert len(unit_of) == len(units)
    heads = {unit.layer: unit.heads for unit in units if unit.layer is not None}
    baseline = _replay_baseline(model, constants, donors)
    for layer, nats in replay(model, inputs, targets, heads, baseline, rows_per_batch):
        if layer in unit_of:
            yield unit_of[layer], nats


def _replay_baseline(
    model: "PreTrainedModel",
    constants: Float[Tensor, "layer head d_head"] | None,
    donors: Int[Tensor, "window pos"] | None,
) -> LayerBaseline | None:
    """Return what replaces a layer's z; donors roll through the model beside the windows."""
    if donors is not None:
        roll = Roll(model, donors.to(model.device))
        return lambda layer: roll.advance_through(layer)[0]
    return None if constants is None else lambda layer: constants[layer]


def _gate_block(
    model: "PreTrainedModel",
    inputs: Int[Tensor, "window pos"],
    targets: Int[Tensor, "window pos"],
    units: Sequence[Unit],
    constants: Float[Tensor, "layer head d_head"] | None,
    donors: Int[Tensor, "window pos"] | None,
    rows_per_batch: int,
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Measure units of the same windows by whole forward passes with gated heads."""
    heads_per_batch = max(1, rows_per_batch // len(inputs))
    for unit in units:
        if unit.layer is None:
            yield unit, row_nats(model, inputs, targets)[None]
            continue
        baseline = None if constants is None else constants[unit.layer]
        if donors is not None:
            baseline = donor_z(model, donors, unit.layer)
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


def _donor_inputs(donors: Donors, numbers: Sequence[int], length: int) -> Int[Tensor, "window pos"]:
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
