"""Shapley values against all orders of a few heads, and against what they are defined by."""

import sys
from itertools import combinations, permutations
from math import factorial

import numpy as np
import pytest
import torch

from mhaprune.measure.subject import Subject
from mhaprune.model.heads import Head
from mhaprune.scores.shapley import shapley
from tests.micro import double_model, output_rows, tiny_model
from tests.subjects import HEADS, KINDS, NUM_TOKENS, WINDOWS, all_nats, make_subject

PLAYERS = (Head(0, 1), Head(1, 0), Head(1, 3))
every_kind = pytest.mark.parametrize("kind", KINDS)


def coalitions(subject: Subject) -> dict[frozenset[Head], np.ndarray]:
    """Each window's loss with each set of the players off."""
    return {
        frozenset(off): all_nats(subject, off)
        for size in range(len(PLAYERS) + 1)
        for off in combinations(PLAYERS, size)
    }


def marginals(nats: dict[frozenset[Head], np.ndarray], order: tuple[Head, ...]) -> np.ndarray:
    """What switching off each of PLAYERS adds in this order: `player window`."""
    added = {}
    for place, head in enumerate(order):
        added[head] = nats[frozenset(order[: place + 1])] - nats[frozenset(order[:place])]
    return np.array([added[head] for head in PLAYERS])


@every_kind
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("heads", [HEADS, PLAYERS])
def test_the_values_add_up_to_the_effect_of_switching_all_players_off(model_type, heads, kind):
    subject = make_subject(double_model(model_type), kind, heads=heads)
    effect = (all_nats(subject, off=heads) - all_nats(subject)).sum() / NUM_TOKENS.sum()
    assert np.nansum(shapley(subject).value) == pytest.approx(effect, abs=1e-9)
    assert abs(effect) > 1e-3


@every_kind
def test_sampled_values_are_those_of_all_orders_up_to_the_error_of_sampling(kind):
    """That error by arithmetic: 10 of the pairs (order, its reverse) are drawn for each window."""
    subject = make_subject(double_model("gpt2"), kind, heads=PLAYERS)
    nats, num_orders = coalitions(subject), 20
    pairs = np.array(
        [
            (marginals(nats, order) + marginals(nats, order[::-1])) / 2
            for order in permutations(PLAYERS)
        ]
    )
    assert len(pairs) == factorial(3)
    exact = pairs.mean(0).sum(-1) / NUM_TOKENS.sum()
    error = np.sqrt(pairs.var(0).sum(-1) / (num_orders / 2)) / NUM_TOKENS.sum()
    assert error.min() > 1e-9
    found = shapley(subject, pairs_per_window=num_orders // 2).at(PLAYERS)
    assert (abs(found - exact) < 4 * error).all()
    assert (abs(exact) > 8 * error).all()


def test_sampling_a_few_orders_stays_within_its_own_standard_error():
    subject = make_subject(double_model("gpt2"), heads=PLAYERS)
    nats = coalitions(subject)
    every = [marginals(nats, order) for order in permutations(PLAYERS)]
    exact = np.mean(every, 0).sum(-1) / NUM_TOKENS.sum()
    found = shapley(subject)
    assert found.standard_error is not None
    errors = np.array([found.standard_error[head.layer, head.head] for head in PLAYERS])
    assert (abs(found.at(PLAYERS) - exact) < 4 * errors).all()


@every_kind
def test_where_effects_add_up_each_head_gets_its_own(kind):
    """With W_O a millionth of itself nothing a head does depends on another."""
    model = tiny_model("gpt2").double()
    for head in HEADS:
        output_rows(model, head).mul_(1e-6)
    subject = make_subject(model, kind)
    intact = all_nats(subject).sum()
    effects = [(all_nats(subject, (head,)).sum() - intact) / NUM_TOKENS.sum() for head in HEADS]
    assert shapley(subject).at(HEADS) == pytest.approx(effects, rel=1e-3, abs=1e-11)
    assert np.abs(effects).max() > 1e-8


def test_a_single_player_gets_its_effect():
    subject = make_subject(tiny_model("gpt2").double(), heads=(Head(1, 2),))
    effect = (all_nats(subject, (Head(1, 2),)) - all_nats(subject)).sum() / NUM_TOKENS.sum()
    assert shapley(subject).value[1, 2] == pytest.approx(effect, rel=1e-9)


def test_a_head_that_writes_nothing_gets_nothing():
    model = tiny_model("gpt2").double()
    output_rows(model, Head(0, 2)).zero_()
    found = shapley(make_subject(model))
    assert found.value[0, 2] == pytest.approx(0, abs=1e-12)
    assert np.abs(np.delete(found.value.ravel(), 2)).min() > 1e-5


def test_each_window_has_orders_of_its_own_in_pairs_of_an_order_and_its_reverse(monkeypatch):
    subject = make_subject(tiny_model("gpt2"), rows_per_batch=9)
    gates: list[torch.Tensor] = []
    module = sys.modules[shapley.__module__]
    gate_heads = module.gate_heads

    def noting(model, gate, baseline):
        gates.append(gate)
        return gate_heads(model, gate, baseline)

    monkeypatch.setattr(module, "gate_heads", noting)
    shapley(subject)
    orders = [(1 - gate.flatten(1)).sum(0).argsort(descending=True).tolist() for gate in gates]
    assert len(orders) == 2 * len(WINDOWS)
    for order, other in zip(orders[::2], orders[1::2], strict=True):
        assert sorted(order) == list(range(8))
        assert other == order[::-1]
    assert len({tuple(order) for order in orders[::2]}) == len(WINDOWS)
