"""Attention written out is the attention of transformers and of torch; the toy is as by hand."""

import math
from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from mhaprune.model.architectures import output_projections, output_weights
from mhaprune.model.attention import Attended, MultiHeadAttention, from_gpt2, layer_attention
from mhaprune.model.attention_toy import EMBEDDING, WORDS, toy_attention, toy_embeddings, toy_layer
from mhaprune.model.gating import captured_z, gate_heads
from mhaprune.model.heads import Head
from mhaprune.prune.compaction import compact
from tests.micro import double_model

IDS = torch.tensor([[5, 60, 5, 17, 0, 33, 2], [9, 9, 1, 40, 41, 42, 43]])
MATRICES = ("W_Q", "W_K", "W_V", "W_O")
BIASES = ("b_Q", "b_K", "b_V", "b_O")


def sharp_gpt2(**entries: Any) -> Any:
    """A float64 GPT-2 of 2 layers and 4 heads whose weights are large enough for sharp patterns."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **entries)).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3, generator=generator)
    return model


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_layer(num_heads: int = 4, d_model: int = 12, seed: int = 0) -> MultiHeadAttention:
    shapes = [(d_model, d_model)] * 4 + [(d_model,)] * 4
    tensors = [random_tensor(*shape, seed=seed + n) / 2 for n, shape in enumerate(shapes)]
    return MultiHeadAttention(num_heads, **dict(zip(MATRICES + BIASES, tensors, strict=True)))


@torch.no_grad()
def layer_outputs(model: Any) -> tuple[list[Tensor], Any]:
    """What each attention module puts out, and what the model returns."""
    outputs: list[Tensor] = []
    hooks = [
        block.attn.register_forward_hook(lambda _module, _inputs, y: outputs.append(y[0]))
        for block in model.transformer.h
    ]
    eager = model.config._attn_implementation == "eager"
    result = model(IDS, use_cache=False, output_attentions=eager)
    for hook in hooks:
        hook.remove()
    return outputs, result


def assert_close(found: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("by_layer", [True, False])
def test_each_layer_is_that_of_transformers(implementation, scaled, by_layer):
    flags = {"scale_attn_weights": scaled, "scale_attn_by_inverse_layer_idx": by_layer}
    model = sharp_gpt2(**flags, attn_implementation=implementation)
    found = layer_attention(model, IDS)
    expected, _ = layer_outputs(model)
    assert len(found) == len(expected) == 2
    for layer in range(2):
        assert_close(found[layer].output, expected[layer])


def test_patterns_are_those_of_eager_attention():
    model = sharp_gpt2(attn_implementation="eager")
    found = layer_attention(model, IDS)
    _, result = layer_outputs(model)
    for layer in range(2):
        assert result.attentions[layer].shape == (2, 4, 7, 7)
        assert_close(found[layer].pattern, result.attentions[layer])


def test_z_is_what_enters_the_output_projection():
    model = sharp_gpt2()
    with captured_z(model) as expected, torch.no_grad():
        model(IDS, use_cache=False)
    for found, z in zip(layer_attention(model, IDS), expected, strict=True):
        assert_close(found.z, z)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 12])
def test_plain_matrices_give_torchs_causal_attention(num_heads):
    layer, x = random_layer(num_heads), random_tensor(2, 5, 12, seed=9)
    q, k, v = (
        F.linear(x, w.T, b).view(2, 5, num_heads, 12 // num_heads).transpose(1, 2)
        for w, b in ((layer.W_Q, layer.b_Q), (layer.W_K, layer.b_K), (layer.W_V, layer.b_V))
    )
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    found = layer.attend(x)
    assert_close(found.z, z)
    assert_close(found.output, F.linear(z.reshape(2, 5, 12), layer.W_O.T, layer.b_O))


def test_each_row_of_a_pattern_sums_to_1_and_ends_at_its_query():
    pattern = random_layer().attend(random_tensor(2, 5, 12)).pattern
    assert_close(pattern.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert torch.all(pattern[..., later] == 0)
    assert torch.all(pattern[..., ~later] > 0)


def test_contributions_and_bias_sum_to_the_output():
    layer = random_layer()
    found = layer.attend(random_tensor(2, 5, 12))
    assert layer.b_O is not None
    assert_close(found.contributions.sum(2) + layer.b_O, found.output, atol=1e-12)


def test_a_contribution_is_z_times_the_rows_of_w_o_that_read_its_head():
    layer = random_layer(num_heads=4, d_model=12)
    found = layer.attend(random_tensor(2, 5, 12))
    for head in range(4):
        rows = layer.W_O[3 * head : 3 * head + 3]
        assert_close(found.contributions[:, :, head], found.z[:, :, head] @ rows, atol=1e-12)


def test_biases_left_out_are_biases_of_zero():
    layer, x = random_layer(), random_tensor(2, 5, 12, seed=9)
    without = replace(layer, **dict.fromkeys(BIASES))
    zero = replace(layer, **dict.fromkeys(BIASES, torch.zeros(12, dtype=torch.float64)))
    assert torch.equal(without.attend(x).output, zero.attend(x).output)


def test_a_later_token_changes_nothing_earlier():
    layer, x = random_layer(), random_tensor(2, 8, 12)
    changed = x.clone()
    changed[:, 5:] = random_tensor(2, 3, 12, seed=7)
    before, after = layer.attend(x), layer.attend(changed)
    assert torch.equal(before.output[:, :5], after.output[:, :5])
    assert torch.equal(before.contributions[:, :5], after.contributions[:, :5])
    assert torch.equal(before.pattern[:, :, :5], after.pattern[:, :, :5])
    assert not torch.isclose(before.output[:, 5:], after.output[:, 5:]).any()


def test_heads_that_move_together_with_their_rows_of_w_o_change_nothing():
    layer, x = random_layer(num_heads=4, d_model=12), random_tensor(2, 5, 12, seed=9)
    order = torch.tensor([2, 0, 3, 1])
    columns = (3 * order[:, None] + torch.arange(3)).flatten()
    inward = {name: getattr(layer, name)[..., columns] for name in MATRICES[:3] + BIASES[:3]}
    moved = replace(layer, **inward, W_O=layer.W_O[columns])
    before, after = layer.attend(x), moved.attend(x)
    assert_close(after.output, before.output, atol=1e-12)
    assert_close(after.pattern, before.pattern[:, order], atol=1e-12)
    assert_close(after.contributions, before.contributions[:, :, order], atol=1e-12)


@pytest.mark.parametrize("with_baseline", [False, True])
def test_ablating_a_head_is_taking_its_contribution_out(with_baseline):
    model = double_model("gpt2")
    baseline = random_tensor(2, 4, 8) if with_baseline else torch.zeros(2, 4, 8).double()
    intact = layer_attention(model, IDS)
    for layer, projection in enumerate(output_projections(model)):
        weights = output_weights(projection, 4).detach()
        for head in range(4):
            gate = torch.ones(2, 4)
            gate[layer, head] = 0
            with gate_heads(model, gate, baseline):
                gated = layer_outputs(model)[0][layer]
            restored = baseline[layer, head] @ weights[head]
            ablated = intact[layer].output - intact[layer].contributions[:, :, head] + restored
            assert_close(ablated, gated)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 12])
def test_a_layer_has_as_many_parameters_whatever_its_number_of_heads(num_heads):
    layer = random_layer(num_heads, d_model=12)
    assert layer.num_parameters == 4 * 12**2 + 4 * 12
    assert replace(layer, **dict.fromkeys(BIASES)).num_parameters == 4 * 12**2


def test_attention_is_just_under_a_quarter_of_gpt2_small():
    with torch.device("meta"):
        model: Any = GPT2LMHeadModel(GPT2Config())
    counts = [from_gpt2(block.attn).num_parameters for block in model.transformer.h]
    assert counts == [2_359_296 + 3_072] * 12
    assert sum(counts) == 28_348_416
    assert model.num_parameters() == 124_439_808
    assert 0.22 < sum(counts) / model.num_parameters() < 0.25
    assert from_gpt2(model.transformer.h[0].attn).d_head == 64


def test_gradients_flow_to_the_weights_of_the_model():
    model = sharp_gpt2()
    module = model.transformer.h[0].attn
    from_gpt2(module).attend(random_tensor(1, 3, 32)).output.sum().backward()
    assert_close(module.c_proj.bias.grad, torch.full((32,), 3.0, dtype=torch.float64))
    assert module.c_attn.weight.grad.abs().min() > 0


def test_the_model_has_no_hooks_left_even_after_an_error():
    model = sharp_gpt2()
    layer_attention(model, IDS)
    with pytest.raises(IndexError):
        layer_attention(model, torch.tensor([[64]]))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def as_users_run_it():
    """Without the shape checks of the tests, which would raise first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("as_users_run_it")
