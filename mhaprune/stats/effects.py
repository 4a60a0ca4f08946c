"""What ablating each head does to the loss, with intervals, from one paired block bootstrap.

Windows of one document resemble each other, so what is resampled is the block (a document). All
heads share the resamples: that keeps the correlation between heads, which the simultaneous
intervals need.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

VERDICTS = ("critical", "useful", "redundant", "harmful", "undetermined")
MIN_BOOTSTRAP_BLOCKS = 10
_HEADS_PER_CHUNK = 64
# Totals in float64 carry rounding of about 1e-15 of their size: a spread below this is rounding.
_ROUNDING = 1e-12
# A resample whose spread is this far below the sample's holds copies of one block's ratio.
_COLLAPSED = 1e-5


@dataclass(frozen=True)
class Effects:
    """The effect of ablating each head and the perplexities it leads to.

    Effects and standard errors are in nats per token; an effect above 0 means the head was useful.
    `ci_*`, `delta_ppl_*` and `ppl_intact_*` each hold with probability `confidence`, head by head.
    `simultaneous_*` hold for all heads at once with probability `confidence`: verdicts use these.
    `method` says in a few words what was resampled, and `num_blocks` how many of them there were.
    """

    effect_nats: Float[np.ndarray, "head"]
    standard_error: Float[np.ndarray, "head"]
    ci_low: Float[np.ndarray, "head"]
    ci_high: Float[np.ndarray, "head"]
    simultaneous_low: Float[np.ndarray, "head"]
    simultaneous_high: Float[np.ndarray, "head"]
    ppl_intact: float
    ppl_intact_low: float
    ppl_intact_high: float
    ppl_ablated: Float[np.ndarray, "head"]
    delta_ppl: Float[np.ndarray, "head"]
    delta_ppl_low: Float[np.ndarray, "head"]
    delta_ppl_high: Float[np.ndarray, "head"]
    num_blocks: int
    method: str
    confidence: float


def paired_effects(
    intact_nats: Float[np.ndarray, "window"],
    ablated_nats: Float[np.ndarray, "head window"],
    num_tokens: Int[np.ndarray, "window"],
    blocks: Int[np.ndarray, "window"],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Effects:
    """Compare each head's ablated loss with the intact loss on the same windows.

    Totals are nats summed over a window's scored tokens. With d_b, t_b the sums over block b:

        effect = sum d_b / sum t_b
        se     = sqrt(n/(n-1) * sum (d_b - effect * t_b)^2) / sum t_b      (linearised ratio)
        t*     = (effect* - effect) / se*                                  (in a resample of blocks)
        ci           = effect - [q_high(t*), q_low(t*)] * se               (bootstrap-t)
        simultaneous = effect -+ quantile(max over heads of |t*|) * se     (max-t)

    delta_ppl = exp(loss + effect) - exp(loss) is studentised likewise, by the delta method. Fewer
    than 10 blocks say nothing about their spread: the windows are then resampled as if independent.
    Fewer than 10 windows: Student's t, Bonferroni-corrected for the simultaneous interval. A head
    without any spread gets its point as interval. One head whose effect sits in very few blocks has
    wild t* and widens the simultaneous intervals of all: more documents are the remedy.

    Raises ValueError for a single window, a loss that is not finite, and resamples too few for the
    confidence. Sources: Efron and Tibshirani 1993, ch. 12 (bootstrap-t); Westfall and Young 1993,
    ch. 2 (max-t); Cochran 1977, ch. 6 (ratio estimator).
    """
    _check(intact_nats, ablated_nats, confidence, num_resamples)
    assert len(ablated_nats) > 0 and num_tokens.min() > 0
    units, over = sampling_units(blocks)
    sample = _sum_blocks(intact_nats, ablated_nats - intact_nats, num_tokens, units)
    num_blocks, num_heads = len(sample.num_tokens), len(ablated_nats)
    errors = _standard_errors(sample)
    few = num_blocks < MIN_BOOTSTRAP_BLOCKS
    if few:
        tails, reach = _student_t(num_blocks, num_heads, confidence)
    else:
        counts = _resample_counts(num_blocks, num_resamples, seed)
        tails, reach = _bootstrap_t(sample, errors, counts, confidence)
    ppl_intact = float(np.exp(sample.loss))
    delta_ppl = ppl_intact * np.expm1(sample.effect_nats)
    points = np.stack([np.full(num_heads, sample.loss), sample.effect_nats, delta_ppl])
    low, high = points - tails[1] * errors, points - tails[0] * errors
    return Effects(
        effect_nats=sample.effect_nats,
        standard_error=errors[1],
        ci_low=low[1],
        ci_high=high[1],
        simultaneous_low=sample.effect_nats - reach * errors[1],
        simultaneous_high=sample.effect_nats + reach * errors[1],
        ppl_intact=ppl_intact,
        ppl_intact_low=float(np.exp(low[0, 0])),
        ppl_intact_high=float(np.exp(high[0, 0])),
        ppl_ablated=ppl_intact + delta_ppl,
        delta_ppl=delta_ppl,
        delta_ppl_low=low[2],
        delta_ppl_high=high[2],
        num_blocks=num_blocks,
        method=f"{'Student t' if few else 'bootstrap-t'} over {over}",
        confidence=confidence,
    )


def verdicts(effects: Effects, tolerance_nats: float, critical_nats: float) -> list[str]:
    """Say of each head what its simultaneous interval allows to say.

    "redundant": inside [-tolerance, tolerance]; "critical": above critical; "useful": above the
    tolerance but not all above critical; "harmful": below -tolerance; else "undetermined".
    Raises ValueError unless 0 < tolerance_nats <= critical_nats.
    """
    if not 0 < tolerance_nats <= critical_nats:
        raise ValueError(
            "expected 0 < tolerance_nats <= critical_nats, "
            f"got tolerance_nats={tolerance_nats} and critical_nats={critical_nats}"
        )

    def verdict(low: float, high: float) -> str:
        if low > critical_nats:
            return "critical"
        if low > tolerance_nats:
            return "useful"
        if high < -tolerance_nats:
            return "harmful"
        if -tolerance_nats <= low and high <= tolerance_nats:
            return "redundant"
        return "undetermined"

    return list(map(verdict, effects.simultaneous_low, effects.simultaneous_high))


def ranking(effect_nats: Float[np.ndarray, "head"]) -> Int[np.ndarray, "head"]:
    """Each head's rank: 1 for the largest effect; of equal effects the earlier head ranks first."""
    ranks = np.empty(len(effect_nats), dtype=np.int64)
    ranks[np.argsort(-effect_nats, kind="stable")] = np.arange(1, len(effect_nats) + 1)
    return ranks


