"""The heatmap shows each head's effect where the head is, and is the same picture every time."""

import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from mhaprune.report import effect_grid, effect_heatmap, save_png

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


def test_other_effects_give_another_picture(tmp_path):
    save_png(heatmap(), tmp_path / "first.png")
    save_png(heatmap(GRID / 2), tmp_path / "second.png")
    assert (tmp_path / "first.png").read_bytes() != (tmp_path / "second.png").read_bytes()


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
