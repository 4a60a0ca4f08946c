"""Replay gives the numbers of gating, on every architecture that it knows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhaprune.measure import replay as replay_module
from mhaprune.measure.leave_one_out import Donors, measure, plan
from mhaprune.measure.perplexity import row_nats, target_nats
from mhaprune.measure.replay import Roll, Unembedding, repeat_rows, replay
from mhaprune.model.architectures import REPLAYABLE, head_shape, replayable_blocks
from mhaprune.model.gating import captured_z
from mhaprune.model.heads import Head
from mhaprune.model.load import load_model
from mhaprune.text.sample import IGNORED, window_batch
from mhaprune.text.windows import make_windows
from tests.micro import micro_gpt2, tiny_model
from tests.subjects import subject_on

every_replayable = pytest.mark.parametrize("model_type", sorted(REPLAYABLE))
TOLERANCE_NATS_PER_TOKEN = 1e-5


def demo():
    places = dict.fromkeys(("hub_id", "revision", "path", "gguf_file"))
    return load_model("demo", **places, dtype="float32", device="cpu").model


def largest_difference(model, ids, windows, heads, ablation, windows_per_unit, rows_per_batch):
    """Largest difference between both engines in nats per token, over heads and windows."""
    units = plan(heads, range(len(windows)), windows_per_unit)
    replayed, gated = (
        dict(measure(subject_on(model, ids, windows, ablation, rows_per_batch, engine), units))
        for engine in ("replay", "gating")
    )
    assert replayed.keys() == gated.keys() == set(units)
    worst = 0.0
    for unit in units:
        tokens = torch.tensor([windows[number].num_scored for number in unit.windows])
        difference = (replayed[unit] - gated[unit]).abs() / tokens
        worst = max(worst, difference.max().item())
    return worst


def all_heads(model):
    shape = head_shape(model)
    return [Head(n, h) for n in range(shape.num_layers) for h in range(shape.num_heads)]


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_replay_equals_gating_for_any_shape_baseline_and_batch(model_type, data):
    model = tiny_model(model_type).float()
    shape = head_shape(model)
    length = data.draw(st.integers(2, 20), "context length")
    stride = data.draw(st.integers(1, length), "stride")
    num_tokens = data.draw(st.integers(length + 1, 3 * length + 2), "tokens")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    ids = torch.randint(0, 60, (num_tokens,), generator=generator)
    windows = make_windows(num_tokens, length, stride)[:5]
    heads = data.draw(st.sets(st.sampled_from(all_heads(model)), min_size=1), "heads")
    constants = torch.randn(shape.num_layers, shape.num_heads, shape.d_head, generator=generator)
    donors = Donors(ids.flip(0), tuple(make_windows(num_tokens, length, length)[:1]))
    ablation = data.draw(st.sampled_from([None, constants, donors]), "ablation")
    sizes = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 9)), "unit and batch")
    worst = largest_difference(model, ids, windows, sorted(heads), ablation, *sizes)
    assert worst < TOLERANCE_NATS_PER_TOKEN


@every_replayable
def test_replay_equals_gating_to_rounding_in_float64(model_type):
    model = tiny_model(model_type).double()
    ids = torch.randint(0, 60, (60,), generator=torch.Generator().manual_seed(0))
    windows = make_windows(60, 16, 12)
    assert largest_difference(model, ids, windows, all_heads(model), None, 2, 6) < 1e-12


def test_replay_equals_gating_on_the_micro_and_the_demo_model():
    micro = micro_gpt2(num_layers=2)
    ids = torch.tensor([0, 1, 2, 0, 2, 1, 0])
    assert (
        largest_difference(micro, ids, make_windows(7, 3, 3), all_heads(micro), None, 1, 2) < 1e-12
    )
    model = demo()
    ids = torch.randint(256, 1024, (513,), generator=torch.Generator().manual_seed(0))
    windows = make_windows(513, 256, 256)
    worst = largest_difference(model, ids, windows, all_heads(model)[::3], None, 2, 8)
    assert worst < TOLERANCE_NATS_PER_TOKEN


@every_replayable
def test_blocks_add_up_as_replay_assumes(model_type):
    """mid = resid + b_O + sum_h z_h W_O[h], and the block's output is mid + mlp(norm(mid))."""
    model = tiny_model(model_type).double()
    inputs = torch.arange(10)[None] % 7
    roll = Roll(model, inputs)
    block, entered = replayable_blocks(model)[0], roll.resid
    z, mid = roll.advance_through(0)
    contributions = torch.einsum(
        "rphd,hdm->rpm", z, block.output_weights(head_shape(model).num_heads)
    )
    bias = getattr(block.projection, "bias", None)
    expected = entered + contributions + (0 if bias is None else bias)
    torch.testing.assert_close(mid, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(roll.resid, mid + block.mlp(block.mlp_norm(mid)), rtol=0, atol=1e-12)
    roll.advance_through(1)
    final = model.base_model(inputs, use_cache=False).last_hidden_state
    torch.testing.assert_close(roll.advance_to_the_end(), final, rtol=0, atol=1e-12)
    with captured_z(model) as captured:
        model(inputs, use_cache=False)
    assert torch.equal(captured[0], z)


def test_replay_yields_what_was_asked_for_by_layer_and_last_the_intact_losses():
    model = tiny_model("gpt2").double()
    ids = torch.arange(12) % 7
    inputs, targets = window_batch(ids, make_windows(12, 6, 6))
    wanted = [({1: [2], 0: [3, 1]}, [0, 1]), ({None: (), 0: [0]}, [0, None]), ({None: ()}, [None])]
    for layers, order in wanted:
        found = dict(replay(model, inputs, targets, layers, None, 4))
        assert list(found) == order
        for layer, nats in found.items():
            assert nats.shape == (max(1, len(layers[layer])), len(inputs))
    torch.testing.assert_close(found[None][0], row_nats(model, inputs, targets))


def test_unembedding_in_tiles_is_the_loss_of_the_whole_logits(monkeypatch):
    monkeypatch.setitem(replay_module._TILES, "cpu", (3, 7))
    model = tiny_model("gpt2").float()
    ids = torch.randint(0, 60, (41,), generator=torch.Generator().manual_seed(1))
    inputs, targets = window_batch(ids, make_windows(41, 20, 7))
    assert (targets == IGNORED).any()
    logits = model(inputs, use_cache=False).logits
    unembedding = Unembedding(model)
    assert len(unembedding.tiles) == -(-model.config.vocab_size // 7)
    nats = unembedding.nats(Roll(model, inputs).advance_to_the_end(), targets)
    torch.testing.assert_close(nats, target_nats(logits, targets), rtol=0, atol=1e-4)
    torch.testing.assert_close(nats, row_nats(model, inputs, targets), rtol=0, atol=1e-4)


def test_only_what_has_a_row_for_each_window_is_repeated():
    rows, shared, vector = torch.arange(6.0).view(2, 3), torch.ones(1, 3), torch.ones(2)
    repeated = repeat_rows({"a": (rows, shared), "b": None, "c": vector}, num_rows=2, times=2)
    assert torch.equal(repeated["a"][0], torch.cat([rows, rows]))
    assert repeated["a"][1] is shared and repeated["b"] is None and repeated["c"] is vector


def test_an_architecture_that_replay_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"replay knows gpt2, llama, mistral, .*, not bloom"):
        replayable_blocks(tiny_model("bloom"))
    inputs = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="not bloom"):
        next(replay(tiny_model("bloom"), inputs, inputs, {0: [0]}, None, 1))
