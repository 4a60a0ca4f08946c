"""A run loads what it is told to, measures nothing twice, and knows what its numbers depend on."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from micro import numpy_gpt2, tiny_model, without_heads
from tiny import tiny_gpt2, tiny_tokenizer

from mhaprune import runs
from mhaprune.config import (
    AblationConfig,
    DatasetConfig,
    EvaluationConfig,
    ModelConfig,
    RankHeadsConfig,
    TrackerConfig,
    plain,
)
from mhaprune.heads import Head, select_heads
from mhaprune.perplexity import row_nats, window_batch
from mhaprune.runs import (
    Prepared,
    choose_engine,
    cut_windows,
    full_windows,
    keep_manifest,
    load_texts,
    measure_losses,
    measurement_context,
    num_rows,
    prepare,
    prepare_ablation,
    window_sizes,
)
from mhaprune.scores.leave_one_out import Donors, Unit
from mhaprune.stories import CALIBRATION_SEED, EVALUATION_SEED, story_texts
from mhaprune.text import Text, Tokens
from mhaprune.windows import Window

ALL_HEADS = select_heads(["L*H*"], 2, 4)
ROW_NATS = 1e-4  # rounding of a window's loss (some 90 nats) between batches of another size


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model and 20 stories, one a line."""
    directory = tmp_path_factory.mktemp("place")
    tiny_gpt2().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    (directory / "stories.txt").write_text("\n".join(story_texts(5, 20)))
    return directory


def make_config(place: Path, ablation: str = "zero", **evaluation: Any) -> RankHeadsConfig:
    sizes: dict[str, Any] = {"context_length": 16, "max_windows": 6, "calibration_windows": 3}
    return RankHeadsConfig(
        ModelConfig("local", path=str(place / "model"), device="cpu"),
        DatasetConfig("text", "text", path=str(place / "stories.txt"), document_start="^"),
        EvaluationConfig(**sizes | evaluation),
        AblationConfig(ablation),
        TrackerConfig("none"),
    )


@pytest.fixture(scope="module")
def prepared(place: Path) -> Prepared:
    return prepare(make_config(place))


def make_tokens(num_tokens: int, document: list[int] | None = None) -> Tokens:
    ids = torch.arange(num_tokens)
    document_of = torch.tensor(document) if document else torch.zeros_like(ids)
    return Tokens(ids=ids, num_bytes=ids + 1, document=document_of, hash="hash")


# ---- texts


def test_stories_are_those_of_the_seeds_for_evaluation_and_calibration():
    evaluation, calibration = load_texts(DatasetConfig("stories", "stories", num_stories=3))
    assert evaluation.documents == story_texts(EVALUATION_SEED, 3)
    assert calibration.documents == story_texts(CALIBRATION_SEED, 3)


