"""Nothing is measured twice, and what a measurement depends on is in its name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mhaprune.measure import measurer
from mhaprune.measure.leave_one_out import Donors, Unit, plan
from mhaprune.measure.measurer import Losses, Measurer, Place
from mhaprune.measure.optimal import optimal_z
from mhaprune.measure.perplexity import row_nats
from mhaprune.measure.progress import Progress
from mhaprune.measure.store import MeasurementStore
from mhaprune.model.architectures import output_projections
from mhaprune.model.heads import Head, select_heads
from mhaprune.run import measuring
from mhaprune.run.config import EvaluationConfig, RankHeadsConfig
from mhaprune.run.measuring import choose_engine, make_subject, measurement_context, rows_at_once
from mhaprune.run.prepare import Prepared, prepare
from mhaprune.run.ranking import rank
from mhaprune.text.sample import window_batch
from mhaprune.text.windows import Window
from tests.micro import numpy_gpt2, tiny_model, without_heads
from tests.tiny import (
    Bar,
    make_config,
    make_place,
    measure_losses,
    other_calibration,
    other_weights,
    subject_of,
)

ALL_HEADS = select_heads(["L*H*"], 2, 4)
ROW_NATS = 1e-4  # rounding of a window's loss (some 90 nats) between batches of another size


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def prepared(place: Path) -> Prepared:
    return prepare(make_config(place))


def with_rows(config: RankHeadsConfig, rows: int) -> RankHeadsConfig:
    return replace(config, evaluation=replace(config.evaluation, rows_per_batch=rows))


# ---- what stands in for a head


def test_zero_ablation_takes_no_calibration(prepared, place):
    config = make_config(place, "zero")
    assert subject_of(prepared, ALL_HEADS, with_rows(config, 2)).ablation is None


def test_mean_ablation_takes_the_mean_of_z_over_the_calibration_windows(prepared, place):
    model, ids = prepared.loaded.model, prepared.calibration.ids
    assert len(prepared.calibration.windows) == 3
    outputs = [
        np.stack(numpy_gpt2(model, ids[window.start : window.stop - 1])[1])
        for window in prepared.calibration.windows
    ]
    mean = np.concatenate(outputs, axis=1).mean(axis=1)
    config = make_config(place, "mean")
    made = subject_of(prepared, ALL_HEADS, with_rows(config, 2)).ablation
    assert isinstance(made, torch.Tensor)
    np.testing.assert_allclose(made, mean, atol=1e-6)


def test_resample_ablation_takes_each_calibration_window_in_an_order_of_the_seed(prepared, place):
    def donors(seed: int) -> tuple[Window, ...]:
        config = replace(make_config(place, "resample"), seed=seed)
        made = subject_of(prepared, ALL_HEADS, with_rows(config, 2)).ablation
        assert isinstance(made, Donors)
        assert made.ids is prepared.calibration.ids
        return made.windows

    assert donors(1) == donors(1)
    assert {frozenset(donors(seed)) for seed in range(9)} == {
        frozenset(prepared.calibration.windows)
    }
    assert len({donors(seed) for seed in range(9)}) > 1


def test_optimal_ablation_is_fitted_to_the_calibration_windows(prepared, place):
    config, bar = make_config(place, "optimal"), Bar()
    config.ablation.steps = 3
    made = subject_of(prepared, ALL_HEADS[:5], with_rows(config, 2), bar).ablation
    assert isinstance(made, torch.Tensor)
    subject = make_subject(prepared, ALL_HEADS[:5], with_rows(config, 2))
    fitted = optimal_z(replace(subject, sample=prepared.calibration), steps=3)
    torch.testing.assert_close(made, fitted)
    assert bar.totals[-1] == 3 * 5 and bar.completed == 3 * 5


def test_an_unknown_ablation_is_refused(prepared, place):
    config = make_config(place)
    config.ablation.kind = "half"
    with pytest.raises(ValueError, match="ablation 'half' is not known"):
        subject_of(prepared, ALL_HEADS, with_rows(config, 2))


# ---- measuring


def noted_units(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Unit]:
    """The units that `measuring.measure` or `.predict` has run through the model, as they come."""
    units: list[Unit] = []
    run = getattr(measurer, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        for unit, nats in run(*arguments, **options):
            units.append(unit)
            yield unit, nats

    monkeypatch.setattr(measurer, name, noting)
    return units


@pytest.fixture
def measured_units(monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    return noted_units(monkeypatch, "measure")


@pytest.fixture
def predicted_units(monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    return noted_units(monkeypatch, "predict")


def assert_same(losses: Losses, others: Losses) -> None:
    for field in fields(Losses):
        np.testing.assert_array_equal(getattr(losses, field.name), getattr(others, field.name))


def lines_of(directory: Path) -> list[str]:
    return (directory / "measurements.jsonl").read_text().splitlines()


@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_losses_are_those_of_models_without_the_head(prepared, place, tmp_path, engine):
    heads, config = [Head(0, 1), Head(1, 3)], make_config(place, engine=engine)
    losses = measure_losses(prepared, heads, config, tmp_path, Bar())
    intact, ablated = losses.intact_nats, losses.ablated_nats
    assert losses.predicted_nats is None
    batch = window_batch(prepared.sample.tokens.ids, prepared.sample.windows)
    model = prepared.loaded.model
    np.testing.assert_allclose(intact, row_nats(model, *batch), atol=ROW_NATS)
    for row, head in enumerate(heads):
        other = row_nats(without_heads(model, [head]), *batch).numpy()
        assert abs(other - intact).min() > 30 * ROW_NATS
        np.testing.assert_allclose(ablated[row], other, atol=ROW_NATS)


@pytest.mark.parametrize(
    ("asked", "used"), [("auto", "replay"), ("replay", "replay"), ("gating", "gating")]
)
def test_the_engine_that_is_chosen_is_the_one_that_measures(
    prepared, place, tmp_path, monkeypatch, asked, used
):
    engines: list[str] = []
    measure = measurer.measure

    def noting(subject: Any, units: Any) -> Any:
        engines.append(subject.engine)
        return measure(subject, units)

    monkeypatch.setattr(measurer, "measure", noting)
    config = make_config(place, engine=asked)
    measure_losses(prepared, ALL_HEADS, config, tmp_path, Bar())
    assert engines == [choose_engine(prepared, config.evaluation)] == [used]


def test_replay_of_an_unknown_architecture_is_refused_and_auto_falls_back_to_gating(prepared):
    other = replace(prepared, loaded=replace(prepared.loaded, model=tiny_model("bloom")))
    assert choose_engine(other, EvaluationConfig()) == "gating"
    with pytest.raises(ValueError, match=r"engine=replay does not know bloom models; use auto$"):
        choose_engine(other, EvaluationConfig(engine="replay"))


def test_what_is_stored_is_not_measured_again(prepared, place, tmp_path, measured_units):
    config = make_config(place)
    first = measure_losses(prepared, ALL_HEADS, config, tmp_path, Bar())
    assert len(measured_units) == 2 * (1 + 2)  # two blocks of windows: intact and two layers
    bar = Bar()
    again = measure_losses(prepared, ALL_HEADS, config, tmp_path, bar)
    assert len(measured_units) == len(lines_of(tmp_path)) == 6
    assert bar.completed == bar.totals[-1] == 6 * (1 + 8)
    assert_same(first, again)


def test_a_measurer_does_not_measure_again_what_it_has_just_measured(
    prepared, place, tmp_path, measured_units
):
    units = plan(ALL_HEADS, range(len(prepared.sample.windows)), 4)
    subject = make_subject(prepared, ALL_HEADS, make_config(place))
    with MeasurementStore(tmp_path / "measurements.jsonl") as store:
        measuring_them = Measurer(subject, Place(store, "context", "zero"), Progress())
        first, again = measuring_them.losses(units), measuring_them.losses(units)
    assert len(measured_units) == len(lines_of(tmp_path)) == len(units)
    assert first.keys() == again.keys() == set(units)
    for unit in units:
        np.testing.assert_array_equal(first[unit], again[unit])


@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
@pytest.mark.parametrize("kept", [[0, 1], [5, 2], [3]])
def test_a_unit_has_the_same_numbers_whatever_was_measured_before(
    prepared, place, tmp_path, measured_units, ablation, kept
):
    config = make_config(place, ablation)
    measure_losses(prepared, ALL_HEADS, config, tmp_path, Bar())
    lines = lines_of(tmp_path)
    (tmp_path / "measurements.jsonl").write_text("".join(f"{lines[n]}\n" for n in kept))
    measured_units.clear()
    measure_losses(prepared, ALL_HEADS, config, tmp_path, Bar())
    assert len(measured_units) == 6 - len(kept)
    assert sorted(lines_of(tmp_path)) == sorted(lines)


def test_more_windows_are_added_to_those_that_are_stored(prepared, place, tmp_path, measured_units):
    few = replace(prepared, sample=replace(prepared.sample, windows=prepared.sample.windows[:4]))
    measure_losses(few, ALL_HEADS, make_config(place), tmp_path, Bar())
    measured_units.clear()
    losses = measure_losses(prepared, ALL_HEADS, make_config(place), tmp_path, Bar())
    assert {unit.windows for unit in measured_units} == {(4, 5)}
    assert len(losses.intact_nats) == 6


def test_another_ablation_is_measured_beside_the_first(prepared, place, tmp_path, measured_units):
    zero = measure_losses(prepared, ALL_HEADS, make_config(place), tmp_path, Bar())
    measured_units.clear()
    config = make_config(place, "mean")
    mean = measure_losses(prepared, ALL_HEADS, config, tmp_path, Bar())
    assert len(measured_units) == 6
    assert (zero.ablated_nats != mean.ablated_nats).all()


def test_progress_is_told_in_rows_and_adds_up(prepared, place, tmp_path):
    bar, heads = Bar(), [Head(1, 0), Head(1, 2)]
    measure_losses(prepared, heads, make_config(place), tmp_path, bar)
    assert [amount for amount in bar.amounts if amount] == [8, 4, 4, 2]
    assert (
        bar.totals == [bar.completed] == [sum(unit.num_rows for unit in plan(heads, range(6), 4))]
    )


@pytest.mark.parametrize("ablation", ["zero", "optimal"])
def test_heads_are_done_when_they_are_measured_not_while_the_ablation_is_prepared(
    prepared, place, tmp_path, ablation
):
    config, bar = make_config(place, ablation), Bar()
    config.ablation.steps = 3
    measure_losses(prepared, ALL_HEADS, config, tmp_path, bar)
    # Two layers of 4 heads on 4 windows, then on 2: 16, 32, 40 and 48 windows of 6 for each head.
    assert bar.heads == [0, 2, 5, 6, 8]


# ---- how many rows at once, and how exact


def test_as_many_rows_go_through_at_once_as_the_configuration_says(prepared, place, monkeypatch):
    monkeypatch.setattr(measuring, "available_bytes", lambda device: 0)
    assert rows_at_once(prepared, make_config(place, rows_per_batch=7).evaluation, "replay") == 7
    assert rows_at_once(prepared, make_config(place).evaluation, "replay") == 1


@pytest.mark.parametrize(("engine", "rows"), [("replay", 20), ("gating", 10)])
def test_else_as_many_as_half_of_the_memory_holds(prepared, place, monkeypatch, engine, rows):
    """A row of 16 tokens: 20 widths of 32 in float32; gating also, twice, logits of 300 or so."""
    vocab_size = prepared.loaded.model.config.vocab_size
    numbers = 20 * 32 + 2 * vocab_size * (engine == "gating")
    num_bytes = 2 * rows * 16 * 4 * numbers
    monkeypatch.setattr(measuring, "available_bytes", lambda device: num_bytes)
    assert (
        make_subject(prepared, ALL_HEADS, make_config(place, engine=engine)).rows_per_batch == rows
    )


def cpu_precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore


def test_fast_products_are_used_for_all_that_is_kept_and_nowhere_else(
    prepared, place, tmp_path, monkeypatch
):
    precisions: list[tuple[str, int]] = []
    measure, before = measurer.measure, cpu_precision()

    def noting(subject: Any, units: list[Unit]):
        for unit, nats in measure(subject, units):
            precisions.append((cpu_precision(), len(units)))
            yield unit, nats

    monkeypatch.setattr(measurer, "measure", noting)
    config, bar = make_config(place, matmul="fast"), Bar()
    losses = measure_losses(prepared, ALL_HEADS, config, tmp_path, bar)
    # The error is taken on one block of windows, exact and fast; then come both blocks.
    assert precisions == [(before, 3)] * 3 + [("bf16", 3)] * 3 + [("bf16", 6)] * 6
    assert cpu_precision() == before != "bf16"
    assert len(lines_of(tmp_path)) == 6
    error = losses.matmul_error_nats
    assert error is not None and 0 <= error < 1e-2
    assert bar.said == [
        f"matmul=fast moves the effects of some heads by up to {error:.1e} nats/token"
    ]
    summary = rank(make_subject(prepared, ALL_HEADS, config), losses, config.evaluation).summary
    assert summary["matmul/error_nats"] == error


def test_exact_products_have_no_error_to_tell(prepared, place, tmp_path):
    config, bar = make_config(place), Bar()
    losses = measure_losses(prepared, ALL_HEADS, config, tmp_path, bar)
    assert losses.matmul_error_nats is None and bar.said == []
    summary = rank(make_subject(prepared, ALL_HEADS, config), losses, config.evaluation).summary
    assert "matmul/error_nats" not in summary


@pytest.mark.parametrize("sampling", ["exhaustive", "adaptive"])
def test_the_error_is_how_far_the_effect_of_some_head_moves_per_token(
    place, tmp_path, monkeypatch, sampling
):
    """Let fast products be those of a model without L1H3: what it does to effects is measured."""
    eight = prepare(make_config(place, max_windows=8))
    config = make_config(place, max_windows=8, matmul="fast", sampling=sampling)
    model, batch = (
        eight.loaded.model,
        window_batch(eight.sample.ids, eight.sample.windows[:4]),
    )
    other = without_heads(model, [Head(1, 3)])

    def effects(of: Any) -> list[float]:
        intact = row_nats(of, *batch)
        return [float((row_nats(without_heads(of, [h]), *batch) - intact).sum()) for h in ALL_HEADS]

    moved = np.subtract(effects(other), effects(model)) / eight.sample.num_tokens[:4].sum()
    weight, changed = (output_projections(m)[1].get_parameter("weight") for m in (model, other))

    @contextmanager
    def fast_matmul() -> Iterator[None]:
        before = weight.detach().clone()
        weight.detach().copy_(changed)
        yield
        weight.detach().copy_(before)

    monkeypatch.setattr(measurer, "fast_matmul", fast_matmul)
    losses = measure_losses(eight, ALL_HEADS, config, tmp_path, Bar())
    assert losses.matmul_error_nats == pytest.approx(abs(moved).max(), abs=1e-6)
    assert abs(moved).max() > 1e-4


# ---- measuring adaptively

NUM_WINDOWS = 40
LOOKS = (16, 32, 40)


@pytest.fixture(scope="module")
def many(place: Path) -> Prepared:
    return prepare(make_config(place, max_windows=NUM_WINDOWS))


def adaptive_config(place: Path, tolerance_nats: float, ablation: str = "zero") -> RankHeadsConfig:
    return make_config(
        place,
        ablation,
        max_windows=NUM_WINDOWS,
        sampling="adaptive",
        tolerance_nats=tolerance_nats,
    )


SOME_STAY_OPEN, ALL_SETTLE = 0.0013, 0.003  # tolerances: most effects are within 0.0005


def test_heads_that_are_settled_are_measured_on_fewer_windows(
    many, place, tmp_path, measured_units, predicted_units
):
    config, bar = adaptive_config(place, SOME_STAY_OPEN), Bar()
    losses = measure_losses(many, ALL_HEADS, config, tmp_path, bar)
    measured = np.isfinite(losses.ablated_nats).sum(1)
    assert set(measured) == set(LOOKS)
    assert np.isfinite(losses.intact_nats).all()
    assert losses.predicted_nats is not None and np.isfinite(losses.predicted_nats).all()
    assert [line.split(":")[0] for line in bar.said] == [f"{n} of 40 windows" for n in LOOKS]
    assert bar.said[0] == "16 of 40 windows: 4 of 8 heads settled, 2 too close to a threshold"
    assert (measured == 16).sum() == 4 + 2
    for n, head in enumerate(ALL_HEADS):
        of_head = [u for u in measured_units if u.layer == head.layer and head.head in u.heads]
        windows = sorted(window for unit in of_head for window in unit.windows)
        assert windows == np.flatnonzero(np.isfinite(losses.ablated_nats[n])).tolist()
    assert predicted_units == plan(ALL_HEADS, range(NUM_WINDOWS), 4)
    assert None not in {unit.layer for unit in measured_units}, "predictions know the intact loss"


def test_what_is_measured_adaptively_is_what_an_exhaustive_run_measures(many, place, tmp_path):
    exhaustive = make_config(place, max_windows=NUM_WINDOWS)
    every = measure_losses(many, ALL_HEADS, exhaustive, tmp_path, Bar())
    config = adaptive_config(place, SOME_STAY_OPEN)
    losses = measure_losses(many, ALL_HEADS, config, tmp_path, Bar())
    measured = np.isfinite(losses.ablated_nats)
    assert 0 < measured.mean() < 1
    np.testing.assert_allclose(losses.intact_nats, every.intact_nats, atol=ROW_NATS)
    np.testing.assert_allclose(
        losses.ablated_nats[measured], every.ablated_nats[measured], atol=ROW_NATS
    )


@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
def test_predictions_are_kept_beside_the_losses_as_first_order(many, place, tmp_path, ablation):
    config = adaptive_config(place, ALL_SETTLE, ablation)
    losses = measure_losses(many, ALL_HEADS, config, tmp_path, Bar())
    key = measurement_context(make_subject(many, ALL_HEADS, config), many, config)
    kept = MeasurementStore(tmp_path / "measurements.jsonl").completed(key)
    assert {kind for kind, *_ in kept} == {ablation, f"{ablation}, first order"}
    assert losses.predicted_nats is not None
    for n, head in enumerate(ALL_HEADS):
        for first in range(0, NUM_WINDOWS, 4):
            block = tuple(range(first, first + 4))
            table = kept[f"{ablation}, first order", head.layer, (0, 1, 2, 3), block].total_nats
            assert list(table[head.head]) == losses.predicted_nats[n, first : first + 4].tolist()


@pytest.mark.parametrize("num_kept", [0, 7, 30, 33, 40])  # 30 of them are predictions
def test_an_adaptive_run_goes_on_to_the_same_numbers_and_measures_only_the_rest(
    many, place, tmp_path, measured_units, predicted_units, num_kept
):
    config = adaptive_config(place, SOME_STAY_OPEN)
    losses = measure_losses(many, ALL_HEADS, config, tmp_path, Bar())
    lines, units = lines_of(tmp_path), predicted_units + measured_units
    assert len(predicted_units) == 30 < 40 < len(lines) == len(units)
    torn = lines[num_kept][:40]
    (tmp_path / "measurements.jsonl").write_text("\n".join([*lines[:num_kept], torn]))
    measured_units.clear()
    predicted_units.clear()
    again = measure_losses(many, ALL_HEADS, config, tmp_path, Bar())
    assert_same(losses, again)
    assert predicted_units + measured_units == units[num_kept:]
    assert [line for line in lines_of(tmp_path) if line != torn] == lines


def test_too_few_windows_are_refused_before_anything_is_measured(prepared, place, tmp_path):
    seven = replace(
        prepared,
        sample=replace(
            prepared.sample, windows=(*prepared.sample.windows, prepared.sample.windows[0])
        ),
    )
    config = adaptive_config(place, ALL_SETTLE)
    with pytest.raises(ValueError) as error:
        measure_losses(seven, ALL_HEADS, config, tmp_path, Bar())
    assert str(error.value) == (
        "adaptive measuring takes at least 8 windows, got 7; use a longer text or "
        "evaluation=exhaustive"
    )
    assert not (tmp_path / "measurements.jsonl").exists()


@pytest.mark.parametrize("tolerance_nats", [SOME_STAY_OPEN, ALL_SETTLE])
def test_adaptive_progress_never_passes_its_total_and_ends_there(
    many, place, tmp_path, tolerance_nats
):
    left: list[int] = []

    class Left(Bar):
        def show(self, progress: Progress) -> None:
            left.append(progress.rows_left)

    config = adaptive_config(place, tolerance_nats)
    measure_losses(many, ALL_HEADS, config, tmp_path, Left())
    assert min(left) == left[-1] == 0


# ---- what a measurement depends on

Change = Callable[[Prepared, RankHeadsConfig], Prepared | None]


def other_protocol(**change: Any) -> Change:
    return lambda prepared, config: replace(
        prepared, sample=replace(prepared.sample, protocol=replace(prepared.protocol, **change))
    )


def fewer_calibration_windows(prepared: Prepared, config: RankHeadsConfig) -> Prepared:
    return replace(
        prepared,
        calibration=replace(prepared.calibration, windows=prepared.calibration.windows[:2]),
    )


def other_seed(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.seed = 7


def other_dtype(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.model.dtype = "float64"


def other_engine(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.evaluation.engine = "gating"


def other_products(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.evaluation.matmul = "fast"


def other_thresholds(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.evaluation.tolerance_nats = 0.02
    config.evaluation.resamples = 500


def context_of(prepared: Prepared, config: RankHeadsConfig) -> str:
    return measurement_context(make_subject(prepared, ALL_HEADS, config), prepared, config)


ALWAYS = {"zero", "mean", "resample"}


@pytest.mark.parametrize(
    ("change", "depends"),
    [
        (other_weights, ALWAYS),
        (other_protocol(tokens_hash="other"), ALWAYS),
        (other_protocol(context_length=8), ALWAYS),
        (other_protocol(stride=8), ALWAYS),
        (other_protocol(first_token="unscored"), ALWAYS),
        (other_dtype, ALWAYS),
        (other_engine, ALWAYS),
        (other_products, ALWAYS),
        (other_calibration, {"mean", "resample"}),
        (fewer_calibration_windows, {"mean", "resample"}),
        (other_seed, {"resample"}),
        (other_protocol(num_windows=4, num_scored=64), set()),
        (other_protocol(text="another name"), set()),
        (other_thresholds, set()),
    ],
)
def test_measurements_are_kept_apart_by_what_they_depend_on_and_nothing_else(
    prepared, place, change: Change, depends
):
    changed_of = set()
    for ablation in ALWAYS:
        before = context_of(prepared, make_config(place, ablation))
        config = make_config(place, ablation)
        changed = change(prepared, config) or prepared
        if context_of(changed, config) != before:
            changed_of.add(ablation)
    assert changed_of == depends
