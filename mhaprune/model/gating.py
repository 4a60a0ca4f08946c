"""Ablate heads in any decoder: `z <- gate * z + (1 - gate) * baseline`, before W_O mixes them.

A registered attention function or a `head_mask` argument is ignored by some architectures without
a word; a forward pre-hook on the output projection W_O reaches all of them. What a gate does not
reach raises, because "nothing changed" would read as "this head does not matter".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mhaprune.model.architectures import HeadShape, head_shape, output_projections
from mhaprune.model.heads import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# One gate per head: 1 keeps it, 0 ablates it. For the whole batch, each row, or each position.
Gate = (
    Float[Tensor, "layer head"]
    | Float[Tensor, "batch layer head"]
    | Float[Tensor, "batch pos layer head"]
)
# baseline[layer] broadcasts against z, `batch pos head d_head`.
Baseline = Float[Tensor, "layer head d_head"] | Sequence[Float[Tensor, "..."]]


@contextmanager
def gate_heads(
    model: "PreTrainedModel",
    gate: Gate,
    baseline: Baseline | None = None,
    lowest_layer: int = 0,
) -> Iterator[None]:
    """Within this context every forward pass of the model has its heads gated.

    Args:
        gate: 1 keeps a head, 0 ablates it; `[batch, layer, head]` gates each row of the batch by
            itself, so that one pass measures several ablations; `[batch, pos, layer, head]` each
            position. Gradients flow to it.
        baseline: what replaces an ablated head's z: one constant per head, or for each layer
            anything that broadcasts against z; None is zero.
        lowest_layer: heads of the layers below are left as they are, whatever the gate says, so
            that a backward pass ends there.

    Raises ValueError where gate or baseline do not fit the model, RuntimeError where a layer's
    heads were not reached by the time the context ends. Afterwards the model is as before, on
    errors too.
    """
    shape = head_shape(model)
    if gate.shape[-2:] != (shape.num_layers, shape.num_heads):
        raise ValueError(
            f"expected a gate of {shape.num_layers} layers x {shape.num_heads} heads, "
            f"got shape {list(gate.shape)}"
        )
    if baseline is not None and len(baseline) != shape.num_layers:
        raise ValueError(f"expected {shape.num_layers} layers of baseline, got {len(baseline)}")
    reached = [False] * shape.num_layers

    def gated(layer: int, z: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"] | None:
        reached[layer] = True
        if layer < lowest_layer:
            return None
        layer_gate = gate[..., layer, :]
        if gate.ndim == 3:
            layer_gate = layer_gate[:, None]
        return gate_z(z, layer_gate, None if baseline is None else baseline[layer])

    with hooked_projections(model, gated):
        yield
    if not all(reached):
        missed = [layer for layer, hit in enumerate(reached) if not hit]
        raise RuntimeError(f"gating reached no forward pass of layers {missed}")


def gate_z(
    z: Float[Tensor, "*batch width"],
    gate: Float[Tensor, "*other head"],
    baseline: Float[Tensor, "..."] | None,
) -> Float[Tensor, "*batch width"]:
    """Return `gate * z + (1 - gate) * baseline`, head by head; `gate` broadcasts against z."""
    heads, gate = z.unflatten(-1, (gate.shape[-1], -1)), gate[..., None].to(z)
    kept = gate * heads
    if baseline is not None:
        kept = kept + (1 - gate) * baseline.to(z)
    return kept.flatten(-2)


def gates_of(
    sets: Sequence[Sequence[Head]], shape: HeadShape
) -> Float[Tensor, "variant layer head"]:
    """Return for each set of heads a gate that is 0 at its heads and 1 elsewhere."""
    gates = torch.ones(len(sets), shape.num_layers, shape.num_heads)
    for gate, heads in zip(gates, sets, strict=True):
        for head in heads:
            gate[head.layer, head.head] = 0
    return gates


def repeat_windows(baseline: Float[Tensor, "..."], times: int) -> Float[Tensor, "..."]:
    """Repeat a layer's baseline for (variant, window) rows, where it has a row for each window."""
    return baseline.repeat(times, 1, 1, 1) if baseline.ndim == 4 else baseline


@contextmanager
def captured_z(model: "PreTrainedModel") -> Iterator[list[Float[Tensor, "batch pos head d_head"]]]:
    """Yield a list that holds each layer's z, detached, after a forward pass in this context."""
    shape = head_shape(model)
    captured: list[Tensor] = [torch.empty(0)] * shape.num_layers

    def capture(layer: int, z: Float[Tensor, "*batch width"]) -> None:
        captured[layer] = z.detach().unflatten(-1, (shape.num_heads, shape.d_head))

    with hooked_projections(model, capture):
        yield captured


@contextmanager
def hooked_projections(
    model: "PreTrainedModel", function: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call `function(layer, z)` on what enters each output projection; None leaves z as it is."""
    with ExitStack() as stack:
        for layer, projection in enumerate(output_projections(model)):
            stack.callback(_hook(projection, layer, function).remove)
        yield


def _hook(projection: nn.Module, layer: int, function: Callable[[int, Tensor], Tensor | None]):
    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        changed = function(layer, inputs[0])
        return None if changed is None else (changed, *inputs[1:])

    return projection.register_forward_pre_hook(before)


@torch.no_grad()
def check_gating(model: "PreTrainedModel", input_ids: Int[Tensor, "pos"]) -> None:
    """Raise ValueError unless ablating any one layer's heads changes the model's logits.

    An architecture in which a gate has no effect would otherwise look like one whose heads do not
    matter.
    """
    shape = head_shape(model)
    row = input_ids[None].to(model.device)
    intact = model(row, use_cache=False).logits
    unchanged = []
    # One pass a layer: equal rows of one batch may differ by rounding, which is no effect.
    for layer in range(shape.num_layers):
        gate = torch.ones(shape.num_layers, shape.num_heads)
        gate[layer] = 0
        with gate_heads(model, gate):
            logits = model(row, use_cache=False).logits
        if torch.equal(logits, intact):
            unchanged.append(layer)
    if unchanged:
        raise ValueError(
            f"ablating all heads of layers {unchanged} leaves this {model.config.model_type} "
            f"model's logits unchanged; its effects cannot be measured"
        )
