"""The fast path: ablate every head of a layer, and replay only what the ablations can change.

Ablating heads of layer l changes nothing before l, and in l the attention output is a sum over
heads: `mid = resid + b_O + sum_h z_h W_O[h]`. So a variant starts from
`mid - (z_h - baseline_h) W_O[h]`, and only the MLP of l, the later blocks, the final norm and the
unembedding follow. The same numbers as gating, up to rounding.

It runs the Hugging Face modules themselves, for decoders whose blocks are sequential and pre-norm
(`architectures.REPLAYABLE`). Its memory grows with the batch of windows, not with their number or
that of the heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mhaprune.model.architectures import Block, final_norm, head_shape, replayable_blocks
from mhaprune.model.gating import Baseline, gate_z, hooked_projections, repeat_windows
from mhaprune.model.kernels import Forwards, Product, fast_blocks, has_room_to_pack, swapped
from mhaprune.text.sample import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Positions and tokens of the vocabulary at once, where logits are to stay in the cache.
_TILES = {"cpu": (2048, 512)}

# What replaces a layer's z: anything that broadcasts against `window pos head d_head`.
LayerBaseline = Callable[[int], Float[Tensor, "..."]]


def replay(
    model: "PreTrainedModel",
    inputs: Int[Tensor, "window pos"],
    targets: Int[Tensor, "window pos"],
    layers: Mapping[int | None, Sequence[int]],
    baseline: LayerBaseline | None,
    rows_per_batch: int,
) -> Iterator[tuple[int | None, Float[Tensor, "variant window"]]]:
    """Yield, layer by layer, the losses of each head's ablation, and last the intact losses.

    Losses are total nats per window in float64. `layers` names the heads of each layer to ablate;
    with None among its keys the intact losses are wanted too. `baseline(layer)` is what replaces z
    there, None is zero. At most `rows_per_batch` rows (head, window) are replayed at once, but
    always all windows of one head.
    """
    inputs, targets = inputs.to(model.device), targets.to(model.device)
    num_windows = len(inputs)
    unembedding, roll = Unembedding(model), Roll(model, inputs)
    for layer in sorted(layer for layer in layers if layer is not None):
        z, mid = roll.advance_through(layer)
        removed = z if baseline is None else z - baseline(layer).to(z)
        heads = torch.tensor(layers[layer], device=model.device)
        parts = []
        weights = roll.output_weights(layer)
        for some in heads.split(max(1, rows_per_batch // num_windows)):
            removal = torch.einsum("rphd,hdm->hrpm", removed[:, :, some], weights[some])
            final = roll.finish(layer, (mid - removal).flatten(0, 1))
            row_targets = targets.repeat(len(some), 1)
            parts.append(unembedding.nats(final, row_targets).view(len(some), num_windows))
        yield layer, torch.cat(parts).cpu()
    if None in layers:
        yield None, unembedding.nats(roll.advance_to_the_end(), targets)[None].cpu()


@torch.no_grad()
def replay_sets(
    model: "PreTrainedModel",
    inputs: Int[Tensor, "window pos"],
    targets: Int[Tensor, "window pos"],
    gates: Float[Tensor, "variant layer head"],
    baseline: Baseline | None,
    rows_per_batch: int,
) -> Float[Tensor, "variant window"]:
    """Return the losses of whole sets of heads ablated together: total nats, float64.

    A gate of 0 ablates a head, 1 keeps it; `baseline` is that of `gating.gate_heads`, with a row
    for each window where it has rows. What lies before a set's first ablated layer is not run
    again. At most `rows_per_batch` rows (set, window) run at once, but always all windows of a set.
    """
    inputs, targets, gates = (tensor.to(model.device) for tensor in (inputs, targets, gates))
    num_windows = len(inputs)
    losses = torch.empty(len(gates), num_windows, dtype=torch.float64)
    ablates = (gates == 0).any(-1)
    end = gates.shape[1]  # for sets without an ablated head
    first_layer = torch.where(ablates.any(1), ablates.int().argmax(1), end).tolist()
    unembedding, roll = Unembedding(model), Roll(model, inputs)
    for layer in sorted(set(first_layer)):
        numbers = torch.tensor([n for n, first in enumerate(first_layer) if first == layer])
        if layer == end:
            losses[numbers] = unembedding.nats(roll.advance_to_the_end(), targets).cpu()
            continue
        z, mid = roll.advance_through(layer)
        removed = z if baseline is None else z - baseline[layer].to(z)
        weights = roll.output_weights(layer).flatten(0, 1)
        for some in numbers.split(max(1, rows_per_batch // num_windows)):
            off = (1 - gates[some, layer]).to(z)[:, None, None, :, None]
            hidden = mid - (off * removed).flatten(-2) @ weights
            with _gated_above(model, layer, gates[some], baseline, num_windows):
                final = roll.finish(layer, hidden.flatten(0, 1))
            nats = unembedding.nats(final, targets.repeat(len(some), 1))
            losses[some] = nats.view(len(some), num_windows).cpu()
    return losses


@contextmanager
def _gated_above(
    model: "PreTrainedModel",
    layer: int,
    gates: Float[Tensor, "variant layer head"],
    baseline: Baseline | None,
    num_windows: int,
) -> Iterator[None]:
    """Gate the heads of the layers above `layer`, for rows that are (variant, window) pairs."""
    rows = gates.repeat_interleave(num_windows, 0)

    def gated(number: int, z: Float[Tensor, "row pos width"]) -> Tensor | None:
        gate = rows[:, None, number]
        if number <= layer or bool((gate == 1).all()):
            return None
        replacement = None if baseline is None else repeat_windows(baseline[number], len(gates))
        return gate_z(z, gate, replacement)

    with hooked_projections(model, gated):
        yield


class Roll:
    """A batch of windows on its way through the intact model, one block after another.

    `resid` is the stream that enters the next block.
    """

    @torch.no_grad()
    def __init__(self, model: "PreTrainedModel", inputs: Int[Tensor, "row pos"]) -> None:
        self.blocks: list[Block] = replayable_blocks(model)
        self.forwards = fast_blocks(self.blocks, packed=False)
        self.forwards_of_variants: dict[int, Forwards] = {}
        self.packed = has_room_to_pack(model)
        self.norm = final_norm(model)
        self.shape = head_shape(model)
        self.next_layer = 0
        self.resid: Float[Tensor, "row pos d_model"]
        self.arguments: list[dict[str, Any]] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.resid = args[0]
            self.arguments.append(kwargs)

        # What the model hands to each block is learned by running it with blocks that do nothing.
        with swapped({block.module: _pass for block in self.blocks}), ExitStack() as stack:
            for block in self.blocks:
                hook = block.module.register_forward_pre_hook(keep, with_kwargs=True)
                stack.callback(hook.remove)
            model.base_model(inputs, use_cache=False)

    @torch.no_grad()
    def advance_through(
        self, layer: int
    ) -> tuple[Float[Tensor, "row pos head d_head"], Float[Tensor, "row pos d_model"]]:
        """Run the blocks up to and including `layer`; return its z and mid, the stream after it."""
        assert layer >= self.next_layer, "layers come in order"
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                seen[name] = args[0]

            return before

        block = self.blocks[layer]
        with swapped(self.forwards), ExitStack() as stack:
            for name, module in (("z", block.projection), ("mid", block.mlp_norm)):
                stack.callback(module.register_forward_pre_hook(keep(name)).remove)
            for number in range(self.next_layer, layer + 1):
                self.resid = self.blocks[number].module(self.resid, **self.arguments[number])
        self.next_layer = layer + 1
        return seen["z"].unflatten(-1, (self.shape.num_heads, self.shape.d_head)), seen["mid"]

    @torch.no_grad()
    def advance_to_the_end(self) -> Float[Tensor, "row pos d_model"]:
        """Run the blocks that are left; return the intact model's output before unembedding."""
        if self.next_layer < len(self.blocks):
            self.advance_through(len(self.blocks) - 1)
        return self.norm(self.resid)

    def output_weights(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """Return W_O of a layer, cut into heads."""
        return self.blocks[layer].output_weights(self.shape.num_heads)

    @torch.no_grad()
    def finish(
        self, layer: int, mid: Float[Tensor, "variant_row pos d_model"]
    ) -> Float[Tensor, "variant_row pos d_model"]:
        """Run all that follows the attention of `layer`, up to unembedding.

        `mid` has the rows of this roll, once for each variant.
        """
        block, num_rows = self.blocks[layer], len(self.resid)
        with ExitStack() as stack:
            for number in range(layer, len(self.blocks)):
                stack.enter_context(swapped(self._forwards_of_variants(number)))
            hidden = mid + block.mlp(block.mlp_norm(mid))
            for number in range(layer + 1, len(self.blocks)):
                times = len(mid) // num_rows
                arguments = repeat_rows(self.arguments[number], num_rows, times)
                hidden = self.blocks[number].module(hidden, **arguments)
            return self.norm(hidden)

    def _forwards_of_variants(self, number: int) -> Forwards:
        """Return what block `number` computes with for variants: there are many, so packing pays.

        Not for the intact model, which takes one pass.
        """
        if number not in self.forwards_of_variants:
            forwards = fast_blocks([self.blocks[number]], packed=self.packed)
            self.forwards_of_variants[number] = forwards
        return self.forwards_of_variants[number]


class Unembedding:
    """Losses from final hidden states, without ever holding all of a position's logits.

    The vocabulary is cut into tiles so small that a tile's logits, for some positions, stay in the
    processor's cache while their exponentials are summed.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        layer = model.get_output_embeddings()
        assert isinstance(layer, nn.Linear)
        self.weight, self.bias = layer.weight, layer.bias
        self.num_positions, tile = _TILES.get(self.weight.device.type, (4096, 16_384))
        weights = self.weight.split(tile)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(tile)
        packed = has_room_to_pack(model)
        self.tiles = [Product(*parts, packed=packed) for parts in zip(weights, biases, strict=True)]

    @torch.no_grad()
    def nats(
        self, hidden: Float[Tensor, "row pos d_model"], targets: Int[Tensor, "row pos"]
    ) -> Float[Tensor, "row"]:
        """Return each row's loss summed over its scored positions, in float64."""
        scored = targets != IGNORED
        nats = [
            self._log_partition(some) - self._logits_of(some, wanted)
            for some, wanted in zip(
                hidden[scored].split(self.num_positions),
                targets[scored].split(self.num_positions),
                strict=True,
            )
        ]
        rows, totals = scored.nonzero()[:, 0], torch.zeros(len(hidden), dtype=torch.float64)
        return totals.to(hidden.device).index_add_(0, rows, torch.cat(nats))

    def _log_partition(self, hidden: Float[Tensor, "scored d_model"]) -> Float[Tensor, "scored"]:
        """Return log sum exp of each position's logits in float64."""
        parts = []
        for tile in self.tiles:
            logits = tile(hidden)
            highest = logits.amax(1, keepdim=True)
            parts.append(logits.sub_(highest).exp_().sum(1).log_() + highest[:, 0])
        return torch.stack(parts).double().logsumexp(0)

    def _logits_of(
        self, hidden: Float[Tensor, "scored d_model"], tokens: Int[Tensor, "scored"]
    ) -> Float[Tensor, "scored"]:
        logits = (hidden * self.weight[tokens]).sum(1)
        return (logits if self.bias is None else logits + self.bias[tokens]).double()


def _pass(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def repeat_rows(arguments: dict[str, Any], num_rows: int, times: int) -> dict[str, Any]:
    """Repeat whatever has a row for each window, so that it fits (head, window) rows."""

    def repeat(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and len(value) == num_rows > 1:
            return value.repeat(times, *[1] * (value.ndim - 1))
        return tuple(map(repeat, value)) if isinstance(value, tuple) else value

    return {name: repeat(value) for name, value in arguments.items()}
