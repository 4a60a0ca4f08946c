import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mhaprune.model.architectures import head_shape, output_projections
from mhaprune.model.gating import captured_z, check_gating, gate_heads, hooked_projections
from mhaprune.model.heads import Head
from tests.micro import (
    every_architecture,
    micro_gpt2,
    numpy_gpt2,
    output_rows,
    tiny_model,
    without_heads,
)

IDS = torch.tensor([[5, 60, 5, 17, 0, 33, 2], [9, 9, 1, 40, 41, 42, 43]])
SOME_HEADS = [Head(0, 1), Head(0, 3), Head(1, 0)]


@pytest.fixture
def two_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


def gate_without(heads, num_layers=2, num_heads=4):
    gate = torch.ones(num_layers, num_heads)
    for head in heads:
        gate[head.layer, head.head] = 0
    return gate


def random_baseline(model):
    shape = head_shape(model)
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape.num_layers, shape.num_heads, shape.d_head, generator=generator)


@torch.no_grad()
def logits_of(model, ids=IDS, gate=None, baseline=None):
    if gate is None:
        return model(ids, use_cache=False).logits
    with gate_heads(model, gate, baseline):
        return model(ids, use_cache=False).logits


def num_hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@torch.no_grad()
def folded(model, heads, baseline):
    """A copy without the heads, their constant baseline moved into the bias of W_O."""
    smaller = without_heads(model, heads)
    for head in heads:
        constant = baseline[head.layer, head.head].to(model.dtype) @ output_rows(model, head)
        projection = output_projections(smaller)[head.layer]
        bias = constant if projection.bias is None else projection.bias + constant
        projection.bias = nn.Parameter(bias)
    return smaller


@every_architecture
def test_gates_all_one_change_no_bit(model_type):
    model = tiny_model(model_type)
    intact = logits_of(model)
    assert torch.equal(logits_of(model, gate=torch.ones(2, 4)), intact)
    assert torch.equal(logits_of(model, gate=torch.ones(2, 2, 4)), intact)
    assert torch.equal(logits_of(model, IDS, torch.ones(2, 4), random_baseline(model)), intact)


@every_architecture
def test_gate_zero_equals_zeroed_rows_of_the_output_projection(model_type):
    model = tiny_model(model_type)
    gated = logits_of(model, gate=gate_without(SOME_HEADS))
    assert torch.equal(gated, logits_of(without_heads(model, SOME_HEADS)))
    assert not torch.equal(gated, logits_of(model))


@every_architecture
def test_each_gate_reaches_a_head_of_its_own(model_type):
    """The intact model and the eight that lack one head all differ, by more than rounding."""
    heads = [Head(layer, head) for layer in range(2) for head in range(4)]
    gates = torch.stack([gate_without(some) for some in [[], *([head] for head in heads)]])
    variants = logits_of(tiny_model(model_type), IDS[:1].expand(9, -1), gates)
    for one, other in itertools.combinations(variants, 2):
        assert (one - other).abs().max() > 1e-3


@every_architecture
def test_a_gate_for_each_row_equals_separate_gates(model_type):
    model = tiny_model(model_type)
    gates = torch.stack([gate_without(SOME_HEADS), gate_without([Head(1, 2)])])
    baseline = random_baseline(model)
    together = logits_of(model, IDS, gates, baseline)
    for row in range(2):
        separate = logits_of(model, IDS[row : row + 1], gates[row], baseline)
        torch.testing.assert_close(together[row : row + 1], separate, rtol=1e-5, atol=1e-5)


def test_a_gate_for_each_row_is_exact_in_float64():
    model = tiny_model("gpt2").double()
    gates = torch.stack([gate_without(SOME_HEADS), torch.full((2, 4), 0.25)])
    together = logits_of(model, IDS, gates)
    separate = torch.cat([logits_of(model, IDS[n : n + 1], gates[n]) for n in range(2)])
    torch.testing.assert_close(together, separate, rtol=1e-12, atol=1e-12)


