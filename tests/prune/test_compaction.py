import copy
import functools
import itertools

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from mhaprune.model.architectures import head_shape
from mhaprune.model.gating import gate_heads
from mhaprune.model.heads import Head
from mhaprune.prune.compaction import COMPACTABLE, compact, kv_cache_bytes_per_token, make_dense
from mhaprune.prune.compaction import num_parameters as count
from tests.micro import micro_gpt2, tiny_model

# The tiny models have 2 layers of 4 heads; all but GPT-2's are in 2 KV groups of 2.
REMOVED = {
    "few": [Head(0, 3), Head(1, 0)],
    "layer": [Head(0, head) for head in range(4)],
    "group": [Head(1, 2), Head(1, 3)],
    "uneven": [Head(0, 0), Head(0, 1), Head(0, 2), Head(1, 1)],
    "all": [Head(layer, head) for layer in range(2) for head in range(4)],
}
every_model = pytest.mark.parametrize("model_type", COMPACTABLE)
every_selection = pytest.mark.parametrize("heads", REMOVED.values(), ids=REMOVED)

IDS = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(3))
PADDING = torch.ones_like(IDS)
PADDING[0, :3] = 0
PADDED = {"attention_mask": PADDING, "position_ids": (PADDING.cumsum(1) - 1).clamp(min=0)}


@functools.cache
def tiny(model_type, dtype=torch.float32):
    return tiny_model(model_type).to(dtype)


def constants(model, scale=1.0):
    shape = head_shape(model)
    generator = torch.Generator().manual_seed(5)
    return scale * torch.randn(
        shape.num_layers, shape.num_heads, shape.d_head, generator=generator, dtype=model.dtype
    )


def gated(model, heads, baseline):
    gate = torch.ones(2, 4)
    for head in heads:
        gate[head.layer, head.head] = 0
    return gate_heads(model, gate, baseline)


@torch.no_grad()
def logits(model, **more):
    return model(IDS, use_cache=False, **more).logits


@torch.no_grad()
def cached_logits(model, *steps):
    """Logits of the left-padded tokens, read in steps of so many by way of a cache; the cache."""
    parts, cache, first = [], DynamicCache(config=model.config), 0
    for stop in itertools.accumulate(steps):
        positions = PADDED["position_ids"][:, first:stop]
        inputs = {"attention_mask": PADDING[:, :stop], "position_ids": positions, "cache": cache}
        parts.append(model(IDS[:, first:stop], **inputs, use_cache=True).logits)
        first = stop
    return torch.cat(parts, 1), cache


# Eager attention takes the softmax in float32, whatever the model's dtype.
@every_model
@every_selection
@pytest.mark.parametrize(
    ("attention", "dtype", "scale", "atol"),
    [("sdpa", torch.float64, 1.0, 1e-10), ("eager", torch.float32, 0.0, 1e-5)],
    ids=["sdpa-float64-constants", "eager-float32-zero"],
)
def test_compact_and_gated_logits_are_the_same(model_type, heads, attention, dtype, scale, atol):
    model = tiny(model_type, dtype)
    model.set_attn_implementation(attention)
    baseline = constants(model) if scale else None
    small, real = compact(model, heads, baseline), PADDING.bool()
    assert small.config._attn_implementation == attention
    assert {parameter.dtype for parameter in small.parameters()} == {dtype}
    with gated(model, heads, baseline):
        expected, padded = logits(model), logits(model, **PADDED)
    torch.testing.assert_close(logits(small), expected, rtol=0, atol=atol)
    for found in (logits(small, **PADDED), cached_logits(small, 5, 1, 3)[0]):
        torch.testing.assert_close(found[real], padded[real], rtol=0, atol=atol)
    assert not torch.allclose(logits(model), expected, atol=1e-2)


