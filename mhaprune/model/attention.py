"""Multi-head attention, written out: the five steps of the textbook, with nothing fused or hidden.

    1. project      q, k, v = x W_Q + b_Q, x W_K + b_K, x W_V + b_V      pos d_model
    2. split        by reshape and transpose                             head pos d_head
    3. attend       pattern = softmax(mask(q kᵀ / sqrt(d_head)))         head query key
                    z = pattern v                                        head pos d_head
    4. concatenate  the heads' z side by side                            pos d_model
    5. mix          output = concatenated z W_O + b_O                    pos d_model

Since W_O mixes by a matrix product, the output is also a sum over heads: b_O plus each head's
contribution z_h W_O[h], where W_O[h] is the d_head rows of W_O that read head h. Taking a head out
is taking its contribution out of that sum. Vaswani et al. 2017, arXiv 1706.03762, section 3.2.

This is the slow, readable reference; what measures whole models runs `gating` and `replay`.
`attention_toy` is a layer small enough to follow with a pencil.
"""

# ruff: noqa: N815 (W_Q, b_Q: the names that the textbook has)

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Attended:
    """What a layer makes of its input, as a whole and head by head.

    `output` is b_O plus the sum of `contributions` over heads. Each row of `pattern` sums to 1 and
    is 0 where the key comes after the query. `z` is what each head reads, before W_O.
    """

    output: Float[Tensor, "batch pos d_model"]
    pattern: Float[Tensor, "batch head query key"]
    z: Float[Tensor, "batch pos head d_head"]
    contributions: Float[Tensor, "batch pos head d_model"]


