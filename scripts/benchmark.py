"""How fast is it? Side by side with what people use, and with what the machine can do.

    python scripts/benchmark.py --quick --json numbers.json

One command measures, in one process group, (i) at GPT-2 small's shape with random weights: replay,
a Hugging Face hook loop, TransformerLens (`pip install -e '.[bench]'`, or `--transformer-lens
PYTHON` for the interpreter of an environment that has transformer-lens<4; 4.0 dropped
`HookedTransformer`) and the matrix products alone; (ii) adaptive beside exhaustive measuring, on
whatever `rank_heads.py` can run: the demo model, or what the arguments after `--` say:

    python scripts/benchmark.py -- model=local model.path=DIR dataset=text dataset.path=FILE

Writes docs/benchmarks.md and its figure.
"""

import argparse
import importlib.util
import json
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from benchmark_adaptive import measure_adaptive, measure_growth
from benchmark_exact import NUM_HEADS, NUM_LAYERS, measure_exact
from matplotlib.figure import Figure

from mhaprune.review.pictures import save_png

ROOT = Path(__file__).resolve().parent.parent
Growth = dict[str, list[tuple[int, float]]]


def draw(numbers: dict[str, float], growth: Growth) -> Figure:
    """Draw cost against depth, windows and heads."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    depth, *others = figure.subplots(1, 3)
    layers = range(NUM_LAYERS)
    for key, label, style in (("seconds", "replay", "o"), ("limit_seconds", "products alone", "-")):
        depth.plot(layers, [numbers[f"exact.layer_{n}_{key}"] for n in layers], style, label=label)
    depth.set(xlabel="layer of the head", ylabel="seconds a head and window")
    depth.legend(frameon=False)
    for axes, (name, points) in zip(others, growth.items(), strict=True):
        counts, seconds = zip(*points, strict=True)
        slope = sum(n * s for n, s in points) / sum(n * n for n in counts)
        axes.plot(counts, seconds, "o")
        axes.plot([0, *counts], [slope * n for n in (0, *counts)], label="proportional")
        axes.set(xlabel=name, ylabel="seconds, demo model")
        axes.legend(frameon=False)
    for axes in (depth, *others):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def report(numbers: dict[str, float], growth: Growth, command: str, adaptive_on: str) -> str:
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
    by_count = [
        (name, ", ".join(f"{seconds:.1f} for {count}" for count, seconds in points))
        for name, points in growth.items()
    ]
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
            "![Cost against depth, windows and heads](benchmarks.png)",
            "",
            *(f"Seconds on the demo model by {name}: {listed}." for name, listed in by_count),
            "",
            "## To the same verdicts",
            "",
            f"Adaptive beside exhaustive measuring: {adaptive_on}; "
            f"{numbers['adaptive.num_heads']} heads, {numbers['adaptive.num_windows']} windows.",
            "",
            "| | exhaustive | adaptive |",
            "|---|---|---|",
            f"| seconds | {numbers['adaptive.exhaustive_seconds']:.0f} "
            f"| {numbers['adaptive.adaptive_seconds']:.0f} |",
            f"| share of windows measured | 1 | {numbers['adaptive.share_of_windows']:.3f} |",
            f"| heads with a verdict | {numbers['adaptive.num_settled_by_exhaustive']} "
            f"| {numbers['adaptive.num_settled_by_adaptive']} |",
            "",
            f"Adaptive is {numbers['adaptive.exhaustive_over_adaptive']:.1f}x as fast. Of the "
            f"{numbers['adaptive.num_settled_by_both']} heads with a verdict in both, "
            f"{numbers['adaptive.verdict_agreement']:.1%} have the same.",
            "",
        ]
    )


def without_places(words: Sequence[str]) -> str:
    """Join the words of a command, quoted for a shell, with the last name of each path only."""
    return re.sub(r"(?<![\w.])/\S*/", "", shlex.join(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds, not 7, and few heads")
    parser.add_argument(
        "--heads", type=int, help="heads of each layer to replay: all, or 4 if quick"
    )
    parser.add_argument("--rows", type=int, default=2, help="heads that are replayed at once")
    parser.add_argument("--transformer-lens", help="a Python that has transformer-lens")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--adaptive-only", action="store_true", help="print part (ii) alone")
    parser.add_argument("overrides", nargs="*", help="of rank_heads.py, after --: what is ranked")
    args = parser.parse_args()
    lens = args.transformer_lens
    if lens is None and importlib.util.find_spec("transformer_lens"):
        lens = sys.executable
    overrides = args.overrides or ["evaluation.max_windows=64" if args.quick else "model=demo"]
    if args.adaptive_only:
        print(json.dumps(measure_adaptive(overrides), indent=2))
        return
    rounds, heads = (3, 4) if args.quick else (7, NUM_HEADS)
    numbers = measure_exact(rounds, args.heads or heads, args.rows, lens)
    by_now = {key: round(number, 2) for key, number in numbers.items() if "layer" not in key}
    print(json.dumps(by_now, indent=2), file=sys.stderr, flush=True)
    growth = measure_growth()
    numbers |= measure_adaptive(overrides)
    command = without_places(["python", "scripts/benchmark.py", *sys.argv[1:]])
    page = report(numbers, growth, command, without_places(overrides))
    args.out.write_text(page)
    save_png(draw(numbers, growth), args.out.with_suffix(".png"))
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    print(page)


if __name__ == "__main__":
    main()
