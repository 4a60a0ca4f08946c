"""What a head attends to: scores of its attention pattern, and the role that they amount to.

`pattern[layer, batch, head, query, key]` is the attention weight from a query position to a key
position; every row sums to 1. At query 0 the first token is all that there is to see, so queries
count from 1 on. The first token is whatever a row begins with: the beginning-of-text token where
the rows were given one. At query 1 the previous token is the first one, and counts as both.

A model is read one row at a time, and each layer's pattern is turned into scores and let go before
the next is made (`eager.map_patterns`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhaprune.model.architectures import output_projections, output_weights
from mhaprune.model.eager import LayerPatterns, map_patterns
from mhaprune.model.gating import hooked_projections

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Patterns = Float[Tensor, "layer batch head pos pos"]
HeadScores = Float[Tensor, "layer head"]

MIN_PERIOD = 16  # of period 2, what followed the earlier occurrence is the previous token

# role -> the score that it goes by, what that has to be at least, whether it comes first
ROLES = {
    "induction": ("induction", 0.3, True),
    "duplicate token": ("duplicate_token", 0.3, True),
    "previous token": ("previous_token", 0.5, False),
    "current token": ("current_token", 0.5, False),
    "sink": ("first_token", 0.5, False),
}


@dataclass(frozen=True, eq=False)
class PatternScores:
    """Every head's scores, float64 on the CPU; each but the last three between 0 and 1.

    `induction` and `duplicate_token` are of repeated random tokens, all others of ordinary text.
    `normalized_entropy` is between 0 (one key) and 1 (all keys alike), `mean_distance` in tokens.
    """

    previous_token: HeadScores
    current_token: HeadScores
    first_token: HeadScores
    induction: HeadScores
    duplicate_token: HeadScores
    normalized_entropy: HeadScores
    entropy_nats: HeadScores
    mean_distance: HeadScores
    output_norm: HeadScores


@dataclass(frozen=True)
class Role:
    """What a head does, by the rule in `roles`, and the score that says so."""

    name: str
    score: float


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


def current_token_score(patterns: Patterns) -> HeadScores:
    """Mean attention of a token to itself, from position 1 on."""
    return offset_score(patterns, offset=0, first_query=1)


def first_token_score(patterns: Patterns) -> HeadScores:
    """Mean attention to the first token, from position 1 on: where idle heads park."""
    return _after_first_query(patterns)[..., 0].mean(dim=(1, 3))


def induction_score(patterns: Patterns, period: int) -> HeadScores:
    """Mean attention to the token that followed the current token's earlier occurrence.

    The text must consist of one leading token (beginning of text) and one random stretch of
    `period` tokens, twice; ValueError where the positions are not as many as that. Attention spread
    evenly scores the mean of 1 / number of keys, about 2 / (3 period). Olsson et al. 2022, arXiv
    2209.11895.
    """
    _check_period(patterns.shape[-1], period)
    return offset_score(patterns, offset=period - 1, first_query=period + 1)


def duplicate_token_score(patterns: Patterns, period: int) -> HeadScores:
    """Mean attention to the current token's earlier occurrence; text and chance as of induction.

    Wang et al. 2022, arXiv 2211.00593.
    """
    _check_period(patterns.shape[-1], period)
    return offset_score(patterns, offset=period, first_query=period + 1)


def entropy_nats(patterns: Patterns) -> HeadScores:
    """Mean over queries of -sum over keys of p ln p, in nats, from position 1 on."""
    return _entropies(patterns).mean(dim=(1, 3))


def normalized_entropy(patterns: Patterns) -> HeadScores:
    """Mean over queries of the entropy / ln(number of keys up to the query), from position 1 on."""
    num_keys = torch.arange(2, patterns.shape[-1] + 1, device=patterns.device)
    return (_entropies(patterns) / num_keys.log()).mean(dim=(1, 3))


def mean_distance(patterns: Patterns) -> HeadScores:
    """Mean over queries of the expected distance from query back to key, from position 1 on."""
    positions = torch.arange(patterns.shape[-1], device=patterns.device).to(patterns)
    return (positions[1:] - _after_first_query(patterns) @ positions).mean(dim=(1, 3))


def _after_first_query(patterns: Patterns) -> Float[Tensor, "layer batch head query pos"]:
    if patterns.shape[-1] < 2:
        raise ValueError(f"expected rows of at least 2 positions, got {patterns.shape[-1]}")
    return patterns[..., 1:, :]


def _entropies(patterns: Patterns) -> Float[Tensor, "layer batch head query"]:
    return torch.special.entr(_after_first_query(patterns)).sum(-1)


def _check_period(num_positions: int, period: int) -> None:
    if period < 1 or num_positions != 2 * period + 1:
        raise ValueError(
            f"expected one token and a stretch of period {period} twice, "
            f"{2 * period + 1} positions, got {num_positions}"
        )


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


def measure_patterns(
    model: "PreTrainedModel",
    rows: Int[Tensor, "row pos"],
    repeated: Int[Tensor, "repeated_row repeated_pos"],
    period: int,
) -> PatternScores:
    """Score every head on rows of text and on rows from `repeated_random_tokens` of that period.

    Each score is the mean over the rows, which are read one by one. `output_norm` is that of
    z_h W_O[h], without bias, and before the norm that OLMo 2 and Gemma 2 put there. Raises
    ValueError for no rows, rows of one token, a period below 16, rows that do not repeat, and as
    map_patterns.
    """
    _check_rows(rows, repeated, period)
    on_text = {
        "previous_token": previous_token_score,
        "current_token": current_token_score,
        "first_token": first_token_score,
        "entropy_nats": entropy_nats,
        "normalized_entropy": normalized_entropy,
        "mean_distance": mean_distance,
    }
    on_repeated = {
        "induction": partial(induction_score, period=period),
        "duplicate_token": partial(duplicate_token_score, period=period),
    }
    return PatternScores(
        **_mean_over_rows(model, rows, on_text),
        **_mean_over_rows(model, repeated, on_repeated),
        output_norm=_output_norm(model, rows),
    )


def _check_rows(
    rows: Int[Tensor, "row pos"], repeated: Int[Tensor, "repeated_row repeated_pos"], period: int
) -> None:
    if not len(rows) or not len(repeated):
        raise ValueError(
            f"expected rows of text and of repeated tokens, got {len(rows)} and {len(repeated)}"
        )
    if period < MIN_PERIOD:
        raise ValueError(f"expected a period of at least {MIN_PERIOD} tokens, got {period}")
    _check_period(repeated.shape[-1], period)
    if not torch.equal(repeated[:, 1 : period + 1], repeated[:, period + 1 :]):
        raise ValueError(
            f"expected rows whose {period} tokens after the first one come twice, got others; "
            f"make them with repeated_random_tokens"
        )


def _mean_over_rows(
    model: "PreTrainedModel",
    rows: Int[Tensor, "row pos"],
    functions: Mapping[str, Callable[[Patterns], HeadScores]],
) -> dict[str, HeadScores]:
    """Return the mean of each function of the rows' patterns, summed in float64."""

    def scores(pattern: LayerPatterns) -> Float[Tensor, "score head"]:
        return torch.cat([function(pattern[None]) for function in functions.values()])

    sums = torch.zeros((), dtype=torch.float64)
    for row in rows:
        sums = sums + torch.stack(map_patterns(model, row[None], scores)).cpu().double()
    return dict(zip(functions, (sums / len(rows)).unbind(1), strict=True))


