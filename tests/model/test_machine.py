"""How many rows at once, by arithmetic; and settings of torch that come back as they were."""

import pytest
import torch

from mhaprune.model.kernels import physical_bytes
from mhaprune.model.machine import available_bytes, choose_rows, fast_matmul
from tests.micro import tiny_model

PLENTY = 10**15
ROW = 64 * 4 * 20 * 32  # bytes of 64 positions: 20 widths of 32 in float32
ROW_WITH_LOGITS = 64 * 4 * (20 * 32 + 2 * 64)  # and twice the logits of 64 tokens


@pytest.fixture(scope="module")
def model():
    return tiny_model("gpt2")


@pytest.mark.parametrize("engine", ["replay", "gating"])
@pytest.mark.parametrize(("length", "rows"), [(64, 32), (1024, 2), (1000, 2), (2048, 1), (5000, 1)])
def test_with_memory_enough_a_cpu_takes_2048_positions_at_once(model, engine, length, rows):
    assert choose_rows(model, length, engine, PLENTY) == rows


def test_another_device_takes_65536_positions_at_once():
    model = tiny_model("gpt2").to("meta")
    assert choose_rows(model, 1024, "replay", PLENTY) == 64


@pytest.mark.parametrize(("engine", "row"), [("replay", ROW), ("gating", ROW_WITH_LOGITS)])
def test_rows_take_up_half_of_the_memory_at_most(model, engine, row):
    assert choose_rows(model, 64, engine, 2 * 5 * row) == 5
    assert choose_rows(model, 64, engine, 2 * 5 * row - 2) == 4


def test_a_number_of_half_the_size_leaves_room_for_twice_the_rows():
    model = tiny_model("gpt2").bfloat16()
    assert choose_rows(model, 64, "replay", 2 * 5 * ROW) == 10


@pytest.mark.parametrize("engine", ["replay", "gating"])
def test_there_is_always_one_row(model, engine):
    assert choose_rows(model, 64, engine, 0) == 1


def test_available_memory_is_some_and_no_more_than_the_machine_has():
    assert 2**20 < available_bytes(torch.device("cpu")) <= physical_bytes()


def precisions() -> tuple[str | bool, str | bool]:
    cpu = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    return cpu.fp32_precision, torch.backends.cuda.matmul.fp32_precision


def test_fast_products_are_fast_within_the_context_and_as_before_after_it():
    before = precisions()
    with fast_matmul():
        assert precisions() == ("bf16", "tf32")
    assert precisions() == before != ("bf16", "tf32")


def test_fast_products_end_with_an_error_too():
    before = precisions()
    with pytest.raises(KeyError), fast_matmul():
        raise KeyError
    assert precisions() == before


def test_a_precision_that_was_chosen_before_comes_back():
    with fast_matmul():
        with fast_matmul():
            pass
        assert precisions() == ("bf16", "tf32")
