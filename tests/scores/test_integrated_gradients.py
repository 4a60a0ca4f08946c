"""Integrated gradients share out, among the heads, what switching all of them off costs."""

import numpy as np
import pytest

from mhaprune.measure.subject import Subject
from mhaprune.scores.integrated_gradients import integrated_gradients
from tests.micro import double_model, output_rows
from tests.subjects import HEADS, KINDS, NUM_TOKENS, all_nats, make_subject, slopes_by_differences

every_kind = pytest.mark.parametrize("kind", KINDS)
every_model = pytest.mark.parametrize("model_type", ["gpt2", "llama"])


def gentle_model(model_type: str):
    """Heads that write a tenth: else some layer norm turns so sharply that 16 steps miss it."""
    model = double_model(model_type)
    for head in HEADS:
        output_rows(model, head).mul_(0.1)
    return model


def effect_of_all(subject: Subject) -> float:
    return (all_nats(subject, off=HEADS) - all_nats(subject)).sum() / NUM_TOKENS.sum()


@every_kind
@every_model
def test_the_values_add_up_to_the_effect_of_switching_all_heads_off(model_type, kind):
    subject = make_subject(gentle_model(model_type), kind)
    found, effect = integrated_gradients(subject, steps=16).value, effect_of_all(subject)
    assert found.sum() == pytest.approx(effect, abs=1e-6)
    assert abs(found).min() > 1e-5 and abs(effect) > 1e-3


@every_kind
@every_model
def test_with_more_steps_they_do_so_however_sharply_the_loss_turns(model_type, kind):
    subject = make_subject(double_model(model_type), kind)
    found = integrated_gradients(subject, steps=64).value
    assert found.sum() == pytest.approx(effect_of_all(subject), abs=1e-6)


@every_kind
@every_model
def test_16_steps_are_as_good_as_64(model_type, kind):
    subject = make_subject(gentle_model(model_type), kind)
    few, many = (integrated_gradients(subject, steps=steps) for steps in (16, 64))
    np.testing.assert_allclose(few.value, many.value, atol=1e-6)
    assert few.standard_error is not None and many.standard_error is not None
    np.testing.assert_allclose(few.standard_error, many.standard_error, atol=1e-6)


@every_kind
def test_it_is_the_mean_of_the_slopes_on_the_way_from_all_off_to_all_on(kind):
    subject = make_subject(gentle_model("gpt2"), kind)
    levels = (np.arange(10) + 0.5) / 10  # midpoints; the error falls with their number squared
    slope = np.mean([slopes_by_differences(subject, level) for level in levels], 0)
    expected = -slope.sum(-1) / NUM_TOKENS.sum()
    np.testing.assert_allclose(integrated_gradients(subject).value, expected, atol=2e-4)


def test_one_step_is_the_slope_halfway():
    subject = make_subject(double_model("gpt2"))
    expected = -slopes_by_differences(subject, 0.5).sum(-1) / NUM_TOKENS.sum()
    found = integrated_gradients(subject, steps=1)
    np.testing.assert_allclose(found.value, expected, rtol=1e-6, atol=1e-9)
