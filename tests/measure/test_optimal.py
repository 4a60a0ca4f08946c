"""Each head's constant hurts least: less than its mean, zero and others' outputs, and by a grid."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mhaprune.measure.baselines import Donors, donor_z, mean_z
from mhaprune.measure.optimal import optimal_z
from mhaprune.measure.progress import Progress
from mhaprune.model.gating import gate_heads
from mhaprune.model.heads import Head
from mhaprune.text.sample import Sample
from mhaprune.text.windows import Window, make_windows
from tests.micro import double_model, micro_gpt2, tiny_model
from tests.subjects import HEADS, IDS, NUM_TOKENS, WINDOWS, all_nats, make_subject, subject_on
from tests.tiny import Bar

ROUNDING = 1e-9  # nats per token, of a model in float64

both_models = pytest.mark.parametrize("model_type", ["gpt2", "llama"])


def fit(model: Any, steps: int = 16, heads: tuple[Head, ...] = HEADS, **options: Any) -> Any:
    return optimal_z(make_subject(model, heads=heads, rows_per_batch=8, **options), steps=steps)


def losses(model: Any, ablation: Any, heads: tuple[Head, ...] = HEADS) -> np.ndarray:
    """Nats per token with each head ablated, window by window through gates."""
    subject = replace(make_subject(model), ablation=ablation)
    return np.array([all_nats(subject, (head,)).sum() for head in heads]) / NUM_TOKENS.sum()


def mean_of(model: Any) -> torch.Tensor:
    return mean_z(model, Sample.of(IDS, WINDOWS), rows_per_batch=8)


@both_models
@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_no_head_loses_more_than_by_its_mean_or_zero_and_some_lose_less(model_type, engine):
    model = double_model(model_type)
    optimal = losses(model, fit(model, engine=engine))
    mean, zero = losses(model, mean_of(model)), losses(model, None)
    least = np.minimum(mean, zero)
    assert (optimal <= least + ROUNDING).all()
    assert (optimal < least - 1e-3).any()


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_however_few_or_many_the_steps_no_head_is_worse_off_than_with_its_mean(steps):
    model = double_model("gpt2")
    assert (losses(model, fit(model, steps)) <= losses(model, mean_of(model)) + ROUNDING).all()


def test_with_more_steps_less_is_lost_on_the_whole():
    model = double_model("gpt2")
    few, many = (losses(model, fit(model, steps)).mean() for steps in (4, 40))
    assert many < few - 1e-3


@both_models
def test_what_a_head_puts_out_on_another_text_hurts_more(model_type):
    """Donors of one token repeated, in a model that does not tell positions apart.

    There a head puts out one vector at all positions, so that resampling ablates by a constant. In
    general it need not hurt more: resampling keeps what depends on the position alone, and a
    constant cannot.
    """
    model = double_model(model_type)
    if model_type == "gpt2":
        model.transformer.wpe.weight.data.zero_()
    heads = HEADS[::3]
    optimal = losses(model, fit(model, 120, heads), heads)
    for token in range(3):
        donors = Donors(torch.full((14,), token), (Window(0, 14, 1),))
        for layer in range(2):
            z = donor_z(model, donors.ids[None], layer)[0]
            torch.testing.assert_close(z, z[:1].expand_as(z))
        assert (optimal < losses(model, donors, heads)).all()


def test_heads_that_were_not_asked_for_keep_their_mean():
    model = tiny_model("gpt2")
    asked = (Head(1, 2), Head(0, 1))
    found, mean = fit(model, heads=asked), mean_of(model)
    for head in HEADS:
        same = torch.equal(found[head.layer, head.head], mean[head.layer, head.head])
        assert same == (head not in asked), head
    assert found.shape == mean.shape == (2, 4, 8)


def test_a_head_s_constant_does_not_depend_on_which_others_are_asked_for():
    model = double_model("llama")
    together, alone = fit(model), fit(model, heads=(Head(1, 2),))
    torch.testing.assert_close(together[1, 2], alone[1, 2])


@pytest.mark.parametrize("rows_per_batch", [1, 3])
def test_the_constants_do_not_depend_on_how_many_rows_go_through_at_once(rows_per_batch):
    model = double_model("gpt2")
    one = optimal_z(make_subject(model, rows_per_batch=rows_per_batch), steps=5)
    torch.testing.assert_close(one, fit(model, steps=5))


def test_where_zero_hurts_least_it_is_zero():
    """Token A is always followed by A, and head 1, of z (0, 2), only adds 2 C to it.

    One step does not take the constant all the way back to zero.
    """
    model, ids, windows = micro_gpt2(), torch.zeros(9, dtype=torch.long), [Window(0, 9, 1)]
    subject = subject_on(model, ids, windows, None, 2, heads=[Head(0, 1)])
    np.testing.assert_allclose(mean_z(model, subject.sample, 1), [[[2, 0], [0, 2]]])
    found = optimal_z(subject, steps=1)
    assert found.tolist() == [[[2, 0], [0, 0]]]


def micro_nats(
    model: Any, ids: torch.Tensor, windows: list[Window], head: int, points: torch.Tensor
) -> np.ndarray:
    """Nats of a one-layer model with each of the points, `point 2`, in place of a head's z."""
    gate = torch.ones(len(points), 1, 2, dtype=torch.float64)
    gate[:, 0, head] = 0
    nats = torch.zeros(len(points), dtype=torch.float64)
    for window in windows:
        inputs = ids[window.start : window.stop - 1].expand(len(points), -1)
        targets = ids[window.first_scored : window.stop].expand(len(points), -1)
        with torch.no_grad(), gate_heads(model, gate, [points[:, None, None]]):
            logits = model(inputs, use_cache=False).logits[:, -targets.shape[1] :]
        nats += F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
    return nats.numpy()


