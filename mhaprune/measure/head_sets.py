"""The loss with a whole set of heads ablated together, on blocks of windows."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.measure.gradients import baseline_of
from mhaprune.measure.leave_one_out import blocks_of
from mhaprune.measure.perplexity import row_nats
from mhaprune.measure.replay import replay_sets
from mhaprune.measure.subject import Subject
from mhaprune.model.gating import gate_heads, gates_of, repeat_windows
from mhaprune.model.heads import HeadSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SetUnit:
    """A set of heads, in order and each once, ablated together on some windows."""

    heads: HeadSet
    windows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """How many windows the model runs for it."""
        return len(self.windows)

    def stored(self, ablation: str) -> tuple[str, None, tuple[()], tuple[int, ...]]:
        """Return the unit as the store names it: the set goes by its size and a hash."""
        digest = hashlib.sha256(" ".join(map(str, self.heads)).encode()).hexdigest()[:16]
        return f"{ablation}, {len(self.heads)} heads off {digest}", None, (), self.windows


def plan_sets(sets: Iterable[HeadSet], num_windows: int, windows_per_unit: int) -> list[SetUnit]:
    """Cut the measurement of different sets into units: block of windows by block of windows."""
    distinct = dict.fromkeys(tuple(sorted(set(one))) for one in sets)
    blocks = blocks_of(range(num_windows), windows_per_unit)
    return [SetUnit(heads, block) for block in blocks for heads in distinct]


def measure_sets(
    subject: Subject, units: Iterable[SetUnit]
) -> Iterator[tuple[SetUnit, Float[Tensor, "one window"]]]:
    """Yield each unit with its loss: total nats on each window, float64; the empty set is intact.

    Rows at once, engine and ablation are the subject's, as in `leave_one_out.measure`.
    """
    measure_block = {"replay": replay_sets, "gating": _gate_sets}[subject.engine]
    rows = subject.rows_per_batch
    for numbers, group in groupby(units, key=lambda unit: unit.windows):
        block = list(group)
        inputs, targets = subject.sample.batch(numbers)
        baseline = baseline_of(subject, numbers, inputs.shape[1])
        gates = gates_of([unit.heads for unit in block], subject.shape)
        at_once = max(1, 4 * rows // len(numbers))  # results come as they are made
        for first in range(0, len(block), at_once):
            some = slice(first, first + at_once)
            nats = measure_block(subject.model, inputs, targets, gates[some], baseline, rows)
            for unit, row in zip(block[some], nats, strict=True):
                yield unit, row[None]


def set_losses(
    results: dict[SetUnit, Float[np.ndarray, "one window"]],
    sets: Sequence[HeadSet],
    num_windows: int,
) -> Float[np.ndarray, "variant all"]:
    """Arrange what the units gave by set and window; each set was measured on every window."""
    row_of = {heads: row for row, heads in enumerate({unit.heads: None for unit in results})}
    losses = np.full((len(row_of), num_windows), np.nan)
    for unit, nats in results.items():
        losses[row_of[unit.heads], list(unit.windows)] = nats[0]
    made = losses[[row_of[tuple(sorted(set(one)))] for one in sets]]
    assert np.isfinite(made).all()
    return made


def _gate_sets(
    model: "PreTrainedModel",
    inputs: Int[Tensor, "window pos"],
    targets: Int[Tensor, "window pos"],
    gates: Float[Tensor, "variant layer head"],
    baseline: Float[Tensor, "layer head d_head"] | list[Tensor] | None,
    rows_per_batch: int,
) -> Float[Tensor, "variant window"]:
    """Measure sets by whole forward passes: rows are (set, window) pairs."""
    losses = []
    for some in gates.split(max(1, rows_per_batch // len(inputs))):
        replacement = baseline
        if isinstance(baseline, list):
            replacement = [repeat_windows(z, len(some)) for z in baseline]
        rows = some.repeat_interleave(len(inputs), 0).to(model.device)
        with gate_heads(model, rows, replacement):
            nats = row_nats(model, inputs.repeat(len(some), 1), targets.repeat(len(some), 1))
        losses.append(nats.view(len(some), len(inputs)))
    return torch.cat(losses)
