"""Results -> pictures."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
    bar = figure.colorbar(image, ax=axes, label="effect, nats/token")
    bar.set_ticks(ticks, labels=[f"{tick:+g}" if tick else "0" for tick in ticks])
    bar.minorticks_off()
    return figure


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
    """Write the figure; the bytes depend on nothing but the figure."""
    figure.savefig(path, dpi=150, metadata={"Software": None})
