"""What a run measures: units of work, each kept in the run's store and never measured twice."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from mhaprune.measure.adaptive import measure_until_settled
from mhaprune.measure.baselines import Ablation, Donors, mean_z
from mhaprune.measure.head_sets import SetUnit, measure_sets
from mhaprune.measure.leave_one_out import Unit, as_arrays, assemble, measure, num_rows, plan
from mhaprune.measure.optimal import optimal_z
from mhaprune.measure.store import Measurement, MeasurementStore, context_key
from mhaprune.model.architectures import can_replay
from mhaprune.model.heads import Head
from mhaprune.model.machine import available_bytes, choose_rows, fast_matmul
from mhaprune.run.config import EvaluationConfig, MeasureConfig, plain
from mhaprune.run.prepare import Prepared
from mhaprune.scores.attribution import predict
from mhaprune.stats.control_variates import look_sizes

PASSES_OF_A_PREDICTION = 3  # what a forward and backward pass cost, in forward passes


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


class OthersAtWork(Exception):  # noqa: N818 (no error: the work goes on elsewhere)
    """This job's share is measured, and `num_units` of other jobs are not."""

    def __init__(self, num_units: int) -> None:
        super().__init__(f"{num_units} units of work are left to other jobs")
        self.num_units = num_units


@runtime_checkable
class Progress(Protocol):
    """Is told how many rows (windows through the model) were done, and how many more there are."""

    def __call__(self, amount: int, left: int | None = None) -> object: ...


def measure_losses(
    prepared: Prepared,
    heads: Sequence[Head],
    config: MeasureConfig,
    directory: Path,
    advance: Progress,
    say: Callable[[str], object] = lambda line: None,
    shard: tuple[int, int] | None = None,
    log: Callable[[dict[str, int]], object] = lambda numbers: None,
) -> Losses:
    """Measure what the configuration asks for; `say` gets a line about each look.

    `log` gets `heads/done`, whenever it grows, and at each look `heads/settled`.

    What `measurements.jsonl` already holds is not measured again; what is new is appended to it at
    once. With a shard, (index, count), only its share is; raises OthersAtWork if that leaves units.
    """
    with MeasurementStore(directory / "measurements.jsonl") as store:
        told = log_heads(advance, len(prepared.windows), len(heads), log)
        measurer = Measurer(prepared, heads, config, store, told)
        error_nats = None
        if config.evaluation.matmul == "fast":
            error_nats = matmul_error(measurer, heads)
            say(f"matmul=fast moves the effects of some heads by up to {error_nats:.1e} nats/token")
        if config.evaluation.sampling == "adaptive":
            losses = _measure_adaptively(measurer, heads, say, log)
            return replace(losses, matmul_error_nats=error_nats)
        units = plan(heads, measurer.all_windows, config.evaluation.windows_per_unit)
        share = units if shard is None else share_of(units, *shard)
        if found := len(share) - measurer.num_missing(share):
            say(f"{found} of {len(share)} units of work are measured already, and skipped")
        if shard is not None:
            left = measurer.measure_share(units, shard)
            if left:
                raise OthersAtWork(left)
        told(0, num_rows(units))
        intact, ablated = assemble(measurer.losses(units), heads, len(prepared.windows))
    assert np.isfinite(intact).all() and np.isfinite(ablated).all()
    return Losses(intact, ablated, matmul_error_nats=error_nats)


AnyUnit = TypeVar("AnyUnit", Unit, SetUnit)


