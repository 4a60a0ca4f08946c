"""What every program does before its question: load, cut the texts into samples, say what runs."""

import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

import torch

from mhaprune.model.architectures import head_shape
from mhaprune.model.gating import check_gating
from mhaprune.model.heads import Head, select_heads
from mhaprune.model.load import LoadedModel, load_model, max_context
from mhaprune.run.config import (
    DatasetConfig,
    EvaluationConfig,
    HeadAtlasConfig,
    MeasureConfig,
    ReadingConfig,
    plain,
)
from mhaprune.run.manifest import manifest
from mhaprune.tables.files import write_json
from mhaprune.text.load import load_hub_text, load_text_file
from mhaprune.text.sample import Protocol, Sample
from mhaprune.text.stories import CALIBRATION_SEED, EVALUATION_SEED, story_texts
from mhaprune.text.tokens import Text, Tokens, check_disjoint, split_calibration, tokenize
from mhaprune.text.windows import Window, make_windows

LONGEST_DEFAULT_CONTEXT = 1024


@dataclass(frozen=True)
class Prepared:
    """A model, the sample it is measured on, and one for calibration with full windows only."""

    loaded: LoadedModel
    sample: Sample
    calibration: Sample

    @property
    def protocol(self) -> Protocol:
        """How the sample was cut."""
        assert self.sample.protocol is not None
        return self.sample.protocol


def prepare(config: ReadingConfig) -> Prepared:
    """Load the model and the texts and cut them into windows.

    Raises ValueError for whatever does not fit: text and context, calibration and evaluation text,
    an architecture that gating does not reach.
    """
    loaded = load_model(**plain(config.model))
    dataset, first_token = config.dataset, config.evaluation.first_token
    evaluation, calibration = tokenize_texts(loaded, dataset)
    check_disjoint(calibration, evaluation)
    length, stride = window_sizes(config.evaluation, max_context(loaded.model))
    windows = cut_windows(config.evaluation, length, stride, evaluation)
    check_gating(loaded.model, evaluation.ids[: min(8, length)])
    protocol = Protocol(
        text=dataset.path or dataset.name,
        joiner=str(loaded.tokenizer.eos_token) if dataset.separator == "eos" else dataset.joiner,
        bos=dataset.bos,
        context_length=length,
        stride=stride,
        first_token=first_token,
        num_windows=len(windows),
        num_scored=sum(window.num_scored for window in windows),
        num_tokens=len(evaluation.ids),
        tokens_hash=evaluation.hash,
    )
    donors = full_windows(calibration, length)[: config.evaluation.calibration_windows]
    return Prepared(loaded, Sample(evaluation, windows, protocol), Sample(calibration, donors))


def choose_heads(prepared: Prepared, config: MeasureConfig) -> list[Head]:
    """Return the heads that the configuration selects."""
    shape = head_shape(prepared.loaded.model)
    return select_heads(config.heads, shape.num_layers, shape.num_heads)


def tokenize_texts(loaded: LoadedModel, dataset: DatasetConfig) -> tuple[Tokens, Tokens]:
    """Return the tokens of the evaluation text and of the calibration text."""
    separator = cast(Literal["none", "eos"], dataset.separator)
    evaluation, calibration = (
        tokenize(loaded.tokenizer, text, bos=dataset.bos, separator=separator)
        for text in load_texts(dataset)
    )
    return evaluation, calibration


def load_texts(config: DatasetConfig) -> tuple[Text, Text]:
    """Return the evaluation text and the calibration text: another text, or the first one's end."""
    if config.source == "stories":
        evaluation, calibration = (
            Text(story_texts(seed, config.num_stories), "", f"stories, seed {seed}")
            for seed in (EVALUATION_SEED, CALIBRATION_SEED)
        )
        return evaluation, calibration

    def load(place: str) -> Text:
        if config.source == "text":
            return load_text_file(place, document_start=config.document_start)
        assert config.hub_id is not None
        return load_hub_text(
            config.hub_id,
            config.config_name,
            place,
            config.column,
            config.revision,
            config.joiner,
            document_start=config.document_start,
        )

    places = {
        "text": (config.path, config.calibration_path),
        "hub": (config.split, config.calibration_split),
    }
    place, calibration_place = places[config.source]
    assert place is not None
    if calibration_place is None:
        return split_calibration(load(place), config.calibration_fraction)
    return load(place), load(calibration_place)


def window_sizes(config: EvaluationConfig, limit: int | None) -> tuple[int, int]:
    """Return context length and stride; ValueError where the model cannot read so much at once."""
    most = limit or LONGEST_DEFAULT_CONTEXT
    length = config.context_length or min(most, LONGEST_DEFAULT_CONTEXT)
    if limit is not None and length > limit:
        raise ValueError(
            f"evaluation.context_length={length} is above the model's context of {limit} tokens"
        )
    stride = config.stride or length
    if stride > length:
        raise ValueError(
            f"evaluation.stride={stride} is above the context length of {length}; tokens in "
            f"between would never be scored"
        )
    return length, stride


def cut_windows(
    config: EvaluationConfig, length: int, stride: int, tokens: Tokens
) -> tuple[Window, ...]:
    """Return the windows of the evaluation text that are measured."""
    first_token = cast(Literal["scored", "unscored"], config.first_token)
    windows = make_windows(len(tokens.ids), length, stride, first_token=first_token)
    return tuple(windows[: config.max_windows])


def full_windows(calibration: Tokens, length: int) -> tuple[Window, ...]:
    """Return the calibration text's windows that do not overlap, each of full length."""
    try:
        windows = make_windows(len(calibration.ids), length, length)
    except ValueError as error:
        raise ValueError(f"calibration text: {error}") from None
    return tuple(window for window in windows if window.num_scored == length)


def keep_manifest(
    directory: Path,
    config: MeasureConfig | HeadAtlasConfig,
    prepared: Prepared,
    *,
    finished: bool,
) -> None:
    """Write manifest.json; a run that goes on keeps its start and must have its model and text.

    Raises ValueError if the manifest that is there is of another model or text.
    """
    path = directory / "manifest.json"
    hashes = {
        "weights_hash": prepared.loaded.weights_hash,
        "tokens_hash": prepared.sample.tokens.hash,
        "calibration_hash": prepared.calibration.tokens.hash,
    }
    started, command = datetime.now(UTC), sys.argv
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for what, (name, value) in zip(
            ("model", "text", "calibration text"), hashes.items(), strict=True
        ):
            if before[name] != value:
                raise ValueError(
                    f"{directory} was measured with another {what} ({name} "
                    f"{before[name][:12]}, now {value[:12]}); start a new run"
                )
        started, command = datetime.fromisoformat(before["started_utc"]), before["command"]
    shape = head_shape(prepared.loaded.model)
    entries = manifest(
        config=plain(config),
        command=command,
        seed=config.seed,
        device=str(prepared.loaded.model.device),
        dtype=config.model.dtype,
        protocol=asdict(prepared.protocol),
        protocol_line=str(prepared.protocol),
        num_threads=torch.get_num_threads(),
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        started=started,
        finished=datetime.now(UTC) if finished else None,
        **hashes,
    )
    write_json(path, entries)