@every_model
@every_selection
def test_dense_and_gated_logits_are_the_same(model_type, heads):
    model = tiny(model_type, torch.float64)
    baseline = None if model_type in ("mistral", "qwen2") else constants(model)
    with gated(model, heads, baseline):
        expected = logits(model)
    dense = make_dense(model, heads, baseline)
    assert type(dense) is type(model)
    torch.testing.assert_close(logits(dense), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_where_a_dense_model_has_no_place_for_a_constant_it_says_so(model_type):
    model = tiny(model_type)
    with pytest.raises(ValueError, match=f"{model_type} model has no output bias .* compact form"):
        make_dense(model, REMOVED["few"], constants(model))


def test_a_dense_llama_gets_biases_only_for_baselines_that_are_not_zero():
    model, heads = tiny_model("llama"), REMOVED["few"]
    zeros = constants(model, 0.0)
    assert count(make_dense(model, heads, zeros)) == count(model)
    dense = make_dense(model, heads, constants(model))
    assert (model.config.attention_bias, dense.config.attention_bias) == (False, True)
    # of q, k, v and o in two layers: 32, 16, 16 and 32
    assert count(dense) - count(model) == 2 * 96


def test_heads_of_other_architectures_can_be_zeroed_densely_but_not_compacted():
    model = tiny_model("gptj").double()
    heads = REMOVED["few"]
    with gated(model, heads, None):
        expected = logits(model)
    torch.testing.assert_close(logits(make_dense(model, heads)), expected, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"no output bias .* use the zero ablation"):
        make_dense(model, heads, constants(model))
    with pytest.raises(ValueError, match=r"'gptj'; can compact gpt2, llama, mistral, qwen2, qwen3"):
        compact(model, heads)
    with pytest.raises(ValueError, match="'gptj'"):
        kv_cache_bytes_per_token(model)


def attention_parameters(model_type, heads, groups, with_output_bias):
    """Parameters of one attention of a tiny model, by arithmetic."""
    d_model, d_head = 32, 16 if model_type == "qwen3" else 8
    if model_type == "gpt2":
        return 4 * heads * d_head * d_model + 3 * heads * d_head + d_model
    weights = 2 * (heads + groups) * d_head * d_model
    qkv_biases = (heads + 2 * groups) * d_head if model_type == "qwen2" else 0
    norms = 2 * d_head if model_type == "qwen3" else 0
    return weights + qkv_biases + norms + (d_model if with_output_bias else 0)


KEPT = {  # query heads and KV groups that each layer keeps
    "few": [(3, 2), (3, 2)],
    "layer": [(0, 0), (4, 2)],
    "group": [(4, 2), (2, 1)],
    "uneven": [(1, 1), (3, 2)],
    "all": [(0, 0), (0, 0)],
}


@every_model
@pytest.mark.parametrize("name", REMOVED)
def test_what_is_left_by_arithmetic(model_type, name):
    model = tiny(model_type)
    with_bias = name not in ("layer", "few")
    small = compact(model, REMOVED[name], constants(model, 1.0 if with_bias else 0.0))
    removed = [
        attention_parameters(model_type, 4, 2, False)
        - attention_parameters(model_type, heads, groups, with_bias)
        for heads, groups in KEPT[name]
    ]
    assert count(small) == count(model) - sum(removed)
    assert small.config.heads_per_layer == [heads for heads, _ in KEPT[name]]
    d_head = 16 if model_type == "qwen3" else 8
    cached = [heads if model_type == "gpt2" else groups for heads, groups in KEPT[name]]
    assert kv_cache_bytes_per_token(small) == sum(cached) * d_head * 2 * 4
    assert kv_cache_bytes_per_token(model) == (4 if model_type == "gpt2" else 2) * d_head * 16
    _, cache = cached_logits(small, 7, 2)
    shapes = [list(layer.keys.shape) for layer in cache.layers]
    assert shapes == [[2, number, 9, d_head] for number in cached]


def test_gpt2_small_loses_a_twelfth_of_a_layers_attention_with_each_head():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        small = compact(model, [Head(4, 11), Head(7, 0), Head(7, 1)])
    a_head = 4 * 64 * 768 + 3 * 64  # columns of q, k and v, a row of W_O; biases of q, k and v
    assert count(model) == 124_439_808
    assert count(small) == 124_439_808 - 3 * a_head
    assert kv_cache_bytes_per_token(model) == 12 * 12 * 2 * 64 * 4
    assert kv_cache_bytes_per_token(small) == (12 * 12 - 3) * 2 * 64 * 4


def test_a_constant_is_folded_as_computed_by_hand():
    model = micro_gpt2()  # head 1 of layer 0 has W_O rows B + C, C
    baseline = torch.zeros(1, 2, 2)
    baseline[0, 1] = torch.tensor([3.0, 5.0])
    b_and_c = torch.tensor([[1, -1, 1, -1], [1, -1, -1, 1]]).double()
    expected = 3 * b_and_c.sum(0) + 5 * b_and_c[1]
    for pruned in (compact, make_dense):
        attention = pruned(model, [Head(0, 1)], baseline).transformer.h[0].attn
        assert torch.equal(attention.c_proj.bias, expected)


@pytest.mark.parametrize("pruned", [compact, make_dense])
def test_the_model_is_left_as_it_was_and_nothing_is_shared_with_it(pruned):
    model = tiny_model("llama").requires_grad_(False)
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    random_state = torch.get_rng_state()
    small = pruned(model, REMOVED["few"], constants(model))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not small.training
    assert not any(parameter.requires_grad for parameter in small.parameters())
    for parameter in small.parameters():
        parameter.fill_(7.0)
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(before) == len(model.state_dict())


def test_the_unembedding_stays_tied():
    small = compact(tiny_model("gpt2"), REMOVED["few"])
    assert small.lm_head.weight is small.transformer.wte.weight


def test_heads_named_twice_are_removed_once_and_no_heads_change_nothing():
    model = tiny_model("qwen3")
    twice = make_dense(model, [Head(0, 1), Head(0, 1)], constants(model))
    once = make_dense(model, [Head(0, 1)], constants(model))
    assert torch.equal(logits(twice), logits(once))
    assert torch.equal(logits(compact(model, [])), logits(model))
    assert count(compact(model, [])) == count(model)


@pytest.mark.parametrize("pruned", [compact, make_dense])
def test_heads_and_baselines_that_do_not_fit_are_refused(pruned):
    model = tiny_model("gpt2")
    for head in (Head(2, 0), Head(0, 4)):
        with pytest.raises(ValueError, match=f"{head} does not exist: .* 2 layers of 4 heads"):
            pruned(model, [Head(0, 0), head])
    with pytest.raises(ValueError, match=r"expected a baseline of shape \[2, 4, 8\]"):
        pruned(model, [Head(0, 0)], torch.zeros(2, 4, 7))


def test_cross_attention_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, add_cross_attention=True))
    with pytest.raises(ValueError, match="without cross-attention"):
        compact(model, [Head(0, 0)])


class Quantizer:
    """Stands for that of a GGUF file, which marks the model though its weights are floats."""

    def remove_quantization_config(self, model):
        del model.hf_quantizer, model.config.quantization_config


def test_the_mark_of_a_quantized_file_goes_as_it_would_keep_the_model_from_being_saved():
    model = tiny_model("llama")
    model.hf_quantizer, model.config.quantization_config = Quantizer(), {"quant_method": "gguf"}
    for pruned in (compact, make_dense):
        small = pruned(model, REMOVED["few"])
        assert getattr(small, "hf_quantizer", None) is None
        assert "quantization_config" not in small.config.to_dict()
    assert model.config.quantization_config == {"quant_method": "gguf"}


@pytest.mark.parametrize("pruned", [compact, make_dense])
def test_weights_that_are_still_quantized_are_refused(pruned):
    model = tiny_model("llama").requires_grad_(False)
    projection = model.model.layers[0].self_attn.o_proj
    projection.weight.data = projection.weight.data.to(torch.int8)
    with pytest.raises(ValueError, match="expected weights in floating point"):
        pruned(model, REMOVED["few"])