@dataclass(frozen=True)
class _Sample:
    """The estimates, and what each block deviates from them: residual = total - estimate * tokens.

    Residuals instead of totals, so that spreads far below the loss survive the subtractions.
    """

    loss: float
    effect_nats: Float[np.ndarray, "head"]
    num_tokens: Float[np.ndarray, "block"]
    intact_residual: Float[np.ndarray, "block"]
    delta_residual: Float[np.ndarray, "head block"]


def _check(
    intact_nats: Float[np.ndarray, "window"],
    ablated_nats: Float[np.ndarray, "head window"],
    confidence: float,
    num_resamples: int,
) -> None:
    if len(intact_nats) < 2:
        raise ValueError(
            f"an interval takes at least 2 windows, got {len(intact_nats)}; measure more windows"
        )
    finite = np.isfinite(np.vstack([intact_nats, ablated_nats]))
    if not finite.all():
        row, window = np.argwhere(~finite)[0]
        which = "the intact loss" if row == 0 else f"the ablated loss of head number {row - 1}"
        raise ValueError(f"expected finite losses, but {which} is not finite in window {window}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1 such as 0.95, got {confidence}")
    fewest = int(np.ceil(2 / (1 - confidence)))
    if num_resamples < fewest:
        raise ValueError(
            f"confidence {confidence} takes at least {fewest} resamples, got {num_resamples}"
        )


def sampling_units(
    blocks: Int[np.ndarray, "window"],
) -> tuple[Int[np.ndarray, "window"], str]:
    """The unit of sampling that each window belongs to, and in words how many units there are."""
    num_windows, num_blocks = len(blocks), len(np.unique(blocks))
    if num_blocks >= MIN_BOOTSTRAP_BLOCKS:
        return blocks, f"{num_blocks} blocks"
    too_few = f", taken as independent (blocks: {num_blocks})" if num_blocks < num_windows else ""
    return np.arange(num_windows), f"{num_windows} windows{too_few}"


def _sum_blocks(
    intact_nats: Float[np.ndarray, "window"],
    delta_nats: Float[np.ndarray, "head window"],
    num_tokens: Int[np.ndarray, "window"],
    units: Int[np.ndarray, "window"],
) -> _Sample:
    member = np.equal.outer(units, np.unique(units)).astype(np.float64)
    tokens, intact, delta = num_tokens @ member, intact_nats @ member, delta_nats @ member
    loss, effect_nats = intact.sum() / tokens.sum(), delta.sum(axis=1) / tokens.sum()
    return _Sample(
        loss=float(loss),
        effect_nats=effect_nats,
        num_tokens=tokens,
        intact_residual=intact - loss * tokens,
        delta_residual=delta - effect_nats[:, None] * tokens,
    )


def _resample_counts(
    num_blocks: int, num_resamples: int, seed: int
) -> Float[np.ndarray, "resample block"]:
    """How often each block occurs when `num_blocks` of them are drawn with replacement."""
    even = np.full(num_blocks, 1 / num_blocks)
    counts = np.random.default_rng(seed).multinomial(num_blocks, even, size=num_resamples)
    return counts.astype(np.float64)


