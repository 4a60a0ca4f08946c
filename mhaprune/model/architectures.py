"""Where each Hugging Face decoder keeps its blocks, output projections and heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# model_type -> (path of the list of blocks, path of the output projection within a block).
# The blocks' path starts at the causal language model.
OUTPUT_PROJECTIONS: dict[str, tuple[str, str]] = {
    "bloom": ("transformer.h", "self_attention.dense"),
    "falcon": ("transformer.h", "self_attention.dense"),
    "gemma": ("model.layers", "self_attn.o_proj"),
    "gemma2": ("model.layers", "self_attn.o_proj"),
    "gemma3_text": ("model.layers", "self_attn.o_proj"),
    "gpt2": ("transformer.h", "attn.c_proj"),
    "gpt_neo": ("transformer.h", "attn.attention.out_proj"),
    "gpt_neox": ("gpt_neox.layers", "attention.dense"),
    "gptj": ("transformer.h", "attn.out_proj"),
    "llama": ("model.layers", "self_attn.o_proj"),
    "mistral": ("model.layers", "self_attn.o_proj"),
    "olmo": ("model.layers", "self_attn.o_proj"),
    "olmo2": ("model.layers", "self_attn.o_proj"),
    "opt": ("model.decoder.layers", "self_attn.out_proj"),
    "phi": ("model.layers", "self_attn.dense"),
    "phi3": ("model.layers", "self_attn.o_proj"),
    "qwen2": ("model.layers", "self_attn.o_proj"),
    "qwen3": ("model.layers", "self_attn.o_proj"),
    "smollm3": ("model.layers", "self_attn.o_proj"),
    "stablelm": ("model.layers", "self_attn.o_proj"),
    "starcoder2": ("model.layers", "self_attn.o_proj"),
}


class Names(NamedTuple):
    """Names of a block's MLP norm and MLP, of the final norm, and of two modules within the MLP.

    The output of `into_activation` goes into `activation`, and nowhere else.
    """

    mlp_norm: str
    mlp: str
    final_norm: str
    into_activation: str
    activation: str


_LLAMA = Names("post_attention_layernorm", "mlp", "model.norm", "gate_proj", "act_fn")

# Decoders whose blocks are sequential and pre-norm: mid = x + attention(norm(x)) and then
# out = mid + mlp(mlp_norm(mid)).
REPLAYABLE: dict[str, Names] = {
    "gpt2": Names("ln_2", "mlp", "transformer.ln_f", "c_fc", "act"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


@dataclass(frozen=True)
class HeadShape:
    """How many heads there are: `num_layers` layers of `num_heads` heads of size `d_head`."""

    num_layers: int
    num_heads: int
    d_head: int


def output_projections(model: "PreTrainedModel") -> list[nn.Module]:
    """Return each layer's output projection W_O, first layer first.

    Its input is the concatenation of the heads' outputs z, `batch pos (head d_head)`. Raises
    ValueError for an architecture that is not known, or whose modules are not where they should be.
    """
    model_type = model.config.model_type
    if model_type not in OUTPUT_PROJECTIONS:
        raise ValueError(
            f"architecture {model_type!r} is not supported; supported are "
            f"{', '.join(sorted(OUTPUT_PROJECTIONS))}"
        )
    blocks_path, projection_path = OUTPUT_PROJECTIONS[model_type]
    try:
        blocks: Sequence[nn.Module] = list(model.get_submodule(blocks_path).children())
        projections = [block.get_submodule(projection_path) for block in blocks]
    except AttributeError as error:
        raise ValueError(
            f"expected {blocks_path}.*.{projection_path} in a {model_type} model, but {error}"
        ) from None
    num_layers = model.config.num_hidden_layers
    if len(projections) != num_layers:
        raise ValueError(
            f"expected one output projection in each of {num_layers} layers, "
            f"found {len(projections)}"
        )
    return projections


def head_shape(model: "PreTrainedModel") -> HeadShape:
    """Return the number of layers, of query heads per layer, and their size.

    Raises ValueError where the layers differ in width or the heads do not divide it.
    """
    num_heads = model.config.num_attention_heads
    widths = sorted({projection_width(projection) for projection in output_projections(model)})
    if len(widths) != 1 or widths[0] % num_heads:
        raise ValueError(
            f"expected every output projection to read {num_heads} heads of one size, "
            f"found input widths {widths}"
        )
    return HeadShape(model.config.num_hidden_layers, num_heads, widths[0] // num_heads)


def projection_width(projection: nn.Module) -> int:
    """Return the number of inputs of a Linear (weights `[out, in]`) or Conv1D (`[in, out]`)."""
    weight = projection.get_parameter("weight")
    return weight.shape[1] if isinstance(projection, nn.Linear) else weight.shape[0]


def output_weights(projection: nn.Module, num_heads: int) -> Float[Tensor, "head d_head d_model"]:
    """View a layer's W_O cut into heads: head h adds `z_h @ output_weights[h]` to the stream."""
    weight = projection.get_parameter("weight")
    weight = weight.T if isinstance(projection, nn.Linear) else weight
    return weight.unflatten(0, (num_heads, -1))


@dataclass(frozen=True)
class Block:
    """A sequential, pre-norm block and the parts that replay runs by themselves."""

    module: nn.Module
    projection: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module
    into_activation: nn.Module
    activation: nn.Module

    def output_weights(self, num_heads: int) -> Float[Tensor, "head d_head d_model"]:
        """Return the block's W_O cut into heads."""
        return output_weights(self.projection, num_heads)


def can_replay(model: "PreTrainedModel") -> bool:
    """Say whether the model's blocks are of the kind that replay knows."""
    crossed = getattr(model.config, "add_cross_attention", False)
    return model.config.model_type in REPLAYABLE and not crossed


def replayable_blocks(model: "PreTrainedModel") -> list[Block]:
    """Return the blocks in order. Raises ValueError where replay does not know the kind."""
    if not can_replay(model):
        raise ValueError(
            f"replay knows {', '.join(sorted(REPLAYABLE))}, not {model.config.model_type}"
        )
    names = REPLAYABLE[model.config.model_type]
    modules = model.get_submodule(OUTPUT_PROJECTIONS[model.config.model_type][0]).children()
    blocks = []
    for module, projection in zip(modules, output_projections(model), strict=True):
        mlp = module.get_submodule(names.mlp)
        inner = map(mlp.get_submodule, (names.into_activation, names.activation))
        blocks.append(Block(module, projection, module.get_submodule(names.mlp_norm), mlp, *inner))
    return blocks


def final_norm(model: "PreTrainedModel") -> nn.Module:
    """Return the norm between the last block and the unembedding."""
    return model.get_submodule(REPLAYABLE[model.config.model_type].final_norm)
