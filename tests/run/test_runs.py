"""A run loads what it is told to, cuts it into windows, and says what it was."""

import json
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhaprune.measure.perplexity import sample_loss
from mhaprune.run import prepare as runs
from mhaprune.run.config import DatasetConfig, EvaluationConfig, RankHeadsConfig, plain
from mhaprune.run.prepare import (
    Prepared,
    cut_windows,
    full_windows,
    keep_manifest,
    load_texts,
    prepare,
    window_sizes,
)
from mhaprune.text.sample import Sample
from mhaprune.text.stories import CALIBRATION_SEED, EVALUATION_SEED, story_texts
from mhaprune.text.tokens import Text, Tokens
from mhaprune.text.windows import Window
from tests.tiny import make_config, make_place, make_tokens, other_calibration, other_weights


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def prepared(place: Path) -> Prepared:
    return prepare(make_config(place))


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
    assert protocol.num_tokens == len(prepared.sample.tokens.ids) > 1000
    assert protocol.tokens_hash == prepared.sample.tokens.hash


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


def with_windows(tokens: Tokens) -> Sample:
    return Sample(tokens, WINDOWS)


def test_a_window_belongs_to_the_document_of_its_first_scored_token():
    some = with_windows(make_tokens(9, document=[0, 1, 1, 1, 1, 1, 4, 4, 7]))
    assert some.blocks.tolist() == [1, 1, 7]


def test_each_window_is_its_own_block_where_documents_are_unknown():
    assert with_windows(make_tokens(9)).blocks.tolist() == [0, 1, 2]


def test_loss_counts_the_tokens_and_bytes_that_are_scored():
    some = with_windows(make_tokens(9))  # token t has t + 1 bytes
    loss = sample_loss(some, np.array([1.0, 2.0, 4.0]))
    assert some.num_tokens.tolist() == [4, 3, 1]
    assert (loss.total_nats, loss.num_tokens) == (7.0, 8)
    assert loss.num_bytes == sum(range(2, 10))


# ---- manifest


def manifest_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text())


def test_a_manifest_has_the_hashes_and_is_finished_when_the_run_is(prepared, place, tmp_path):
    keep_manifest(tmp_path, make_config(place), prepared, finished=False)
    started = manifest_in(tmp_path)
    assert started["weights_hash"] == prepared.loaded.weights_hash
    assert started["tokens_hash"] == prepared.sample.tokens.hash
    assert started["calibration_hash"] == prepared.calibration.tokens.hash
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


def other_text(prepared: Prepared, config: RankHeadsConfig) -> Prepared:
    """The same run of another text, by its hash."""
    return replace(prepared, sample=replace(prepared.sample, tokens=make_tokens(9)))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_weights, "model (weights_hash"),
        (other_text, "text (tokens_hash"),
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
