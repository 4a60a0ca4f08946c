"""Attention patterns made by hand have the scores that one reads off them."""

from fractions import Fraction

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from mhaprune.patterns import (
    induction_score,
    offset_score,
    previous_token_score,
    repeated_random_tokens,
)

PERIOD = 3
NUM_POSITIONS = 2 * PERIOD + 1


def attend(keys: list[int]) -> Float[Tensor, "1 1 1 pos pos"]:
    """One head in which the query at each position looks at one key only."""
    return torch.eye(len(keys))[keys][None, None, None]


CURRENT = attend([0, 1, 2, 3, 4, 5, 6])
PREVIOUS = attend([0, 0, 1, 2, 3, 4, 5])
INDUCTION = attend([0, 0, 0, 0, 2, 3, 4])  # position 4 repeats position 1, which 2 followed
UNIFORM = (torch.ones(7, 7).tril() / torch.arange(1, 8)[:, None])[None, None, None]
UNIFORM_PREVIOUS = sum(Fraction(1, size) for size in range(2, 8)) / 6
UNIFORM_INDUCTION = sum(Fraction(1, size) for size in range(5, 8)) / 3


@pytest.mark.parametrize(
    ("pattern", "previous", "induction"),
    [
        (CURRENT, 0, 0),
        (PREVIOUS, 1, 0),
        (INDUCTION, Fraction(1, 6), 1),  # 1 looks at 0; otherwise it looks further back
        (UNIFORM, UNIFORM_PREVIOUS, UNIFORM_INDUCTION),
    ],
    ids=["current", "previous", "induction", "uniform"],
)
def test_a_pattern_made_by_hand_has_the_scores_read_off_it(pattern, previous, induction):
    torch.testing.assert_close(previous_token_score(pattern), torch.tensor([[float(previous)]]))
    torch.testing.assert_close(induction_score(pattern, PERIOD), torch.tensor([[float(induction)]]))


def test_offset_0_is_attention_to_the_current_token():
    assert offset_score(CURRENT, offset=0, first_query=0).item() == 1
    assert offset_score(PREVIOUS, offset=0, first_query=0).item() == pytest.approx(1 / 7)
    assert offset_score(PREVIOUS, offset=0, first_query=1).item() == 0


def test_queries_before_the_first_one_do_not_count():
    late = attend([0, 0, 0, 0, 0, 4, 5])
    assert offset_score(late, offset=1, first_query=5).item() == 1
    assert offset_score(late, offset=1, first_query=3).item() == 0.5


def test_each_head_of_each_layer_gets_its_own_score_averaged_over_the_batch():
    both = torch.cat([PREVIOUS, CURRENT], dim=1)
    layers = torch.cat([both, both.flip(1)], dim=0)
    heads = torch.cat([layers, PREVIOUS.expand(2, 2, 1, 7, 7), UNIFORM.expand(2, 2, 1, 7, 7)], 2)
    expected = torch.tensor([0.5, 1, float(UNIFORM_PREVIOUS)]).expand(2, 3)
    torch.testing.assert_close(previous_token_score(heads), expected)
    current_below = torch.cat([both, CURRENT.expand(1, 2, 1, 7, 7)], dim=0)
    assert previous_token_score(current_below).tolist() == [[0.5], [0]]


@pytest.mark.parametrize(("offset", "first_query"), [(-1, 0), (2, 1), (0, 7), (7, 7)])
def test_a_query_without_a_key_is_refused(offset, first_query):
    with pytest.raises(
        ValueError, match=f"< 7 positions, got offset {offset} and first_query {first_query}$"
    ):
        offset_score(UNIFORM, offset, first_query)


@pytest.mark.parametrize("period", [0, 1, 2, 4, 6])
def test_a_period_that_is_not_that_of_the_text_is_refused(period):
    with pytest.raises(ValueError, match=f"period {period} .* got 7$"):
        induction_score(UNIFORM, period)


def test_one_position_has_no_previous_token():
    with pytest.raises(ValueError, match="< 1 positions"):
        previous_token_score(attend([0]))


def rows_of_random_tokens(seed: int, num_rows: int = 50, period: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return repeated_random_tokens(torch.tensor([10, 20, 30]), 7, num_rows, period, generator)


def test_a_row_is_the_first_token_and_one_stretch_twice():
    rows = rows_of_random_tokens(seed=0)
    assert rows.shape == (50, 1 + 2 * 8)
    assert (rows[:, 0] == 7).all()
    assert torch.equal(rows[:, 1:9], rows[:, 9:])


def test_the_random_tokens_are_all_of_the_choices_and_no_others_equally_often():
    tokens, counts = rows_of_random_tokens(seed=0, num_rows=500, period=6)[:, 1:7].unique(
        return_counts=True
    )
    assert tokens.tolist() == [10, 20, 30]
    assert counts.sum() == 3000
    assert (counts - 1000).abs().max() < 130  # five standard deviations, sqrt(3000 * 1/3 * 2/3)


def test_rows_are_told_apart_and_named_by_their_seed():
    rows = rows_of_random_tokens(seed=0)
    assert len({tuple(row) for row in rows.tolist()}) > 45
    assert torch.equal(rows, rows_of_random_tokens(seed=0))
    assert not torch.equal(rows, rows_of_random_tokens(seed=1))


def test_looking_where_the_token_after_the_earlier_occurrence_is_scores_1_on_such_a_row():
    generator = torch.Generator().manual_seed(0)
    row = repeated_random_tokens(torch.arange(10**6), -1, 1, 5, generator)[0].tolist()
    after_earlier = [row.index(token) + 1 for token in row[6:]]
    assert induction_score(attend([0] * 6 + after_earlier), period=5).item() == 1
