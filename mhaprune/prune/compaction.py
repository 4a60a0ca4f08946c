"""Remove heads for good: what a gate of 0 does while a model is measured, done to its weights.

A head whose output z is a constant b adds `b W_O[h]` to the residual stream at every position, so
heads that are ablated by a constant leave nothing but a bias behind:

    bias = sum over removed heads h of  baseline[h] @ W_O[h]

`compact` takes the heads' rows and columns out of the projections; `make_dense` keeps the model's
shape, for whoever can only load that. Both compute what the gated model computes, up to rounding.
"""

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mhaprune.model.architectures import (
    OUTPUT_PROJECTIONS,
    head_shape,
    output_projections,
    output_weights,
)
from mhaprune.model.heads import Head
from mhaprune.prune.modeling_pruned import PRUNED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

COMPACTABLE = tuple(sorted(PRUNED))
TAKES_BIAS = ("llama", "qwen3")  # their config can give the projections biases that they lack


def compact(
    model: "PreTrainedModel",
    heads: Iterable[Head],
    baseline: Float[Tensor, "layer head d_head"] | None = None,
) -> "PreTrainedModel":
    """Return a new model without these heads, each layer only as wide as the heads that it keeps.

    A KV group goes when all of its query heads have. `baseline` is what replaced each removed
    head's z, None for zero. The model given is unchanged. Raises ValueError for heads that do not
    exist, a baseline of another shape, quantized weights, and an architecture not COMPACTABLE.
    """
    model_type = model.config.model_type
    if model_type not in PRUNED or getattr(model.config, "add_cross_attention", False):
        raise ValueError(
            f"cannot compact a model of type {model_type!r}; can compact "
            f"{', '.join(COMPACTABLE)} without cross-attention"
        )
    removed = set(heads)
    biases = _folded_biases(model, removed, baseline)
    shape = head_shape(model)
    kept = [
        [head for head in range(shape.num_heads) if Head(layer, head) not in removed]
        for layer in range(shape.num_layers)
    ]
    with torch.device("meta"):  # shapes only, and no draw from the random generator
        compacted: Any = PRUNED[model_type][1](_pruned_config(model, kept, biases is not None))
    compacted.load_state_dict(_kept_weights(model, kept, biases), assign=True)
    compacted.tie_weights()
    for name, buffer in model.named_buffers():  # rotary frequencies are in no state dict
        module, _, attribute = name.rpartition(".")
        compacted.get_submodule(module)._buffers[attribute] = buffer.clone()
    compacted.generation_config = copy.deepcopy(model.generation_config)
    compacted.requires_grad_(any(parameter.requires_grad for parameter in model.parameters()))
    return compacted.train(model.training)


