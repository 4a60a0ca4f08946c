"""Results -> pictures."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from scipy.stats import rankdata

from mhaprune.tables.files import write_atomically

POINTS_PER_UNIT = 110  # of correlation, on a figure of `cost_against_agreement`
LINE_OF_TEXT = 0.09  # of correlation
NOT_MEASURED = {"facecolor": "0.88", "edgecolor": "0.65", "hatch": "////"}
MARKS = {"critical": ("black", "white"), "redundant": ("none", "0.3")}  # verdict: (inside, rim)


def effect_grid(
    layers: Int[np.ndarray, "row"],
    heads: Int[np.ndarray, "row"],
    effects_nats: Float[np.ndarray, "row"],
    num_layers: int,
    num_heads: int,
) -> Float[np.ndarray, "layer head"]:
    """Arrange one effect per row by layer and head; NaN where no row has that head."""
    grid = np.full((num_layers, num_heads), np.nan)
    grid[layers, heads] = effects_nats
    return grid


def effect_heatmap(
    grid: Float[np.ndarray, "layer head"],
    verdicts: dict[tuple[int, int], str],
    title: str,
    tolerance_nats: float,
    label: str = "effect, nats/token",
) -> Figure:
    """Draw effects by layer and head, white at zero: green heads are useful, brown ones harmful.

    The scale is linear within the tolerance and logarithmic beyond, so that a critical head does
    not wash out the others. A dot marks a critical head, a ring a redundant one; a head that was
    not measured (NaN) is hatched. Brown and green differ for any kind of colour vision.
    """
    num_layers, num_heads = grid.shape
    width = max(5.0, 2.2 + 0.42 * num_heads)
    height = max(2.8, 1.6 + 0.36 * num_layers)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=min(11, 110 * width / max(len(title), 1)))  # as wide as it gets
    axes = figure.subplots()
    axes.set(xlabel="head", ylabel="layer", xticks=_ticks(num_heads), yticks=_ticks(num_layers))
    reach = np.abs(grid[np.isfinite(grid)]).max(initial=2 * tolerance_nats)
    norm = SymLogNorm(linthresh=tolerance_nats, vmin=-reach, vmax=reach)
    axes.patch.set(**NOT_MEASURED)  # shows through where there is no effect to draw
    image = axes.imshow(np.ma.masked_invalid(grid), cmap="BrBG", norm=norm, aspect="auto")
    _separate_cells(axes, num_layers, num_heads)
    for verdict in MARKS:
        _mark(axes, [cell for cell in verdicts if verdicts[cell] == verdict], verdict)
    handles = axes.get_legend_handles_labels()[0]
    if np.isnan(grid).any():
        handles.append(Patch(label="not measured"))
        handles[-1].set(**NOT_MEASURED)
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    ticks = _effect_ticks(tolerance_nats, float(reach))
    bar = figure.colorbar(image, ax=axes, label=label)
    bar.set_ticks(ticks, labels=[f"{tick:+g}" if tick else "0" for tick in ticks])
    bar.minorticks_off()
    return figure


def score_heatmap(grid: Float[np.ndarray, "layer head"], title: str, label: str) -> Figure:
    """Draw a score by layer and head: as `effect_heatmap`, linear up to a tenth of the largest."""
    largest = float(np.abs(grid[np.isfinite(grid)]).max(initial=0)) or 1.0
    return effect_heatmap(grid, {}, title, largest / 10, label)


def _mark(axes: Axes, cells: Sequence[tuple[int, int]], verdict: str) -> None:
    inside, rim = MARKS[verdict]
    layers, heads = np.array(cells, dtype=int).reshape(-1, 2).T
    axes.scatter(heads, layers, s=40, facecolor=inside, edgecolor=rim, label=verdict)


def _ticks(count: int) -> Sequence[int]:
    return range(0, count, 1 if count <= 16 else 2 if count <= 32 else 4)


def _effect_ticks(tolerance_nats: float, reach_nats: float) -> list[float]:
    """Zero, the tolerance and the powers of ten well beyond it, on both sides."""
    powers = [10.0**power for power in range(-9, 3)]
    sizes = [tolerance_nats, *(p for p in powers if 2 * tolerance_nats < p <= reach_nats)]
    return [*(-size for size in reversed(sizes)), 0.0, *sizes]


def _separate_cells(axes: Axes, num_layers: int, num_heads: int) -> None:
    axes.set_xticks(np.arange(0.5, num_heads - 1), minor=True)
    axes.set_yticks(np.arange(0.5, num_layers - 1), minor=True)
    axes.grid(which="minor", color="white")
    axes.tick_params(which="minor", length=0)


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure, whole or not at all; the bytes depend on nothing but the figure.

    Raises the `OSError` of the failure, naming `path`; what was there before is then unchanged.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150, metadata={"Software": None})
    write_atomically(path, content.getvalue())


def score_scatter(
    scores: Mapping[str, Float[np.ndarray, "head"]], effects_nats: Float[np.ndarray, "head"]
) -> Figure:
    """Draw the heads' ranks by the measured effect and by all scores against each other.

    Ranks, as one critical head would press all others into a corner; the histograms are of the
    values themselves. The most important head is at the top and at the right.
    """
    columns = {"measured effect": effects_nats, **scores}
    count = len(columns)
    figure = Figure(figsize=(1.5 * count + 1, 1.5 * count + 0.5), layout="constrained")
    grid = figure.subplots(count, count, squeeze=False)
    for row, (below, y) in enumerate(columns.items()):
        for column, (left, x) in enumerate(columns.items()):
            axes = grid[row, column]
            axes.set(xticks=[], yticks=[])
            axes.spines[["top", "right"]].set_visible(False)
            if row == column:
                axes.hist(x, bins=16, color="0.6")
            else:
                axes.scatter(
                    rankdata(x), rankdata(y), s=7, color="tab:blue", alpha=0.6, linewidth=0
                )
            if row == count - 1:
                axes.set_xlabel(left.replace("_", "\n"), fontsize=8)
            if column == 0:
                axes.set_ylabel(below.replace("_", "\n"), fontsize=8)
    return figure


def cost_against_agreement(
    passes: Mapping[str, float], spearman: Mapping[str, tuple[float, float, float]]
) -> Figure:
    """Draw each score's Spearman correlation (value, low, high) over its cost in forward passes."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lowest: dict[float, float] = {}  # name at each cost so far, going down: none over another
    for name in sorted(passes, key=lambda name: -spearman[name][0]):
        cost, (value, low, high) = max(passes[name], 0.5), spearman[name]
        reach = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar(cost, value, yerr=reach, fmt="o", capsize=3)
        lowest[cost] = min(value, lowest.get(cost, np.inf) - LINE_OF_TEXT)
        moved = POINTS_PER_UNIT * (lowest[cost] - value)
        place = {"xytext": (6, 4 + moved), "textcoords": "offset points"}
        axes.annotate(name, (cost, value), **place, fontsize=8)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(xscale="log", xlabel="cost, forward passes over the calibration text (0 drawn at 0.5)")
    axes.set(ylabel="Spearman correlation with the measured effect", ylim=(-1.05, 1.05))
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    return figure


