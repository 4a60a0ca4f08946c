"""Tiny models, tokenizers and runs made on the fly, for tests: random weights, as GPT-2."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from mhaprune.measure.measurer import Losses
from mhaprune.measure.progress import Progress, View
from mhaprune.measure.subject import Subject
from mhaprune.model.heads import Head
from mhaprune.run import measuring
from mhaprune.run.config import (
    AblationConfig,
    DatasetConfig,
    EvaluationConfig,
    MeasureConfig,
    ModelConfig,
    RankHeadsConfig,
    TrackerConfig,
)
from mhaprune.run.measuring import make_subject, with_ablation
from mhaprune.run.prepare import Prepared
from mhaprune.text.stories import story_texts
from mhaprune.text.tokens import Tokens

END = "<|endoftext|>"
TRAINING_TEXT = "the cat sat on the mat because it was tired and the mat was soft"


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be tokenized, and bos and eos are both `<|endoftext|>`, id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=64
    )


def tiny_gpt2(
    *,
    vocab_size: int = 300,
    n_layer: int = 2,
    n_head: int = 4,
    n_embd: int = 32,
    n_positions: int = 64,
    seed: int = 0,
) -> GPT2LMHeadModel:
    """GPT-2 with random float32 weights from `seed`, in eval mode; torch's seed is left alone."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        n_positions=n_positions,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


def make_place(directory: Path) -> Path:
    """Fill a directory with a tiny model and 20 stories, one a line."""
    tiny_gpt2().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    (directory / "stories.txt").write_text("\n".join(story_texts(5, 20)))
    return directory


def make_config(place: Path, ablation: str = "zero", **evaluation: Any) -> RankHeadsConfig:
    """Rank the heads of the place's model on 6 windows of 16 tokens of its stories."""
    sizes: dict[str, Any] = {"context_length": 16, "max_windows": 6, "calibration_windows": 3}
    return RankHeadsConfig(
        ModelConfig("local", path=str(place / "model"), device="cpu"),
        DatasetConfig("text", "text", path=str(place / "stories.txt"), document_start="^"),
        EvaluationConfig(**sizes | evaluation),
        AblationConfig(ablation),
        TrackerConfig("none"),
    )


def make_tokens(num_tokens: int, document: list[int] | None = None) -> Tokens:
    """Tokens 0, 1, 2 ... of 1, 2, 3 ... bytes."""
    ids = torch.arange(num_tokens)
    document_of = torch.tensor(document) if document else torch.zeros_like(ids)
    return Tokens(ids=ids, num_bytes=ids + 1, document=document_of, hash="hash")


def other_weights(prepared: Prepared, config: RankHeadsConfig) -> Prepared:
    """The same run of another model, by its hash."""
    return replace(prepared, loaded=replace(prepared.loaded, weights_hash="other"))


def other_calibration(prepared: Prepared, config: RankHeadsConfig) -> Prepared:
    """The same run with another calibration text, by its hash."""
    return replace(
        prepared,
        calibration=replace(
            prepared.calibration, tokens=replace(prepared.calibration.tokens, hash="other")
        ),
    )


class Bar:
    """A view of progress that notes what was done, how much there was in all, and what was said."""

    def __init__(self) -> None:
        self.amounts: list[int] = []
        self.totals: list[int] = []
        self.heads: list[int] = []
        self.said: list[str] = []
        self.completed = 0

    def show(self, progress: Progress) -> None:
        self.amounts.append(progress.rows_done - self.completed)
        self.completed = progress.rows_done
        total = progress.rows_done + progress.rows_left
        if self.totals[-1:] != [total]:
            self.totals.append(total)
        if self.heads[-1:] != [progress.heads_done]:
            self.heads.append(progress.heads_done)

    def say(self, line: str) -> None:
        self.said.append(line)


def subject_of(
    prepared: Prepared, heads: Sequence[Head], config: MeasureConfig, view: View | None = None
) -> Subject:
    """The subject as programs make it, against the ablation that is configured."""
    progress = Progress([view] if view else [])
    subject = make_subject(prepared, heads, config)
    return with_ablation(subject, prepared.calibration, config.ablation, progress)


def measure_losses(
    prepared: Prepared,
    heads: Sequence[Head],
    config: MeasureConfig,
    directory: Path,
    view: View | None = None,
    shard: tuple[int, int] | None = None,
) -> Losses:
    """Measure as programs do."""
    progress = Progress([view] if view else [])
    subject = subject_of(prepared, heads, config, view)
    with measuring.measuring(subject, prepared, config, directory, progress) as measurer:
        return measuring.measure_losses(measurer, config.evaluation, shard)