@dataclass(frozen=True)
class MultiHeadAttention:
    """A causal attention layer: four square matrices `[in, out]`, four biases, a number of heads.

    Head h owns columns h * d_head to (h + 1) * d_head - 1 of W_Q, W_K and W_V and the same rows of
    W_O. A bias that is None is not added. `scale` multiplies the scores q kᵀ; None stands for
    1 / sqrt(d_head). Raises ValueError where the shapes do not fit together.
    """

    num_heads: int
    W_Q: Float[Tensor, "d_model d_model"]
    W_K: Float[Tensor, "d_model d_model"]
    W_V: Float[Tensor, "d_model d_model"]
    W_O: Float[Tensor, "d_model d_model"]
    b_Q: Float[Tensor, "d_model"] | None = None
    b_K: Float[Tensor, "d_model"] | None = None
    b_V: Float[Tensor, "d_model"] | None = None
    b_O: Float[Tensor, "d_model"] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        d_model = self.d_model
        for name, tensor in self.parameters().items():
            expected = [d_model, d_model] if name.startswith("W") else [d_model]
            if list(tensor.shape) != expected:
                raise ValueError(
                    f"expected {name} of shape {expected}, as W_Q has {d_model} rows, "
                    f"got {list(tensor.shape)}"
                )
        if self.num_heads < 1 or d_model % self.num_heads:
            raise ValueError(
                f"expected a number of heads that divides d_model {d_model}, got {self.num_heads}"
            )

    @property
    def d_model(self) -> int:
        return self.W_Q.shape[0]

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    @property
    def output_weights(self) -> Float[Tensor, "head d_head d_model"]:
        """W_O cut into heads: head h adds `z_h @ output_weights[h]` to the output."""
        return self.W_O.unflatten(0, (self.num_heads, self.d_head))

    @property
    def num_parameters(self) -> int:
        """4 d_model² and, with all biases, 4 d_model more: the number of heads is not in it."""
        return sum(tensor.numel() for tensor in self.parameters().values())

    def parameters(self) -> dict[str, Tensor]:
        """The matrices, and the biases that there are, by name."""
        names = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
        named = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def attend(self, x: Float[Tensor, "batch pos d_model"]) -> Attended:
        """Run the five steps on `x`. Raises ValueError where its width is not d_model."""
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"expected input of shape [batch, pos, {self.d_model}], got {list(x.shape)}"
            )
        q = self.split(project(x, self.W_Q, self.b_Q))
        k = self.split(project(x, self.W_K, self.b_K))
        v = self.split(project(x, self.W_V, self.b_V))
        scale = self.d_head**-0.5 if self.scale is None else self.scale
        pattern = causal_softmax(q @ k.transpose(-1, -2) * scale)
        z = (pattern @ v).transpose(1, 2)
        output = project(z.flatten(2), self.W_O, self.b_O)
        contributions = torch.einsum("bphd,hdm->bphm", z, self.output_weights)
        return Attended(output, pattern, z, contributions)

    def split(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Cut the width into heads, and put heads before positions so that one product does all."""
        return x.unflatten(-1, (self.num_heads, self.d_head)).transpose(1, 2)


def project(
    x: Float[Tensor, "batch pos width"],
    weight: Float[Tensor, "width out"],
    bias: Float[Tensor, "out"] | None,
) -> Float[Tensor, "batch pos out"]:
    """Return `x @ weight + bias`."""
    return x @ weight if bias is None else x @ weight + bias


def causal_softmax(
    scores: Float[Tensor, "batch head pos pos"],
) -> Float[Tensor, "batch head pos pos"]:
    """Softmax over the keys at or before each query; the keys after it get exactly 0."""
    num_positions = scores.shape[-1]
    visible = torch.ones(num_positions, num_positions, dtype=torch.bool, device=scores.device)
    return scores.masked_fill(~visible.tril(), -torch.inf).softmax(-1)


def from_gpt2(attention: nn.Module) -> MultiHeadAttention:
    """Read the layer of a Hugging Face GPT-2 block, `model.transformer.h[i].attn`.

    It shares the module's weights, and honours `scale_attn_weights` and
    `scale_attn_by_inverse_layer_idx`. Dropout is left out, as in eval mode;
    `reorder_and_upcast_attn` changes rounding only and is left out too. Raises ValueError for
    anything but the self-attention of a GPT-2 with all of its heads.
    """
    if not isinstance(attention, GPT2Attention) or attention.is_cross_attention:
        crossed = getattr(attention, "is_cross_attention", False)
        raise ValueError(
            f"expected the self-attention of a GPT-2 block, model.transformer.h[i].attn, "
            f"got {'the cross attention of ' if crossed else ''}{type(attention).__name__}"
        )
    w_q, w_k, w_v = attention.c_attn.weight.chunk(3, dim=1)  # Conv1D keeps [in, out]
    b_q, b_k, b_v = attention.c_attn.bias.chunk(3)
    w_o, b_o = attention.c_proj.weight, attention.c_proj.bias
    scale = attention.head_dim**-0.5 if attention.scale_attn_weights else 1.0
    if attention.scale_attn_by_inverse_layer_idx:
        assert attention.layer_idx is not None
        scale /= attention.layer_idx + 1
    heads = attention.num_heads
    return MultiHeadAttention(heads, w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, scale)


@torch.no_grad()
def layer_attention(
    model: "PreTrainedModel", input_ids: Int[Tensor, "batch pos"]
) -> list[Attended]:
    """Return what each attention layer of a Hugging Face GPT-2 makes of these tokens.

    Each layer gets what entered it in one pass of the model itself, so errors do not add up. Holds
    all layers at once: about num_layers * num_heads * pos * (pos + d_model) numbers a row. Raises
    ValueError for other models, and for one in training mode, whose dropout is not written out.
    """
    if model.config.model_type != "gpt2":
        raise ValueError(f"expected a model of type gpt2, got {model.config.model_type}")
    if model.training:
        raise ValueError("expected a model in eval mode, got training mode: call model.eval()")
    blocks = model.base_model.get_submodule("h").children()
    layers = [block.get_submodule("attn") for block in blocks]
    with captured_inputs(layers) as inputs:
        model.base_model(input_ids.to(model.device), use_cache=False)
    return [from_gpt2(layer).attend(x) for layer, x in zip(layers, inputs, strict=True)]


@contextmanager
def captured_inputs(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list that gets the first argument of each call of the modules, in order of calls."""
    captured: list[Tensor] = []

    def capture(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured.append(inputs[0])

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(capture).remove)
        yield captured
