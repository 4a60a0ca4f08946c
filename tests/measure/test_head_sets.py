"""Sets of heads ablated together lose the same by replay, by gating and window by window."""

import functools
import hashlib
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from mhaprune.measure.head_sets import SetUnit, measure_sets, plan_sets, set_losses
from mhaprune.measure.leave_one_out import Unit, measure, num_rows, plan
from mhaprune.measure.perplexity import row_nats
from mhaprune.model.architectures import head_shape
from mhaprune.model.gating import gates_of
from mhaprune.model.heads import Head
from mhaprune.text.sample import window_batch
from tests.micro import double_model
from tests.subjects import HEADS, KINDS, WINDOWS, all_nats, make_subject

SETS = {
    "none": (),
    "one head": (Head(1, 2),),
    "heads of two layers": (Head(0, 1), Head(0, 3), Head(1, 0)),
    "heads of the last layer": (Head(1, 1), Head(1, 3)),
    "a layer": HEADS[:4],
    "all": HEADS,
}
every_model = pytest.mark.parametrize("model_type", ["gpt2", "llama"])
every_kind = pytest.mark.parametrize("kind", KINDS)
every_batch = pytest.mark.parametrize("rows_per_batch", [1, 16])
every_engine = pytest.mark.parametrize("engine", ["replay", "gating"])


def measured(subject, units, rows_per_batch, engine):
    """What each unit gave, in order."""
    return list(measure_sets(replace(subject, rows_per_batch=rows_per_batch, engine=engine), units))


def losses(subject, sets, rows_per_batch, engine, windows_per_unit=3):
    units = plan_sets(sets, len(subject.sample.windows), windows_per_unit)
    found = measured(subject, units, rows_per_batch, engine)
    results = {unit: nats.numpy() for unit, nats in found}
    return set_losses(results, sets, len(subject.sample.windows))


@functools.cache
def losses_alone(model_type, kind):
    """Of each set, window by window."""
    subject = make_subject(double_model(model_type), kind)
    return np.stack([all_nats(subject, heads) for heads in SETS.values()])


# ---- the numbers


@every_batch
@every_kind
@every_model
def test_replay_gating_and_each_window_alone_give_the_same_losses(model_type, kind, rows_per_batch):
    subject, sets = make_subject(double_model(model_type), kind), list(SETS.values())
    replayed, gated = (
        losses(subject, sets, rows_per_batch, engine) for engine in ("replay", "gating")
    )
    alone = losses_alone(model_type, kind)
    np.testing.assert_allclose(replayed, gated, rtol=0, atol=1e-10)
    np.testing.assert_allclose(gated, alone, rtol=0, atol=1e-10)
    assert np.abs(np.diff(alone.sum(1))).min() > 1e-3  # no set does what another does


@every_engine
@every_kind
@every_model
def test_a_set_of_one_head_loses_what_leaving_it_out_loses(model_type, kind, engine):
    subject = make_subject(double_model(model_type), kind)
    units = plan(HEADS, range(len(WINDOWS)), 3)
    expected = np.full((len(HEADS), len(WINDOWS)), np.nan)
    for unit, nats in measure(replace(subject, rows_per_batch=4, engine=engine), units):
        if unit.layer is not None:
            rows = [HEADS.index(Head(unit.layer, head)) for head in unit.heads]
            expected[np.ix_(rows, unit.windows)] = nats
    found = losses(subject, [(head,) for head in HEADS], 4, engine)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@every_engine
@every_kind
def test_without_a_head_in_it_a_set_is_the_intact_model(kind, engine):
    subject = make_subject(double_model("gpt2"), kind)
    intact = row_nats(subject.model, *window_batch(subject.sample.ids, WINDOWS))
    [found] = losses(subject, [()], 4, engine)
    np.testing.assert_allclose(found, intact, rtol=0, atol=1e-10)


@every_engine
def test_a_result_is_one_row_of_nats_for_each_unit_in_the_order_of_the_plan(engine):
    subject = make_subject(double_model("gpt2"))
    units = plan_sets(SETS.values(), len(WINDOWS), 3)
    found = measured(subject, units, 4, engine)
    assert [unit for unit, _ in found] == units
    assert [tuple(nats.shape) for _, nats in found] == [(1, len(unit.windows)) for unit in units]
    assert {nats.dtype for _, nats in found} == {torch.float64}


def test_a_gate_is_0_at_the_heads_of_its_set_and_1_elsewhere():
    gates = gates_of([(), (Head(0, 1), Head(1, 3))], head_shape(double_model("gpt2")))
    assert gates.tolist() == [[[1, 1, 1, 1], [1, 1, 1, 1]], [[1, 0, 1, 1], [1, 1, 1, 0]]]


# ---- the plan


def test_sets_are_planned_block_by_block_each_once_whatever_the_order_of_its_heads():
    one, other = Head(0, 1), Head(1, 0)
    units = plan_sets([(other, one), (), (one, other), (one, one), (one,)], 5, windows_per_unit=2)
    assert units == [
        SetUnit(heads, block)
        for block in ((0, 1), (2, 3), (4,))
        for heads in ((one, other), (), (one,))
    ]
    assert num_rows(units) == 3 * 5


def test_a_set_is_stored_under_its_size_and_a_hash_of_its_heads():
    digest = hashlib.sha256(b"L0H1 L1H0").hexdigest()[:16]
    assert digest == "3872c10aa3a28804"
    unit = SetUnit((Head(0, 1), Head(1, 0)), (4, 5))
    assert unit.stored("mean") == (f"mean, 2 heads off {digest}", None, (), (4, 5))


def test_different_sets_ablations_and_windows_have_different_names():
    every_set = [some for count in range(9) for some in combinations(HEADS, count)]
    units = [SetUnit(heads, windows) for heads in every_set for windows in ((0,), (0, 1))]
    names = {unit.stored(kind) for unit in units for kind in ("zero", "mean")}
    assert len(names) == 2**8 * 2 * 2
    assert Unit(None, (), (0,)).stored("zero") not in names


def test_losses_are_arranged_by_set_and_window_and_a_set_may_come_twice():
    one, two = (Head(0, 0),), (Head(0, 0), Head(1, 1))
    results = {
        SetUnit(two, (0, 1)): np.array([[1.0, 2.0]]),
        SetUnit((), (0, 1)): np.array([[3.0, 4.0]]),
        SetUnit((), (2,)): np.array([[5.0]]),
        SetUnit(two, (2,)): np.array([[6.0]]),
        SetUnit(one, (2,)): np.array([[7.0]]),
        SetUnit(one, (0, 1)): np.array([[8.0, 9.0]]),
    }
    found = set_losses(results, [(), two[::-1], one, ()], num_windows=3)
    assert found.tolist() == [[3, 4, 5], [1, 2, 6], [8, 9, 7], [3, 4, 5]]
