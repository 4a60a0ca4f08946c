"""Leave-one-out: the loss with one head ablated, head by head, on the same windows as without.

effect = loss(head ablated) - loss(intact), paired window by window; positive means that the head
was useful. Michel, Levy, Neubig 2019, arXiv 1905.10650.

The work is cut into units, each one layer's heads on a block of windows. A unit's result depends on
nothing but the unit, so that runs can stop, resume and be shared out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.measure.baselines import Ablation, Donors, donor_inputs, donor_z
from mhaprune.measure.perplexity import row_nats, window_batch
from mhaprune.measure.replay import LayerBaseline, Roll, replay
from mhaprune.model.architectures import head_shape
from mhaprune.model.gating import gate_heads, gates_of, repeat_windows
from mhaprune.model.heads import Head
from mhaprune.scores.estimate import Estimate, Subject, estimate_rates, spread
from mhaprune.text.windows import Window

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

    def stored(self, ablation: str) -> tuple[str, int | None, tuple[int, ...], tuple[int, ...]]:
        """Return the unit as the store names it."""
        return ablation, self.layer, self.heads, self.windows


def plan(heads: Iterable[Head], windows: Sequence[int], windows_per_unit: int) -> list[Unit]:
    """Cut the measurement into units: each block of windows, intact first, then by layer."""
    layers = [
        (layer, tuple(head.head for head in group))
        for layer, group in groupby(sorted(heads), key=lambda head: head.layer)
    ]
    units = []
    for block in blocks_of(windows, windows_per_unit):
        units.append(Unit(None, (), block))
        units += [Unit(layer, numbers, block) for layer, numbers in layers]
    return units


def blocks_of(windows: Sequence[int], windows_per_unit: int) -> list[tuple[int, ...]]:
    """Cut window numbers into the blocks that are measured together."""
    firsts = range(0, len(windows), windows_per_unit)
    return [tuple(windows[first : first + windows_per_unit]) for first in firsts]


def leave_one_out(subject: Subject, *, windows_per_unit: int = 4) -> Estimate:
    """Return each head's measured effect in nats per token."""
    units = plan(subject.heads, range(len(subject.windows)), windows_per_unit)
    found = measure(
        *(subject.model, subject.ids, subject.windows, units, subject.ablation),
        *(subject.rows_per_batch, subject.engine),
    )
    intact, ablated = assemble(as_arrays(found), subject.heads, len(subject.windows))
    return estimate_rates(
        subject, spread(subject, ablated - intact), forward_equivalents=1 + len(subject.heads)
    )


def as_arrays(
    found: Iterable[tuple[Unit, Float[Tensor, "..."]]],
) -> dict[Unit, Float[np.ndarray, "..."]]:
    """Collect what units gave, as numpy arrays."""
    return {unit: nats.numpy() for unit, nats in found}


def assemble(
    results: Mapping[Unit, Float[np.ndarray, "..."]],
    heads: Sequence[Head],
    num_windows: int,
) -> tuple[Float[np.ndarray, "all"], Float[np.ndarray, "head all"]]:
    """Arrange what units gave by head and window; NaN where nothing was measured."""
    intact = np.full(num_windows, np.nan)
    ablated = np.full((len(heads), num_windows), np.nan)
    row_of = {head: row for row, head in enumerate(heads)}
    for unit, nats in results.items():
        if unit.layer is None:
            intact[list(unit.windows)] = nats[0]
            continue
        rows = [row_of[Head(unit.layer, head)] for head in unit.heads]
        ablated[np.ix_(rows, unit.windows)] = nats
    return intact, ablated


@runtime_checkable
class HasRows(Protocol):
    """A unit of work."""

    @property
    def num_rows(self) -> int: ...


def num_rows(units: Iterable[HasRows]) -> int:
    """Return how many windows go through the model for these units."""
    return sum(unit.num_rows for unit in units)


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
            donors = donor_inputs(ablation, numbers, inputs.shape[1])
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
    heads = {unit.layer: unit.heads for unit in units}
    baseline = _replay_baseline(model, constants, donors)
    for layer, nats in replay(model, inputs, targets, heads, baseline, rows_per_batch):
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
    gate = gates_of([(Head(layer, head),) for head in heads.tolist()], shape)
    gate = gate.repeat_interleave(len(inputs), 0).to(model.device)
    replacement = None
    if baseline is not None:
        baseline = repeat_windows(baseline, len(heads))
        replacement = [torch.zeros(()) if n != layer else baseline for n in range(shape.num_layers)]
    rows, row_targets = inputs.repeat(len(heads), 1), targets.repeat(len(heads), 1)
    with gate_heads(model, gate, replacement):
        return row_nats(model, rows, row_targets).view(len(heads), len(inputs))