@every_architecture
def test_constant_baseline_equals_folding_it_into_the_bias(model_type):
    model = tiny_model(model_type)
    baseline = random_baseline(model)
    gated = logits_of(model, IDS, gate_without(SOME_HEADS), baseline)
    expected = logits_of(folded(model, SOME_HEADS, baseline))
    torch.testing.assert_close(gated, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("gate", "coefficients"),
    [
        ([1, 1], [1, 2, 2]),
        ([0, 1], [1, 0, 2]),
        ([1, 0], [1, 2, 0]),
        ([0.5, 1], [1, 1, 2]),
        ([2, -1], [1, 4, -2]),
        ([0, 0], [1, 0, 0]),
    ],
)
def test_micro_model_gated_by_hand(gate, coefficients):
    """Token A leaves the block as A + gate_0 2B + gate_1 2C."""
    logits = logits_of(micro_gpt2(), torch.tensor([[0]]), torch.tensor([gate]).float())[0, 0, :3]
    expected = 4 * np.array(coefficients) / math.hypot(*coefficients)
    np.testing.assert_allclose(logits, expected, atol=1e-12)


def test_micro_model_with_a_baseline_by_hand():
    """Head 0 has gate 1/4, baseline (4, -2): A + 1/4 (2B) + 3/4 (4B - 4A) + 2C = (-2, 3.5, 2)."""
    baseline = torch.tensor([[[4.0, -2.0], [9.0, 9.0]]])
    gate = torch.tensor([[0.25, 1.0]])
    logits = logits_of(micro_gpt2(), torch.tensor([[0]]), gate, baseline)[0, 0, :3]
    expected = 4 * np.array([-2, 3.5, 2]) / math.sqrt(4 + 12.25 + 4)
    np.testing.assert_allclose(logits, expected, atol=1e-12)


def test_a_baseline_for_each_position_replaces_z_position_by_position():
    model = tiny_model("gpt2").double()
    donor = torch.randn(2, 7, 4, 8, generator=torch.Generator().manual_seed(3)).double()
    gated = logits_of(model, IDS, gate_without([Head(1, 2)]), [torch.zeros(()), donor])
    for row in range(2):

        def replace(layer, z, row=row):
            return np.concatenate([z[:, :2], donor[row, :, 2:3], z[:, 3:]], 1) if layer else z

        expected, _ = numpy_gpt2(model, IDS[row], replace)
        np.testing.assert_allclose(gated[row], expected, atol=1e-10)


@torch.no_grad()
def test_layers_below_the_lowest_are_left_as_they_are():
    model = tiny_model("gpt2").double()
    everywhere, above = gate_without(SOME_HEADS), gate_without([Head(1, 0)])
    with gate_heads(model, everywhere, random_baseline(model), lowest_layer=1):
        found = logits_of(model)
    assert torch.equal(found, logits_of(model, gate=above, baseline=random_baseline(model)))
    assert not torch.equal(
        found, logits_of(model, gate=everywhere, baseline=random_baseline(model))
    )


