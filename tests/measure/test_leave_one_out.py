import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mhaprune.measure.baselines import mean_z
from mhaprune.measure.leave_one_out import Donors, Unit, assemble, measure, plan
from mhaprune.measure.perplexity import row_nats
from mhaprune.model.heads import Head
from mhaprune.scores.leave_one_out import leave_one_out
from mhaprune.text.sample import Sample, window_batch
from mhaprune.text.windows import Window, make_windows
from tests.micro import micro_gpt2, numpy_gpt2, numpy_nats, tiny_model, without_heads
from tests.subjects import assert_same_estimate, subject_on

IDS = torch.randint(64, (40,), generator=torch.Generator().manual_seed(4))
WINDOWS = make_windows(len(IDS), context_length=12, stride=7)  # 5 windows, the last scores 6
HEADS = [Head(layer, head) for layer in range(2) for head in range(4)]
DONORS = Donors(IDS.flip(0), (Window(0, 13, 1), Window(4, 20, 5), Window(20, 34, 21)))

# The text A B C; see micro_gpt2 for what its model makes of it.
MICRO_IDS, MICRO_WINDOWS = torch.tensor([0, 1, 2]), [Window(0, 3, 1)]


def by_hand(after_a, after_b):
    """Loss of predicting B, then C, from what the block leaves: (alpha, beta, gamma)."""
    logits = [4 * np.array(after) / math.hypot(*after) for after in (after_a, after_b)]
    partitions = [2 * np.cosh(coefficients).sum() for coefficients in logits]
    return np.log(partitions).sum() - logits[0][1] - logits[1][2]


def losses(model, units, ablation=None, rows_per_batch=8, ids=IDS, windows=WINDOWS):
    """(head or None, window) -> total nats."""
    subject = subject_on(model, ids, windows, ablation, rows_per_batch)
    return {
        (None if unit.layer is None else Head(unit.layer, unit.heads[variant]), window): float(nats)
        for unit, result in measure(subject, units)
        for variant, row in enumerate(result)
        for window, nats in zip(unit.windows, row, strict=True)
    }


def micro_losses(ablation):
    units = plan([Head(0, 0), Head(0, 1)], windows=[0], windows_per_unit=1)
    found = losses(micro_gpt2(), units, ablation, ids=MICRO_IDS, windows=MICRO_WINDOWS)
    return [found[head, 0] for head in (None, Head(0, 0), Head(0, 1))]


def cross_entropy(model, window):
    """The window's loss, run on its own."""
    with torch.no_grad():
        logits = model(IDS[None, window.start : window.stop - 1]).logits[0].double()
    targets = IDS[window.first_scored : window.stop]
    return F.cross_entropy(logits[-len(targets) :], targets, reduction="sum").item()


def test_plan_goes_block_by_block_intact_first_then_layer_by_layer():
    heads = [Head(3, 1), Head(0, 2), Head(0, 0)]
    assert plan(heads, windows=range(5), windows_per_unit=2) == [
        Unit(None, (), (0, 1)),
        Unit(0, (0, 2), (0, 1)),
        Unit(3, (1,), (0, 1)),
        Unit(None, (), (2, 3)),
        Unit(0, (0, 2), (2, 3)),
        Unit(3, (1,), (2, 3)),
        Unit(None, (), (4,)),
        Unit(0, (0, 2), (4,)),
        Unit(3, (1,), (4,)),
    ]


def test_plan_takes_the_windows_that_it_is_given_in_their_order():
    assert plan([Head(1, 3)], windows=[7, 2, 5], windows_per_unit=2) == [
        Unit(None, (), (7, 2)),
        Unit(1, (3,), (7, 2)),
        Unit(None, (), (5,)),
        Unit(1, (3,), (5,)),
    ]
    assert plan([Head(1, 3)], windows=[], windows_per_unit=2) == []


