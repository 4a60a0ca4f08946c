import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mhaprune.measure.perplexity import TokenLoss, row_nats, target_nats
from mhaprune.text.sample import IGNORED, window_batch
from mhaprune.text.windows import Window, make_windows
from tests.micro import every_architecture, micro_gpt2, tiny_model


def random_logits(dtype=torch.float64, rows=3, positions=7, vocabulary=11):
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(rows, positions, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (rows, positions), generator=generator)
    targets[0, :3] = targets[2, -1] = IGNORED
    return logits.to(dtype), targets


def cross_entropy_by_row(logits, targets):
    sums = [
        F.cross_entropy(row, target, reduction="sum", ignore_index=IGNORED)
        for row, target in zip(logits.double(), targets, strict=True)
    ]
    return torch.stack(sums)


def test_token_loss_divides_once():
    loss = TokenLoss(total_nats=6 * math.log(2), num_tokens=3, num_bytes=12)
    assert loss.nats_per_token == pytest.approx(2 * math.log(2), rel=1e-15)
    assert loss.perplexity == pytest.approx(4, rel=1e-15)
    assert loss.bits_per_byte == pytest.approx(0.5, rel=1e-15)


def test_token_losses_add_sums_and_counts_not_averages():
    total = TokenLoss(10.0, 1, 4) + TokenLoss(2.0, 5, 20)
    assert total == TokenLoss(12.0, 6, 24)
    assert total.nats_per_token == 2


@pytest.mark.parametrize(
    ("total_nats", "num_tokens"), [(0.0, 0), (math.nan, 3), (math.inf, 3), (-math.inf, 3)]
)
def test_loss_of_nothing_or_not_finite_raises(total_nats, num_tokens):
    with pytest.raises(ValueError, match=f"got {total_nats} nats over {num_tokens} tokens"):
        TokenLoss(total_nats, num_tokens, 9)


def test_bits_per_byte_of_no_bytes_raises():
    with pytest.raises(ValueError, match="at least one byte"):
        _ = TokenLoss(1.0, 1, 0).bits_per_byte


def test_window_batch_shifts_targets_and_ignores_what_another_window_scores():
    ids = torch.arange(10, 18)
    inputs, targets = window_batch(ids, [Window(0, 5, 1), Window(3, 8, 5)])
    assert inputs.tolist() == [[10, 11, 12, 13], [13, 14, 15, 16]]
    assert targets.tolist() == [[11, 12, 13, 14], [IGNORED, 15, 16, 17]]


def test_window_batch_pads_on_the_right():
    inputs, targets = window_batch(torch.arange(10, 18), [Window(5, 8, 7), Window(0, 5, 3)])
    assert inputs.tolist() == [[15, 16, 0, 0], [10, 11, 12, 13]]
    assert targets.tolist() == [[IGNORED, 17, IGNORED, IGNORED], [IGNORED, IGNORED, 13, 14]]


@given(context_length=st.integers(1, 9), data=st.data())
def test_window_batch_scores_each_token_after_the_first_once_with_its_predecessor(
    context_length, data
):
    stride = data.draw(st.integers(1, context_length))
    num_tokens = context_length + data.draw(st.integers(1, 20))
    ids = torch.arange(num_tokens)
    inputs, targets = window_batch(ids, make_windows(num_tokens, context_length, stride))
    scored = targets != IGNORED
    assert targets[scored].tolist() == list(range(1, num_tokens))
    assert inputs[scored].tolist() == list(range(num_tokens - 1))


def test_target_nats_by_hand():
    """Two tokens with logits 0 and ln 3: probabilities 1/4 and 3/4."""
    logits = torch.tensor([0.0, math.log(3)], dtype=torch.float64).expand(2, 3, 2)
    targets = torch.tensor([[0, 1, 1], [0, IGNORED, IGNORED]])
    expected = [math.log(4) + 2 * math.log(4 / 3), math.log(4)]
    assert target_nats(logits, targets).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 256])
def test_target_nats_equal_cross_entropy_in_chunks_of_any_size(chunk):
    logits, targets = random_logits()
    expected = cross_entropy_by_row(logits, targets)
    torch.testing.assert_close(target_nats(logits, targets, chunk), expected, rtol=1e-13, atol=0)


def test_bfloat16_logits_are_summed_up_in_higher_precision():
    logits, targets = random_logits(torch.bfloat16)
    nats = target_nats(logits, targets)
    assert nats.dtype == torch.float64
    torch.testing.assert_close(nats, cross_entropy_by_row(logits, targets), rtol=1e-6, atol=0)


def test_row_with_nothing_scored_has_no_loss():
    logits, targets = random_logits()
    targets[1] = IGNORED
    assert target_nats(logits, targets)[1] == 0


def test_micro_model_loss_by_hand():
    """Logits +-(4, 8, 8)/3 predict B (8/3), then +-(8, 8, 4)/3 predict C (4/3)."""
    partition = 2 * math.cosh(4 / 3) + 4 * math.cosh(8 / 3)
    nats = row_nats(micro_gpt2(), torch.tensor([[0, 1]]), torch.tensor([[1, 2]]))
    assert nats.tolist() == pytest.approx([2 * math.log(partition) - 4], rel=1e-13)


def test_uniform_model_loses_ln_of_the_vocabulary_per_token():
    model = tiny_model("gpt2")
    torch.nn.init.zeros_(model.lm_head.weight)
    inputs, targets = (
        torch.tensor([[5, 6, 7], [8, 9, 10]]),
        torch.tensor([[6, 7, 8], [IGNORED, 3, 4]]),
    )
    expected = np.array([3, 2]) * math.log(64)
    assert row_nats(model, inputs, targets).tolist() == pytest.approx(expected, rel=1e-6)


@every_architecture
def test_short_window_has_the_same_loss_alone_as_beside_a_long_one(model_type):
    model, ids = tiny_model(model_type), torch.arange(3, 23)
    windows = [Window(0, 5, 1), Window(2, 20, 12), Window(4, 8, 6)]
    together = row_nats(model, *window_batch(ids, windows))
    alone = torch.cat([row_nats(model, *window_batch(ids, [window])) for window in windows])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