def test_a_text_and_its_calibration_text_are_two_files_kept_whole(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("three")
    config = DatasetConfig(
        *("text", "text"), path=f"{tmp_path}/a", calibration_path=f"{tmp_path}/b"
    )
    evaluation, calibration = load_texts(config)
    assert (evaluation.whole, calibration.whole) == ("one\ntwo\n", "three")


def test_without_a_calibration_text_the_last_fraction_of_the_text_is_set_aside(tmp_path):
    (tmp_path / "a").write_text("0123456789\n" * 10)
    config = DatasetConfig(
        "text", "text", path=f"{tmp_path}/a", calibration_fraction=0.2, document_start="^"
    )
    evaluation, calibration = load_texts(config)
    assert (len(evaluation.documents), len(calibration.documents)) == (8, 2)


def test_a_hub_text_is_asked_for_by_split_and_calibration_split(monkeypatch):
    asked: list[tuple[Any, ...]] = []

    def load_hub_text(*arguments: Any, document_start: str | None) -> Text:
        asked.append((*arguments, document_start))
        return Text((f"text {len(asked)}",), "", "hub")

    monkeypatch.setattr(runs, "load_hub_text", load_hub_text)
    config = DatasetConfig(
        *("name", "hub"),
        hub_id="a/b",
        config_name="c",
        split="test",
        calibration_split="validation",
        revision="r",
        joiner="\n\n",
        document_start="^ = ",
    )
    assert [text.whole for text in load_texts(config)] == ["text 1", "text 2"]
    assert asked == [
        ("a/b", "c", "test", "text", "r", "\n\n", "^ = "),
        ("a/b", "c", "validation", "text", "r", "\n\n", "^ = "),
    ]


def test_calibrating_on_the_evaluation_text_is_refused(place):
    config = make_config(place)
    config.dataset.calibration_path = config.dataset.path
    with pytest.raises(ValueError, match=r"^the calibration text holds .*passages[^\n]*$"):
        prepare(config)


def test_a_prepared_run_says_by_what_protocol(prepared, place):
    protocol = prepared.protocol
    assert protocol.text == str(place / "stories.txt")
    assert (protocol.context_length, protocol.stride, protocol.num_windows) == (16, 16, 6)
    assert protocol.num_scored == 6 * 16
    assert protocol.num_tokens == len(prepared.tokens.ids) > 1000
    assert protocol.tokens_hash == prepared.tokens.hash


# ---- windows


@pytest.mark.parametrize(
    ("context_length", "stride", "limit", "sizes"),
    [
        (None, None, 64, (64, 64)),
        (None, None, 4096, (1024, 1024)),
        (None, None, None, (1024, 1024)),
        (None, 8, 64, (64, 8)),
        (16, None, 64, (16, 16)),
        (2048, 512, 4096, (2048, 512)),
        (2048, 512, None, (2048, 512)),
        (64, 64, 64, (64, 64)),
    ],
)
def test_context_and_stride_default_to_what_the_model_reads_but_at_most_1024(
    context_length, stride, limit, sizes
):
    config = EvaluationConfig(context_length=context_length, stride=stride)
    assert window_sizes(config, limit) == sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context_length": 65}, "evaluation.context_length=65 is above the model's context of 64"),
        ({"stride": 65}, "evaluation.stride=65 is above the context length of 64; tokens in"),
    ],
)
def test_sizes_that_the_model_cannot_do_are_refused_in_one_line(sizes, message):
    with pytest.raises(ValueError) as error:
        window_sizes(EvaluationConfig(**sizes), 64)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("first_token", "max_windows", "num_scored"),
    [
        ("scored", None, [16] * 6 + [3]),  # 99 targets
        ("scored", 2, [16, 16]),
        ("unscored", None, [15] * 6 + [3]),  # a window of 16 tokens scores all but its first
        ("unscored", 3, [15, 15, 15]),
    ],
)
def test_windows_cover_the_text_up_to_the_number_asked_for(first_token, max_windows, num_scored):
    config = EvaluationConfig(first_token=first_token, max_windows=max_windows)
    windows = cut_windows(config, 16, 16, make_tokens(100))
    assert [window.num_scored for window in windows] == num_scored


def test_calibration_windows_are_the_full_ones():
    windows = full_windows(make_tokens(100), 16)
    assert [window.start for window in windows] == [0, 16, 32, 48, 64, 80]
    assert {window.num_inputs for window in windows} == {16}


def test_a_calibration_text_shorter_than_a_window_is_named():
    with pytest.raises(ValueError, match=r"^calibration text: the text has 16 tokens, but one wi"):
        full_windows(make_tokens(16), 16)


WINDOWS = (Window(0, 5, 1), Window(3, 8, 5), Window(4, 9, 8))


def with_windows(prepared: Prepared, tokens: Tokens) -> Prepared:
    return replace(prepared, tokens=tokens, windows=WINDOWS)


def test_a_window_belongs_to_the_document_of_its_first_scored_token(prepared):
    some = with_windows(prepared, make_tokens(9, document=[0, 1, 1, 1, 1, 1, 4, 4, 7]))
    assert some.blocks.tolist() == [1, 1, 7]


def test_each_window_is_its_own_block_where_documents_are_unknown(prepared):
    assert with_windows(prepared, make_tokens(9)).blocks.tolist() == [0, 1, 2]


def test_loss_counts_the_tokens_and_bytes_that_are_scored(prepared):
    some = with_windows(prepared, make_tokens(9))  # token t has t + 1 bytes
    loss = some.loss(np.array([1.0, 2.0, 4.0]))
    assert some.num_tokens.tolist() == [4, 3, 1]
    assert (loss.total_nats, loss.num_tokens) == (7.0, 8)
    assert loss.num_bytes == sum(range(2, 10))


# ---- what stands in for a head


def test_zero_ablation_takes_no_calibration(prepared):
    assert prepare_ablation(prepared, "zero", rows_per_batch=2, seed=0) is None


def test_mean_ablation_takes_the_mean_of_z_over_the_calibration_windows(prepared):
    model, ids = prepared.loaded.model, prepared.calibration.ids
    assert len(prepared.calibration_windows) == 3
    outputs = [
        np.stack(numpy_gpt2(model, ids[window.start : window.stop - 1])[1])
        for window in prepared.calibration_windows
    ]
    mean = np.concatenate(outputs, axis=1).mean(axis=1)
    made = prepare_ablation(prepared, "mean", rows_per_batch=2, seed=0)
    assert isinstance(made, torch.Tensor)
    np.testing.assert_allclose(made, mean, atol=1e-6)


