"""What transformers does with a pruned model: caches, windows, generation, patterns, configs."""

import ast
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from mhaprune.model.gating import gate_heads
from mhaprune.model.heads import Head
from mhaprune.prune import modeling_pruned
from mhaprune.prune.compaction import COMPACTABLE, compact
from mhaprune.prune.modeling_pruned import PRUNED, PrunedGPT2Config, PrunedLlamaConfig
from tests.micro import tiny_model

HEADLESS = [Head(0, head) for head in range(4)] + [Head(1, 1)]  # layer 1 has uneven groups
EVERY_HEAD = [Head(layer, head) for layer in range(2) for head in range(4)]
every_model = pytest.mark.parametrize("model_type", COMPACTABLE)

IDS = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(7))
PADDING = torch.ones_like(IDS)
PADDING[0, :3] = 0
GENERATION = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def both(model_type, heads, dtype=torch.float64):
    """The model, gates that are closed for these heads, and the model without them."""
    model, gate = tiny_model(model_type).to(dtype), torch.ones(2, 4)
    for head in heads:
        gate[head.layer, head.head] = 0
    return model, gate, compact(model, heads)


@torch.no_grad()
def read(model, *sizes, **more):
    """Logits of IDS, read by way of one cache in steps of so many tokens."""
    cache, parts = DynamicCache(config=model.config), []
    for ids in IDS.split(sizes, dim=1):
        parts.append(model(ids, cache=cache, use_cache=True, **more).logits)
    return torch.cat(parts, 1)


@every_model
@pytest.mark.parametrize("heads", [HEADLESS, EVERY_HEAD], ids=["headless", "every head"])
@pytest.mark.parametrize(
    "more", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str
)
def test_generates_the_tokens_that_the_gated_model_generates(model_type, heads, more):
    model, gate, small = both(model_type, heads)
    with gate_heads(model, gate):
        options = GENERATION | {"num_beams": more.get("num_beams", 1)}
        expected = model.generate(IDS, attention_mask=PADDING, **options)
    found = small.generate(IDS, attention_mask=PADDING, **GENERATION, **more)
    assert found.shape == (2, 17)
    assert torch.equal(found, expected)


@every_model
def test_positions_count_on_where_no_layer_has_heads(model_type):
    _, _, small = both(model_type, EVERY_HEAD)
    with torch.no_grad():
        output = small(IDS[:, :5], use_cache=True)
        assert [list(layer.keys.shape[:3]) for layer in output.cache.layers] == [[2, 0, 5]] * 2
        assert output.cache.get_seq_length() == 5
        last = small(IDS[:, 5:], cache=output.cache, use_cache=True)
        assert last.cache.get_seq_length() == 9
        expected = small(IDS, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(last.logits, expected, rtol=0, atol=1e-10)
    last.cache.crop(-2)
    assert last.cache.get_seq_length() == 7
    last.cache.reset()
    assert last.cache.get_seq_length() == 0


@pytest.mark.parametrize("made_by_hand", [True, False])
def test_a_cache_that_grows_its_layers_as_they_come_will_do(made_by_hand):
    _, _, small = both("gpt2", HEADLESS)
    cache = DynamicCache() if made_by_hand else None
    with torch.no_grad():
        cache = small(IDS[:, :5], cache=cache, use_cache=True).cache
        found = small(IDS[:, 5:], cache=cache, use_cache=True).logits
        expected = small(IDS, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [HEADLESS, EVERY_HEAD, [Head(1, 0)]], ids=len)
def test_sliding_windows_stay(model_type, heads):
    wide = tiny_model(model_type).double()
    entries = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    config = wide.config.to_dict() | entries
    config.pop("layer_types", None)
    model = type(wide)(type(wide.config)(**config)).double().eval()
    model.load_state_dict(wide.state_dict())
    assert not torch.allclose(model(IDS).logits, wide(IDS).logits, atol=1e-3)
    gate = torch.ones(2, 4)
    for head in heads:
        gate[head.layer, head.head] = 0
    with gate_heads(model, gate), torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    small = compact(model, heads)
    with torch.no_grad():
        found = small(IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(read(small, 3, 4, 1, 1), expected, rtol=0, atol=1e-10)


@every_model
def test_eager_attention_returns_the_patterns_of_the_heads_that_are_left(model_type):
    model, gate, small = both(model_type, HEADLESS, torch.float32)
    for each in (model, small):
        each.set_attn_implementation("eager")
    with gate_heads(model, gate), torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
        found = small(IDS, output_attentions=True).attentions
    assert found[0].shape == (2, 0, 9, 9)
    torch.testing.assert_close(found[1], expected[1][:, [0, 2, 3]], rtol=0, atol=1e-6)


@every_model
def test_gradients_reach_every_parameter_that_is_left(model_type):
    _, _, small = both(model_type, [Head(0, 0), Head(0, 1)])
    small.requires_grad_(True).train()(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad.any() for parameter in small.parameters())


@every_model
def test_a_config_that_says_nothing_keeps_every_head(model_type):
    model = tiny_model(model_type)
    entries = model.config.to_dict()
    entries.pop("model_type")
    config_class, model_class = PRUNED[model_type]
    config = config_class(**entries)
    assert config.heads_per_layer == [4, 4]
    same = model_class(config).eval()
    same.load_state_dict(model.state_dict())
    assert torch.equal(same(IDS).logits, model(IDS).logits)


@every_model
def test_a_new_model_can_be_made_from_a_config_alone(model_type):
    _, _, small = both(model_type, HEADLESS)
    made = AutoModelForCausalLM.from_config(small.config)
    assert type(made) is type(small) is PRUNED[model_type][1]
    shapes = {name: weight.shape for name, weight in small.state_dict().items()}
    assert {name: weight.shape for name, weight in made.state_dict().items()} == shapes
    assert all(weight.isfinite().all() for weight in made.parameters())


def test_the_auto_classes_know_the_configs():
    for model_type, (config_class, _) in PRUNED.items():
        assert type(AutoConfig.for_model(f"mhaprune_{model_type}")) is config_class


def test_configs_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match=r"heads_per_layer for 12 layers, got \[3, 4\]"):
        PrunedGPT2Config(heads_per_layer=[3, 4])
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=r"add up to heads_per_layer \[3, 4\], got \[\[2, 2\]"):
        PrunedLlamaConfig(heads_per_layer=[3, 4], **sizes)
    groups = [[1, 2], [2, 2]]
    config = PrunedLlamaConfig(heads_per_layer=[3, 4], query_heads_per_group=groups, **sizes)
    assert config.to_diff_dict()["query_heads_per_group"] == groups


def test_the_file_stands_alone():
    tree = ast.parse(Path(modeling_pruned.__file__).read_text(encoding="utf-8"))
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert {name.split(".")[0] for name in imported} == {
        "typing",
        "torch",
        "transformers",
    }
