"""Gradient importance against slopes by finite differences and z . dL/dz by autograd."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mhaprune.measure.baselines import Donors, donor_z
from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import output_projections
from mhaprune.model.heads import Head
from mhaprune.scores.gradient import gradient
from tests.micro import double_model
from tests.subjects import KINDS, NUM_TOKENS, make_subject, slopes_by_differences

every_kind = pytest.mark.parametrize("kind", KINDS)
every_model = pytest.mark.parametrize("model_type", ["gpt2", "llama"])


def subject_of(model_type: str = "gpt2", kind: str = "zero", **changes) -> Subject:
    return make_subject(double_model(model_type), kind, rows_per_batch=3, **changes)


def slopes_at_tokens(subject: Subject, number: int) -> np.ndarray:
    """(z - baseline) . dL/dz of one window, `layer pos head`, by autograd on what enters W_O."""
    model, window, entered = subject.model, subject.sample.windows[number], []
    inputs = subject.sample.ids[None, window.start : window.stop - 1]
    with ExitStack() as stack:
        for projection in output_projections(model):
            hook = projection.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
            stack.callback(hook.remove)
        logits = model(inputs, use_cache=False).logits[0, -window.num_scored :]
    targets = subject.sample.ids[window.first_scored : window.stop]
    gradients = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), entered)
    found = []
    for layer, (z, slope) in enumerate(zip(entered, gradients, strict=True)):
        z, slope = (part[0].detach().unflatten(-1, (4, -1)) for part in (z, slope))
        found.append(((z - baseline(subject, number, layer, len(z))) * slope).sum(-1))
    return torch.stack(found).numpy()


def baseline(subject: Subject, number: int, layer: int, length: int) -> torch.Tensor:
    ablation = subject.ablation
    if ablation is None:
        return torch.zeros(())
    if not isinstance(ablation, Donors):
        return ablation[layer].double()
    donor = ablation.windows[number % len(ablation.windows)]
    ids = ablation.ids[None, donor.start : donor.stop - 1][:, :length]
    return donor_z(subject.model, ids, layer)[0]


@every_kind
@every_model
def test_by_example_it_is_the_mean_of_the_absolute_slopes(model_type, kind):
    subject = subject_of(model_type, kind)
    expected = abs(slopes_by_differences(subject, 1.0)).sum(-1) / NUM_TOKENS.sum()
    np.testing.assert_allclose(gradient(subject).value, expected, rtol=1e-6)


@every_kind
@every_model
def test_by_token_it_is_the_sum_of_the_absolute_slopes_at_each_position(model_type, kind):
    subject = subject_of(model_type, kind)
    by_window = [abs(slopes_at_tokens(subject, number)).sum(1) for number in range(8)]
    expected = np.sum(by_window, 0) / NUM_TOKENS.sum()
    found = gradient(subject, absolute="token")
    np.testing.assert_allclose(found.value, expected, rtol=1e-9)
    residuals = np.array(by_window) - expected * NUM_TOKENS[:, None, None]
    error = np.sqrt(8 * residuals.var(0, ddof=1)) / NUM_TOKENS.sum()
    assert found.standard_error is not None
    np.testing.assert_allclose(found.standard_error, error, rtol=1e-8)


@every_kind
def test_by_token_nothing_cancels_so_that_no_head_has_less_than_by_example(kind):
    subject = subject_of("gpt2", kind)
    by_example, by_token = (gradient(subject, absolute=how).value for how in ("example", "token"))
    assert (by_token > by_example).all()


@pytest.mark.parametrize("absolute", ["example", "token"])
def test_normalized_by_layer_each_layer_has_norm_1_and_its_order(absolute):
    plain, found = (
        gradient(subject_of(), absolute=absolute, normalization=how) for how in ("none", "layer")
    )
    np.testing.assert_allclose((found.value**2).sum(1), [1, 1], rtol=1e-12)
    np.testing.assert_array_equal(found.value.argsort(1), plain.value.argsort(1))
    assert np.ptp(plain.value / found.value, axis=1) == pytest.approx([0, 0], abs=1e-12)


def test_normalized_as_a_whole_all_heads_together_have_norm_1_and_their_order():
    plain, found = (gradient(subject_of(), normalization=how) for how in ("none", "global"))
    assert (found.value**2).sum() == pytest.approx(1, rel=1e-12)
    np.testing.assert_array_equal(found.value.ravel().argsort(), plain.value.ravel().argsort())


@pytest.mark.parametrize("normalization", ["layer", "global"])
def test_the_standard_error_is_normalized_as_the_value_is(normalization):
    plain, found = (gradient(subject_of(), normalization=how) for how in ("none", normalization))
    assert found.standard_error is not None and plain.standard_error is not None
    relative = plain.standard_error / plain.value
    np.testing.assert_allclose(found.standard_error / found.value, relative, rtol=1e-12)
    assert found.forward_equivalents == 3


def test_only_the_heads_that_were_asked_for_count_towards_the_norm():
    heads = (Head(0, 1), Head(0, 2), Head(1, 3))
    found = gradient(subject_of(heads=heads), normalization="layer").value
    assert np.nansum(found**2, axis=1) == pytest.approx([1, 1])
    assert found[1, 3] == pytest.approx(1)


@pytest.mark.parametrize("normalization", ["layer", "global"])
def test_a_layer_without_any_slope_is_zero_and_not_divided_by_it(normalization):
    model = double_model("gpt2")
    model.transformer.h[0].attn.c_proj.weight.detach().zero_()
    found = gradient(make_subject(model), normalization=normalization)
    assert found.value[0].tolist() == [0, 0, 0, 0]
    assert (found.value[1] ** 2).sum() == pytest.approx(1)