def test_resample_ablation_takes_each_calibration_window_in_an_order_of_the_seed(prepared):
    def donors(seed: int) -> tuple[Window, ...]:
        made = prepare_ablation(prepared, "resample", rows_per_batch=2, seed=seed)
        assert isinstance(made, Donors)
        assert made.ids is prepared.calibration.ids
        return made.windows

    assert donors(1) == donors(1)
    assert {frozenset(donors(seed)) for seed in range(9)} == {
        frozenset(prepared.calibration_windows)
    }
    assert len({donors(seed) for seed in range(9)}) > 1


def test_an_unknown_ablation_is_refused(prepared):
    with pytest.raises(ValueError, match="ablation 'half' is not one of zero, mean, resample"):
        prepare_ablation(prepared, "half", rows_per_batch=2, seed=0)


# ---- measuring


@pytest.fixture
def measured_units(monkeypatch) -> list[Unit]:
    """The units that went through the model, as they come."""
    units: list[Unit] = []
    measure = runs.measure

    def noting(model: Any, ids: Any, windows: Any, missing: Any, *rest: Any) -> Any:
        for unit, nats in measure(model, ids, windows, missing, *rest):
            units.append(unit)
            yield unit, nats

    monkeypatch.setattr(runs, "measure", noting)
    return units


def ignore(num_rows: int) -> None:
    pass


def lines_of(directory: Path) -> list[str]:
    return (directory / "measurements.jsonl").read_text().splitlines()


@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_losses_are_those_of_models_without_the_head(prepared, place, tmp_path, engine):
    heads, config = [Head(0, 1), Head(1, 3)], make_config(place, engine=engine)
    intact, ablated = measure_losses(prepared, heads, config, tmp_path, ignore)
    batch = window_batch(prepared.tokens.ids, prepared.windows)
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
    measure = runs.measure

    def noting(*arguments: Any) -> Any:
        engines.append(arguments[-1])
        return measure(*arguments)

    monkeypatch.setattr(runs, "measure", noting)
    config = make_config(place, engine=asked)
    measure_losses(prepared, ALL_HEADS, config, tmp_path, ignore)
    assert engines == [choose_engine(prepared, config.evaluation)] == [used]


def test_replay_of_an_unknown_architecture_is_refused_and_auto_falls_back_to_gating(prepared):
    other = replace(prepared, loaded=replace(prepared.loaded, model=tiny_model("bloom")))
    assert choose_engine(other, EvaluationConfig()) == "gating"
    with pytest.raises(ValueError, match=r"engine=replay does not know bloom models; use auto$"):
        choose_engine(other, EvaluationConfig(engine="replay"))