class Measurer:
    """Measures units of work, or finds them in the run's store."""

    def __init__(
        self,
        prepared: Prepared,
        heads: Sequence[Head],
        config: MeasureConfig,
        store: MeasurementStore,
        advance: Progress,
    ) -> None:
        self.prepared, self.config, self.store, self.advance = prepared, config, store, advance
        self.all_windows = range(len(prepared.windows))
        self.subject = prepared.loaded.model, prepared.tokens.ids, prepared.windows
        self.key = measurement_context(prepared, config)
        self.known = store.completed(self.key)
        self.engine: Literal["replay", "gating"] = choose_engine(prepared, config.evaluation)
        self.rows = rows_at_once(prepared, config.evaluation)
        self.ablation = prepare_ablation(prepared, heads, config, self.rows, advance)

    def num_missing(self, units: Sequence[Unit]) -> int:
        """Return how many of the units were in the store neither when it was read nor since."""
        kind = self.config.ablation.kind
        return sum(unit.stored(kind) not in self.known for unit in units)

    def measure_share(self, units: Sequence[Unit], shard: tuple[int, int]) -> int:
        """Measure the share of shard (index, count); return how many units are left.

        Others may have measured theirs meanwhile: the store is read anew.
        """
        share = share_of(units, *shard)
        self.advance(0, num_rows(share))
        self.losses(share)
        self.known = self.store.completed(self.key)
        return self.num_missing(units)

    def losses(self, units: Sequence[Unit]) -> dict[Unit, Float[np.ndarray, "..."]]:
        """Return the total nats of each unit's variants on its windows."""
        measure_missing = partial(measure, engine=self.engine)
        return self._obtain(self.config.ablation.kind, units, measure_missing, num_rows)

    def sets(self, units: Sequence[SetUnit]) -> dict[SetUnit, Float[np.ndarray, "..."]]:
        """Return the total nats with each unit's heads ablated together, on its windows."""
        measure_missing = partial(measure_sets, engine=self.engine)
        return self._obtain(self.config.ablation.kind, units, measure_missing, num_rows)

    def predictions(self, units: Sequence[Unit]) -> dict[Unit, Float[np.ndarray, "..."]]:
        """Return each head's effect to first order, and the loss for the intact unit."""
        kind = f"{self.config.ablation.kind}, first order"
        return self._obtain(kind, units, predict, prediction_rows)

    def _obtain(
        self,
        kind: str,
        units: Sequence[AnyUnit],
        measure_missing: Callable[..., Iterator[tuple[AnyUnit, Float[Tensor, "..."]]]],
        rows_of: Callable[[Iterable[AnyUnit]], int],
    ) -> dict[AnyUnit, Float[np.ndarray, "..."]]:
        found = {
            unit: self.known[key] for unit in units if (key := unit.stored(kind)) in self.known
        }
        self.advance(rows_of(found))
        results = {unit: np.array(record.total_nats) for unit, record in found.items()}
        missing = [unit for unit in units if unit not in found]
        with fast_matmul() if self.config.evaluation.matmul == "fast" else nullcontext():
            for unit, nats in measure_missing(*self.subject, missing, self.ablation, self.rows):
                table = tuple(tuple(row) for row in nats.tolist())
                record = Measurement(self.key, *unit.stored(kind), table)
                self.store.append(record)
                self.known[record.unit] = record
                results[unit] = nats.numpy()
                self.advance(rows_of([unit]))
        return results