def test_assembling_puts_each_number_at_its_head_and_window_and_nan_elsewhere():
    heads = [Head(3, 1), Head(0, 2), Head(0, 0)]
    results = {
        Unit(None, (), (3, 1)): np.array([[30.0, 10.0]]),
        Unit(0, (0, 2), (3, 1)): np.array([[33.0, 31.0], [23.0, 21.0]]),
        Unit(3, (1,), (1,)): np.array([[11.0]]),
    }
    intact, ablated = assemble(results, heads, num_windows=4)
    nan = math.nan
    np.testing.assert_array_equal(intact, [nan, 10, nan, 30])
    np.testing.assert_array_equal(
        ablated, [[nan, 11, nan, nan], [nan, 21, nan, 23], [nan, 31, nan, 33]]
    )


def test_a_units_rows_are_its_heads_times_its_windows():
    assert Unit(None, (), (0, 1, 2)).num_rows == 3
    assert Unit(4, (0, 7), (0, 1, 2)).num_rows == 6


def test_micro_zero_ablation_by_hand():
    """Intact: A + 2B + 2C, then B + (B + 2A) + C; the middle is head 0's, the end head 1's."""
    expected = [
        by_hand((1, 2, 2), (2, 2, 1)),
        by_hand((1, 0, 2), (0, 1, 1)),
        by_hand((1, 2, 0), (2, 2, 0)),
    ]
    assert micro_losses(ablation=None) == pytest.approx(expected, rel=1e-12)


def test_micro_mean_ablation_by_hand():
    """The mean z is (3/2, 1/2) in head 0, which adds A + 3/2 B; (0, 3/2) in head 1: 3/2 C."""
    mean = mean_z(micro_gpt2(), Sample.of(MICRO_IDS, MICRO_WINDOWS), rows_per_batch=1)
    assert mean.tolist() == [[[1.5, 0.5], [0, 1.5]]]
    expected = [
        by_hand((1, 2, 2), (2, 2, 1)),
        by_hand((2, 1.5, 2), (1, 2.5, 1)),
        by_hand((1, 2, 1.5), (2, 2, 1.5)),
    ]
    assert micro_losses(mean) == pytest.approx(expected, rel=1e-12)


def test_micro_resample_ablation_by_hand():
    """Donor C A. z: (0, 0), (2, 0), then (1, 0), (1, 1).

    Head 0 adds nothing, then B; head 1 adds 2 (B + C), then B + C + C.
    """
    donors = Donors(torch.tensor([2, 0, 0]), (Window(0, 3, 1),))
    expected = [
        by_hand((1, 2, 2), (2, 2, 1)),
        by_hand((1, 0, 2), (0, 2, 1)),
        by_hand((1, 4, 2), (2, 3, 2)),
    ]
    assert micro_losses(donors) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])
def test_zero_ablation_equals_zeroing_output_rows_in_a_copy(model_type):
    model = tiny_model(model_type)
    found = losses(model, plan(HEADS, range(len(WINDOWS)), windows_per_unit=2))
    assert found.keys() == {(head, n) for head in [None, *HEADS] for n in range(len(WINDOWS))}
    for head in [None, *HEADS]:
        ablated = without_heads(model, [head] if head else [])
        for n, window in enumerate(WINDOWS):
            assert found[head, n] == pytest.approx(cross_entropy(ablated, window), rel=1e-5)


@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
@pytest.mark.parametrize(("windows_per_unit", "rows_per_batch"), [(1, 1), (2, 3), (3, 100)])
def test_losses_do_not_depend_on_batches_blocks_or_order(
    ablation, windows_per_unit, rows_per_batch
):
    model = tiny_model("gpt2").double()
    mean = mean_z(model, Sample.of(IDS, WINDOWS), rows_per_batch=2)
    ablation = {"zero": None, "mean": mean, "resample": DONORS}[ablation]
    expected = losses(model, plan(HEADS, range(len(WINDOWS)), 5), ablation, rows_per_batch=1)
    units = plan(HEADS, range(len(WINDOWS)), windows_per_unit)[::-1]
    found = losses(model, units, ablation, rows_per_batch)
    assert found == pytest.approx(expected, rel=1e-12)


def test_no_more_rows_than_allowed_go_through_the_model_at_once():
    model, num_rows = tiny_model("gpt2"), []
    model.register_forward_pre_hook(lambda _, inputs: num_rows.append(len(inputs[0])))
    unit = Unit(1, (0, 1, 3), (0, 2))
    next(measure(subject_on(model, IDS, WINDOWS, rows_per_batch=5), [unit]))
    assert num_rows == [4, 2]


