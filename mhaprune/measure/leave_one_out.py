"""Leave-one-out: the loss with one head ablated, head by head, on the same windows as without.

effect = loss(head ablated) - loss(intact), paired window by window; positive means that the head
was useful. Michel, Levy, Neubig 2019, arXiv 1905.10650.

The work is cut into units, each one layer's heads on a block of windows. A unit's result depends on
nothing but the unit, so that runs can stop, resume and be shared out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.measure.baselines import Donors, donor_inputs, donor_z
from mhaprune.measure.perplexity import row_nats
from mhaprune.measure.replay import LayerBaseline, Roll, replay
from mhaprune.measure.subject import Subject
from mhaprune.model.gating import gate_heads, gates_of, repeat_windows
from mhaprune.model.heads import Head


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


@dataclass(frozen=True, eq=False)
class Block:
    """A block of windows as it goes through the model, and what replaces an ablated head's z.

    `constants` are one for each head, `donors` the inputs of donor windows; without either, zero.
    """

    inputs: Int[Tensor, "window pos"]
    targets: Int[Tensor, "window pos"]
    constants: Float[Tensor, "layer head d_head"] | None
    donors: Int[Tensor, "window pos"] | None


def measure(
    subject: Subject, units: Iterable[Unit]
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Yield each unit with its losses: total nats of each head's ablation on each window, float64.

    The intact unit has one variant. Which heads are ablated is the units' say, not the subject's.
    At most `subject.rows_per_batch` windows go through the model at once, but always a whole block
    for one head.
    """
    measure_block = {"replay": _replay_block, "gating": _gate_block}[subject.engine]
    for numbers, group in groupby(units, key=lambda unit: unit.windows):
        inputs, targets = subject.sample.batch(numbers)
        constants = donors = None
        if isinstance(subject.ablation, Donors):
            donors = donor_inputs(subject.ablation, numbers, inputs.shape[1])
        else:
            constants = subject.ablation
        yield from measure_block(subject, Block(inputs, targets, constants, donors), tuple(group))


def _replay_block(
    subject: Subject, block: Block, units: Sequence[Unit]
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Measure units of the same windows, at most one of a layer."""
    unit_of = {unit.layer: unit for unit in units}
    assert len(unit_of) == len(units)
    heads = {unit.layer: unit.heads for unit in units}
    baseline, rows = _replay_baseline(subject, block), subject.rows_per_batch
    for layer, nats in replay(subject.model, block.inputs, block.targets, heads, baseline, rows):
        yield unit_of[layer], nats


def _replay_baseline(subject: Subject, block: Block) -> LayerBaseline | None:
    """Return what replaces a layer's z; donors roll through the model beside the windows."""
    constants = block.constants
    if block.donors is not None:
        roll = Roll(subject.model, block.donors.to(subject.model.device))
        return lambda layer: roll.advance_through(layer)[0]
    return None if constants is None else lambda layer: constants[layer]


def _gate_block(
    subject: Subject, block: Block, units: Sequence[Unit]
) -> Iterator[tuple[Unit, Float[Tensor, "variant window"]]]:
    """Measure units of the same windows by whole forward passes with gated heads."""
    heads_per_batch = max(1, subject.rows_per_batch // len(block.inputs))
    for unit in units:
        if unit.layer is None:
            yield unit, row_nats(subject.model, block.inputs, block.targets)[None]
            continue
        baseline = None if block.constants is None else block.constants[unit.layer]
        if block.donors is not None:
            baseline = donor_z(subject.model, block.donors, unit.layer)
        parts = [
            _measure_heads(subject, block, [Head(unit.layer, n) for n in heads.tolist()], baseline)
            for heads in torch.tensor(unit.heads).split(heads_per_batch)
        ]
        yield unit, torch.cat(parts)


def _measure_heads(
    subject: Subject, block: Block, heads: Sequence[Head], baseline: Float[Tensor, "..."] | None
) -> Float[Tensor, "head window"]:
    """Ablate several heads of a layer in one forward pass: rows are (head, window) pairs."""
    model, shape, num_windows = subject.model, subject.shape, len(block.inputs)
    gate = gates_of([(head,) for head in heads], shape)
    gate = gate.repeat_interleave(num_windows, 0).to(model.device)
    replacement = None
    if baseline is not None:
        own = repeat_windows(baseline, len(heads))
        layers = range(shape.num_layers)
        replacement = [own if n == heads[0].layer else torch.zeros(()) for n in layers]
    inputs, targets = block.inputs.repeat(len(heads), 1), block.targets.repeat(len(heads), 1)
    with gate_heads(model, gate, replacement):
        return row_nats(model, inputs, targets).view(len(heads), num_windows)
