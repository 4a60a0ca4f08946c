"""GPT-2 from the hub has its published perplexity and heads; without the hub a run says so soon."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from mhaprune.measure.perplexity import sample_loss
from mhaprune.model.load import LoadedModel, load_model
from mhaprune.roles.patterns import previous_token_score
from mhaprune.run.config import CONF_DIR, RankHeadsConfig, plain, validate
from mhaprune.run.prepare import Prepared, prepare
from mhaprune.text import hub
from tests.tiny import measure_losses

PROGRAM = Path(__file__).parents[2] / "experiments" / "rank_heads.py"
SENTENCE = "The cat sat on the mat because it was tired"
CAT, IT = 1, 7  # positions in it

pytestmark = pytest.mark.hub


@pytest.fixture(scope="module")
def config() -> RankHeadsConfig:
    choices = ["model=gpt2", "dataset=wikitext2", "evaluation=published"]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return validate(compose("rank_heads", choices), RankHeadsConfig)


def skip_if_out_of_reach(error: ValueError) -> None:
    if "nor within reach" in str(error):
        pytest.skip(str(error).partition("; where there is a network")[0])


@pytest.fixture(scope="module")
def gpt2(config: RankHeadsConfig) -> LoadedModel:
    try:
        return load_model(**plain(config.model))
    except ValueError as error:
        skip_if_out_of_reach(error)
        raise


@pytest.fixture(scope="module")
def prepared(config: RankHeadsConfig, gpt2: LoadedModel) -> Prepared:
    try:
        return prepare(config)
    except ValueError as error:
        skip_if_out_of_reach(error)
        raise


@pytest.fixture(scope="module")
def layer_4(gpt2: LoadedModel) -> Tensor:
    """The sentence's attention in layer 4, `head query key`."""
    ids = torch.tensor([gpt2.tokenizer(SENTENCE)["input_ids"]], device=gpt2.model.device)
    words = gpt2.tokenizer.convert_ids_to_tokens(ids[0].tolist())
    assert words == SENTENCE.replace(" ", " Ġ").split()  # Ġ is how GPT-2 writes a leading space
    gpt2.model.set_attn_implementation("eager")
    try:
        return gpt2.model(ids, output_attentions=True).attentions[4][0].cpu()
    finally:
        gpt2.model.set_attn_implementation("sdpa")


def test_wikitext2_has_its_287644_tokens_and_gpt2_its_perplexity_of_29_94(
    config, prepared, tmp_path
):
    assert len(prepared.sample.tokens.ids) == 287_644
    losses = measure_losses(prepared, [], config, tmp_path)
    loss = sample_loss(prepared.sample, losses.intact_nats)
    assert loss.num_tokens == 287_363  # 281 windows leave their first token out
    assert loss.perplexity == pytest.approx(29.94, abs=0.01)


def test_head_4_11_attends_to_the_previous_token_at_every_position(layer_4):
    assert layer_4[11].diagonal(offset=-1).min() > 0.99
    assert previous_token_score(layer_4[None, None])[0].argmax() == 11


def test_head_4_3_sends_it_to_the_cat(layer_4):
    earlier = layer_4[3, IT, 1:IT]  # but the first token, on which heads park
    assert 1 + earlier.argmax() == CAT


def test_head_4_7_gives_about_half_to_the_current_token(layer_4):
    assert 0.3 < layer_4[7].diagonal()[1:].mean() < 0.7


def test_most_other_heads_of_layer_4_park_on_the_first_token(layer_4):
    to_first = layer_4[:, 1:, 0].mean(1)
    assert (to_first > 0.5).sum() >= 5


def test_an_uncached_model_without_the_hub_is_one_line_within_seconds(tmp_path):
    if hub._hub_problem() is None:
        pytest.skip("the hub is within reach")
    cache = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "cache" / "hub")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "model=gpt2", "tracker=none"],
        cwd=tmp_path,
        env=os.environ | cache,
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - started < 20  # most of it imports; the hub's own calls hang for 23-47
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: model openai-community/gpt2 at revision 607a30d7")
    for part in (cache["HF_HUB_CACHE"], "`hf download openai-community/gpt2", "`make demo`"):
        assert part in line