def test_gradient_of_gate_and_baseline_equals_finite_differences():
    model = tiny_model("gpt2").double()

    def loss(gate, baseline):
        with gate_heads(model, gate, baseline.expand(-1, -1, 8)):
            logits = model(IDS, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    gate = torch.linspace(0.1, 1, 8).view(2, 4).double().requires_grad_()
    baseline = random_baseline(model)[..., :1].double().requires_grad_()
    assert torch.autograd.gradcheck(loss, (gate, baseline))


def test_captured_z_is_softmax_attention_and_changes_nothing():
    model = tiny_model("gpt2").double()
    with captured_z(model) as captured:
        logits = logits_of(model)
    assert torch.equal(logits, logits_of(model))
    for row in range(2):
        _, expected = numpy_gpt2(model, IDS[row])
        np.testing.assert_allclose([z[row] for z in captured], expected, atol=1e-12)


def test_hooked_projections_replace_z_by_what_the_function_returns():
    """In the micro model z = 0 in both heads leaves token A alone: logits (4, 0, 0)."""
    with hooked_projections(micro := micro_gpt2(), lambda layer, z: z * 0):
        logits = logits_of(micro, torch.tensor([[0]]))
    assert logits[0, 0, :3].tolist() == [4, 0, 0]


@every_architecture
def test_no_hook_is_left_after_the_context(model_type):
    model = tiny_model(model_type)
    with gate_heads(model, torch.zeros(2, 4)), captured_z(model):
        model(IDS)
        assert num_hooks(model) == 4
    assert num_hooks(model) == 0


def test_no_hook_is_left_after_an_exception():
    model = tiny_model("gpt2")
    intact = logits_of(model)
    with pytest.raises(KeyError), gate_heads(model, torch.zeros(2, 4)), captured_z(model):
        raise KeyError
    assert num_hooks(model) == 0
    assert torch.equal(logits_of(model), intact)


@pytest.mark.parametrize("shape", [(2, 5), (3, 4), (4, 2), (7, 2, 5)])
def test_gate_of_the_wrong_shape_raises(shape):
    model = tiny_model("gpt2")
    message = rf"expected a gate of 2 layers x 4 heads, got shape \[{str(list(shape))[1:-1]}\]"
    with pytest.raises(ValueError, match=message), gate_heads(model, torch.ones(shape)):
        pass


def test_baseline_of_the_wrong_number_of_layers_raises():
    model = tiny_model("gpt2")
    with (
        pytest.raises(ValueError, match="expected 2 layers of baseline, got 3"),
        gate_heads(model, torch.ones(2, 4), [torch.zeros(4, 8)] * 3),
    ):
        pass


def test_no_forward_pass_raises_and_names_every_layer():
    with (
        pytest.raises(RuntimeError, match=r"no forward pass of layers \[0, 1\]"),
        gate_heads(tiny_model("gpt2"), torch.ones(2, 4)),
    ):
        pass


def test_a_layer_that_did_not_run_raises_and_is_named():
    model = tiny_model("gpt2")
    with (
        pytest.raises(RuntimeError, match=r"no forward pass of layers \[1\]"),
        gate_heads(model, torch.ones(2, 4)),
    ):
        model.transformer.h[0](torch.zeros(1, 3, 32))
    assert num_hooks(model) == 0


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gpt_neo", "qwen3"])
def test_generation_under_gating_is_the_same_with_and_without_a_cache(model_type):
    model = tiny_model(model_type)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}

    def generate(use_cache, gate):
        with gate_heads(model, gate, random_baseline(model)):
            return model.generate(IDS, attention_mask=IDS * 0 + 1, use_cache=use_cache, **options)

    gate = gate_without(SOME_HEADS)
    assert torch.equal(generate(True, gate), generate(False, gate))
    assert not torch.equal(generate(True, gate), generate(True, torch.ones(2, 4)))


@every_architecture
def test_check_gating_sets_each_layer_without_its_heads_against_the_intact_model(model_type):
    """The logits it looks at are those of copies whose rows of W_O are zero: all differ."""
    model, seen = tiny_model(model_type), []
    with model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits)):
        check_gating(model, IDS[0])
    intact, *without = seen
    assert torch.equal(intact, logits_of(model, IDS[:1]))
    expected = [
        logits_of(without_heads(model, [Head(layer, head) for head in range(4)]), IDS[:1])
        for layer in range(2)
    ]
    torch.testing.assert_close(without, expected, rtol=1e-4, atol=1e-4)
    assert all((logits - intact).abs().max() > 1e-2 for logits in expected)
    assert num_hooks(model) == 0


@every_architecture
def test_check_gating_names_the_layers_whose_heads_cannot_matter(model_type):
    model = without_heads(tiny_model(model_type), [Head(1, head) for head in range(4)])
    message = rf"heads of layers \[1\] leaves this {model_type} model's logits unchanged"
    with pytest.raises(ValueError, match=message):
        check_gating(model, IDS[0])


def test_check_gating_takes_no_rounding_for_an_effect(two_threads):
    """On two threads, equal rows of a batch of three short ones differ in their last bits."""
    model = without_heads(tiny_model("gpt2"), [Head(1, head) for head in range(4)])
    with pytest.raises(ValueError, match=r"heads of layers \[1\]"):
        check_gating(model, IDS[0, :3])
