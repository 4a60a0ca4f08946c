"""Attention patterns of any supported decoder, by its eager implementation: SDPA returns none.

A pattern is large (12 heads on 1,024 tokens: 50 MB a layer in float32), so each layer's can be used
and let go before the next is made.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mhaprune.model.architectures import OUTPUT_PROJECTIONS, output_projections

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LayerPatterns = Float[Tensor, "batch head pos pos"]
Result = TypeVar("Result")

ROW_SUM_TOLERANCE = 0.01  # weights in bfloat16 have 2 to 3 digits


@contextmanager
def eager_attention(model: "PreTrainedModel") -> Iterator[None]:
    """Within this context attention is computed the plain way: SDPA returns no patterns.

    By the config: `set_attn_implementation` leaves Falcon as it is and only logs that.
    """
    former = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = former


@torch.no_grad()
def map_patterns(
    model: "PreTrainedModel",
    input_ids: Int[Tensor, "batch pos"],
    function: Callable[[LayerPatterns], Result],
) -> list[Result]:
    """Run the model and return `function(pattern)` of each layer, holding one pattern at a time.

    Patterns are float32. Raises ValueError for an architecture that is not supported or returns no
    weights, and where those of the keys up to a query do not sum to 1. Afterwards the model is as
    before, on errors too.
    """
    results: list[Result] = []

    def take(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        results.append(function(_checked_pattern(module, output)))
        return (output[0], None, *output[2:])  # so that the model does not collect them

    with eager_attention(model), ExitStack() as stack:
        for module in _attention_modules(model):
            # first in line: transformers hangs hooks of its own here, and these keep the weights
            stack.callback(module.register_forward_hook(take, prepend=True).remove)
        model.base_model(input_ids.to(model.device), output_attentions=True, use_cache=False)
    assert len(results) == model.config.num_hidden_layers, "a layer's attention did not run once"
    return results


def _attention_modules(model: "PreTrainedModel") -> list[nn.Module]:
    """Return each layer's module that holds the output projection, first layer first."""
    output_projections(model)  # raises where they are not where they should be
    blocks_path, projection_path = OUTPUT_PROJECTIONS[model.config.model_type]
    blocks = model.get_submodule(blocks_path).children()
    return [block.get_submodule(projection_path.rpartition(".")[0]) for block in blocks]


def _checked_pattern(module: nn.Module, output: Any) -> LayerPatterns:
    """Return the weights among an attention module's outputs, in float32. Raises ValueError."""
    pattern = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    name = type(module).__name__
    if not isinstance(pattern, Tensor):
        raise ValueError(f"expected attention weights from {name}, got none: it cannot be measured")
    pattern = pattern.detach().float()
    off_by = (pattern.tril().sum(-1) - 1).abs().max().item()
    if not off_by <= ROW_SUM_TOLERANCE:
        raise ValueError(
            f"expected attention weights from {name} that sum to 1 up to the query, some are off "
            f"by {off_by:.2g}: put the model in eval mode; sinks outside the text are not supported"
        )
    return pattern


def model_patterns(
    model: "PreTrainedModel", input_ids: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer batch head pos pos"]:
    """Return all attention patterns of any supported decoder, float32; raises as map_patterns.

    For short texts: see `measure_patterns` for what does not hold them all at once.
    """
    return torch.stack(map_patterns(model, input_ids, lambda pattern: pattern))