def test_shapes_that_do_not_fit_are_told_in_one_line():
    layer: Any = random_layer(num_heads=4, d_model=12)
    with pytest.raises(ValueError, match=r"expected W_K of shape \[12, 12\].*got \[12, 8\]"):
        replace(layer, W_K=layer.W_K[:, :8])
    with pytest.raises(ValueError, match=r"expected W_Q of shape \[12, 12\].*got \[12, 36\]"):
        replace(layer, W_Q=layer.W_Q.repeat(1, 3))
    with pytest.raises(ValueError, match=r"expected b_O of shape \[12\].*got \[11\]"):
        replace(layer, b_O=layer.b_O[:11])
    for num_heads in (5, 0, -1):
        with pytest.raises(ValueError, match=f"divides d_model 12, got {num_heads}"):
            replace(layer, num_heads=num_heads)
    with pytest.raises(ValueError, match=r"expected input of shape \[batch, pos, 12\], got \[2, 5"):
        layer.attend(random_tensor(2, 5, 13))
    with pytest.raises(
        ValueError, match=r"expected input of shape \[batch, pos, 12\], got \[5, 12"
    ):
        layer.attend(random_tensor(5, 12))


def test_what_is_not_gpt2_self_attention_is_refused():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "add_cross_attention": True}
    crossed: Any = GPT2LMHeadModel(GPT2Config(**sizes))
    with pytest.raises(ValueError, match="got the cross attention of GPT2Attention"):
        from_gpt2(crossed.transformer.h[0].crossattention)
    assert from_gpt2(crossed.transformer.h[0].attn).num_heads == 2
    with pytest.raises(ValueError, match=r"model\.transformer\.h\[i\]\.attn, got Linear"):
        from_gpt2(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="expected a model of type gpt2, got llama"):
        layer_attention(double_model("llama"), IDS)
    with pytest.raises(ValueError, match=r"got training mode: call model\.eval\(\)"):
        layer_attention(sharp_gpt2().train(), IDS)


