import pytest
import torch
from torch import nn
from transformers import Conv1D

from mhaprune.model.architectures import (
    HeadShape,
    head_shape,
    output_projections,
    projection_width,
)
from tests.micro import TINY_CONFIGS, every_architecture, micro_gpt2, tiny_model


@every_architecture
def test_heads_are_counted_and_sized_as_configured(model_type):
    """Query heads, also where fewer key-value heads are shared or head_dim is set by itself."""
    wide = "head_dim" in TINY_CONFIGS[model_type]
    expected = HeadShape(num_layers=2, num_heads=4, d_head=16 if wide else 8)
    assert head_shape(tiny_model(model_type)) == expected


@every_architecture
def test_projections_are_the_modules_that_map_heads_to_the_residual_stream(model_type):
    model = tiny_model(model_type)
    weights = [projection.get_parameter("weight") for projection in output_projections(model)]
    shape = head_shape(model)
    d_model, width = model.config.hidden_size, shape.num_heads * shape.d_head
    expected = (width, d_model) if model_type == "gpt2" else (d_model, width)
    assert [tuple(weight.shape) for weight in weights] == [expected, expected]


@every_architecture
def test_projections_come_in_the_order_in_which_they_run(model_type):
    model, ran = tiny_model(model_type), []
    for layer, projection in enumerate(output_projections(model)):
        projection.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
    assert ran == [0, 1]


def test_micro_model_has_one_layer_of_two_heads_of_size_two():
    assert head_shape(micro_gpt2()) == HeadShape(num_layers=1, num_heads=2, d_head=2)


def test_width_is_the_number_of_inputs_in_either_layout():
    assert projection_width(nn.Linear(in_features=3, out_features=5)) == 3
    assert projection_width(Conv1D(nf=5, nx=3)) == 3


def test_unknown_architecture_raises_and_names_those_supported():
    model = tiny_model("llama")
    model.config.model_type = "mamba"
    message = r"architecture 'mamba' is not supported; supported are bloom, falcon, .*, starcoder2"
    with pytest.raises(ValueError, match=message):
        output_projections(model)


def test_missing_projection_raises_and_says_what_was_expected():
    model = tiny_model("llama")
    del model.model.layers[1].self_attn.o_proj
    message = r"expected model\.layers\.\*\.self_attn\.o_proj in a llama model, but .*o_proj"
    with pytest.raises(ValueError, match=message):
        output_projections(model)


def test_missing_list_of_blocks_raises_and_says_what_was_expected():
    model = tiny_model("llama")
    model.config.model_type = "gpt2"
    message = r"expected transformer\.h\.\*\.attn\.c_proj in a gpt2 model, but .*transformer"
    with pytest.raises(ValueError, match=message):
        output_projections(model)


def test_fewer_blocks_than_layers_raises():
    model = tiny_model("gpt2")
    del model.transformer.h[1]
    with pytest.raises(ValueError, match="one output projection in each of 2 layers, found 1"):
        output_projections(model)


def test_layers_of_unequal_width_raise():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj = nn.Linear(24, 32)
    message = r"expected every output projection to read 4 heads .* widths \[24, 32\]"
    with pytest.raises(ValueError, match=message):
        head_shape(model)


def test_width_that_the_heads_do_not_divide_raises_and_names_it():
    model = tiny_model("llama")
    for block in model.model.layers:
        block.self_attn.o_proj = nn.Linear(30, 32)
    with pytest.raises(ValueError, match=r"4 heads of one size, found input widths \[30\]"):
        head_shape(model)