def log_heads(
    advance: Progress, num_windows: int, num_heads: int, log: Callable[[dict[str, int]], object]
) -> Progress:
    """Return a progress that also logs how many heads' worth of windows are done."""
    rows = done = 0

    def told(amount: int, left: int | None = None) -> None:
        nonlocal rows, done
        advance(amount, left)
        rows += amount
        if done < (heads := min(rows // num_windows, num_heads)):
            done = heads
            log({"heads/done": done})

    return told


def share_of(units: Sequence[Unit], index: int, count: int) -> list[Unit]:
    """Return one of `count` nearly equal stretches of the units."""
    return [unit for n, unit in enumerate(units) if n * count // len(units) == index]


def _measure_adaptively(
    measurer: Measurer,
    heads: Sequence[Head],
    say: Callable[[str], object],
    log: Callable[[dict[str, int]], object],
) -> Losses:
    prepared, evaluation = measurer.prepared, measurer.config.evaluation
    num_windows, per_unit = len(prepared.windows), evaluation.windows_per_unit
    look_sizes(num_windows)  # too few windows: refused before anything is measured
    units = plan(heads, measurer.all_windows, per_unit)
    measurer.advance(0, len(heads) * num_windows + prediction_rows(units))
    predictions = measurer.predictions(units)
    intact, predicted = assemble(predictions, heads, num_windows)
    looks = measure_until_settled(
        *(heads, intact, predicted, prepared.num_tokens, prepared.blocks, measurer.losses),
        windows_per_unit=per_unit,
        confidence=evaluation.confidence,
        tolerance_nats=evaluation.tolerance_nats,
        critical_nats=evaluation.critical_nats,
        seed=measurer.config.seed,
    )
    losses = Losses(intact, np.full_like(predicted, np.nan), predicted)
    for look in looks:
        measurer.advance(0, look.most_rows)
        settled, hard = int(look.settled.sum()), int(look.out_of_reach.sum())
        log({"heads/settled": settled})
        say(
            f"{look.num_windows} of {num_windows} windows: {settled} of {len(heads)} heads settled"
            + f", {hard} too close to a threshold" * bool(hard)
        )
        losses = Losses(intact, look.ablated_nats, predicted)
    return losses


def matmul_error(measurer: Measurer, heads: Sequence[Head]) -> float:
    """Return how far `matmul=fast` moves the effect of any of up to six heads, in nats per token.

    Taken over a few windows and heads from the first to the last layer.
    """
    num_tokens = measurer.prepared.num_tokens
    windows = measurer.all_windows[: measurer.config.evaluation.windows_per_unit]
    some = sorted(heads)[:: max(1, len(heads) // 6)]
    units = plan(some, windows, len(windows))

    def effects() -> Float[np.ndarray, "head window"]:
        found = measure(*measurer.subject, units, measurer.ablation, measurer.rows, measurer.engine)
        intact, ablated = assemble(as_arrays(found), some, len(num_tokens))
        return (ablated - intact)[:, list(windows)]

    exact = effects()
    with fast_matmul():
        moved = effects() - exact
    return float(np.abs(moved.sum(1)).max() / num_tokens[list(windows)].sum())


def prediction_rows(units: Iterable[Unit]) -> int:
    """Return what predicting these units costs, in rows: one pass back gives all heads at once."""
    intact = [unit for unit in units if unit.layer is None]
    return PASSES_OF_A_PREDICTION * num_rows(intact)


def prepare_ablation(
    prepared: Prepared,
    heads: Sequence[Head],
    config: MeasureConfig,
    rows_per_batch: int,
    advance: Progress = lambda amount, left=None: None,
) -> Ablation:
    """Return what replaces an ablated head's z: nothing, its own constant, or donor windows.

    It is found once for all that is asked about the prepared model.
    """
    key = str((plain(config.ablation), config.seed, config.evaluation.engine, heads))
    if key not in prepared.ablations:
        prepared.ablations[key] = _find_ablation(prepared, heads, config, rows_per_batch, advance)
    return prepared.ablations[key]


def _find_ablation(
    prepared: Prepared,
    heads: Sequence[Head],
    config: MeasureConfig,
    rows_per_batch: int,
    advance: Progress,
) -> Ablation:
    windows, ids = prepared.calibration_windows, prepared.calibration.ids
    match config.ablation.kind:
        case "zero":
            return None
        case "mean":
            return mean_z(prepared.loaded.model, ids, windows, rows_per_batch)
        case "resample":
            order = np.random.default_rng(config.seed).permutation(len(windows))
            return Donors(ids, tuple(windows[index] for index in order))
        case "optimal":
            steps = config.ablation.steps
            advance(0, steps * len(heads))
            return optimal_z(
                *(prepared.loaded.model, ids, windows, heads),
                steps=steps,
                rows_per_batch=rows_per_batch,
                engine=choose_engine(prepared, config.evaluation),
                advance=advance,
            )
    raise ValueError(f"ablation {config.ablation.kind!r} is not known")


def choose_engine(prepared: Prepared, config: EvaluationConfig) -> Literal["replay", "gating"]:
    """Return how heads are ablated; ValueError where replay is asked for and does not apply."""
    model = prepared.loaded.model
    if config.engine == "replay" and not can_replay(model):
        raise ValueError(
            f"evaluation.engine=replay does not know {model.config.model_type} models; use auto"
        )
    return "gating" if config.engine == "gating" or not can_replay(model) else "replay"


def rows_at_once(prepared: Prepared, config: EvaluationConfig) -> int:
    """Return how many windows go through the model at once."""
    if config.rows_per_batch is not None:
        return config.rows_per_batch
    model, length = prepared.loaded.model, prepared.protocol.context_length
    num_bytes = available_bytes(model.device)
    return choose_rows(model, length, choose_engine(prepared, config), num_bytes)


def measurement_context(prepared: Prepared, config: MeasureConfig) -> str:
    """Name what the measurements depend on besides ablation, head and window."""
    calibrated = config.ablation.kind != "zero"
    return context_key(
        weights_hash=prepared.loaded.weights_hash,
        protocol=asdict(prepared.protocol)
        | {"num_windows": None, "num_scored": None, "text": None},
        calibration=[prepared.calibration.hash, len(prepared.calibration_windows)] * calibrated,
        seed=config.seed if config.ablation.kind == "resample" else None,
        steps=config.ablation.steps if config.ablation.kind == "optimal" else None,
        engine=choose_engine(prepared, config.evaluation),
        matmul=config.evaluation.matmul,
        dtype=config.model.dtype,
        device=prepared.loaded.model.device.type,
    )