@pytest.mark.parametrize(("text_seed", "head", "steps"), [(1, 0, 100), (1, 1, 100), (3, 1, 400)])
def test_a_constant_of_two_numbers_is_the_best_of_a_fine_grid(text_seed, head, steps):
    """On texts whose least loss lies within the grid, and downhill from the mean."""
    ids = torch.randint(6, (25,), generator=torch.Generator().manual_seed(text_seed))
    model, windows = micro_gpt2(), make_windows(len(ids), context_length=8, stride=8)
    axis = torch.arange(-4, 4, 0.0625, dtype=torch.float64) + 0.01  # off where all cancels
    on_grid = micro_nats(model, ids, windows, head, torch.cartesian_prod(axis, axis))
    subject = subject_on(model, ids, windows, None, 4, heads=[Head(0, head)])
    found = optimal_z(subject, steps=steps)
    mean = mean_z(model, subject.sample, rows_per_batch=4)
    by_found, by_mean = (
        micro_nats(model, ids, windows, head, constants[0, head][None].double())[0]
        for constants in (found, mean)
    )
    assert by_mean > 1.05 * on_grid.min()
    assert by_found <= on_grid.min() + 0.01 * (by_mean - on_grid.min())


def test_a_step_is_told_once_for_every_head():
    bar = Bar()
    heads = (Head(0, 3), Head(1, 0), Head(1, 1), Head(0, 0), Head(1, 2))
    subject = make_subject(tiny_model("gpt2"), heads=heads, rows_per_batch=2)
    optimal_z(subject, steps=3, progress=Progress([bar]))
    assert bar.amounts == [0, *3 * [2, 2, 1]]  # 0: that 15 are to come
    assert bar.totals == [15]


@both_models
def test_the_model_is_left_as_it_was(model_type):
    model = tiny_model(model_type)
    before = copy.deepcopy(model.state_dict())
    found = fit(model, steps=2)
    assert not found.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_two_fits_are_the_same():
    model = tiny_model("gpt2")
    assert torch.equal(fit(model), fit(model))
