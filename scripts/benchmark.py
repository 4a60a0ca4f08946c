"""How fast is replay? Side by side with what people use, and with what the machine can do.

    python scripts/benchmark.py --quick --json numbers.json

Measures, alternating and in one process group, at GPT-2 small's shape with random weights: our
replay; a plain Hugging Face hook loop; TransformerLens `run_with_hooks`, in a virtual environment
of its own (`--transformer-lens PYTHON`, the interpreter of one that has transformer-lens<4, as 4.0
dropped `HookedTransformer`); and the matrix products alone. Replay gets cheaper with depth, so it
is measured on all layers; the loops run the whole model for every head, so one head is any head.
Writes `docs/benchmarks.md`.
"""

import argparse
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from mhaprune.architectures import output_projections
from mhaprune.perplexity import window_batch
from mhaprune.replay import UNEMBEDDING_CHUNK, replay
from mhaprune.windows import make_windows

ROOT = Path(__file__).resolve().parent.parent
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
    """Seconds that replay takes for `heads` heads of each layer, layer by layer."""
    layers = {layer: range(heads) for layer in range(NUM_LAYERS)}
    marks = [time.perf_counter()]
    for _ in replay(work.model, work.inputs, work.targets, layers, None, rows):
        marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks[1:])]


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


def products_of_replay() -> list[tuple[int, int, int, int]]:
    """Matrix products (rows, inner, columns, how many) of replaying one head of each layer."""
    blocks = sum(range(NUM_LAYERS))  # whole blocks after the ablated layer, over all layers
    mlps = blocks + NUM_LAYERS
    chunks = NUM_LAYERS * CONTEXT // UNEMBEDDING_CHUNK
    return [
        (CONTEXT, D_MODEL, 3 * D_MODEL, blocks),
        (CONTEXT, D_MODEL, D_MODEL, blocks),
        (CONTEXT, D_MODEL, 4 * D_MODEL, mlps),
        (CONTEXT, 4 * D_MODEL, D_MODEL, mlps),
        (VOCAB, D_MODEL, UNEMBEDDING_CHUNK, chunks),
    ]


def seconds_of_products() -> float:
    """Seconds that the matrix products of replaying one head of each layer take, by themselves.

    Attention's own products (queries with keys, weights with values) are counted by timing fused
    attention, as nothing of it can be left out.
    """
    total = 0.0
    for rows, inner, columns, count in products_of_replay():
        left, right = torch.randn(rows, inner), torch.randn(inner, columns)
        out = torch.empty(rows, columns)
        best = min(seconds(lambda: torch.mm(left, right, out=out)) for _ in range(5))  # noqa: B023
        total += count * best
    q = torch.randn(1, NUM_HEADS, CONTEXT, 64)
    attention = min(
        seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)) for _ in range(5)
    )
    return total + sum(range(NUM_LAYERS)) * attention


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


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Alternate between the contestants; every number is a median over the rounds."""
    work = make_work()
    lens = TransformerLens(args.transformer_lens) if args.transformer_lens else None
    hook_loop(work, 0)
    if lens:
        lens.seconds(0)
    layers, hooks, others, limits = [], [], [], []
    for turn in range(args.rounds):
        layers.append([t / args.heads for t in replay_layers(work, args.heads, args.rows)])
        hooks.append(seconds(lambda: hook_loop(work, turn % NUM_LAYERS)))  # noqa: B023
        if lens:
            others.append(lens.seconds(turn % NUM_LAYERS))
        limits.append(seconds_of_products() / NUM_LAYERS)
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    by_layer = [statistics.median(turn[n] for turn in layers) for n in range(NUM_LAYERS)]
    replayed, hooked = statistics.fmean(by_layer), statistics.median(hooks)
    numbers = {
        "exact.replay_seconds": replayed,
        "exact.hooks_seconds": hooked,
        "exact.limit_seconds": statistics.median(limits),
        "exact.replay_over_hooks": hooked / replayed,
        "exact.fraction_of_matmul_limit": statistics.median(limits) / replayed,
        "exact.peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    if lens:
        numbers["exact.transformerlens_seconds"] = statistics.median(others)
        numbers["exact.replay_over_transformerlens"] = statistics.median(others) / replayed
    return numbers | {f"exact.layer_{n}_seconds": t for n, t in enumerate(by_layer)}


def report(numbers: dict[str, float], command: str) -> str:
    """The numbers as a page."""
    names = {
        "exact.transformerlens_seconds": "TransformerLens `run_with_hooks`",
        "exact.hooks_seconds": "Hugging Face hook loop",
        "exact.replay_seconds": "replay, mean over layers",
        "exact.limit_seconds": "its matrix products and attention alone",
    }
    rows = [
        f"| {title} | {numbers[key]:.3f} | {numbers[key] / numbers['exact.replay_seconds']:.2f} |"
        for key, title in names.items()
        if key in numbers
    ]
    depth = ", ".join(f"{numbers[f'exact.layer_{n}_seconds']:.2f}" for n in range(NUM_LAYERS))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return "\n".join(
        [
            "# Benchmarks",
            "",
            f"`{command}` on {platform.machine()}, {torch.get_num_threads()} threads, {versions}, "
            "float32.",
            "",
            "Seconds for one head and window of 1,024 tokens, GPT-2 small's shape, random weights:",
            "",
            "| what | seconds | over replay |",
            "|---|---|---|",
            *rows,
            "",
            f"Replay by layer of the head, 0 to 11: {depth}.",
            f"Peak memory of the process: {numbers['exact.peak_rss_gb']:.1f} GB.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    parser.add_argument("--heads", type=int, default=4, help="heads of each layer to replay")
    parser.add_argument("--rows", type=int, default=4, help="heads that are replayed at once")
    parser.add_argument("--transformer-lens", help="a Python that has transformer-lens")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    args = parser.parse_args()
    args.rounds = 3 if args.quick else 7
    numbers = measure(args)
    command = "python scripts/benchmark.py" + " --quick" * args.quick
    command += " --transformer-lens PYTHON" * bool(args.transformer_lens)
    page = report(numbers, command)
    args.out.write_text(page)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    print(page)


if __name__ == "__main__":
    main()
