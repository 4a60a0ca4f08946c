"""Where each Hugging Face decoder keeps its blocks, output projections and heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

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
