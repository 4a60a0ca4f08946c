"""Fisher information against finite differences, window by window."""

import numpy as np
import pytest

from mhaprune.scores.fisher import fisher
from tests.micro import double_model, tiny_model
from tests.subjects import (
    KINDS,
    NUM_TOKENS,
    WINDOWS,
    assert_same_estimate,
    make_subject,
    slopes_by_differences,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_it_is_half_the_mean_of_the_squared_slopes_per_token(model_type, kind):
    subject = make_subject(double_model(model_type), kind)
    halves = (slopes_by_differences(subject, 1.0) / NUM_TOKENS) ** 2 / 2
    found = fisher(subject)
    np.testing.assert_allclose(found.value, halves.mean(-1), rtol=1e-5)
    error = halves.std(-1, ddof=1) / np.sqrt(len(WINDOWS))
    assert found.standard_error is not None
    np.testing.assert_allclose(found.standard_error, error, rtol=1e-5)


def test_it_is_of_each_window_and_not_of_a_batch():
    """The square of a batch's mean slope, as published code takes it, would depend on the batch."""
    model = tiny_model("gpt2").double()
    one, two, all_at_once = (
        fisher(make_subject(model, rows_per_batch=rows)) for rows in (1, 2, 16)
    )
    assert_same_estimate(one, all_at_once, rtol=1e-9)
    assert_same_estimate(two, all_at_once, rtol=1e-9)
    slope = slopes_by_differences(make_subject(model), 1.0) / NUM_TOKENS
    of_pairs = (slope.reshape(2, 4, 4, 2).mean(-1) ** 2).mean(-1) / 2
    assert (abs(of_pairs / all_at_once.value - 1) > 0.05).all()


def test_one_window_has_no_standard_error():
    subject = make_subject(tiny_model("gpt2"), windows=WINDOWS[:1])
    assert fisher(subject).standard_error is None
