"""Fast kernels compute what the modules compute, and leave no trace."""

import pytest
import torch
from torch.nn import functional as F

from mhaprune.model import kernels
from mhaprune.model.architectures import REPLAYABLE, replayable_blocks
from mhaprune.model.kernels import Product, fast_blocks, fast_linears, swapped
from mhaprune.model.machine import fast_matmul
from tests.micro import tiny_model

either_way = pytest.mark.parametrize("packed", [False, True])
every_replayable = pytest.mark.parametrize("model_type", sorted(REPLAYABLE))
IDS = torch.arange(24).view(2, 12) % 11


def lowered(model):
    """What the model's modules look like from outside."""
    return [
        (name, type(module), "forward" in vars(module)) for name, module in model.named_modules()
    ]


@either_way
@every_replayable
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_gives_the_same_logits_with_its_modules_swapped(model_type, dtype, packed):
    model = tiny_model(model_type).to(getattr(torch, dtype))
    expected = model.double()(IDS).logits
    model = model.to(getattr(torch, dtype))
    forwards = fast_blocks(replayable_blocks(model), packed=packed)
    with swapped(forwards):
        found = model(IDS).logits
    tolerance = 1e-12 if dtype == "float64" else 5e-6 * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.skipif(not kernels._has_onednn(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(
    ("model_type", "per_block"), [("gpt2", 4 + 1), ("llama", 7 + 1), ("qwen2", 7 + 1)]
)
def test_every_matrix_of_a_block_and_its_activation_are_swapped(model_type, per_block):
    blocks = replayable_blocks(tiny_model(model_type).float())
    forwards = fast_blocks(blocks, packed=True)
    assert len(forwards) == per_block * len(blocks)
    for block in blocks:
        inputs = torch.randn(3, block.mlp_norm.weight.shape[0])
        expected = block.activation(block.into_activation(inputs))
        torch.testing.assert_close(forwards[block.into_activation](inputs), expected)
        assert forwards[block.activation](inputs) is inputs


def test_where_onednn_is_missing_only_the_gelu_that_is_written_out_is_swapped(monkeypatch):
    monkeypatch.setattr(kernels, "_has_onednn", lambda: False)
    blocks = replayable_blocks(tiny_model("gpt2").float())
    forwards = fast_blocks(blocks, packed=True)
    assert set(forwards) == {block.activation for block in blocks}
    inputs = torch.linspace(-6, 6, 101, dtype=torch.float64)
    expected = (
        0.5 * inputs * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inputs + 0.044715 * inputs**3)))
    )
    torch.testing.assert_close(forwards[blocks[0].activation](inputs), expected)
    assert fast_blocks(replayable_blocks(tiny_model("llama").float()), packed=True) == {}
    inputs, weight, bias = torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(4)
    assert torch.equal(Product(weight, bias, packed=True)(inputs), F.linear(inputs, weight, bias))


def test_products_that_may_round_are_left_to_torch():
    blocks = replayable_blocks(tiny_model("llama").float())
    with fast_matmul():
        assert fast_blocks(blocks, packed=True) == {}


def test_an_operator_that_fails_or_errs_counts_as_missing(monkeypatch):
    for name in ("_onednn", "_packed"):
        for wrong in (lambda *_: torch.zeros(2, 2), _raises):
            with monkeypatch.context() as context:
                context.setattr(kernels, name, wrong)
                kernels._has_onednn.cache_clear()
                assert not kernels._has_onednn()
    kernels._has_onednn.cache_clear()


def _raises(*_):
    raise RuntimeError("not built")


def test_modules_are_as_before_afterwards_also_on_errors_and_when_nested():
    model = tiny_model("gpt2").float()
    before, forwards = lowered(model), fast_blocks(replayable_blocks(model), packed=True)
    with pytest.raises(KeyError), swapped(forwards):
        inside = lowered(model)
        with swapped({model.lm_head: torch.sin} | dict(forwards)):
            assert lowered(model) != inside
        assert lowered(model) == inside != before
        raise KeyError
    assert lowered(model) == before


@every_replayable
def test_gradients_by_the_inputs_are_those_of_the_modules(model_type):
    model = tiny_model(model_type).float().requires_grad_(False)

    def slope():
        embedded = model.get_input_embeddings()(IDS).requires_grad_(True)
        loss = model(inputs_embeds=embedded).logits.square().mean()
        return torch.autograd.grad(loss, embedded)[0]

    expected, linears = slope(), fast_linears(model)
    with swapped(linears):
        found = slope()
    assert model.get_output_embeddings() in linears
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


def test_layers_that_are_being_trained_are_left_alone():
    model = tiny_model("gpt2").float().requires_grad_(True)
    assert fast_linears(model) == {}


@pytest.mark.parametrize("replaced", ["into_activation", "activation"])
def test_what_somebody_else_replaced_is_neither_swapped_nor_fused(replaced):
    model = tiny_model("llama").float().requires_grad_(False)
    block = replayable_blocks(model)[0]
    module = getattr(block, replaced)
    theirs = module.forward
    module.forward = lambda inputs: 2 * theirs(inputs)
    expected, forwards = model(IDS).logits, fast_blocks(replayable_blocks(model), packed=True)
    assert module not in forwards
    with swapped(forwards):
        found = model(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not kernels._has_onednn(), reason="this torch has no oneDNN")
def test_packing_copies_and_only_where_onednn_multiplies():
    weight = torch.eye(3)
    assert Product(weight, packed=False).weight is weight
    assert Product(weight, packed=True).weight.is_mkldnn
    assert Product(weight.double(), packed=True).weight.dtype == torch.float64
    assert torch.equal(weight, torch.eye(3))


@pytest.mark.parametrize(("num_bytes", "room"), [(3199, False), (3200, True)])
def test_weights_are_packed_where_they_take_an_eighth_of_the_memory_at_most(
    monkeypatch, num_bytes, room
):
    monkeypatch.setattr(kernels, "physical_bytes", lambda: num_bytes)
    assert kernels.has_room_to_pack(torch.nn.Linear(9, 10)) == room  # 100 numbers, 400 bytes


@pytest.mark.parametrize("shape", [(1, 3), (7, 3), (2, 5, 3), (0, 3)])
@pytest.mark.parametrize("transposed", [False, True])
@either_way
def test_a_product_is_that_of_a_linear_layer(shape, transposed, packed):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator)
    weight = torch.randn((3, 4) if transposed else (4, 3), generator=generator)
    weight = weight.T if transposed else weight
    for bias in (None, torch.randn(4, generator=generator)):
        wide = None if bias is None else bias.double()
        expected = F.linear(inputs.double(), weight.double(), wide).float()
        found = Product(weight, bias, packed=packed)(inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