@torch.no_grad()
def _output_norm(model: "PreTrainedModel", rows: Int[Tensor, "row pos"]) -> HeadScores:
    """Return the mean over all tokens of the length of z_h W_O[h]."""
    projections, num_heads = output_projections(model), model.config.num_attention_heads
    sums = torch.zeros(len(projections), num_heads, dtype=torch.float64)

    def add(layer: int, z: Float[Tensor, "*batch width"]) -> None:
        weights = output_weights(projections[layer], num_heads)
        outputs = torch.einsum("bphd,hdm->bphm", z.unflatten(-1, (num_heads, -1)), weights)
        sums[layer] += outputs.float().norm(dim=-1).sum((0, 1)).cpu().double()

    with hooked_projections(model, add):
        for row in rows:
            model.base_model(row[None].to(model.device), use_cache=False)
    return sums / rows.numel()


def roles(scores: PatternScores) -> list[list[Role | None]]:
    """Return each head's role, `[layer][head]`, or None where no score is high enough for one.

    | role                       | score at least | since                                         |
    |----------------------------|----------------|-----------------------------------------------|
    | induction, duplicate token | 0.3            | over 7 times chance at any period allowed     |
    | previous, current, sink    | 0.5            | most of its attention: nothing else has more  |

    The first two come first: they take finding a token, not just a place, and such a head parks
    on the first token wherever nothing repeats. Within either kind the highest score decides.
    """
    num_layers, num_heads = scores.induction.shape
    return [
        [_role(scores, layer, head) for head in range(num_heads)] for layer in range(num_layers)
    ]


def _role(scores: PatternScores, layer: int, head: int) -> Role | None:
    passed = []
    for name, (field, least, comes_first) in ROLES.items():
        score = getattr(scores, field)[layer, head].item()
        if score >= least:
            passed.append((comes_first, score, name))
    if not passed:
        return None
    _, score, name = max(passed)
    return Role(name, score)