def _draw(
    sample: _Sample, counts: Float[np.ndarray, "resample block"]
) -> tuple[Float[np.ndarray, "3 head resample"], Float[np.ndarray, "3 head resample"]]:
    """How far loss, effect and delta_ppl move, and their errors, if b is drawn counts[:, b] times.

    Where a sample's block residuals are r, an estimate moves by u = sum r / sum t and leaves the
    residuals r - u*t. To first order the residuals of delta_ppl = ppl - ppl_intact are
    ppl * (r_intact + r_delta) - ppl_intact * r_intact = delta_ppl * r_intact + ppl * r_delta.
    """
    tokens, intact, delta = sample.num_tokens, sample.intact_residual, sample.delta_residual
    weights = counts.T
    sum_t, sum_tt = tokens @ weights, tokens**2 @ weights
    move_i, move_d = intact @ weights / sum_t, delta @ weights / sum_t
    sum_it, sum_dt = (intact * tokens) @ weights, (delta * tokens) @ weights
    squares_i = intact**2 @ weights - 2 * move_i * sum_it + move_i**2 * sum_tt
    squares_d = delta**2 @ weights - 2 * move_d * sum_dt + move_d**2 * sum_tt
    products = (intact * delta) @ weights - move_d * sum_it - move_i * (sum_dt - move_d * sum_tt)

    effect_nats = sample.effect_nats[:, None]
    ppl_intact = np.exp(sample.loss + move_i)
    delta_ppl = ppl_intact * np.expm1(effect_nats + move_d)
    ppl = ppl_intact + delta_ppl
    squares_p = delta_ppl**2 * squares_i + 2 * delta_ppl * ppl * products + ppl**2 * squares_d
    move_p = delta_ppl - np.exp(sample.loss) * np.expm1(effect_nats)

    moves = np.stack([np.broadcast_to(move_i, move_d.shape), move_d, move_p])
    squares = np.stack([np.broadcast_to(squares_i, move_d.shape), squares_d, squares_p])
    num_blocks = len(tokens)
    errors = np.sqrt(num_blocks / (num_blocks - 1) * np.maximum(squares, 0)) / sum_t
    return moves, errors


def _standard_errors(sample: _Sample) -> Float[np.ndarray, "3 head"]:
    """Those of loss, effect and delta_ppl, exactly 0 where all the spread there is is rounding."""
    _, errors = _draw(sample, np.ones((1, len(sample.num_tokens))))
    rounding_nats = _ROUNDING * (abs(sample.loss) + np.abs(sample.effect_nats))
    ppl = np.exp(sample.loss + sample.effect_nats)
    rounding = np.stack([rounding_nats, rounding_nats, rounding_nats * ppl])
    return np.where(errors[..., 0] > rounding, errors[..., 0], 0.0)


def _bootstrap_t(
    sample: _Sample,
    errors: Float[np.ndarray, "3 head"],
    counts: Float[np.ndarray, "resample block"],
    confidence: float,
) -> tuple[Float[np.ndarray, "2 3 head"], float]:
    """The low and high quantile of t* of each quantity, and that of max |t*| over the effects.

    In a resample without spread (of one block only, say) t* is taken with the sample's own error.
    """
    levels = [(1 - confidence) / 2, (1 + confidence) / 2]
    tails, max_t = np.zeros((2, *errors.shape)), np.zeros(len(counts))
    for first in range(0, errors.shape[1], _HEADS_PER_CHUNK):
        chunk = slice(first, first + _HEADS_PER_CHUNK)
        effect_nats, delta_residual = sample.effect_nats[chunk], sample.delta_residual[chunk]
        some_heads = replace(sample, effect_nats=effect_nats, delta_residual=delta_residual)
        moves, resampled = _draw(some_heads, counts)
        own = errors[:, chunk, None]
        error = np.where(resampled > _COLLAPSED * own, resampled, own)
        t = np.divide(
            moves, error, out=np.zeros_like(moves), where=np.broadcast_to(own > 0, moves.shape)
        )
        tails[:, :, chunk] = np.quantile(t, levels, axis=-1)
        max_t = np.maximum(max_t, np.abs(t[1]).max(axis=0))
    return tails, float(np.quantile(max_t, confidence))


def _student_t(
    num_blocks: int, num_heads: int, confidence: float
) -> tuple[Float[np.ndarray, "2 3 head"], float]:
    """The same two from Student's t with n - 1 degrees of freedom, the second by Bonferroni."""
    from scipy import stats  # slow to import, and reading finished runs needs none of it

    reach = stats.t.isf((1 - confidence) / 2, num_blocks - 1)
    tails = np.broadcast_to(np.array([-reach, reach])[:, None, None], (2, 3, num_heads))
    return tails, float(stats.t.isf((1 - confidence) / 2 / num_heads, num_blocks - 1))