@torch.no_grad()
def make_dense(
    model: "PreTrainedModel",
    heads: Iterable[Head],
    baseline: Float[Tensor, "layer head d_head"] | None = None,
) -> "PreTrainedModel":
    """Return a copy of the model, of the same class and shape, in which these heads do nothing.

    Their rows of W_O are zero and their baselines are folded into its bias. Llama and Qwen3, which
    may have no such bias, get one by `attention_bias` in their config; the biases of q, k and v
    that come with it are zero. Raises ValueError for heads that do not exist, a baseline of another
    shape, quantized weights, and where the architecture has no place for a baseline but zero.
    """
    removed = set(heads)
    biases = _folded_biases(model, removed, baseline)
    dense, num_heads = copy.deepcopy(model), head_shape(model).num_heads
    if (quantizer := getattr(dense, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(dense)  # the weights are floats: they can be saved
    projections = output_projections(dense)
    for head in removed:
        output_weights(projections[head.layer], num_heads)[head.head].zero_()
    if biases is not None:
        _ensure_biases(dense)
        for projection, bias in zip(projections, biases, strict=True):
            projection.get_parameter("bias").add_(bias)
    return dense


def num_parameters(model: nn.Module) -> int:
    """Count the model's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def kv_cache_bytes_per_token(model: "PreTrainedModel") -> int:
    """Return by how many bytes each token grows the KV cache of a COMPACTABLE or compacted model.

    Keys and values of every layer, in the model's dtype. A layer with a sliding window stops
    growing at the window's length. Raises ValueError for other architectures.
    """
    if model.config.model_type.removeprefix("mhaprune_") not in PRUNED:
        raise ValueError(
            f"cannot say what a model of type {model.config.model_type!r} caches; can for "
            f"{', '.join(COMPACTABLE)}, compacted or not"
        )
    numbers = 0
    for attention in _attentions(model).values():
        if hasattr(attention, "c_attn"):  # q, k and v side by side
            numbers += attention.get_parameter("c_attn.weight").shape[1] * 2 // 3
        else:
            numbers += attention.get_parameter("k_proj.weight").shape[0]
            numbers += attention.get_parameter("v_proj.weight").shape[0]
    return numbers * model.dtype.itemsize


@torch.no_grad()
def _folded_biases(
    model: "PreTrainedModel", removed: set[Head], baseline: Float[Tensor, "..."] | None
) -> list[Float[Tensor, "d_model"]] | None:
    """Return for each layer what its removed heads add to the stream; None where that is zero.

    Raises ValueError for what does not fit: quantized weights, heads that do not exist, a baseline
    of another shape.
    """
    shape, projections = head_shape(model), output_projections(model)
    if not all(
        projection.get_parameter("weight").is_floating_point() for projection in projections
    ):
        raise ValueError("expected weights in floating point; dequantize the model first")
    expected = [shape.num_layers, shape.num_heads, shape.d_head]
    exists = {Head(*pair) for pair in itertools.product(*map(range, expected[:2]))}
    if absent := removed - exists:
        raise ValueError(
            f"{min(absent)} does not exist: this model has {shape.num_layers} layers of "
            f"{shape.num_heads} heads, numbered from 0"
        )
    if baseline is not None and list(baseline.shape) != expected:
        raise ValueError(
            f"expected a baseline of shape {expected} (layer, head, d_head), "
            f"got {list(baseline.shape)}"
        )
    if baseline is None or not any(baseline[head.layer, head.head].any() for head in removed):
        return None
    biases = []
    for layer, projection in enumerate(projections):
        rows = output_weights(projection, shape.num_heads)
        bias = torch.zeros(rows.shape[-1], dtype=torch.float64)
        for head in sorted(head.head for head in removed if head.layer == layer):
            bias += baseline[layer, head].cpu().double() @ rows[head].cpu().double()
        biases.append(bias.to(rows))
    return biases


def _group_sizes(model: "PreTrainedModel", kept: Sequence[int]) -> list[int]:
    """How many of one layer's kept query heads each of the model's KV groups has."""
    num_groups = model.config.num_key_value_heads
    share = model.config.num_attention_heads // num_groups
    return [sum(head // share == group for head in kept) for group in range(num_groups)]


def _pruned_config(
    model: "PreTrainedModel", kept: Sequence[Sequence[int]], output_bias: bool
) -> "PreTrainedConfig":
    """Return the model's config and, in it, which heads each layer keeps."""
    entries = model.config.to_dict()
    for key in ("model_type", "architectures", "auto_map", "quantization_config"):
        entries.pop(key, None)
    entries["heads_per_layer"] = [len(heads) for heads in kept]
    if model.config.model_type != "gpt2":
        entries["query_heads_per_group"] = [
            [number for number in _group_sizes(model, heads) if number] for heads in kept
        ]
        entries["output_bias"] = output_bias
    config = PRUNED[model.config.model_type][0](**entries)
    config._attn_implementation = model.config._attn_implementation
    config.dtype = model.dtype
    return config


@torch.no_grad()
def _kept_weights(
    model: "PreTrainedModel",
    kept: Sequence[Sequence[int]],
    biases: Sequence[Float[Tensor, "d_model"]] | None,
) -> dict[str, Tensor]:
    """Return the state dict of the model without the rows and columns of the other heads."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    output_projection = OUTPUT_PROJECTIONS[model.config.model_type][1].rpartition(".")[2]
    for layer, (path, attention) in enumerate(_attentions(model).items()):
        for name, (outputs, inputs) in _kept_numbers(model, kept[layer]).items():
            module: Any = attention.get_submodule(name)
            cut = _outputs_first(module)[outputs][:, inputs]
            cut = cut if isinstance(module, nn.Linear) else cut.T
            weights[f"{path}.{name}.weight"] = cut.clone(memory_format=torch.contiguous_format)
            if module.bias is not None:
                weights[f"{path}.{name}.bias"] = module.bias[outputs].clone()
        if biases is not None:
            name = f"{path}.{output_projection}.bias"
            weights[name] = biases[layer] + weights.get(name, 0)
    return weights


def _kept_numbers(
    model: "PreTrainedModel", kept: Sequence[int]
) -> dict[str, tuple[Tensor | slice, Tensor | slice]]:
    """Return, for each projection of a layer that keeps these heads, which (outputs, inputs) stay.

    Head h is made of the numbers from `h d_head` to `(h + 1) d_head`, in W_O's input and in q's
    output; a KV group likewise in the outputs of k and v.
    """
    shape, everything = head_shape(model), slice(None)

    def numbers(blocks: Sequence[int]) -> Int[Tensor, "number"]:
        starts = shape.d_head * torch.tensor(blocks, dtype=torch.long)
        return (starts[:, None] + torch.arange(shape.d_head)).flatten()

    queries = numbers(kept)
    if model.config.model_type == "gpt2":
        width = shape.num_heads * shape.d_head
        q_k_and_v = torch.cat([queries, queries + width, queries + 2 * width])
        return {"c_attn": (q_k_and_v, everything), "c_proj": (everything, queries)}
    groups = numbers([group for group, size in enumerate(_group_sizes(model, kept)) if size])
    return {
        "q_proj": (queries, everything),
        "k_proj": (groups, everything),
        "v_proj": (groups, everything),
        "o_proj": (everything, queries),
    }


def _ensure_biases(model: "PreTrainedModel") -> None:
    """Give output projections that have no bias one of zeros, in place, or raise ValueError."""
    projections = output_projections(model)
    if all(projection.bias is not None for projection in projections):
        return
    if model.config.model_type not in TAKES_BIAS:
        instead = "compact form" if model.config.model_type in COMPACTABLE else "zero ablation"
        raise ValueError(
            f"a dense {model.config.model_type} model has no output bias to hold a baseline that "
            f"is not zero; use the {instead}"
        )
    model.config.attention_bias = True
    for attention in _attentions(model).values():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear: Any = attention.get_submodule(name)
            zeros = linear.weight.new_zeros(linear.out_features)
            linear.bias = nn.Parameter(zeros, requires_grad=linear.weight.requires_grad)


def _attentions(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """Return each layer's attention module by its path in the model, first layer first."""
    blocks, projection = OUTPUT_PROJECTIONS[model.config.model_type.removeprefix("mhaprune_")]
    within_block = projection.rpartition(".")[0]
    paths = [f"{blocks}.{n}.{within_block}" for n in range(model.config.num_hidden_layers)]
    return {path: model.get_submodule(path) for path in paths}


def _outputs_first(projection: nn.Module) -> Float[Tensor, "output input"]:
    """View the weights of a Linear, which stores them so, or a Conv1D, which does not."""
    weight = projection.get_parameter("weight")
    return weight if isinstance(projection, nn.Linear) else weight.T
