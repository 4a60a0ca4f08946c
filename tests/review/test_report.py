"""The heatmap shows each head's effect where the head is, and is the same picture every time."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection, LineCollection
from matplotlib.colors import SymLogNorm, to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import AxesImage, imread
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from mhaprune.review.pictures import (
    Line,
    cost_against_agreement,
    effect_grid,
    effect_heatmap,
    pair_heatmap,
    pruning_curves,
    save_png,
    score_heatmap,
    score_scatter,
)

TOLERANCE_NATS = 0.002
GRID = np.array([[1.0, 0.0, -0.02], [0.001, np.nan, -0.001]])
VERDICTS = {(0, 0): "critical", (0, 1): "redundant", (1, 0): "redundant", (0, 2): "harmful"}


def heatmap(grid: np.ndarray = GRID, title: str = "a run") -> Figure:
    return effect_heatmap(grid, VERDICTS if grid is GRID else {}, title, TOLERANCE_NATS)


def image_of(figure: Figure) -> AxesImage:
    return figure.axes[0].images[0]


def test_effects_lie_where_their_heads_are_and_the_others_are_not_a_number():
    grid = effect_grid(np.array([1, 0]), np.array([2, 0]), np.array([0.5, -0.25]), 2, 3)
    expected = [[-0.25, math.nan, math.nan], [math.nan, math.nan, 0.5]]
    np.testing.assert_array_equal(grid, expected)


def shade(effect_nats: float) -> float:
    """Where an effect lies on the scale of colours, from 0 to 1."""
    return np.asarray(image_of(heatmap()).norm(np.array([effect_nats]))).item()


def colour(effect_nats: float) -> np.ndarray:
    return image_of(heatmap()).to_rgba(np.array([effect_nats]))[0, :3]


def test_zero_is_in_the_middle_of_the_scale_and_nearly_white():
    assert shade(0.0) == 0.5
    assert (shade(-1.0), shade(1.0)) == (0, 1)
    assert shade(0.02) + shade(-0.02) == pytest.approx(1)
    assert colour(0.0).min() > 0.95
    assert colour(0.0).min() > colour(0.002).min() > colour(1.0).min()


def test_useful_heads_are_green_and_harmful_ones_brown():
    assert np.argmax(colour(0.1)) == 1
    red, green, blue = colour(-0.1)
    assert red > green > blue


def test_the_scale_is_linear_within_the_tolerance_and_logarithmic_beyond():
    assert shade(0.001) - 0.5 == pytest.approx((shade(0.002) - 0.5) / 2)
    assert shade(1.0) - shade(0.1) == pytest.approx(shade(0.1) - shade(0.01))


@pytest.mark.parametrize(
    ("verdict", "cells"), [("critical", [(0, 0)]), ("redundant", [(0, 1), (1, 0)])]
)
def test_a_mark_lies_on_each_head_of_its_verdict(verdict, cells):
    marks = {marks.get_label(): marks for marks in heatmap().axes[0].collections}[verdict]
    assert [(layer, head) for head, layer in np.asarray(marks.get_offsets()).tolist()] == cells


def test_a_dot_is_filled_and_a_ring_is_not():
    critical, redundant = heatmap().axes[0].collections
    assert np.asarray(critical.get_facecolor()).tolist() == [list(to_rgba("black"))]
    assert np.asarray(redundant.get_facecolor()).size == 0


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_explains_the_marks_and_hatching_where_a_head_was_not_measured():
    assert legend(heatmap()) == ["critical", "redundant", "not measured"]
    assert legend(heatmap(np.zeros((2, 2)))) == ["critical", "redundant"]


def test_heads_that_were_not_measured_are_see_through_over_the_hatching():
    figure = heatmap()
    alpha = image_of(figure).to_rgba(np.ma.masked_invalid(GRID))[..., 3]
    assert (alpha == np.where(np.isnan(GRID), 0, 1)).all()
    assert figure.axes[0].patch.get_hatch()


def bar_labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[1].get_yticklabels()]


def test_the_bar_names_zero_the_tolerance_and_powers_of_ten():
    large, small = (bar_labels(heatmap(np.array([[reach]]))) for reach in (1.0, 0.0))
    assert large == "-1 -0.1 -0.01 -0.002 0 +0.002 +0.01 +0.1 +1".split()
    assert small == "-0.002 0 +0.002".split()


@pytest.mark.parametrize(
    "grid",
    [GRID, np.zeros((2, 3)), np.full((1, 4), 0.01), np.full((2, 2), np.nan), np.array([[50.0]])],
    ids=["some", "no effect", "one layer", "nothing measured", "one head"],
)
def test_the_same_effects_give_the_same_bytes_of_a_png(tmp_path, grid):
    paths = [tmp_path / "first.png", tmp_path / "second.png"]
    for path in paths:
        save_png(heatmap(grid), path)
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(b"\x89PNG\r\n\x1a\n")
    assert first == second


def painted(figure: Figure, path: Path) -> np.ndarray:
    """The colours of the cells in the PNG, `layer head 3`, right of and below their middles."""
    save_png(figure, path)
    pixels, axes = imread(path), figure.axes[0]
    assert pixels.shape[:2] == tuple(int(150 * inches) for inches in figure.get_size_inches()[::-1])
    rows, columns = np.asarray(image_of(figure).get_array()).shape
    cells = np.array(
        [[(head + 0.3, layer + 0.3) for head in range(columns)] for layer in range(rows)]
    )
    x, y = (axes.transData.transform(cells.reshape(-1, 2)) * 150 / figure.dpi).T
    found = pixels[(pixels.shape[0] - y).astype(int), x.astype(int), :3]
    return found.reshape(rows, columns, 3)


def symmetric_log(effect_nats: float, reach_nats: float) -> np.ndarray:
    """The colour by hand: a decade is as long as 9/10 of what lies within the tolerance, each side.

    The scale goes from `-reach_nats` to `reach_nats`.
    """

    def length(nats: float) -> float:
        return min(nats / TOLERANCE_NATS, 1) / 0.9 + math.log10(max(nats / TOLERANCE_NATS, 1))

    share = math.copysign(length(abs(effect_nats)) / length(reach_nats), effect_nats)
    return np.array(colormaps["BrBG"]((1 + share) / 2)[:3])


@pytest.mark.parametrize("times", [1, 0.5, -1])
def test_each_cell_of_the_picture_has_the_colour_of_its_effect(tmp_path, times):
    grid = GRID * times
    found = painted(effect_heatmap(grid, {}, "a run", TOLERANCE_NATS), tmp_path / "a.png")
    for cell in np.argwhere(np.isfinite(grid)):
        expected = symmetric_log(grid[tuple(cell)], np.nanmax(np.abs(grid)))
        np.testing.assert_allclose(found[tuple(cell)], expected, atol=0.02)


@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 1), (4, 8), (12, 12), (30, 9)])
def test_no_text_is_cut_off_even_under_a_long_title(num_layers, num_heads):
    grid = np.full((num_layers, num_heads), 5.0)
    figure = heatmap(grid, "2026-11-30_07-15-07_smollm2_135m_instruct_wikitext103_resample_x1")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            box = text.get_window_extent(canvas.get_renderer())
            assert -1 <= box.x0 < box.x1 <= width + 1, text.get_text()
            assert -1 <= box.y0 < box.y1 <= height + 1, text.get_text()


# ---- scores


def test_a_score_is_drawn_as_effects_are_linear_up_to_a_tenth_of_the_largest():
    grid = np.array([[2.0, -0.5], [np.nan, 0.2]])
    figure = score_heatmap(grid, "a run", "fisher")
    drawn = np.ma.asarray(image_of(figure).get_array())
    np.testing.assert_array_equal(drawn.filled(np.nan), grid)
    norm = image_of(figure).norm
    assert isinstance(norm, SymLogNorm)
    assert (norm.vmin, norm.vmax, norm.linthresh) == (-2, 2, pytest.approx(0.2))
    assert figure.axes[1].get_ylabel() == "fisher"
    assert figure.get_suptitle() == "a run"
    assert legend(figure)[-1] == "not measured"
    assert [np.asarray(marks.get_offsets()).size for marks in figure.axes[0].collections] == [0, 0]


@pytest.mark.parametrize(
    ("grid", "reach", "linear", "shades"),
    [
        (np.zeros((2, 3)), 0.2, 0.1, [0.5] * 6),
        (np.full((2, 2), np.nan), 0.2, 0.1, []),
        (np.array([[1e-9, -1e-9]]), 1e-9, 1e-10, [1.0, 0.0]),
    ],
    ids=["zero", "not measured", "tiny"],
)
def test_a_score_of_nothing_is_drawn_too(tmp_path, grid, reach, linear, shades):
    """White where it is zero, at the ends of the scale where it is largest, else hatched."""
    figure = score_heatmap(grid, "a run", "fisher")
    norm = image_of(figure).norm
    assert isinstance(norm, SymLogNorm)
    assert (norm.vmin, norm.vmax, norm.linthresh) == (-reach, reach, pytest.approx(linear))
    found = painted(figure, tmp_path / "a.png")
    expected = colormaps["BrBG"](np.array(shades, dtype=float))[..., :3]
    np.testing.assert_allclose(found[np.isfinite(grid)], expected, atol=0.02)
    assert ("not measured" in legend(figure)) == np.isnan(grid).any()


EFFECTS = np.array([0.5, -0.25, 0.0, 0.125])
SCORES = {
    "integrated_gradients": np.array([3.0, 1.0, 2.0, 2.5]),
    "random": np.array([0.0, 1.0, 0.5, 0.25]),
}


def test_effects_and_scores_are_drawn_each_against_each():
    figure = score_scatter(SCORES, EFFECTS)
    columns = [EFFECTS, *SCORES.values()]
    assert len(figure.axes) == 9
    for row, y in enumerate(columns):
        for column, x in enumerate(columns):
            axes = figure.axes[3 * row + column]
            if row == column:
                bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
                assert sum(bar.get_height() for bar in bars) == 4
                assert len(axes.collections) == 0
            else:
                [dots] = axes.collections
                ranks = [1 + np.array([(each < value).sum() for value in each]) for each in (x, y)]
                np.testing.assert_array_equal(dots.get_offsets(), np.stack(ranks, 1))


def test_the_outer_plots_name_what_is_drawn():
    figure = score_scatter(SCORES, EFFECTS)
    names = ["measured effect", "integrated\ngradients", "random"]
    assert [axes.get_xlabel() for axes in figure.axes] == [""] * 6 + names
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels[::3] == names
    assert set(labels[1::3] + labels[2::3]) == {""}


PASSES = {"random": 0.0, "fisher": 3.0, "leave_one_out": 33.0}
SPEARMAN = {
    "random": (-0.1, -0.4, 0.3),
    "fisher": (0.5, 0.25, 0.625),
    "leave_one_out": (1.0, 1.0, 0.99),  # a percentile interval need not hold its value
}


def test_each_score_stands_at_its_cost_and_agreement_with_its_interval_and_name():
    [axes] = cost_against_agreement(PASSES, SPEARMAN).axes
    assert axes.get_xscale() == "log"
    drawn = {}
    for container, text in zip(axes.containers, axes.texts, strict=True):
        assert isinstance(container, ErrorbarContainer) and isinstance(text, Annotation)
        dot, _, (bar,) = container.lines
        assert isinstance(bar, LineCollection)
        [interval] = bar.get_segments()
        [x], [y] = np.asarray(dot.get_xdata()), np.asarray(dot.get_ydata())
        assert text.xy == (x, y)
        assert interval[:, 0].tolist() == [x, x]
        drawn[text.get_text()] = (x, y, *interval[:, 1])
    assert drawn == {
        "random": pytest.approx((0.5, -0.1, -0.4, 0.3)),  # a logarithm has no place for 0
        "fisher": pytest.approx((3, 0.5, 0.25, 0.625)),
        "leave_one_out": pytest.approx((33, 1, 1, 1)),
    }
    low, high = axes.get_ylim()
    assert low <= -1 and high >= 1
    assert axes.get_xlabel().startswith("cost, forward passes")
    assert axes.get_ylabel() == "Spearman correlation with the measured effect"


def test_names_of_scores_at_one_place_do_not_lie_over_each_other():
    close = {"gradient": 0.61, "fisher": 0.608, "attribution": 0.55, "shapley": 0.61}
    passes = dict.fromkeys(close, 3.0) | {"shapley": 56.0}
    figure = cost_against_agreement(passes, {name: (v, v, v) for name, v in close.items()})
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize(
    "draw",
    [lambda: score_scatter(SCORES, EFFECTS), lambda: cost_against_agreement(PASSES, SPEARMAN)],
    ids=["scatter", "cost"],
)
def test_figures_of_scores_are_the_same_bytes_every_time(tmp_path, draw):
    for name in ("first", "second"):
        save_png(draw(), tmp_path / f"{name}.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


# ---- pruning

NUM_REMOVED = [0, 2, 4]
LINES = [
    Line("fisher", "-", NUM_REMOVED, [10.0, 10.5, 12.0], [10.0, 10.2, 11.0], [10.0, 10.8, 13.0]),
    Line("fisher", "--", NUM_REMOVED, [10.0, 20.0, 40.0], [10.0, 15.0, 30.0], [10.0, 25.0, 50.0]),
    Line("gradient", "-", [0, 3], [10.0, 11.0], [10.0, 10.5], [10.0, 11.5]),
]
RANDOM = [
    Line("random_0", "-", [0, 1, 2, 4], [10.0, 11.0, 12.0, 30.0], [0.0] * 4, [0.0] * 4),
    Line("random_1", "-", [0, 2, 3, 4], [10.0, 15.0, 20.0, 25.0], [0.0] * 4, [0.0] * 4),
]


def test_each_pruning_curve_is_a_line_over_its_interval():
    [axes] = pruning_curves(LINES, RANDOM, 10.0, "a run").axes
    drawn, dotted = axes.lines[:3], axes.lines[3:]
    for line, said in zip(drawn, LINES, strict=True):
        assert np.asarray(line.get_xdata()).tolist() == list(said.num_removed)
        assert np.asarray(line.get_ydata()).tolist() == list(said.perplexity)
        assert line.get_linestyle() == said.style
    assert drawn[0].get_color() == drawn[1].get_color() != drawn[2].get_color()
    for band, said in zip(axes.collections[1:], LINES, strict=True):
        assert_band(band, said.num_removed, said.low, said.high)
    assert [np.asarray(line.get_ydata()).tolist() for line in dotted] == [
        pytest.approx([height, height]) for height in (10.1, 10.5, 11.0)
    ]
    assert {line.get_linestyle() for line in dotted} == {":"}
    assert (axes.get_yscale(), axes.get_title()) == ("log", "a run")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("heads removed", "perplexity")


def assert_band(band: Collection, num_removed, low, high) -> None:
    """The polygon's corners are the ends of the intervals."""
    [path] = band.get_paths()
    corners = {(float(x), float(y)) for x, y in np.asarray(path.vertices)}
    expected = {*zip(num_removed, low, strict=True), *zip(num_removed, high, strict=True)}
    assert corners == {(float(x), float(y)) for x, y in expected}


