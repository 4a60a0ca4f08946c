"""What scores are made of: ratios of totals, batches that fit, slopes by finite differences."""

import math

import numpy as np
import pytest
import torch

from mhaprune.measure import gradients
from mhaprune.measure.gradients import loss_and_slope, rows_for_gradients
from mhaprune.model.heads import Head
from mhaprune.scores.estimate import Estimate, batches, estimate_rates, only, slopes, spread
from mhaprune.text.windows import Window
from tests.micro import double_model, tiny_model
from tests.subjects import (
    KINDS,
    NUM_TOKENS,
    WINDOWS,
    all_nats,
    make_subject,
    slopes_by_differences,
)

SOME = (Head(1, 2), Head(0, 3))
TOTALS = np.random.default_rng(0).normal(3, 1, (2, 4, len(WINDOWS)))


@pytest.fixture(scope="module")
def model():
    return tiny_model("gpt2").double()


def test_values_come_in_the_order_of_the_heads_that_are_asked_for():
    value = np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    made = Estimate(value, None, forward_equivalents=1)
    assert made.at([Head(1, 3), Head(0, 1), Head(1, 0)]).tolist() == [8, 2, 5]
    assert made.at([]).tolist() == []


def test_the_windows_of_the_subject_score_as_many_tokens_as_they_should(model):
    assert make_subject(model).sample.num_tokens.tolist() == NUM_TOKENS.tolist()


def test_rates_are_ratios_of_totals_with_the_error_of_a_ratio(model):
    """Against the variance of what is left of each window: total - rate * tokens."""
    found = estimate_rates(make_subject(model), TOTALS, forward_equivalents=7)
    for layer, head in np.ndindex(2, 4):
        totals = TOTALS[layer, head]
        rate = totals.sum() / NUM_TOKENS.sum()
        variance = (totals - rate * NUM_TOKENS).var(ddof=1)
        error = math.sqrt(len(WINDOWS) * variance) / NUM_TOKENS.sum()
        assert found.value[layer, head] == pytest.approx(rate, rel=1e-12)
        assert found.standard_error is not None
        assert found.standard_error[layer, head] == pytest.approx(error, rel=1e-12)
    assert found.forward_equivalents == 7


def test_totals_in_proportion_to_the_tokens_have_no_error(model):
    totals = np.broadcast_to(0.25 * NUM_TOKENS, (2, 4, len(WINDOWS)))
    found = estimate_rates(make_subject(model), totals, 1)
    np.testing.assert_allclose(found.value, 0.25)
    assert found.standard_error is not None
    np.testing.assert_allclose(found.standard_error, 0, atol=1e-15)


def test_one_window_has_a_value_and_no_standard_error(model):
    subject = make_subject(model, windows=WINDOWS[:1])
    found = estimate_rates(subject, TOTALS[..., :1], 1)
    np.testing.assert_allclose(found.value, TOTALS[..., 0] / 12)
    assert found.standard_error is None


def test_rows_are_arranged_by_layer_and_head_whatever_their_order(model):
    subject = make_subject(model, heads=SOME)
    made = spread(subject, np.array([[1.0, 2], [3, 4]]), fill=-1.0)
    assert made[1, 2].tolist() == [1, 2] and made[0, 3].tolist() == [3, 4]
    assert (made == -1).sum() == 6 * 2
    assert (spread(subject, np.array([[1.0], [3]])) == 0).sum() == 6


def test_heads_that_were_not_asked_for_become_nan(model):
    values = np.arange(8.0).reshape(2, 4)
    kept = only(make_subject(model, heads=SOME), values)
    assert kept[1, 2] == 6 and kept[0, 3] == 3
    assert np.isnan(kept).sum() == 6
    assert not np.isnan(values).any()


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, [1] * 8), (3, [3, 3, 2]), (8, [8]), (100, [8]), (5, [5, 3])]
)
def test_batches_hold_each_window_once_in_order_and_no_more_rows_than_allowed(model, rows, sizes):
    found = list(batches(make_subject(model, rows_per_batch=rows)))
    assert [len(numbers) for numbers in found] == sizes
    assert [number for numbers in found for number in numbers] == list(range(8))


def test_rows_for_gradients_are_what_the_memory_has_room_for(model, monkeypatch):
    """A position keeps 34 widths in each of 2 blocks and, twice, the logits of 64 tokens."""
    subject = make_subject(model, rows_per_batch=16)
    kept = 34 * 2 * 32 + 2 * 64
    for room, rows in [(12 * kept * 5, 5), (12 * kept * 5 - 1, 4), (12 * kept * 99, 16), (0, 1)]:
        monkeypatch.setattr(gradients, "NUMBERS_AT_ONCE", room)
        assert rows_for_gradients(subject, 12) == rows
    monkeypatch.setattr(gradients, "NUMBERS_AT_ONCE", 12 * (34 * 32 + 2 * 64) * 7)
    assert rows_for_gradients(subject, 12, lowest_layer=1) == 7


def test_batches_are_cut_for_the_longest_window(model, monkeypatch):
    windows = (Window(0, 4, 1), Window(0, 25, 1), Window(0, 5, 1))
    monkeypatch.setattr(gradients, "NUMBERS_AT_ONCE", 24 * (34 * 2 * 32 + 2 * 64) * 2)
    assert list(batches(make_subject(model, windows=windows))) == [[0, 1], [2]]


@pytest.mark.parametrize("level", [1.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_slopes_are_those_of_the_loss_by_finite_differences(model_type, kind, level):
    subject = make_subject(double_model(model_type), kind, rows_per_batch=3)
    losses, found = slopes(subject, level)
    level = float(np.float32(level))  # gates are float32 until they meet the model
    np.testing.assert_allclose(found, slopes_by_differences(subject, level), rtol=1e-6, atol=1e-7)
    assert abs(found).min() > 1e-5
    if level == 1:
        np.testing.assert_allclose(losses, all_nats(subject), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_at_positions_add_up_to_the_slope_of_the_window(model, kind):
    subject = make_subject(model, kind)
    numbers = [3, 7, 1]  # the last window is shorter than the others
    losses, of_window = loss_and_slope(subject, numbers, torch.ones(3, 2, 4))
    same_losses, at_positions = loss_and_slope(subject, numbers, torch.ones(3, 12, 2, 4))
    assert at_positions.shape == (3, 12, 2, 4)
    torch.testing.assert_close(at_positions.sum(1), of_window, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(same_losses, losses, rtol=1e-12, atol=0)
    assert (at_positions[1, 10:] == 0).all()  # padding
    assert (at_positions[[0, 2], :, 0] != 0).all()
