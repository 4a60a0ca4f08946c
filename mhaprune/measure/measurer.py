"""Measures units of work, each kept in a store and never measured twice."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from mhaprune.measure.head_sets import SetUnit, measure_sets
from mhaprune.measure.leave_one_out import Unit, as_arrays, assemble, measure, num_rows, plan
from mhaprune.measure.prediction import predict, prediction_rows
from mhaprune.measure.progress import Progress
from mhaprune.measure.store import Measurement, MeasurementStore
from mhaprune.measure.subject import Subject
from mhaprune.model.machine import fast_matmul


@dataclass(frozen=True)
class Losses:
    """Total nats per window: intact, with each head ablated, and each head's predicted effect.

    Without predictions every head was measured on every window; with them (`sampling=adaptive`)
    `ablated_nats` is NaN where it was not. `matmul_error_nats`, in nats per token, is the largest
    error of an effect that `matmul=fast` was seen to make.
    """

    intact_nats: Float[np.ndarray, "window"]
    ablated_nats: Float[np.ndarray, "head window"]
    predicted_nats: Float[np.ndarray, "head window"] | None = None
    matmul_error_nats: float | None = None


AnyUnit = TypeVar("AnyUnit", Unit, SetUnit)


@dataclass(frozen=True)
class Place:
    """Where measurements are kept: a store, and under what names.

    `context` is the `store.context_key` of all that the numbers depend on besides ablation, heads
    and windows; `ablation` is the ablation's name.
    """

    store: MeasurementStore
    context: str
    ablation: str


class Measurer:
    """Measures units of work on a subject, or finds them in the store."""

    def __init__(
        self, subject: Subject, place: Place, progress: Progress, *, fast: bool = False
    ) -> None:
        """`fast` lets float32 products be rounded (`machine.fast_matmul`)."""
        self.subject, self.place, self.progress, self.fast = subject, place, progress, fast
        self.num_windows = len(subject.sample.windows)
        self.known = place.store.completed(place.context)

    def num_missing(self, units: Sequence[Unit]) -> int:
        """Return how many of the units were in the store neither when it was read nor since."""
        return sum(unit.stored(self.place.ablation) not in self.known for unit in units)

    def measure_share(self, share: Sequence[Unit], units: Sequence[Unit]) -> int:
        """Measure a share of the units; return how many of them all are left.

        Others may have measured theirs meanwhile: the store is read anew.
        """
        self.progress.begin("measure", num_rows(share))
        self.losses(share)
        self.known = self.place.store.completed(self.place.context)
        return self.num_missing(units)

    def losses(self, units: Sequence[Unit]) -> dict[Unit, Float[np.ndarray, "..."]]:
        """Return the total nats of each unit's variants on its windows."""

        def count(some: Iterable[Unit]) -> None:
            ablated = num_rows(unit for unit in some if unit.layer is not None)
            self.progress.measured(ablated, self.num_windows)

        return self._obtain(self.place.ablation, units, (measure, num_rows), count)

    def sets(self, units: Sequence[SetUnit]) -> dict[SetUnit, Float[np.ndarray, "..."]]:
        """Return the total nats with each unit's heads ablated together, on its windows."""
        return self._obtain(self.place.ablation, units, (measure_sets, num_rows))

    def predictions(self, units: Sequence[Unit]) -> dict[Unit, Float[np.ndarray, "..."]]:
        """Return each head's effect to first order, and the loss for the intact unit."""
        return self._obtain(
            f"{self.place.ablation}, first order", units, (predict, prediction_rows)
        )

    def _obtain(
        self,
        kind: str,
        units: Sequence[AnyUnit],
        how: tuple[
            Callable[[Subject, Iterable[AnyUnit]], Iterator[tuple[AnyUnit, Float[Tensor, "..."]]]],
            Callable[[Iterable[AnyUnit]], int],
        ],
        count: Callable[[Iterable[AnyUnit]], object] = lambda units: None,
    ) -> dict[AnyUnit, Float[np.ndarray, "..."]]:
        """Look units up or run them; `how` runs them and says what they cost in rows."""
        run, rows_of = how
        found = {
            unit: self.known[key] for unit in units if (key := unit.stored(kind)) in self.known
        }
        self.progress.advance(rows_of(found))
        count(found)
        results = {unit: np.array(record.total_nats) for unit, record in found.items()}
        missing = [unit for unit in units if unit not in found]
        with fast_matmul() if self.fast else nullcontext():
            for unit, nats in run(self.subject, missing):
                table = tuple(tuple(row) for row in nats.tolist())
                record = Measurement(self.place.context, *unit.stored(kind), table)
                self.place.store.append(record)
                self.known[record.unit] = record
                results[unit] = nats.numpy()
                self.progress.advance(rows_of([unit]))
                count([unit])
        return results


def share_of(units: Sequence[Unit], index: int, count: int) -> list[Unit]:
    """Return one of `count` nearly equal stretches of the units."""
    return [unit for n, unit in enumerate(units) if n * count // len(units) == index]


def matmul_error(subject: Subject, num_windows: int) -> float:
    """Return how far `fast_matmul` moves the effect of any of up to six heads, in nats per token.

    Taken over the first `num_windows` windows and heads from the first to the last layer.
    """
    num_tokens = subject.sample.num_tokens
    windows = list(range(len(num_tokens)))[:num_windows]
    some = sorted(subject.heads)[:: max(1, len(subject.heads) // 6)]
    units = plan(some, windows, len(windows))

    def effects() -> Float[np.ndarray, "head window"]:
        found = as_arrays(measure(subject, units))
        intact, ablated = assemble(found, some, len(num_tokens))
        return (ablated - intact)[:, windows]

    exact = effects()
    with fast_matmul():
        moved = effects() - exact
    return float(np.abs(moved.sum(1)).max() / num_tokens[windows].sum())
