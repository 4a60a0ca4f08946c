"""What holds for every score, whatever it estimates."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mhaprune.measure.subject import Subject
from mhaprune.model.heads import Head
from mhaprune.scores.catalogue import SCORES
from mhaprune.scores.estimate import Estimate
from tests.micro import tiny_model
from tests.subjects import HEADS, WINDOWS, assert_same_estimate, make_subject

OPTIONS: dict[str, dict[str, Any]] = {
    "integrated_gradients": {"steps": 3},
    "learned_gates": {"steps": 4, "lambdas": (0.01, 0.1)},
}
SOME = (Head(1, 2), Head(0, 3), Head(0, 0))
ROUNDING = {"rtol": 1e-9, "atol": 1e-12}
# What a window, or a step of training, draws at random depends on its place: orders of switching
# heads off, gates. Adaptive measuring begins with a few windows that are drawn by number; random
# has no windows to put in order.
PLACE_MATTERS = ("shapley", "learned_gates", "adaptive", "random")
COSTS = {  # for H heads; adaptive with so few windows measures all of them, after predicting
    "leave_one_out": lambda num_heads: 1 + num_heads,
    "adaptive": lambda num_heads: 3 + num_heads,
    "gradient": lambda num_heads: 3,
    "fisher": lambda num_heads: 3,
    "attribution": lambda num_heads: 3,
    "integrated_gradients": lambda num_heads: 3 * 3,
    "shapley": lambda num_heads: 2 * (num_heads + 1),
    "learned_gates": lambda num_heads: 3 * 4 * 2,  # every step takes all windows
    "activation_norm": lambda num_heads: 1,
    "random": lambda num_heads: 0,
}

every_score = pytest.mark.parametrize("name", SCORES)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_subject(tiny_model("gpt2").double())


def score(name: str, subject: Subject) -> Estimate:
    return SCORES[name](subject, **OPTIONS.get(name, {}))


@pytest.mark.parametrize(("rows_per_batch", "kind"), [(1, "zero"), (2, "donors")])
@pytest.mark.parametrize("name", SCORES)
def test_values_do_not_depend_on_how_many_rows_go_through_at_once(
    subject, name, rows_per_batch, kind
):
    subject = make_subject(subject.model, kind)
    expected = score(name, replace(subject, rows_per_batch=16))
    found = score(name, replace(subject, rows_per_batch=rows_per_batch))
    assert_same_estimate(found, expected, **ROUNDING)
    assert found.forward_equivalents == expected.forward_equivalents


@pytest.mark.parametrize("name", [name for name in SCORES if name not in PLACE_MATTERS])
def test_values_do_not_depend_on_the_order_of_the_windows(subject, name):
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    shuffled = replace(
        subject, sample=replace(subject.sample, windows=tuple(WINDOWS[number] for number in order))
    )
    assert_same_estimate(score(name, shuffled), score(name, subject), **ROUNDING)


@every_score
def test_heads_that_are_asked_for_have_a_value_and_the_others_have_none(subject, name):
    found = score(name, replace(subject, heads=SOME))
    asked = np.zeros((2, 4), dtype=bool)
    for head in SOME:
        asked[head.layer, head.head] = True
    assert found.value.shape == (2, 4)
    np.testing.assert_array_equal(np.isfinite(found.value), asked)
    np.testing.assert_array_equal(np.isnan(found.value), ~asked)
    if found.standard_error is not None:
        assert found.standard_error.shape == (2, 4)
        assert (found.standard_error[asked] >= 0).all()
        assert np.isnan(found.standard_error[~asked]).all()


@pytest.mark.parametrize("name", [name for name in SCORES if name != "shapley"])
def test_heads_have_their_value_whatever_order_they_are_asked_for_in(subject, name):
    """But shapley's: what it draws at random are places among the heads that are asked for."""
    found = score(name, replace(subject, heads=HEADS[::-1]))
    assert_same_estimate(found, score(name, subject), **ROUNDING)


@every_score
def test_the_model_is_left_as_it_was(name):
    model = tiny_model("gpt2")
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    score(name, make_subject(model, "donors", heads=SOME))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not module._backward_hooks and not module._backward_pre_hooks
    assert before.keys() == model.state_dict().keys()
    assert all(weight.equal(before[key]) for key, weight in model.state_dict().items())


@every_score
def test_the_same_seed_gives_the_same_numbers(subject, name):
    subject = replace(subject, heads=SOME, seed=5)
    assert_same_estimate(score(name, subject), score(name, subject), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["shapley", "learned_gates", "random"])
def test_another_seed_draws_other_numbers(subject, name):
    found, other = (score(name, replace(subject, seed=seed)).value for seed in (5, 6))
    assert (found != other).any()


@pytest.mark.parametrize("heads", [HEADS, SOME])
@every_score
def test_the_cost_is_that_of_the_passes(subject, name, heads):
    found = score(name, replace(subject, heads=heads))
    assert found.forward_equivalents == pytest.approx(COSTS[name](len(heads)), rel=1e-12)


def test_the_cost_of_shapley_grows_with_the_orders(subject):
    found = SCORES["shapley"](replace(subject, heads=SOME), pairs_per_window=3)
    assert found.forward_equivalents == 6 * 4


def test_random_values_are_the_steps_from_0_to_1(subject):
    assert sorted(score("random", subject).value.ravel()) == pytest.approx(np.arange(8) / 7)
