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

import psutil
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mhaprune.model.architectures import Block

# Classes of transformers and torch -> how oneDNN names that activation: kind and algorithm.
_FUSED = {
    "NewGELUActivation": ("gelu", "tanh"),
    "GELUTanh": ("gelu", "tanh"),
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
}

Forwards = Mapping[nn.Module, Callable[..., Tensor]]


class Product:
    """inputs weight^T + bias, as fast as the machine can, for many inputs. There is no gradient.

    `packed` makes oneDNN's own copy of the matrix: about 2 ns a number once, and products are 3%
    faster in all, so that it pays from 7,000 rows on. The matrix must not change meanwhile.
    """

    def __init__(
        self,
        weight: Float[Tensor, "d_out d_in"],
        bias: Float[Tensor, "d_out"] | None = None,
        activation: tuple[str, str] | None = None,
        *,
        packed: bool,
    ) -> None:
        self.is_fast = _is_fast(weight)
        assert self.is_fast or activation is None, "only oneDNN fuses activations"
        self.weight = _packed(weight) if packed and self.is_fast else weight
        self.bias, self.activation = bias, activation

    def __call__(self, inputs: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        if self.is_fast:
            return _onednn(inputs, self.weight, self.bias, self.activation)
        return F.linear(inputs, self.weight, self.bias)


def has_room_to_pack(model: nn.Module) -> bool:
    """Say whether the weights take at most an eighth of the machine's memory.

    That does not depend on what else runs, so that the same run computes the same way again.
    """
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    return 8 * num_bytes <= physical_bytes()


def physical_bytes() -> int:
    """Return how much memory the machine has."""
    return psutil.virtual_memory().total


def fast_linears(module: nn.Module) -> Forwards:
    """Return for the linear layers in `module` the functions that `swapped` puts in their place.

    Gradients flow through them to the inputs. Layers whose weights want gradients stay as they are.
    """
    return {
        layer: _with_gradient(weight, bias)
        for layer, weight, bias in _matrices(module)
        if not weight.requires_grad
    }


def fast_blocks(blocks: Sequence[Block], *, packed: bool) -> Forwards:
    """Return the like for all of some blocks, with activations fused: for use without gradients.

    `packed` as for `Product`.
    """
    found: dict[nn.Module, Callable[..., Tensor]] = {}
    for block in blocks:
        activation = _FUSED.get(type(block.activation).__name__)
        if "forward" in vars(block.activation):
            activation = None
        if activation == ("gelu", "tanh"):
            found[block.activation] = partial(F.gelu, approximate="tanh")
        for layer, weight, bias in _matrices(block.module):
            fused = activation if layer is block.into_activation else None
            found[layer] = Product(weight, bias, fused, packed=packed)
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
    return lambda inputs: _ByInputs.apply(inputs, weight, bias)


def _onednn(
    inputs: Float[Tensor, "*rows d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, "d_out"] | None,
    activation: tuple[str, str] | None = None,
) -> Float[Tensor, "*rows d_out"]:
    kind, algorithm = activation or ("none", "")
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, kind, [], algorithm)


def _packed(weight: Float[Tensor, "d_out d_in"]) -> Tensor:
    """Return a matrix in the opaque layout that oneDNN multiplies by, for about 2,048 rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 2048)


class _ByInputs(torch.autograd.Function):
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
        expected = F.linear(inputs, weight, bias)
        found = [_onednn(inputs, some, bias) for some in (weight, _packed(weight))]
        return all(torch.equal(each, expected) for each in found)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _as_it_is(inputs: Tensor) -> Tensor:
    return inputs