def test_the_range_of_random_orders_is_a_band_over_the_numbers_that_all_have():
    [axes] = pruning_curves(LINES, RANDOM, 10.0, "a run").axes
    assert_band(axes.collections[0], [0, 2, 4], [10.0, 12.0, 25.0], [10.0, 15.0, 30.0])
    [without] = pruning_curves(LINES, [], 10.0, "a run").axes
    assert len(without.collections) == len(LINES) == len(axes.collections) - 1


def test_the_legend_of_pruning_curves_names_each_order_once():
    [axes] = pruning_curves(LINES, RANDOM, 10.0, "a run").axes
    shown = axes.get_legend()
    assert shown is not None
    names = [text.get_text() for text in shown.get_texts()]
    assert names == ["2 random orders", "fisher", "gradient"]
    assert shown.get_title().get_text() == "solid: least important first\ndashed: most first"


def test_curves_that_only_take_the_most_important_heads_first_are_named_too():
    [axes] = pruning_curves(LINES[1:2], [], 10.0, "a run").axes
    shown = axes.get_legend()
    assert shown is not None
    assert [text.get_text() for text in shown.get_texts()] == ["fisher"]


PAIR_NAMES = ["L0H2", "L0H10", "L1H0"]
PAIR_NATS = np.array([[np.nan, 0.25, -0.5], [0.25, np.nan, 0.0], [-0.5, 0.0, np.nan]])


