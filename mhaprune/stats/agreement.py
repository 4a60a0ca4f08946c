"""How well a score agrees with measured effects, and with itself."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from mhaprune.stats.effects import sampling_units


@dataclass(frozen=True)
class Agreement:
    """Rank correlations with intervals, and what share of the top heads and of the signs is right.

    `top_k_overlap` is the share of the k most important heads, by effect, that are among the k
    highest scores; `sign_agreement` the share of heads whose score and effect are both above 0 or
    both not, which says something of signed scores only.
    """

    spearman: float
    ci_low: float
    ci_high: float
    kendall: float
    kendall_low: float
    kendall_high: float
    top_k_overlap: float
    sign_agreement: float


def rank_agreement(
    score: Float[np.ndarray, "head"],
    delta_nats: Float[np.ndarray, "head window"],
    num_tokens: Int[np.ndarray, "window"],
    blocks: Int[np.ndarray, "window"],
    *,
    top_k: int,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Agreement:
    """Compare a score with the effects, which are sum(delta_nats) / sum(num_tokens) of each head.

    The intervals are percentiles of a bootstrap over heads and, independently, over blocks of
    windows: they cover that other heads and another text of this kind would give another agreement.
    Resamples in which all heads are equal count as no agreement. Raises ValueError for fewer than 3
    heads or a top_k that is not among them.
    """
    num_heads = len(score)
    check_agreement(num_heads, top_k)
    effects = delta_nats.sum(1) / num_tokens.sum()
    units, _ = sampling_units(blocks)
    member = np.equal.outer(units, np.unique(units)).astype(np.float64)
    delta, tokens = delta_nats @ member, num_tokens @ member
    generator = np.random.default_rng(seed)
    draws = np.empty((num_resamples, 2))
    for draw in range(num_resamples):
        counts = np.bincount(
            generator.integers(len(tokens), size=len(tokens)), minlength=len(tokens)
        )
        heads = generator.integers(num_heads, size=num_heads)
        redrawn = (delta[heads] @ counts) / (tokens @ counts)
        draws[draw] = rank_correlations(score[heads], redrawn)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    (low, kendall_low), (high, kendall_high) = np.quantile(draws, tails, axis=0)
    spearman, kendall = rank_correlations(score, effects)
    top = [set(np.argsort(-values, kind="stable")[:top_k]) for values in (score, effects)]
    return Agreement(
        spearman=spearman,
        ci_low=float(low),
        ci_high=float(high),
        kendall=kendall,
        kendall_low=float(kendall_low),
        kendall_high=float(kendall_high),
        top_k_overlap=len(top[0] & top[1]) / top_k,
        sign_agreement=float(np.mean((score > 0) == (effects > 0))),
    )


def check_agreement(num_heads: int, top_k: int) -> None:
    """Raise ValueError for fewer than 3 heads, or a top_k that is not from 1 to all of them."""
    if num_heads < 3:
        raise ValueError(f"agreement takes at least 3 heads, got {num_heads}")
    if not 1 <= top_k <= num_heads:
        raise ValueError(f"top_k must be from 1 to the {num_heads} heads, got {top_k}")


def reliability(first: Float[np.ndarray, "head"], second: Float[np.ndarray, "head"]) -> float:
    """Return how well a score would agree with itself on another text of the same size.

    From its Spearman correlation r between halves of the text, by Spearman and Brown's formula
    2r / (1 + r); a negative r is returned as it is.
    """
    r, _ = rank_correlations(first, second)
    return 2 * r / (1 + r) if r > 0 else r


def rank_correlations(
    a: Float[np.ndarray, "head"], b: Float[np.ndarray, "head"]
) -> tuple[float, float]:
    """Return Spearman's rho and Kendall's tau-b; 0 where one side has no order."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0, 0.0
    from scipy import stats  # slow to import

    rho, tau = np.asarray(stats.spearmanr(a, b))[0], np.asarray(stats.kendalltau(a, b))[0]
    return float(rho), float(tau)
