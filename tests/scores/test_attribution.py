"""Predictions are the slope of the loss along a head's gate, by finite differences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from mhaprune.measure import gradients
from mhaprune.measure.baselines import Ablation, Donors, donor_z, mean_z
from mhaprune.measure.leave_one_out import Unit, measure, plan
from mhaprune.measure.perplexity import row_nats
from mhaprune.measure.prediction import predict
from mhaprune.measure.subject import Subject
from mhaprune.model.gating import gate_heads
from mhaprune.model.heads import Head
from mhaprune.scores.attribution import attribution
from mhaprune.scores.leave_one_out import leave_one_out
from mhaprune.text.sample import Sample, window_batch
from mhaprune.text.windows import Window, make_windows
from tests.micro import double_model, micro_gpt2, output_rows, tiny_model

IDS = torch.randint(64, (40,), generator=torch.Generator().manual_seed(4))
WINDOWS = make_windows(len(IDS), context_length=12, stride=7)  # 5 windows, the last scores 6
HEADS = [Head(layer, head) for layer in range(2) for head in range(4)]
DONORS = Donors(IDS.flip(0), (Window(0, 13, 1), Window(4, 20, 5), Window(20, 34, 21)))
KINDS = ("zero", "constant", "donors")
SAMPLE = Sample.of(IDS, WINDOWS)
FLOAT32 = 1e-6  # relative; the gate, and so its gradient, is kept in float32
STEP = 1e-5


def make_ablation(model, kind: str) -> Ablation:
    mean = mean_z(model, SAMPLE, rows_per_batch=2)
    return {"zero": None, "constant": mean, "donors": DONORS}[kind]


def subject_of(model, ablation: Ablation = None, rows_per_batch: int = 8) -> Subject:
    return Subject(model, SAMPLE, tuple(HEADS), ablation, rows_per_batch)


def predictions(model, units, ablation=None, rows_per_batch=8):
    """(head or None, window) -> predicted effect or loss in total nats."""
    return {
        (None if unit.layer is None else Head(unit.layer, unit.heads[variant]), window): float(nats)
        for unit, result in predict(subject_of(model, ablation, rows_per_batch), units)
        for variant, row in enumerate(result)
        for window, nats in zip(unit.windows, row, strict=True)
    }


def gated_nats(model, window: int, head: Head, keep: float, ablation: Ablation) -> float:
    """The window's loss, run on its own, with one head's gate at `keep`."""
    inputs, targets = window_batch(IDS, [WINDOWS[window]])
    baseline: Any = ablation
    if isinstance(ablation, Donors):
        donor = ablation.windows[window % len(ablation.windows)]
        donor_ids = ablation.ids[donor.start : donor.stop - 1][None, : inputs.shape[1]]
        baseline = [donor_z(model, donor_ids, layer) for layer in range(2)]
    gate = torch.ones(2, 4, dtype=torch.float64)
    gate[head.layer, head.head] = keep
    with gate_heads(model, gate, baseline):
        return float(row_nats(model, inputs, targets))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_prediction_is_the_slope_of_the_loss_from_gate_1_to_gate_0(model_type, kind):
    model = double_model(model_type)
    ablation = make_ablation(model, kind)
    found = predictions(model, plan(HEADS, range(len(WINDOWS)), 2), ablation)
    for head in HEADS:
        for window in range(len(WINDOWS)):
            above, below = (
                gated_nats(model, window, head, 1 + step, ablation) for step in (STEP, -STEP)
            )
            slope = (above - below) / (2 * STEP)
            assert found[head, window] == pytest.approx(-slope, rel=FLOAT32, abs=1e-7)
    assert min(abs(nats) for nats in found.values()) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_the_same_whatever_layers_are_asked_for(kind):
    """The pass back ends at the lowest of them."""
    model = double_model("gpt2")
    ablation = make_ablation(model, kind)
    whole = predictions(model, plan(HEADS, range(len(WINDOWS)), 2), ablation)
    last_layer = predictions(model, plan(HEADS[4:], range(len(WINDOWS)), 2), ablation)
    alone = predictions(model, plan([], range(len(WINDOWS)), 2), ablation)
    assert len(whole) > len(last_layer) > len(alone) == len(WINDOWS)
    for key, nats in (last_layer | alone).items():
        assert nats == pytest.approx(whole[key], rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_an_effect_too_small_to_bend_the_loss_is_predicted_as_it_is_measured(kind):
    """With W_O a millionth of itself the loss is linear in the gates: their squares are nothing."""
    model = tiny_model("gpt2").double()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_proj.weight *= 1e-6
    units = plan(HEADS, range(len(WINDOWS)), 5)
    ablation = make_ablation(model, kind)
    found = predictions(model, units, ablation)
    measured = dict(measure(subject_of(model, ablation), units))
    intact = measured[units[0]][0]
    for unit in units[1:]:
        effects = measured[unit] - intact
        assert effects.abs().min() > 1e-9
        for head, row in zip(unit.heads, effects.tolist(), strict=True):
            assert unit.layer is not None
            predicted = [found[Head(unit.layer, head), window] for window in unit.windows]
            assert predicted == pytest.approx(row, rel=1e-3, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_of_such_effects_is_the_measured_one_with_its_standard_error(kind):
    model = tiny_model("gpt2").double()
    for head in HEADS:
        output_rows(model, head).mul_(1e-6)
    ablation = make_ablation(model, kind)
    subject = subject_of(model, ablation, rows_per_batch=3)
    predicted, measured = attribution(subject), leave_one_out(subject)
    assert predicted.value == pytest.approx(measured.value, rel=1e-3, abs=1e-11)
    assert predicted.standard_error == pytest.approx(measured.standard_error, rel=1e-3, abs=1e-11)
    assert abs(measured.value).min() > 1e-9


def test_the_score_is_the_sum_of_the_predictions_over_the_tokens():
    model = tiny_model("gpt2").double()
    found = predictions(model, plan(HEADS, range(len(WINDOWS)), 2))
    score = attribution(Subject(model, SAMPLE, tuple(HEADS)))
    for head in HEADS:
        total = sum(found[head, window] for window in range(len(WINDOWS)))
        assert score.value[head.layer, head.head] == pytest.approx(total / 39, rel=FLOAT32)


def test_on_the_micro_model_the_slope_is_the_one_on_paper():
    """Text A B, from (1, 2, 2) / 3: head 0 adds 2B, head 1 adds 2C; logits 4 (a, b, c) / length.

    Nats to predict B: n = ln Z - 4 b / r with Z = 2 sum cosh(4 c_i / r) and r = 3.
    """
    heads = Head(0, 0), Head(0, 1)
    sample = Sample.of(torch.tensor([0, 1]), [Window(0, 2, 1)])
    subject = Subject(micro_gpt2(), sample, heads, rows_per_batch=1)
    (_, intact), (_, found) = predict(subject, plan(heads, [0], 1))
    after = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64, requires_grad=True)
    logits = 4 * after / after.norm()
    nats = (2 * logits.cosh().sum()).log() - logits[1]
    (slope,) = torch.autograd.grad(nats, after)
    assert intact.item() == pytest.approx(nats.item(), rel=1e-12)
    expected = [-2 * float(slope[1]), -2 * float(slope[2])]
    assert found[:, 0].tolist() == pytest.approx(expected, rel=FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("windows_per_unit", "rows_per_batch"), [(1, 1), (2, 3), (3, 2), (5, 4)])
def test_predictions_do_not_depend_on_batches_blocks_or_order(
    kind, windows_per_unit, rows_per_batch
):
    model = tiny_model("gpt2").double()
    ablation = make_ablation(model, kind)
    expected = predictions(model, plan(HEADS, range(len(WINDOWS)), 5), ablation, rows_per_batch=9)
    units = plan(HEADS, [3, 0, 4, 1, 2], windows_per_unit)
    found = predictions(model, units, ablation, rows_per_batch)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=FLOAT32)
    for window in range(len(WINDOWS)):
        assert found[None, window] == pytest.approx(expected[None, window], rel=1e-12)


def test_only_the_heads_of_a_unit_come_out_and_in_its_order():
    model = tiny_model("gpt2").double()
    every = predictions(model, plan(HEADS, range(len(WINDOWS)), 5))
    units = [Unit(1, (3, 0), (4, 1, 2)), Unit(0, (2,), (4, 1, 2)), Unit(1, (2,), (0,))]
    found = list(predict(subject_of(model), units))
    assert [unit for unit, _ in found] == units
    assert [nats.dtype for _, nats in found] == [torch.float64] * 3
    for unit, nats in found:
        assert unit.layer is not None
        expected = [[every[Head(unit.layer, h), w] for w in unit.windows] for h in unit.heads]
        assert nats.tolist() == [pytest.approx(row, rel=FLOAT32) for row in expected]


def test_the_intact_unit_is_the_plain_loss():
    model = tiny_model("llama")
    unit = Unit(None, (), (0, 3))
    [(same_unit, nats)] = predict(subject_of(model, rows_per_batch=2), [unit])
    assert same_unit is unit
    assert nats.tolist() == [row_nats(model, *window_batch(IDS, [WINDOWS[0], WINDOWS[3]])).tolist()]


@contextmanager
def rows_noted(model: nn.Module) -> Iterator[list[int]]:
    """How many windows go through the model at once."""
    rows: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    try:
        yield rows
    finally:
        handle.remove()


def test_one_pass_serves_all_layers_and_takes_no_more_rows_than_allowed(monkeypatch):
    model, units = tiny_model("gpt2"), plan(HEADS, range(len(WINDOWS)), 5)
    with rows_noted(model) as rows:
        predictions(model, units, rows_per_batch=3)
    assert rows == [3, 2]
    monkeypatch.setattr(gradients, "NUMBERS_AT_ONCE", 1)  # no memory; one window always goes
    with rows_noted(model) as rows:
        predictions(model, units, rows_per_batch=3)
    assert rows == [1] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_left_as_it_was_and_its_gradients_alone(kind):
    model = tiny_model("gpt2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    predictions(model, plan(HEADS, range(len(WINDOWS)), 2), make_ablation(model, kind))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_do_not_ask_whether_gradients_are_on(kind):
    model, units = tiny_model("gpt2").double(), plan(HEADS, range(len(WINDOWS)), 2)
    ablation = make_ablation(model, kind)
    expected = predictions(model, units, ablation)
    with torch.no_grad():
        assert predictions(model, units, ablation) == expected
        assert not torch.is_grad_enabled()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert predictions(model, units, ablation) == pytest.approx(expected, rel=FLOAT32)


def test_a_donor_shorter_than_the_windows_is_refused():
    donors = Donors(IDS, (Window(0, 13, 1), Window(0, 12, 1)))
    message = "donor windows of at least 12 input tokens, got one of 11"
    with pytest.raises(ValueError, match=message):
        predictions(tiny_model("gpt2"), plan(HEADS, range(len(WINDOWS)), 2), donors)