def test_what_is_stored_is_not_measured_again(prepared, place, tmp_path, measured_units):
    config = make_config(place)
    first = measure_losses(prepared, ALL_HEADS, config, tmp_path, ignore)
    assert len(measured_units) == 2 * (1 + 2)  # two blocks of windows: intact and two layers
    advanced: list[int] = []
    again = measure_losses(prepared, ALL_HEADS, config, tmp_path, advanced.append)
    assert len(measured_units) == len(lines_of(tmp_path)) == 6
    assert advanced == [num_rows(prepared, ALL_HEADS, config)] == [6 * (1 + 8)]
    for before, after in zip(first, again, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
@pytest.mark.parametrize("kept", [[0, 1], [5, 2], [3]])
def test_a_unit_has_the_same_numbers_whatever_was_measured_before(
    prepared, place, tmp_path, measured_units, ablation, kept
):
    config = make_config(place, ablation)
    measure_losses(prepared, ALL_HEADS, config, tmp_path, ignore)
    lines = lines_of(tmp_path)
    (tmp_path / "measurements.jsonl").write_text("".join(f"{lines[n]}\n" for n in kept))
    measured_units.clear()
    measure_losses(prepared, ALL_HEADS, config, tmp_path, ignore)
    assert len(measured_units) == 6 - len(kept)
    assert sorted(lines_of(tmp_path)) == sorted(lines)


def test_more_windows_are_added_to_those_that_are_stored(prepared, place, tmp_path, measured_units):
    few = replace(prepared, windows=prepared.windows[:4])
    measure_losses(few, ALL_HEADS, make_config(place), tmp_path, ignore)
    measured_units.clear()
    intact, _ = measure_losses(prepared, ALL_HEADS, make_config(place), tmp_path, ignore)
    assert {unit.windows for unit in measured_units} == {(4, 5)}
    assert len(intact) == 6


def test_another_ablation_is_measured_beside_the_first(prepared, place, tmp_path, measured_units):
    _, zero = measure_losses(prepared, ALL_HEADS, make_config(place), tmp_path, ignore)
    measured_units.clear()
    config = make_config(place, "mean")
    _, mean = measure_losses(prepared, ALL_HEADS, config, tmp_path, ignore)
    assert len(measured_units) == 6
    assert (zero != mean).all()


def test_progress_is_told_in_rows_and_adds_up(prepared, place, tmp_path):
    advanced: list[int] = []
    config = make_config(place)
    measure_losses(prepared, [Head(1, 0), Head(1, 2)], config, tmp_path, advanced.append)
    assert advanced == [0, 4, 8, 2, 4]
    assert sum(advanced) == num_rows(prepared, [Head(1, 0), Head(1, 2)], config)


# ---- what a measurement depends on

Change = Callable[[Prepared, RankHeadsConfig], Prepared | None]


def other_weights(prepared: Prepared, config: RankHeadsConfig) -> Prepared:
    return replace(prepared, loaded=replace(prepared.loaded, weights_hash="other"))


def other_protocol(**change: Any) -> Change:
    return lambda prepared, config: replace(prepared, protocol=replace(prepared.protocol, **change))


def other_calibration(prepared: Prepared, config: RankHeadsConfig) -> Prepared:
    return replace(prepared, calibration=replace(prepared.calibration, hash="other"))


def fewer_calibration_windows(prepared: Prepared, config: RankHeadsConfig) -> Prepared:
    return replace(prepared, calibration_windows=prepared.calibration_windows[:2])


def other_seed(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.seed = 7


def other_dtype(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.model.dtype = "float64"


def other_engine(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.evaluation.engine = "gating"


def other_thresholds(prepared: Prepared, config: RankHeadsConfig) -> None:
    config.evaluation.tolerance_nats = 0.02
    config.evaluation.resamples = 500


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
        before = measurement_context(prepared, make_config(place, ablation))
        config = make_config(place, ablation)
        changed = change(prepared, config) or prepared
        if measurement_context(changed, config) != before:
            changed_of.add(ablation)
    assert changed_of == depends


# ---- manifest


def manifest_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text())


def test_a_manifest_has_the_hashes_and_is_finished_when_the_run_is(prepared, place, tmp_path):
    keep_manifest(tmp_path, make_config(place), prepared, finished=False)
    started = manifest_in(tmp_path)
    assert started["weights_hash"] == prepared.loaded.weights_hash
    assert started["tokens_hash"] == prepared.tokens.hash
    assert started["calibration_hash"] == prepared.calibration.hash
    assert started["protocol"] == asdict(prepared.protocol)
    assert started["config"] == plain(make_config(place))
    assert started["finished_utc"] is None
    keep_manifest(tmp_path, make_config(place), prepared, finished=True)
    finished = manifest_in(tmp_path)
    assert finished["started_utc"] == started["started_utc"] <= finished["finished_utc"]


def test_a_run_that_goes_on_keeps_its_start(prepared, place, tmp_path):
    keep_manifest(tmp_path, make_config(place), prepared, finished=False)
    long_ago = "2020-02-03T04:05:06+00:00"
    changed = manifest_in(tmp_path) | {"started_utc": long_ago}
    (tmp_path / "manifest.json").write_text(json.dumps(changed))
    keep_manifest(tmp_path, make_config(place), prepared, finished=True)
    after = manifest_in(tmp_path)
    assert after["started_utc"] == long_ago
    assert datetime.fromisoformat(after["finished_utc"]) > datetime.fromisoformat(long_ago)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_weights, "model (weights_hash"),
        (lambda prepared, _: replace(prepared, tokens=make_tokens(9)), "text (tokens_hash"),
        (other_calibration, "calibration text (calibration_hash"),
    ],
)
def test_a_run_does_not_go_on_with_another_model_or_text(prepared, place, tmp_path, change, what):
    config = make_config(place)
    keep_manifest(tmp_path, config, prepared, finished=False)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(ValueError) as error:
        keep_manifest(tmp_path, config, change(prepared, config), finished=True)
    assert f"was measured with another {what}" in str(error.value)
    assert str(error.value).endswith("; start a new run") and "\n" not in str(error.value)
    assert (tmp_path / "manifest.json").read_bytes() == before
