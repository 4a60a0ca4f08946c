"""What a run measures, as its configuration says: the subject, its place in the store, losses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from mhaprune.measure.adaptive import Look, Stopping, measure_until_settled
from mhaprune.measure.baselines import Ablation, Donors, mean_z
from mhaprune.measure.leave_one_out import assemble, num_rows, plan
from mhaprune.measure.measurer import Losses, Measurer, Place, matmul_error, share_of
from mhaprune.measure.optimal import optimal_z
from mhaprune.measure.prediction import prediction_rows
from mhaprune.measure.progress import Progress
from mhaprune.measure.store import MeasurementStore, context_key
from mhaprune.measure.subject import Engine, Subject
from mhaprune.model.architectures import can_replay
from mhaprune.model.heads import Head
from mhaprune.model.machine import available_bytes, choose_rows
from mhaprune.run.config import AblationConfig, EvaluationConfig, MeasureConfig
from mhaprune.run.prepare import Prepared
from mhaprune.stats.control_variates import look_sizes
from mhaprune.text.sample import Sample


class OthersAtWork(Exception):  # noqa: N818 (no error: the work goes on elsewhere)
    """This job's share is measured, and `num_units` of other jobs are not."""

    def __init__(self, num_units: int) -> None:
        super().__init__(f"{num_units} units of work are left to other jobs")
        self.num_units = num_units


def make_subject(prepared: Prepared, heads: Sequence[Head], config: MeasureConfig) -> Subject:
    """Return the heads on the evaluation text, against zero ablation; see `with_ablation`.

    Engine and rows at once are decided here, once for the run.
    """
    engine = choose_engine(prepared, config.evaluation)
    return Subject(
        prepared.loaded.model,
        prepared.sample,
        tuple(heads),
        rows_per_batch=rows_at_once(prepared, config.evaluation, engine),
        engine=engine,
        seed=config.seed,
    )


def with_ablation(
    subject: Subject, calibration: Sample, config: AblationConfig, progress: Progress
) -> Subject:
    """Return the subject against the ablation that is configured."""
    calibrating = replace(subject, sample=calibration)
    return replace(subject, ablation=find_ablation(calibrating, config, progress))


def find_ablation(subject: Subject, config: AblationConfig, progress: Progress) -> Ablation:
    """Return what replaces an ablated head's z: nothing, its own constant, or donor windows.

    The subject's sample is of calibration text.
    """
    sample = subject.sample
    match config.kind:
        case "zero":
            return None
        case "mean":
            return mean_z(subject.model, sample, subject.rows_per_batch)
        case "resample":
            order = np.random.default_rng(subject.seed).permutation(len(sample.windows))
            return Donors(sample.ids, tuple(sample.windows[index] for index in order))
        case "optimal":
            return optimal_z(subject, steps=config.steps, progress=progress)
    raise ValueError(f"ablation {config.kind!r} is not known")


def choose_engine(prepared: Prepared, config: EvaluationConfig) -> Engine:
    """Return how heads are ablated; ValueError where replay is asked for and does not apply."""
    model = prepared.loaded.model
    if config.engine == "replay" and not can_replay(model):
        raise ValueError(
            f"evaluation.engine=replay does not know {model.config.model_type} models; use auto"
        )
    return "gating" if config.engine == "gating" or not can_replay(model) else "replay"


def rows_at_once(prepared: Prepared, config: EvaluationConfig, engine: Engine) -> int:
    """Return how many windows go through the model at once."""
    if config.rows_per_batch is not None:
        return config.rows_per_batch
    model, length = prepared.loaded.model, prepared.protocol.context_length
    return choose_rows(model, length, engine, available_bytes(model.device))


