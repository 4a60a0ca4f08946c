"""Decoders whose layers have unequal numbers of attention heads, for Hugging Face transformers.

This one file is saved beside the weights of a pruned model and is all that it takes to load them.
In its config `num_attention_heads` is the number before pruning, which sets the size of a head, and

    heads_per_layer        query heads that each layer keeps
    query_heads_per_group  of each KV group that a layer keeps, how many query heads (grouped-query)
    output_bias            whether the output projections have a bias, for what replaces lost heads

Importing the file registers its models, so that AutoModelForCausalLM loads them.
"""

# pyright: reportIncompatibleMethodOverride=false
# (transformers' own attention modules differ in their signatures, and from release to release)

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.pytorch_utils import Conv1D

OLD_CACHE = "past_key_values"  # what earlier releases of transformers 5 call the argument `cache`
Attended = tuple[torch.Tensor, torch.Tensor | None]  # what is added to the stream, the patterns


class HeadlessCacheLayer(DynamicLayer):
    """Keys and values `[batch, 0, pos, d_head]`, which still count positions.

    DynamicLayer takes them for those of a layer that was never used, and positions would start
    over at each step of cached generation.
    """

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]


def without_heads(attention: Any, hidden: torch.Tensor, cache: Cache | None) -> Attended:
    """What a layer without heads does: cache nothing for each position, add the folded bias."""
    keys = empty = hidden.new_zeros(hidden.shape[0], 0, hidden.shape[1], attention.head_dim)
    if cache is not None:
        keys, _ = cache.update(empty, empty, attention.layer_idx)
        if type(cache.layers[attention.layer_idx]) is DynamicLayer:
            cache.layers[attention.layer_idx] = HeadlessCacheLayer()
            cache.layers[attention.layer_idx].update(keys, keys)
    output = attention.c_proj if isinstance(attention, GPT2Attention) else attention.o_proj
    added = torch.zeros_like(hidden) if output.bias is None else output.bias.expand_as(hidden)
    eager = attention.config._attn_implementation == "eager"
    return added, empty @ keys.transpose(2, 3) if eager else None


def resize(layer: nn.Linear | Conv1D, inputs: int, outputs: int) -> None:
    """Cut a layer to fewer inputs and outputs, in place; which of its weights stay is arbitrary."""
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = inputs, outputs
        weight = layer.weight[:outputs, :inputs]
    else:
        layer.nx, layer.nf = inputs, outputs
        weight = layer.weight[:inputs, :outputs]
    layer.weight = nn.Parameter(weight.detach().clone())
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[:outputs].detach().clone())


def complete_heads(config: Any) -> None:
    """Set `heads_per_layer` to every head if it is not in the config; check it if it is."""
    num_layers = config.num_hidden_layers
    kept = getattr(config, "heads_per_layer", [config.num_attention_heads] * num_layers)
    if len(kept) != num_layers:
        raise ValueError(f"expected heads_per_layer for {num_layers} layers, got {kept}")
    config.heads_per_layer = kept


def complete_groups(config: Any) -> None:
    """Do the same for the other entries of a grouped-query model."""
    complete_heads(config)
    config.output_bias = getattr(config, "output_bias", False)
    share = config.num_attention_heads // config.num_key_value_heads
    every_group = [[share] * config.num_key_value_heads for _ in range(config.num_hidden_layers)]
    kept = getattr(config, "query_heads_per_group", every_group)
    if [sum(groups) for groups in kept] != config.heads_per_layer:
        raise ValueError(
            f"expected query_heads_per_group to add up to heads_per_layer "
            f"{config.heads_per_layer}, got {kept}"
        )
    config.query_heads_per_group = kept


class PrunedGPT2Config(GPT2Config):
    model_type = "mhaprune_gpt2"

    def __init__(self, **entries: Any):
        super().__init__(**entries)
        complete_heads(self)


class PrunedLlamaConfig(LlamaConfig):
    model_type = "mhaprune_llama"

    def __init__(self, **entries: Any):
        super().__init__(**entries)
        complete_groups(self)


class PrunedMistralConfig(MistralConfig):
    model_type = "mhaprune_mistral"

    def __init__(self, **entries: Any):
        super().__init__(**entries)
        complete_groups(self)


class PrunedQwen2Config(Qwen2Config):
    model_type = "mhaprune_qwen2"

    def __init__(self, **entries: Any):
        super().__init__(**entries)
        complete_groups(self)


class PrunedQwen3Config(Qwen3Config):
    model_type = "mhaprune_qwen3"

    def __init__(self, **entries: Any):
        super().__init__(**entries)
        complete_groups(self)


