"""Acceptance of the weights that ship with the package: the demo model does what it is for."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from mhaprune.model.heads import select_heads
from mhaprune.model.load import DEMO_MODEL_DIR, LoadedModel, load_model, max_context
from mhaprune.roles.patterns import induction_score, previous_token_score, repeated_random_tokens
from mhaprune.run.config import (
    AblationConfig,
    DatasetConfig,
    EvaluationConfig,
    ModelConfig,
    RankHeadsConfig,
    TrackerConfig,
)
from mhaprune.run.measuring import make_subject
from mhaprune.run.prepare import prepare
from mhaprune.run.ranking import rank
from mhaprune.text.stories import CALIBRATION_SEED, EVALUATION_SEED, Story, stories
from scripts.train_demo_model import LAST_PHASE, PHASES, TOKENIZER_SEED
from tests.tiny import measure_losses

HELD_OUT_SEED = 77
CONTEXT, PERIOD = 256, 64


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    nowhere = {"hub_id": None, "revision": None, "path": None, "gguf_file": None}
    return load_model("demo", **nowhere, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def held_out() -> list[Story]:
    return list(itertools.islice(stories(HELD_OUT_SEED), 400))


def in_ids(demo: LoadedModel, some: Sequence[Story]) -> list[list[Any]]:
    """Each story between end-of-text tokens."""
    end = demo.tokenizer.eos_token_id
    encoded: Any = demo.tokenizer([story.text for story in some], add_special_tokens=False)
    return [[end, *ids, end] for ids in encoded["input_ids"]]


@pytest.fixture(scope="module")
def held_out_rows(demo: LoadedModel, held_out: list[Story]) -> Tensor:
    """8 rows of a whole context: stories one after another, each after one end-of-text token."""
    ids = torch.tensor([token for story in in_ids(demo, held_out) for token in story[:-1]])
    return ids[: 8 * CONTEXT].view(8, CONTEXT)


def patterns(model: Any, rows: Tensor) -> Tensor:
    """Attention, `layer row head query key`."""
    model.set_attn_implementation("eager")
    try:
        return torch.stack(model(rows, output_attentions=True).attentions)
    finally:
        model.set_attn_implementation("sdpa")


def test_the_files_take_at_most_8_megabytes():
    files = [path for path in DEMO_MODEL_DIR.iterdir() if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) <= 8_000_000


def test_it_is_a_gpt2_of_4_layers_of_8_heads_and_a_context_of_256(demo):
    assert type(demo.model) is GPT2LMHeadModel
    assert (demo.model.config.n_layer, demo.model.config.n_head) == (4, 8)
    assert max_context(demo.model) == CONTEXT


def test_it_was_trained_on_other_stories_than_it_is_tested_and_demonstrated_on():
    trained_on = {TOKENIZER_SEED, LAST_PHASE.seed, *(phase.seed for phase in PHASES)}
    assert not trained_on & {HELD_OUT_SEED, EVALUATION_SEED, CALIBRATION_SEED}


def test_it_has_an_induction_head(demo, held_out_rows):
    end = demo.tokenizer.eos_token_id
    choices = held_out_rows.unique()
    generator = torch.Generator().manual_seed(0)
    rows = repeated_random_tokens(choices[choices != end], end, 16, PERIOD, generator)
    assert induction_score(patterns(demo.model, rows), PERIOD).max() >= 0.5


def test_it_has_a_previous_token_head(demo, held_out_rows):
    assert previous_token_score(patterns(demo.model, held_out_rows)).max() >= 0.5


def test_its_loss_on_narratives_is_within_a_tenth_of_their_entropy(demo, held_out):
    """What made a narrative is known, so no model can lose less on average than -ln p."""
    narratives = [story for story in held_out if story.log_probability is not None]
    rows = [torch.tensor(ids) for ids in in_ids(demo, narratives)]
    assert len(rows) >= 100 and max(map(len, rows)) <= CONTEXT + 1
    nats = 0.0
    for ids in rows:
        logits = demo.model(ids[None, :-1]).logits[0]
        nats += F.cross_entropy(logits, ids[1:], reduction="sum").item()
    entropy_nats = -sum(story.log_probability or 0.0 for story in narratives)
    assert 0.95 <= nats / entropy_nats <= 1.1


def test_it_has_critical_and_redundant_heads(tmp_path: Path):
    """Of 32 heads at least 3 are critical and 8 redundant, at the default thresholds.

    32 of the text's 227 windows: they say 5 and 9, as do 40 and 48 windows and other bootstrap
    seeds; all 227 say 5 and 11. With 32 the interval of the 3rd critical head is 0.05 nats above
    its threshold, that of the 8th redundant one 0.0008 nats within its own.
    """
    config = RankHeadsConfig(
        ModelConfig("demo", device="cpu"),
        DatasetConfig("stories", "stories", separator="eos"),
        EvaluationConfig(max_windows=32),
        AblationConfig("zero"),
        TrackerConfig("none"),
    )
    prepared, heads = prepare(config), select_heads(["L*H*"], 4, 8)
    losses = measure_losses(prepared, heads, config, tmp_path)
    ranking = rank(make_subject(prepared, heads, config), losses, config.evaluation)
    counts = Counter(row.verdict for row in ranking.rows)
    assert counts["critical"] >= 3
    assert counts["redundant"] >= 8
