"""The norm of what a head writes, against W_O applied to nothing but that head's z."""

import numpy as np
import pytest
import torch

from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import output_projections
from mhaprune.model.gating import captured_z
from mhaprune.model.heads import Head
from mhaprune.scores.activation_norm import activation_norm
from mhaprune.text.sample import Sample
from mhaprune.text.windows import Window
from tests.micro import micro_gpt2, tiny_model
from tests.subjects import WINDOWS, make_subject


def norms_of_window(model, ids: torch.Tensor) -> np.ndarray:
    """Summed over positions, `layer head`: |W_O(head's z, zeros elsewhere) - W_O(zeros)|."""
    with torch.no_grad(), captured_z(model) as captured:
        model(ids[None])
    found = np.zeros((2, 4))
    for layer, (z, project) in enumerate(zip(captured, output_projections(model), strict=True)):
        for head in range(4):
            alone = torch.zeros_like(z)
            alone[..., head, :] = z[..., head, :]
            with torch.no_grad():
                written = project(alone.flatten(-2)) - project(torch.zeros_like(z).flatten(-2))
            found[layer, head] = written.square().sum(-1).sqrt().sum()
    return found


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])  # Conv1D, Linear, wide heads
def test_it_is_the_mean_norm_over_every_position_that_is_read(model_type):
    model = tiny_model(model_type).double()
    subject = make_subject(model, rows_per_batch=3)
    sums = np.array(
        [norms_of_window(model, subject.sample.ids[w.start : w.stop - 1]) for w in WINDOWS]
    )
    lengths = np.array([12] * 7 + [10])
    found, expected = activation_norm(subject), sums.sum(0) / lengths.sum()
    np.testing.assert_allclose(found.value, expected, rtol=1e-6)
    residuals = sums - expected * lengths[:, None, None]
    error = np.sqrt(8 * residuals.var(0, ddof=1)) / lengths.sum()
    assert found.standard_error is not None
    np.testing.assert_allclose(found.standard_error, error, rtol=1e-5)


def test_on_the_micro_model_it_is_the_one_on_paper():
    """It reads A B: head 0 adds 2B, then B + 2A, and head 1 2C, then C.

    A, B and C are orthogonal and 2 long, so that these are 4, sqrt(20), 4 and 2 long.
    """
    heads = Head(0, 0), Head(0, 1)
    subject = Subject(micro_gpt2(), Sample.of(torch.tensor([0, 1, 2]), (Window(0, 3, 1),)), heads)
    found = activation_norm(subject)
    assert found.value[0].tolist() == pytest.approx([(4 + 20**0.5) / 2, (4 + 2) / 2], rel=1e-6)
    assert found.standard_error is None