def test_resample_ablation_equals_replacing_z_by_the_donors():
    model = tiny_model("gpt2").double()
    found = losses(model, plan(HEADS, range(len(WINDOWS)), windows_per_unit=4), DONORS)
    for head in HEADS:
        for n, window in enumerate(WINDOWS):
            donor = DONORS.windows[n % 3]
            inputs = IDS[window.start : window.stop - 1]
            donor_ids = DONORS.ids[donor.start : donor.stop - 1][: len(inputs)]
            expected = donor_nats(model, inputs, donor_ids, head, window)
            assert found[head, n] == pytest.approx(expected, rel=1e-10)


def donor_nats(model, inputs, donor_ids, head, window):
    _, donor_outputs = numpy_gpt2(model, donor_ids)

    def replace(layer, z):
        z = z.copy()
        if layer == head.layer:
            z[:, head.head] = donor_outputs[layer][:, head.head]
        return z

    logits, _ = numpy_gpt2(model, inputs, replace)
    targets = IDS[window.first_scored : window.stop].numpy()
    return numpy_nats(logits[-len(targets) :], targets)


def test_intact_unit_is_the_plain_loss():
    model = tiny_model("gpt2")
    unit = Unit(None, (), (0, 3))
    [(same_unit, nats)] = measure(subject_on(model, IDS, WINDOWS, rows_per_batch=1), [unit])
    assert same_unit is unit
    assert nats.tolist() == [row_nats(model, *window_batch(IDS, [WINDOWS[0], WINDOWS[3]])).tolist()]


def test_a_donor_shorter_than_the_windows_raises_even_beside_a_long_one():
    donors = Donors(IDS, (Window(0, 13, 1), Window(0, 12, 1)))
    units = plan(HEADS, range(len(WINDOWS)), windows_per_unit=2)
    message = "donor windows of at least 12 input tokens, got one of 11"
    with pytest.raises(ValueError, match=message):
        losses(tiny_model("gpt2"), units, donors)


def test_a_short_donor_of_another_units_windows_does_no_harm():
    donors = Donors(IDS, (Window(0, 13, 1), Window(0, 12, 1)))
    unit = Unit(0, (2,), (0, 2))
    found = losses(tiny_model("gpt2"), [unit], donors)
    assert found == pytest.approx(
        losses(tiny_model("gpt2"), [unit], Donors(IDS, donors.windows[:1]))
    )


# ---- the score


@pytest.mark.parametrize("engine", ["gating", "replay"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_score_is_the_loss_without_the_head_less_the_loss_with_it(model_type, engine):
    model, heads = tiny_model(model_type).double(), (Head(1, 3), Head(0, 1), Head(0, 2))
    found = leave_one_out(subject_on(model, IDS, WINDOWS, None, 8, engine, heads))
    tokens = np.array([window.num_scored for window in WINDOWS])
    intact = np.array([cross_entropy(model, window) for window in WINDOWS])
    for head in heads:
        ablated = without_heads(model, [head])
        effects = np.array([cross_entropy(ablated, window) for window in WINDOWS]) - intact
        effect = effects.sum() / tokens.sum()
        error = math.sqrt(5 * (effects - effect * tokens).var(ddof=1)) / tokens.sum()
        assert found.value[head.layer, head.head] == pytest.approx(effect, rel=1e-4, abs=1e-6)
        assert found.standard_error is not None
        assert found.standard_error[head.layer, head.head] == pytest.approx(error, rel=1e-3)
    assert np.isnan(found.value).sum() == 5


@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
def test_the_score_does_not_depend_on_how_the_windows_are_cut_into_units(ablation):
    model = tiny_model("gpt2").double()
    mean = mean_z(model, Sample.of(IDS, WINDOWS), rows_per_batch=2)
    ablation = {"zero": None, "mean": mean, "resample": DONORS}[ablation]
    subject = subject_on(model, IDS, WINDOWS, ablation, heads=HEADS)
    few, many = (leave_one_out(subject, windows_per_unit=size) for size in (1, 5))
    assert_same_estimate(few, many, rtol=1e-9)