def test_interactions_are_drawn_by_pair_and_labelled_on_both_sides():
    figure = pair_heatmap(PAIR_NAMES, PAIR_NATS, "a run")
    axes, bar = figure.axes
    drawn = np.ma.asarray(axes.images[0].get_array()).filled(np.nan)
    np.testing.assert_array_equal(drawn, PAIR_NATS)
    np.testing.assert_array_equal(drawn, drawn.T)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels] == PAIR_NAMES
    assert axes.get_title() == "a run"
    assert bar.get_ylabel() == "joint effect less the sum, nats/token"
    assert axes.patch.get_hatch()  # shows through on the diagonal


def test_no_interaction_is_white_one_that_costs_more_brown_and_less_green():
    image = image_of(pair_heatmap(PAIR_NAMES, PAIR_NATS, "a run"))
    more, none, less = image.to_rgba(np.array([0.5, 0.0, -0.5]))[:, :3]
    assert none.min() > 0.95
    assert np.argmax(less) == 1
    assert more[0] > more[1] > more[2]
    assert image.get_clim() == (-0.5, 0.5)


@pytest.mark.parametrize("grid", [np.zeros((3, 3)), np.full((3, 3), np.nan), PAIR_NATS])
def test_figures_of_pruning_are_the_same_bytes_every_time(tmp_path, grid):
    for name in ("first", "second"):
        save_png(pair_heatmap(PAIR_NAMES, grid, "a run"), tmp_path / f"pairs_{name}.png")
        save_png(pruning_curves(LINES, RANDOM, 10.0, "a run"), tmp_path / f"curves_{name}.png")
    for kind in ("pairs", "curves"):
        first, second = ((tmp_path / f"{kind}_{n}.png").read_bytes() for n in ("first", "second"))
        assert first == second