class PrunedGPT2Attention(GPT2Attention):
    """GPT-2's attention with the layer's own number of heads."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx=layer_idx)
        self.num_heads = config.heads_per_layer[layer_idx]
        self.split_size = self.num_heads * self.head_dim
        resize(self.c_attn, self.embed_dim, 3 * self.split_size)
        resize(self.c_proj, self.split_size, self.embed_dim)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_heads:
            return super().forward(hidden_states, *args, **kwargs)
        return without_heads(self, hidden_states, kwargs.get("cache", kwargs.get(OLD_CACHE)))


class GroupedAttention(nn.Module):
    """What the attention of a pruned grouped-query model does in place of the original's."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        attention: Any = self
        groups = config.query_heads_per_group[layer_idx]
        self.num_heads = sum(groups)
        width, kv_width = (number * attention.head_dim for number in (self.num_heads, len(groups)))
        resize(attention.q_proj, config.hidden_size, width)
        resize(attention.k_proj, config.hidden_size, kv_width)
        resize(attention.v_proj, config.hidden_size, kv_width)
        resize(attention.o_proj, width, config.hidden_size)
        if config.output_bias and attention.o_proj.bias is None:
            attention.o_proj.bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.num_key_value_groups = groups[0] if len(set(groups)) == 1 else 1
        uneven = enumerate(groups if len(set(groups)) > 1 else [])
        self.group_of_head = [group for group, heads in uneven for _ in range(heads)]
        if not hasattr(self, "sliding_window"):
            self.sliding_window = getattr(config, "sliding_window", None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Attended:
        own: Any = self
        old_cache = kwargs.pop(OLD_CACHE, None)
        cache = kwargs.pop("cache", old_cache)
        if not self.num_heads:
            return without_heads(self, hidden_states, cache)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = own.q_norm(query), own.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, own.layer_idx)
        if self.group_of_head:
            key, value = key[:, self.group_of_head], value[:, self.group_of_head]
        implementation = own.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get(implementation, eager_attention_forward)
        dropout = own.attention_dropout if self.training else 0.0
        options = {"scaling": own.scaling, "sliding_window": self.sliding_window, **kwargs}
        z, patterns = attend(self, query, key, value, attention_mask, dropout=dropout, **options)
        return own.o_proj(z.flatten(-2)), patterns


class PrunedLlamaAttention(GroupedAttention, LlamaAttention): ...


class PrunedMistralAttention(GroupedAttention, MistralAttention): ...


class PrunedQwen2Attention(GroupedAttention, Qwen2Attention): ...


class PrunedQwen3Attention(GroupedAttention, Qwen3Attention): ...


class PrunedGPT2LMHeadModel(GPT2LMHeadModel):
    config_class = PrunedGPT2Config

    def __init__(self, config: PrunedGPT2Config):
        super().__init__(config)
        for layer, block in enumerate(self.transformer.h):
            block.attn = PrunedGPT2Attention(config, layer)
        self.post_init()


class GroupedDecoder(PreTrainedModel):
    """A grouped-query model built as the original is, its attention then replaced."""

    attention_class: type[GroupedAttention]

    def __init__(self, config: Any):
        super().__init__(config)
        for layer, block in enumerate(self.get_submodule("model.layers").children()):
            block.self_attn = self.attention_class(config, layer)
        self.post_init()


class PrunedLlamaForCausalLM(GroupedDecoder, LlamaForCausalLM):
    config_class = PrunedLlamaConfig
    attention_class = PrunedLlamaAttention


class PrunedMistralForCausalLM(GroupedDecoder, MistralForCausalLM):
    config_class = PrunedMistralConfig
    attention_class = PrunedMistralAttention


class PrunedQwen2ForCausalLM(GroupedDecoder, Qwen2ForCausalLM):
    config_class = PrunedQwen2Config
    attention_class = PrunedQwen2Attention


class PrunedQwen3ForCausalLM(GroupedDecoder, Qwen3ForCausalLM):
    config_class = PrunedQwen3Config
    attention_class = PrunedQwen3Attention


# The model_type before pruning -> config and model after it.
PRUNED: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "gpt2": (PrunedGPT2Config, PrunedGPT2LMHeadModel),
    "llama": (PrunedLlamaConfig, PrunedLlamaForCausalLM),
    "mistral": (PrunedMistralConfig, PrunedMistralForCausalLM),
    "qwen2": (PrunedQwen2Config, PrunedQwen2ForCausalLM),
    "qwen3": (PrunedQwen3Config, PrunedQwen3ForCausalLM),
}


def register() -> None:
    """Let the Auto classes load pruned models, and let save_pretrained copy this file."""
    for config, model in PRUNED.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
        config.register_for_auto_class()
        model.register_for_auto_class("AutoModelForCausalLM")


register()