@pytest.mark.usefixtures("as_users_run_it")
def test_a_layer_that_lost_heads_is_refused():
    small: Any = compact(sharp_gpt2(), [Head(0, 1)])
    with pytest.raises(ValueError, match=r"expected W_Q of shape \[32, 32\].*got \[32, 24\]"):
        from_gpt2(small.transformer.h[0].attn)


# The toy, by hand: a query that meets its key scores (2*2 + 2*2) / sqrt(2), all others 0.

MEETS = math.exp(8 / math.sqrt(2))
CAT, THE, MAT, IT, TIRED = 1, 4, 5, 7, 9


@pytest.fixture(scope="module")
def toy() -> Attended:
    return toy_attention()


def test_the_toys_sentence_is_numbered_from_0():
    named = {CAT: "cat", THE: "the", MAT: "mat", IT: "it", TIRED: "tired"}
    assert {number: WORDS[number] for number in named} == named
    assert len(WORDS) == 10
    assert EMBEDDING["the"] != EMBEDDING["The"]


def test_head_0_sends_the_last_the_to_the_cat(toy):
    row = toy.pattern[0, 0, THE].tolist()
    assert row[CAT] == pytest.approx(MEETS / (MEETS + 4), abs=1e-12)
    assert row[CAT] > 0.9
    others = [weight for key, weight in enumerate(row[: THE + 1]) if key != CAT]
    assert others == pytest.approx([1 / (MEETS + 4)] * 4, abs=1e-12)
    assert row[MAT] == 0  # of the same embedding as the cat, but not yet said


def test_head_0_splits_it_between_the_two_nouns(toy):
    row = toy.pattern[0, 0, IT].tolist()
    share = MEETS / (2 * MEETS + 6)
    assert [row[CAT], row[MAT]] == pytest.approx([share, share], abs=1e-12)
    assert row[0] == pytest.approx(1 / (2 * MEETS + 6), abs=1e-12)


@pytest.mark.parametrize("query", [1, 2, 3, 5, 6, 8, 9])
def test_head_0_spreads_evenly_where_a_word_seeks_nothing(toy, query):
    row = toy.pattern[0, 0, query].tolist()
    assert row == pytest.approx([1 / (query + 1)] * (query + 1) + [0] * (9 - query), abs=1e-12)


@pytest.mark.parametrize("query", range(10))
def test_head_1_sends_every_word_back_to_the_first(toy, query):
    row = toy.pattern[0, 1, query].tolist()
    share = MEETS / (MEETS + query)
    assert row[0] == pytest.approx(share, abs=1e-12)
    assert row[0] > 0.9
    rest = [1 / (MEETS + query)] * query + [0] * (9 - query)
    assert row[1:] == pytest.approx(rest, abs=1e-12)


def test_the_toys_output_at_the_is_the_sum_worked_out_in_its_docstring(toy):
    noun, first = MEETS / (MEETS + 4), 1 / (MEETS + 4)
    back = MEETS / (MEETS + 4)
    contributions = toy.contributions[0, THE].tolist()
    assert contributions[0] == pytest.approx([0, noun, first, 0], abs=1e-12)
    assert contributions[1] == pytest.approx([0, 0, back, 1], abs=1e-12)
    assert toy.output[0, THE].tolist() == pytest.approx([0, noun, first + back, 1], abs=1e-12)
    assert toy.z[0, THE].flatten().tolist() == pytest.approx([noun, first, back, 1], abs=1e-12)


def test_the_toys_pattern_follows_from_plain_floats_at_every_position(toy):
    """Scores, exponentials and shares word by word, from the toy's numbers, without tensors."""
    layer, words = toy_layer(), toy_embeddings()[0].tolist()
    w_q, w_k = layer.W_Q.tolist(), layer.W_K.tolist()

    def mapped(word: list[float], matrix: list[list[float]], head: int) -> list[float]:
        columns = (2 * head, 2 * head + 1)
        return [sum(word[row] * matrix[row][column] for row in range(4)) for column in columns]

    for head in range(2):
        for query, word in enumerate(words):
            q = mapped(word, w_q, head)
            keys = [mapped(earlier, w_k, head) for earlier in words[: query + 1]]
            weights = [math.exp((q[0] * k[0] + q[1] * k[1]) / math.sqrt(2)) for k in keys]
            expected = [weight / sum(weights) for weight in weights] + [0] * (9 - query)
            assert toy.pattern[0, head, query].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_toy_has_64_parameters():
    assert toy_layer().num_parameters == 4 * 4**2