@dataclass(frozen=True)
class Line:
    """A pruning curve to draw: perplexities, with intervals, by the number of heads removed."""

    label: str
    style: str
    num_removed: Sequence[int]
    perplexity: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def pruning_curves(
    lines: Sequence[Line], random_lines: Sequence[Line], ppl_intact: float, title: str
) -> Figure:
    """Draw perplexity against heads removed; the grey band is the range of the random orders.

    Dotted lines mark 1%, 5% and 10% more than intact. Lines of one label share a colour.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    if random_lines:
        counts = sorted(set.intersection(*(set(line.num_removed) for line in random_lines)))
        at = [
            [dict(zip(line.num_removed, line.perplexity, strict=True))[n] for n in counts]
            for line in random_lines
        ]
        axes.fill_between(
            counts,
            np.min(at, 0),
            np.max(at, 0),
            color="0.85",
            label=f"{len(random_lines)} random orders",
        )
    colors = {label: f"C{n}" for n, label in enumerate(dict.fromkeys(x.label for x in lines))}
    first = {line.label: line for line in reversed(lines)}
    for line in lines:
        color = colors[line.label]
        named = line.label if line is first[line.label] else None
        axes.plot(line.num_removed, line.perplexity, line.style, color=color, label=named)
        axes.fill_between(
            line.num_removed, line.low, line.high, color=color, alpha=0.2, linewidth=0
        )
    for increase in (0.01, 0.05, 0.10):
        axes.axhline(ppl_intact * (1 + increase), color="0.4", linewidth=0.7, linestyle=":")
    axes.set(yscale="log", xlabel="heads removed", ylabel="perplexity", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, title="solid: least important first\ndashed: most first")
    return figure


def pair_heatmap(
    names: Sequence[str], interaction_nats: Float[np.ndarray, "head head"], title: str
) -> Figure:
    """Draw interactions of pairs: brown, the pair costs more than its parts; green, less."""
    size = max(4.0, 1.5 + 0.35 * len(names))
    figure = Figure(figsize=(size + 2, size), layout="constrained")
    axes = figure.subplots()
    reach = float(np.nanmax(np.abs(interaction_nats), initial=1e-9))
    axes.patch.set(**NOT_MEASURED)
    image = axes.imshow(
        np.ma.masked_invalid(interaction_nats), cmap="BrBG_r", vmin=-reach, vmax=reach
    )
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="joint effect less the sum, nats/token")
    return figure
