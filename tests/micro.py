"""Models for tests: one to compute by hand, one of every architecture, and GPT-2 in numpy."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from mhaprune.model.architectures import OUTPUT_PROJECTIONS, head_shape, output_projections
from mhaprune.model.heads import Head

A, B, C = np.array([[1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]])

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SIZES | {"intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = DECODER | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}  # d_head is not hidden_size / num_attention_heads
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": SIZES | {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma": WIDE,
    "gemma2": WIDE,
    "gemma3_text": WIDE,
    "gpt2": GPT,
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
    "gpt_neox": DECODER,
    "gptj": GPT | {"rotary_dim": 4},
    "llama": GROUPED,
    "mistral": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "phi": GROUPED,
    "phi3": GROUPED,
    "qwen2": GROUPED,
    "qwen3": WIDE,
    "smollm3": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
}

every_architecture = pytest.mark.parametrize("model_type", sorted(OUTPUT_PROJECTIONS))


def micro_gpt2(num_layers: int = 1) -> GPT2LMHeadModel:
    """A GPT-2 in float64 whose logits can be computed by hand.

    The residual stream stays in the span of A, B and C, which have mean 0 and mean square 1 and are
    orthogonal. So write it as coefficients (alpha, beta, gamma): layer norm divides them by their
    length, and the logits of the six tokens A, B, C, -A, -B, -C are 4 (alpha, beta, gamma) over
    that length, then the same negated. No position embeddings, no MLP; queries and keys are zero,
    so that z is the running mean of v:

        head 0: v = (2 alpha, 2 beta),  W_O rows B, 2A      adds  z_0 B + z_1 2A
        head 1: v = (2 gamma, 2 alpha), W_O rows B + C, C   adds  z_0 (B + C) + z_1 C

    A further layer has the rows of W_O moved down by one, the last to the top.
    """
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=6,
            n_embd=4,
            n_layer=num_layers,
            n_head=2,
            n_positions=8,
            layer_norm_epsilon=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    weights = {
        name: torch.ones_like(weight) if "ln_" in name and "weight" in name else weight * 0
        for name, weight in model.double().eval().state_dict().items()
    }
    tokens = torch.tensor(np.array([A, B, C, -A, -B, -C])).double()
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = tokens
    to_v = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]])
    w_o = torch.tensor(np.array([B, 2 * A, B + C, C])).double()
    for layer in range(num_layers):
        weights[f"transformer.h.{layer}.attn.c_attn.weight"][:, 8:] = to_v
        weights[f"transformer.h.{layer}.attn.c_proj.weight"] = w_o.roll(layer, 0)
    model.load_state_dict(weights)
    return model


def tiny_model(model_type: str, seed: int = 0) -> Any:
    """A random model of 2 layers, 4 heads and 64 tokens, its norms and biases random as well."""
    config = AutoConfig.for_model(
        model_type,
        **TINY_CONFIGS[model_type],
        vocab_size=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def double_model(model_type: str) -> Any:
    """A tiny model all in float64; Llama's norms otherwise go through float32, whatever comes."""
    model = tiny_model(model_type).double()

    def norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return module.get_parameter("weight") * x * (mean_square + 1e-6).rsqrt()

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            assert module.variance_epsilon == 1e-6
            module.forward = partial(norm, module)
    return model


def without_heads(model: Any, heads: Iterable[Head]) -> Any:
    """A copy of the model in which the heads' rows of W_O are zero."""
    model = copy.deepcopy(model)
    for head in heads:
        output_rows(model, head).zero_()
    return model


def output_rows(model: Any, head: Head) -> torch.Tensor:
    """A view of the head's rows of W_O, `d_head d_model`."""
    projection, d_head = output_projections(model)[head.layer], head_shape(model).d_head
    weight = projection.get_parameter("weight").detach()
    rows = weight.T if isinstance(projection, nn.Linear) else weight
    return rows[head.head * d_head : (head.head + 1) * d_head]


def numpy_gpt2(
    model: Any,
    ids: Sequence[int] | np.ndarray | torch.Tensor,
    replace: Callable[[int, np.ndarray], np.ndarray] = lambda layer, z: z,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """GPT-2 written out, in float64: ids -> logits `pos vocab`, each layer's z `pos head d_head`.

    `replace(layer, z)` is what goes on in place of z.
    """
    weights = {name: weight.double().numpy() for name, weight in model.state_dict().items()}

    def affine(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        variance = x.var(-1, keepdims=True) + model.config.layer_norm_epsilon
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance)
        return x * weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]

    ids = np.asarray(ids)
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][: len(ids)]
    outputs = []
    for layer in range(model.config.n_layer):
        block = f"h.{layer}"
        qkv = affine(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x))
        outputs.append(numpy_attention(qkv, model.config.n_head))
        z = replace(layer, outputs[-1])
        x = x + affine(f"{block}.attn.c_proj", z.reshape(len(ids), -1))
        inner = affine(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x))
        x = x + affine(f"{block}.mlp.c_proj", gelu(inner))
    return norm("ln_f", x) @ weights["transformer.wte.weight"].T, outputs


def numpy_attention(qkv: np.ndarray, num_heads: int) -> np.ndarray:
    """Causal softmax attention: `pos (3 head d_head)` -> z, `pos head d_head`."""
    q, k, v = (part.reshape(len(qkv), num_heads, -1) for part in np.split(qkv, 3, axis=-1))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    pattern = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(len(qkv))
    return np.einsum("hqk,khd->qhd", pattern / pattern.sum(-1, keepdims=True), v)


def gelu(x: np.ndarray) -> np.ndarray:
    """GPT-2's GELU, the tanh approximation."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def numpy_nats(logits: np.ndarray, targets: Sequence[int] | np.ndarray) -> float:
    """Summed loss: -ln softmax(logits)[target] over all positions."""
    partition = np.exp(logits).sum(-1)
    return float(np.log(partition).sum() - logits[np.arange(len(targets)), targets].sum())
