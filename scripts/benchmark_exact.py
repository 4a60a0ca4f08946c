"""Replay beside a hook loop, TransformerLens and the machine's own limit, at GPT-2 small's shape.

Replay gets cheaper with depth, so it is measured on all layers; the loops run the whole model for
every head, so one head is any head.
"""

import itertools
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from mhaprune.measure.replay import replay
from mhaprune.model.architectures import output_projections
from mhaprune.model.kernels import Product
from mhaprune.text.sample import window_batch
from mhaprune.text.windows import make_windows

NUM_LAYERS, NUM_HEADS, D_MODEL, VOCAB, CONTEXT = 12, 12, 768, 50_257, 1024

TRANSFORMER_LENS_LOOP = """
import sys, time, torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
torch.manual_seed(0)
config = HookedTransformerConfig(
    n_layers=12, n_heads=12, d_model=768, d_head=64, d_mlp=3072, d_vocab=50257, n_ctx=1024,
    act_fn="gelu_new", normalization_type="LN", device="cpu",
)
model = HookedTransformer(config)
tokens = torch.randint(0, 50257, (1, 1025))
def ablate(z, hook):
    z[:, :, 3] = 0
    return z
print("ready", flush=True)
with torch.no_grad():
    for line in sys.stdin:
        start = time.perf_counter()
        logits = model.run_with_hooks(
            tokens[:, :-1], fwd_hooks=[(f"blocks.{int(line)}.attn.hook_z", ablate)]
        )
        loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()
        print(time.perf_counter() - start, flush=True)
"""


@dataclass(frozen=True)
class Work:
    """A random GPT-2 small and one window of 1,024 random tokens."""

    model: GPT2LMHeadModel
    inputs: torch.Tensor
    targets: torch.Tensor


def make_work() -> Work:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)
    ids = torch.randint(0, VOCAB, (CONTEXT + 1,))
    return Work(model, *window_batch(ids, make_windows(len(ids), CONTEXT, CONTEXT)))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def replay_layers(work: Work, heads: int, rows: int) -> list[float]:
    """Seconds that replay takes for `heads` heads of each layer, layer by layer, and then intact.

    Rolling through the intact model is in it.
    """
    layers = {layer: range(heads) for layer in range(NUM_LAYERS)} | {None: ()}
    marks = [time.perf_counter()]
    for _ in replay(work.model, work.inputs, work.targets, layers, None, rows):
        marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)]


@torch.no_grad()
def hook_loop(work: Work, layer: int) -> None:
    """Ablate one head as a first draft would: zero its part of z, run it all, take the loss."""

    def ablate(_, args):
        z = args[0].clone()
        z[..., 3 * 64 : 4 * 64] = 0
        return (z,)

    hook = output_projections(work.model)[layer].register_forward_pre_hook(ablate)
    logits = work.model(work.inputs).logits
    F.cross_entropy(logits[0], work.targets[0]).item()
    hook.remove()


def seconds_of_products() -> list[float]:
    """Seconds that the matrix products of replaying one head take by themselves, layer by layer.

    After a head of layer l come l's MLP, the blocks above it and the unembedding. Attention's own
    products (queries with keys, weights with values) are counted by timing fused attention, as
    nothing of it can be left out.
    """

    def fastest(rows: int, inner: int, columns: int) -> float:
        """By either library: what torch's `mm` calls, and what replay calls."""
        left, right = torch.randn(rows, inner), torch.randn(columns, inner)
        out = torch.empty(rows, columns)
        multiply = Product(right, packed=True)
        either = (lambda: torch.mm(left, right.T, out=out)), (lambda: multiply(left))
        return min(seconds(function) for function in 5 * either)

    q = torch.randn(1, NUM_HEADS, CONTEXT, 64)
    attention = min(
        seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)) for _ in range(5)
    )
    projections = fastest(CONTEXT, D_MODEL, 3 * D_MODEL) + fastest(CONTEXT, D_MODEL, D_MODEL)
    mlp = fastest(CONTEXT, D_MODEL, 4 * D_MODEL) + fastest(CONTEXT, 4 * D_MODEL, D_MODEL)
    unembedding = fastest(CONTEXT, D_MODEL, VOCAB)
    above = range(NUM_LAYERS - 1, -1, -1)
    return [mlp + blocks * (attention + projections + mlp) + unembedding for blocks in above]


class TransformerLens:
    """The loop in a process of its own, asked for one head at a time."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", TRANSFORMER_LENS_LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while self._read() != "ready":
            pass

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the TransformerLens process ended; is it installed there?")
        return line.strip()

    def seconds(self, layer: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{layer}\n")
        self.process.stdin.flush()
        return float(self._read())


def measure_exact(
    rounds: int, heads: int, rows: int, transformer_lens: str | None
) -> dict[str, float]:
    """Alternate between the contestants; every number is a median over the rounds.

    Replays `heads` heads of each layer, `rows` at once. `transformer_lens` is the Python of an
    environment that has it.
    """
    work = make_work()
    lens = TransformerLens(transformer_lens) if transformer_lens else None
    hook_loop(work, 0)
    if lens:
        lens.seconds(0)
    layers, hooks, others, limits, start = [], [], [], [], time.perf_counter()
    for turn in range(rounds):
        layers.append([t / heads for t in replay_layers(work, heads, rows)])
        hooks.append(seconds(lambda: hook_loop(work, turn % NUM_LAYERS)))  # noqa: B023
        if lens:
            others.append(lens.seconds(turn % NUM_LAYERS))
        limits.append(seconds_of_products())
        left = (time.perf_counter() - start) * (rounds / (turn + 1) - 1) / 60
        print(f"round {turn + 1} of {rounds}, {left:.0f} min left", file=sys.stderr, flush=True)
    by_layer, limit_by_layer = (
        [statistics.median(each) for each in zip(*turns, strict=True)] for turns in (layers, limits)
    )
    replayed, hooked = sum(by_layer) / NUM_LAYERS, statistics.median(hooks)
    limit = statistics.fmean(limit_by_layer)
    numbers = {
        "exact.replay_seconds": replayed,
        "exact.hooks_seconds": hooked,
        "exact.limit_seconds": limit,
        "exact.replay_over_hooks": hooked / replayed,
        "exact.fraction_of_matmul_limit": limit / replayed,
        "exact.peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    if lens:
        numbers["exact.transformerlens_seconds"] = statistics.median(others)
        numbers["exact.replay_over_transformerlens"] = statistics.median(others) / replayed
        lens.process.kill()
    numbers |= {f"exact.layer_{n}_seconds": t for n, t in enumerate(by_layer[:-1])}
    return numbers | {f"exact.layer_{n}_limit_seconds": t for n, t in enumerate(limit_by_layer)}
