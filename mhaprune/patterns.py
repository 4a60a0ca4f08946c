"""What a head attends to: scores of its attention pattern, each between 0 and 1.

`pattern[layer, batch, head, query, key]` is the attention weight from a query position to a key
position; every row sums to 1. Eager attention is needed to get it from a Hugging Face model
(`attn_implementation="eager"`, then `output_attentions=True`): SDPA returns no patterns.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

Patterns = Float[Tensor, "layer batch head pos pos"]
HeadScores = Float[Tensor, "layer head"]


def offset_score(patterns: Patterns, offset: int, first_query: int) -> HeadScores:
    """Mean attention from each query position to the position `offset` before it.

    Queries from `first_query` on count. Raises ValueError where such a query has no such key.
    """
    num_positions = patterns.shape[-1]
    if not 0 <= offset <= first_query < num_positions:
        raise ValueError(
            f"expected 0 <= offset <= first_query < {num_positions} positions, "
            f"got offset {offset} and first_query {first_query}"
        )
    diagonal = patterns.diagonal(offset=-offset, dim1=-2, dim2=-1)
    return diagonal[..., first_query - offset :].mean(dim=(1, 3))


def previous_token_score(patterns: Patterns) -> HeadScores:
    """Mean attention to the token just before, from position 1 on."""
    return offset_score(patterns, offset=1, first_query=1)


def induction_score(patterns: Patterns, period: int) -> HeadScores:
    """Mean attention to the token that followed the current token's earlier occurrence.

    The text must consist of one leading token (beginning of text) and one random stretch of
    `period` tokens, twice; ValueError where the positions are not as many as that. Olsson et al.
    2022, arXiv 2209.11895.
    """
    num_positions = patterns.shape[-1]
    if period < 1 or num_positions != 2 * period + 1:
        raise ValueError(
            f"expected one token and a stretch of period {period} twice, "
            f"{2 * period + 1} positions, got {num_positions}"
        )
    return offset_score(patterns, offset=period - 1, first_query=period + 1)


def repeated_random_tokens(
    token_choices: Int[Tensor, "choice"],
    first_token: int,
    num_rows: int,
    period: int,
    generator: torch.Generator,
) -> Int[Tensor, "row pos"]:
    """Rows of `first_token` and a stretch of `period` uniformly random tokens, twice."""
    picks = torch.randint(len(token_choices), (num_rows, period), generator=generator)
    stretch = token_choices[picks]
    start = torch.full((num_rows, 1), first_token, dtype=stretch.dtype)
    return torch.cat([start, stretch, stretch], dim=1)
