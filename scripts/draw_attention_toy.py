"""Draw the two attention patterns of the toy in `mhaprune/model/attention_toy.py`.

    python scripts/draw_attention_toy.py

Writes docs/attention_toy.png.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from mhaprune.model.attention_toy import WORDS, toy_attention
from mhaprune.review.pictures import save_png

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "attention_toy.png"
TITLES = (
    "head 0: a word that seeks a noun looks at the nouns so far",
    "head 1: every word looks back at “The”",
)


def draw_pattern(axes: Axes, pattern: Float[np.ndarray, "query key"], title: str) -> None:
    """Draw one head: a row per query, its weights in its cells, grey after the query."""
    numbered = [f"{word} {position}" for position, word in enumerate(WORDS)]
    positions = range(len(WORDS))
    visible = np.tri(len(WORDS), dtype=bool)
    axes.set_facecolor("0.93")  # of what is hidden from the query
    axes.imshow(np.ma.masked_array(pattern, ~visible), cmap="Blues", vmin=0, vmax=1)
    for query, key in np.argwhere(visible):
        weight = pattern[query, key]
        color = "white" if weight > 0.6 else "0.1" if weight > 0.01 else "0.5"
        axes.text(key, query, f"{weight:.3f}", ha="center", va="center", fontsize=8.5, color=color)
    axes.set_title(title, fontsize=11, pad=10)
    axes.set(xlabel="key: the word looked at", ylabel="query: the word that looks")
    axes.set_xticks(positions, numbered, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(positions, numbered)
    axes.set_xticks(np.arange(0.5, len(WORDS) - 1), minor=True)
    axes.set_yticks(np.arange(0.5, len(WORDS) - 1), minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def draw(pattern: Float[np.ndarray, "head query key"]) -> Figure:
    """Draw the heads side by side."""
    figure = Figure(figsize=(12, 6), layout=ConstrainedLayoutEngine(wspace=0.06))
    for axes, of_head, title in zip(figure.subplots(1, 2), pattern, TITLES, strict=True):
        draw_pattern(axes, of_head, title)
    return figure


if __name__ == "__main__":
    save_png(draw(toy_attention().pattern[0].numpy()), PICTURE)
