import math

import numpy as np
import pytest
import torch

from mhaprune.model.architectures import OUTPUT_PROJECTIONS, HeadShape, head_shape
from mhaprune.model.heads import Head
from tests.micro import TINY_CONFIGS, micro_gpt2, numpy_gpt2, numpy_nats, tiny_model, without_heads


def both_signs(coefficients):
    """Logits of A, B, C -> logits of A, B, C, -A, -B, -C."""
    coefficients = np.array(coefficients)
    return np.concatenate([coefficients, -coefficients], axis=-1)


def torch_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def test_micro_model_has_the_logits_computed_by_hand():
    """Tokens A, B, C.

    token  v of head 0, 1    z = running mean of v        coefficients: token + heads     length
    A      (2, 0), (0, 2)    (2, 0), (0, 2)               A + 2B + 2C = (1, 2, 2)         3
    B      (0, 2), (0, 0)    (1, 1), (0, 1)               B + B + 2A + C = (2, 2, 1)      3
    C      (0, 0), (2, 0)    (2/3, 2/3), (2/3, 2/3)       C + 2/3 (B + 2A + B + C + C)    3
                                                          = (4/3, 4/3, 7/3)
    """
    expected = [[4 / 3, 8 / 3, 8 / 3], [8 / 3, 8 / 3, 4 / 3], [16 / 9, 16 / 9, 28 / 9]]
    actual = torch_logits(micro_gpt2(), [0, 1, 2])
    np.testing.assert_allclose(actual, both_signs(expected), atol=1e-12)


def test_two_layer_micro_model_has_the_logits_computed_by_hand():
    """Token A enters layer 1 as (1, 2, 2), by layer norm (1, 2, 2) / 3.

    z = v: head 0 (2/3, 4/3), head 1 (4/3, 2/3). W_O rows are now C, B | 2A, B + C, so it adds
    2/3 C + 4/3 B + 8/3 A + 2/3 (B + C): (1, 2, 2) + (8/3, 2, 4/3) = (11, 12, 10) / 3.
    """
    expected = np.array([11, 12, 10]) * 4 / math.sqrt(365)
    actual = torch_logits(micro_gpt2(num_layers=2), [0])
    np.testing.assert_allclose(actual, both_signs([expected]), atol=1e-12)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_numpy_gpt2_agrees_with_the_micro_model(num_layers):
    model, ids = micro_gpt2(num_layers), [0, 5, 1, 2, 3, 3]
    np.testing.assert_allclose(torch_logits(model, ids), numpy_gpt2(model, ids)[0], atol=1e-12)


def test_numpy_gpt2_agrees_with_a_random_model():
    model, ids = tiny_model("gpt2").double(), [5, 60, 5, 17, 0, 33, 2]
    np.testing.assert_allclose(torch_logits(model, ids), numpy_gpt2(model, ids)[0], atol=1e-10)


def test_numpy_nats_of_two_equal_logits_is_ln_2():
    assert numpy_nats(np.array([[7.0, 7.0], [-1.0, -1.0]]), [0, 1]) == pytest.approx(
        2 * math.log(2)
    )


def test_without_heads_zeroes_one_heads_rows_in_a_copy():
    model = micro_gpt2()
    copy = without_heads(model, [Head(0, 1)])
    name = "transformer.h.0.attn.c_proj.weight"
    assert copy.state_dict()[name].tolist() == [[1, -1, 1, -1], [2, 2, -2, -2], [0] * 4, [0] * 4]
    assert model.state_dict()[name][3].tolist() == [1, -1, -1, 1]


def test_every_supported_architecture_has_a_tiny_model():
    assert TINY_CONFIGS.keys() == OUTPUT_PROJECTIONS.keys()


def test_tiny_models_are_the_same_each_time_and_leave_the_global_seed_alone():
    state = torch.get_rng_state()
    first, second = tiny_model("llama"), tiny_model("llama")
    assert torch.equal(torch.get_rng_state(), state)
    assert head_shape(first) == HeadShape(num_layers=2, num_heads=4, d_head=8)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
