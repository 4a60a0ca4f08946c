import numpy as np
import pytest
import torch

from mhaprune.measure.baselines import donor_z, mean_z, rms_z
from mhaprune.model.architectures import output_projections
from mhaprune.text.sample import Sample
from mhaprune.text.windows import Window
from tests.micro import every_architecture, micro_gpt2, numpy_gpt2, tiny_model

IDS = torch.arange(3, 33)
RAGGED = [Window(0, 9, 1), Window(5, 8, 6), Window(6, 24, 12), Window(27, 30, 28)]
SAMPLE = Sample.of(IDS, RAGGED)
MICRO = Sample.of(torch.tensor([0, 1, 2]), [Window(0, 3, 1), Window(0, 2, 1)])


def inputs_of(window):
    return IDS[window.start : window.stop - 1]


def numpy_mean_z(model, windows):
    """The mean over positions, window by window, nothing padded."""
    per_window = [numpy_gpt2(model, inputs_of(window))[1] for window in windows]
    return np.stack([np.concatenate(z).mean(0) for z in zip(*per_window, strict=True)])


def test_micro_mean_by_hand():
    """Tokens A, B have z (2, 0), (0, 2) and (1, 1), (0, 1); token A alone (2, 0), (0, 2)."""
    mean = mean_z(micro_gpt2(), MICRO, 2)
    expected = np.array([[[2 + 1 + 2, 0 + 1 + 0], [0, 2 + 1 + 2]]]) / 3
    np.testing.assert_allclose(mean, expected, rtol=1e-7)


def test_mean_equals_softmax_attention_averaged_over_unpadded_windows():
    model = tiny_model("gpt2")
    mean = mean_z(model, SAMPLE, rows_per_batch=4)
    np.testing.assert_allclose(mean, numpy_mean_z(model, RAGGED), atol=2e-6)


def test_mean_does_not_depend_on_which_tokens_are_scored():
    model = tiny_model("gpt2")
    scored_later = [Window(w.start, w.stop, w.stop - 1) for w in RAGGED]
    assert torch.equal(mean_z(model, SAMPLE, 2), mean_z(model, Sample.of(IDS, scored_later), 2))


@every_architecture
@pytest.mark.parametrize("rows_per_batch", [1, 3])
def test_mean_does_not_depend_on_the_batch_size(model_type, rows_per_batch):
    model = tiny_model(model_type)
    expected = mean_z(model, SAMPLE, rows_per_batch=4)
    torch.testing.assert_close(mean_z(model, SAMPLE, rows_per_batch), expected)


def test_donor_z_is_the_layers_softmax_attention_output():
    model, windows = tiny_model("gpt2").double(), torch.stack([IDS[:7], IDS[9:16]])
    for layer in range(2):
        expected = [numpy_gpt2(model, window)[1][layer] for window in windows]
        np.testing.assert_allclose(donor_z(model, windows, layer), np.stack(expected), atol=1e-12)


def test_query_heads_of_one_group_share_values():
    """At the first position a head's z is its value: v of key-value head h // 2."""
    model, ids = tiny_model("llama"), torch.tensor([[7]])
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        normed = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        v = attention.v_proj(normed).view(2, 8)
    expected = v[[0, 0, 1, 1]]
    torch.testing.assert_close(donor_z(model, ids, layer=0)[0, 0], expected)


@every_architecture
def test_z_through_the_output_projection_is_the_attentions_output(model_type):
    model = tiny_model(model_type)
    projection, seen = output_projections(model)[1], []
    handle = projection.register_forward_hook(lambda _, inputs, output: seen.append(output))
    z = donor_z(model, IDS[None], layer=1)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(projection(z.flatten(-2)), seen[0])


def test_micro_root_mean_square_by_hand():
    """z as above, over two dimensions: (4 + 1 + 4 + 1) / 6 and (4 + 1 + 4) / 6."""
    rms = rms_z(micro_gpt2(), MICRO, 2)
    expected = np.sqrt([[(4 + 1 + 1 + 4) / 6, (4 + 1 + 4) / 6]])
    np.testing.assert_allclose(rms, expected, rtol=1e-7)


@pytest.mark.parametrize("rows_per_batch", [1, 4])
def test_root_mean_square_is_that_of_softmax_attention_over_unpadded_windows(rows_per_batch):
    model = tiny_model("gpt2")
    rms = rms_z(model, SAMPLE, rows_per_batch)
    per_window = [numpy_gpt2(model, inputs_of(window))[1] for window in RAGGED]
    squares = [np.concatenate(z) ** 2 for z in zip(*per_window, strict=True)]
    expected = np.sqrt([square.mean(axis=(0, 2)) for square in squares])
    np.testing.assert_allclose(rms, expected, rtol=1e-5)


def test_no_position_is_averaged_with_a_gradient():
    model = tiny_model("gpt2")
    assert not mean_z(model, SAMPLE, 2).requires_grad
    assert not rms_z(model, SAMPLE, 2).requires_grad