@contextmanager
def measuring(
    subject: Subject,
    prepared: Prepared,
    config: MeasureConfig,
    directory: Path,
    progress: Progress,
) -> Iterator[Measurer]:
    """Open the run's store, `measurements.jsonl`: what it holds is not measured again."""
    with MeasurementStore(directory / "measurements.jsonl") as store:
        place = Place(store, measurement_context(subject, prepared, config), config.ablation.kind)
        yield Measurer(subject, place, progress, fast=config.evaluation.matmul == "fast")


def measure_losses(
    measurer: Measurer, config: EvaluationConfig, shard: tuple[int, int] | None = None
) -> Losses:
    """Measure each of the subject's heads, as the configuration says.

    With a shard, (index, count), only its share is; raises OthersAtWork if that leaves units.
    """
    progress, subject, error_nats = measurer.progress, measurer.subject, None
    if measurer.fast:
        error_nats = matmul_error(subject, config.windows_per_unit)
        progress.say(
            f"matmul=fast moves the effects of some heads by up to {error_nats:.1e} nats/token"
        )
    if config.sampling == "adaptive":
        return replace(_measure_adaptively(measurer, config), matmul_error_nats=error_nats)
    units = plan(subject.heads, range(measurer.num_windows), config.windows_per_unit)
    share = units if shard is None else share_of(units, *shard)
    if found := len(share) - measurer.num_missing(share):
        progress.say(f"{found} of {len(share)} units of work are measured already, and skipped")
    if shard is not None and (left := measurer.measure_share(share, units)):
        raise OthersAtWork(left)
    progress.begin("measure", num_rows(units))
    intact, ablated = assemble(measurer.losses(units), subject.heads, measurer.num_windows)
    assert np.isfinite(intact).all() and np.isfinite(ablated).all()
    return Losses(intact, ablated, matmul_error_nats=error_nats)


def _measure_adaptively(measurer: Measurer, config: EvaluationConfig) -> Losses:
    subject, progress, num_windows = measurer.subject, measurer.progress, measurer.num_windows
    look_sizes(num_windows)  # too few windows: refused before anything is measured
    units = plan(subject.heads, range(num_windows), config.windows_per_unit)
    progress.begin("predict", len(subject.heads) * num_windows + prediction_rows(units))
    intact, predicted = assemble(measurer.predictions(units), subject.heads, num_windows)
    progress.begin("look", progress.rows_left)
    stopping = Stopping(
        config.windows_per_unit, config.confidence, config.tolerance_nats, config.critical_nats
    )
    ablated = np.full_like(predicted, np.nan)
    blocks = subject.sample.blocks
    for look in measure_until_settled(
        subject, intact, predicted, blocks, stopping, measurer.losses
    ):
        _tell(look, num_windows, progress)
        ablated = look.ablated_nats
    return Losses(intact, ablated, predicted)


def _tell(look: Look, num_windows: int, progress: Progress) -> None:
    settled, hard = int(look.settled.sum()), int(look.out_of_reach.sum())
    left_as_they_are = settled + hard if look.most_rows else len(look.settled)
    progress.look(left_as_they_are, settled, look.most_rows)
    progress.say(
        f"{look.num_windows} of {num_windows} windows: {settled} of {len(look.settled)} heads "
        f"settled" + f", {hard} too close to a threshold" * bool(hard)
    )


def measurement_context(subject: Subject, prepared: Prepared, config: MeasureConfig) -> str:
    """Name what the measurements depend on besides ablation, head and window."""
    calibrated = config.ablation.kind != "zero"
    calibration = prepared.calibration
    return context_key(
        weights_hash=prepared.loaded.weights_hash,
        protocol=asdict(prepared.protocol)
        | {"num_windows": None, "num_scored": None, "text": None},
        calibration=[calibration.tokens.hash, len(calibration.windows)] * calibrated,
        seed=config.seed if config.ablation.kind == "resample" else None,
        steps=config.ablation.steps if config.ablation.kind == "optimal" else None,
        engine=subject.engine,
        matmul=config.evaluation.matmul,
        dtype=config.model.dtype,
        device=prepared.loaded.model.device.type,
    )
