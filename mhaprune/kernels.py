"""Faster kernels for a model's own blocks: the same functions, in fewer passes over memory.

On a CPU, in float32, oneDNN multiplies matrices faster than what torch's `Linear` calls, and adds
the bias and applies the activation while the product is still in the cache. torch has it as the
operator that compiled models use. Where that is missing, or for other devices and types, modules
run as they are, but for a tanh-GELU that is written out in elementwise steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mhaprune.architectures import Block

# Classes of transformers and torch -> how oneDNN names that activation: kind and algorithm.
_FUSED = {
    "NewGELUActivation": ("gelu", "tanh"),
    "GELUTanh": ("gelu", "tanh"),
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
}

Forwards = Mapping[nn.Module, Callable[..., Tensor]]


def product(
    inputs: Float[Tensor, "*rows d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, "d_out"] | None = None,
) -> Float[Tensor, "*rows d_out"]:
    """Return inputs weight^T + bias, as fast as the machine can. There is no gradient."""
    return _onednn(inputs, weight, bias) if _is_fast(weight) else F.linear(inputs, weight, bias)


def fast_linears(module: nn.Module) -> Forwards:
    """Return for the linear layers in `module` the functions that `swapped` puts in their place.

    Gradients flow through them to the inputs. Layers whose weights want gradients stay as they are.
    """
    return {
        layer: _with_gradient(weight, bias)
        for layer, weight, bias in _matrices(module)
        if not weight.requires_grad
    }


def fast_blocks(blocks: Sequence[Block]) -> Forwards:
    """Return the like for all of some blocks, with activations fused: for use without gradients."""
    found: dict[nn.Module, Callable[..., Tensor]] = {}
    for block in blocks:
        activation = _FUSED.get(type(block.activation).__name__)
        if "forward" in vars(block.activation):
            activation = None
        if activation == ("gelu", "tanh"):
            found[block.activation] = partial(F.gelu, approximate="tanh")
        for layer, weight, bias in _matrices(block.module):
            fused = activation if layer is block.into_activation else None
            found[layer] = partial(_onednn, weight=weight, bias=bias, activation=fused)
            if fused:
                found[block.activation] = _as_it_is
    return found


@contextmanager
def swapped(forwards: Forwards) -> Iterator[None]:
    """Within this context the modules compute these functions. Their hooks run as ever."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.callback(_put_back, module, vars(module).get("forward"))
            module.forward = forward
        yield


def _put_back(module: nn.Module, forward: Callable[..., Tensor] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _is_fast(weight: Tensor) -> bool:
    """Say whether oneDNN is to multiply by this matrix.

    Not where float32 products may round their factors (`matmul=fast`): torch's own know how.
    """
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    exact = weight.dtype == torch.float32 and matmul.fp32_precision != "bf16"
    return exact and weight.device.type == "cpu" and _has_onednn()


def _matrices(module: nn.Module) -> Iterator[tuple[nn.Module, Tensor, Tensor | None]]:
    """Yield each layer that oneDNN can do: a Linear, or a Conv1D, whose weights are `[in, out]`.

    Not one whose `forward` somebody else has replaced.
    """
    for layer in module.modules():
        known = type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"
        if known and "forward" not in vars(layer):
            weight = layer.get_parameter("weight")
            weight = weight if isinstance(layer, nn.Linear) else weight.T
            if _is_fast(weight):
                yield layer, weight, dict(layer.named_parameters()).get("bias")


def _with_gradient(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda inputs: _Product.apply(inputs, weight, bias)


def _onednn(
    inputs: Float[Tensor, "*rows d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, "d_out"] | None,
    activation: tuple[str, str] | None = None,
) -> Float[Tensor, "*rows d_out"]:
    kind, algorithm = activation or ("none", "")
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, kind, [], algorithm)


class _Product(torch.autograd.Function):
    """inputs weight^T + bias, with a gradient by the inputs alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _onednn(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        return _onednn(slopes[0], ctx.weight.T, None), None, None


@cache
def _has_onednn() -> bool:
    """Try the operator: it is no part of torch's public interface, and some builds lack it."""
    inputs, weight, bias = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2)
    try:
        return torch.equal(_onednn(inputs, weight, bias), F.linear(inputs, weight, bias))
    except (AttributeError, RuntimeError, TypeError):
        return False


def _as_it_is(inputs: Tensor) -> Tensor:
    return inputs
