"""A head's effect from few measured windows and a cheap prediction on all of them.

One backward pass predicts every head's effect on a window to first order. As an estimate of the
effect that prediction is poor; as a control variate it is excellent. With predictions g on all
windows and measured effects d on few,

    effect = beta * mean_all(g) + mean_few(d - beta * g)

varies less than mean_few(d), by as much as g and d correlate. Once all windows are measured, g
cancels and what is left is the plain mean. Cochran 1977, ch. 12 (double sampling with regression).
"""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from mhaprune.stats.effects import Effects, sampling_units, verdicts

FEWEST_WINDOWS = 8  # to fit a regression and still know its error
FIRST_LOOK = 16
LEAST_CHANCE = 0.2  # of a verdict on all windows: a head with less is left as it is
_LARGEST_LEVERAGE = 0.9


@dataclass(frozen=True)
class Regression:
    """What the control variate did for each head.

    `correlation` is that of prediction and effect over the measured windows, `num_windows` of them;
    `variance_reduction` is the variance of the mean of these windows alone over the estimate's.
    """

    correlation: Float[np.ndarray, "head"]
    variance_reduction: Float[np.ndarray, "head"]
    num_windows: Int[np.ndarray, "head"]


def look_sizes(num_windows: int) -> list[int]:
    """Return how many windows are measured by each look: 16, 32, 64 ... and at last all.

    Raises ValueError for fewer than 8 windows.
    """
    if num_windows < FEWEST_WINDOWS:
        raise ValueError(
            f"adaptive measuring takes at least {FEWEST_WINDOWS} windows, got {num_windows}; use a "
            f"longer text or evaluation=exhaustive"
        )
    sizes = [FIRST_LOOK]
    while sizes[-1] < num_windows:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], num_windows]


def regression_effects(
    intact_nats: Float[np.ndarray, "window"],
    ablated_nats: Float[np.ndarray, "head window"],
    predicted_nats: Float[np.ndarray, "head window"],
    num_tokens: Int[np.ndarray, "window"],
    blocks: Int[np.ndarray, "window"],
    *,
    confidence: float = 0.95,
) -> tuple[Effects, Regression]:
    """Estimate each head's effect on the kind of text that the windows are a sample of.

    `ablated_nats` is NaN where a head was not measured; which windows are must be a random choice.
    Totals per window: d = ablated - intact, g predicted, r = d - beta g, t scored tokens; sums over
    all windows or over the measured ones (few):

        effect = beta * sum_all g / sum_all t + sum_few r / sum_few t
        psi    = beta * (g - mean_all(g) t) / sum_all t + (r - mean_few(r) t) / sum_few t / (1 - h)
        se^2   = B / (B - 1) * sum over the B blocks of (sum of psi in the block)^2

    where r counts on measured windows only, and a window's leverage h keeps few from looking
    better than they are (HC3: MacKinnon and White 1985, J. Econometrics 29). Intervals take
    Student's t with (measured blocks - 2) degrees of freedom, bent by Hall's transformation, since
    effects are skewed: few windows seldom hold the rare large ones. `simultaneous_*` hold for all
    heads at all looks (`look_sizes`) by Bonferroni, so that measuring a head may stop as soon as
    they settle it; they are never bent inwards. Raises ValueError for fewer than 8 windows of a
    head. Sources: Cochran 1977, ch. 12; Hall 1992, J. R. Stat. Soc. B 54.
    """
    measured = ~np.isnan(ablated_nats)
    if (fewest := int(measured.sum(1).min())) < FEWEST_WINDOWS:
        raise ValueError(
            f"a regression takes at least {FEWEST_WINDOWS} measured windows, got {fewest}"
        )
    units, over = sampling_units(blocks)
    member = np.equal.outer(units, np.unique(units)).astype(np.float64)
    fit = _fit(
        np.where(measured, ablated_nats - intact_nats, 0), predicted_nats, measured, num_tokens
    )
    loss = float(intact_nats.sum() / num_tokens.sum())
    psi_loss = (intact_nats - loss * num_tokens) / num_tokens.sum()
    ppl_intact = float(np.exp(loss))
    delta_ppl = ppl_intact * np.expm1(fit.effect)
    psi_ppl = delta_ppl[:, None] * psi_loss + (ppl_intact + delta_ppl)[:, None] * fit.psi

    alpha, num_blocks = 1 - confidence, member.shape[1]
    degrees = np.maximum((measured @ member > 0).sum(1) - 2, 1)
    num_comparisons = len(fit.effect) * len(look_sizes(len(intact_nats)))
    reach = stats.t.isf(alpha / 2, degrees)
    wide = stats.t.isf(alpha / 2 / num_comparisons, degrees)
    error, error_ppl = _error(fit.psi @ member), _error(psi_ppl @ member)
    skew, skew_ppl = _skew(fit.psi @ member), _skew(psi_ppl @ member)
    loss_reach = stats.t.isf(alpha / 2, num_blocks - 1) * float(
        _error((psi_loss @ member)[None])[0]
    )
    effects = Effects(
        effect_nats=fit.effect,
        standard_error=error,
        ci_low=fit.effect - _bend(reach, skew) * error,
        ci_high=fit.effect - _bend(-reach, skew) * error,
        simultaneous_low=fit.effect - np.maximum(_bend(wide, skew), wide) * error,
        simultaneous_high=fit.effect - np.minimum(_bend(-wide, skew), -wide) * error,
        ppl_intact=ppl_intact,
        ppl_intact_low=float(np.exp(loss - loss_reach)),
        ppl_intact_high=float(np.exp(loss + loss_reach)),
        ppl_ablated=ppl_intact + delta_ppl,
        delta_ppl=delta_ppl,
        delta_ppl_low=delta_ppl - _bend(reach, skew_ppl) * error_ppl,
        delta_ppl_high=delta_ppl - _bend(-reach, skew_ppl) * error_ppl,
        num_blocks=num_blocks,
        method=f"control variates, Student t over {over}",
        confidence=confidence,
    )
    plain_error = _error(fit.plain_psi @ member)
    gain = _divide(plain_error**2, error**2, where_zero=1.0)
    return effects, Regression(fit.correlation, gain, measured.sum(1))


def is_settled(
    effects: Effects, tolerance_nats: float, critical_nats: float
) -> Bool[np.ndarray, "head"]:
    """Say for each head whether more windows could give it another verdict, if intervals hold.

    "useful" is not settled while the head may still turn out critical.
    """
    named = np.array(verdicts(effects, tolerance_nats, critical_nats))
    open_above = (named == "useful") & (effects.simultaneous_high > critical_nats)
    return (named != "undetermined") & ~open_above


def chance_of_verdict(
    effects: Effects,
    regression: Regression,
    num_windows: int,
    tolerance_nats: float,
    critical_nats: float,
) -> Float[np.ndarray, "head"]:
    """Return for each head the chance that measuring all of `num_windows` windows would settle it.

    Conditional power under the present estimate (Lan, Simon, Halperin 1982, "Stochastically
    curtailed tests in long-term clinical trials"): with the spread seen so far, the estimate on all
    windows is normal around the present one, its variance the present less the final one; and it
    settles the head where the simultaneous interval around it holds no threshold. To stop where the
    chance is small costs no validity: such a head has no verdict.
    """
    num_comparisons = len(effects.effect_nats) * len(look_sizes(num_windows))
    reach = stats.norm.isf((1 - effects.confidence) / 2 / num_comparisons)
    plain_error = effects.standard_error * np.sqrt(regression.variance_reduction)
    final_error = plain_error * np.sqrt(regression.num_windows / num_windows)
    still_to_move = np.sqrt(np.maximum(effects.standard_error**2 - final_error**2, 1e-24))
    edges = (-np.inf, -tolerance_nats, tolerance_nats, critical_nats, np.inf)
    chances = []
    for below, above in itertools.pairwise(edges):
        first, last = below + reach * final_error, above - reach * final_error
        inside = [
            stats.norm.cdf((edge - effects.effect_nats) / still_to_move) for edge in (first, last)
        ]
        chances.append(np.maximum(inside[1] - inside[0], 0))
    return np.sum(chances, axis=0)


@dataclass(frozen=True)
class _Fit:
    """Estimates, and what each window adds to their deviation from the truth (psi)."""

    effect: Float[np.ndarray, "head"]
    psi: Float[np.ndarray, "head window"]
    plain_psi: Float[np.ndarray, "head window"]
    correlation: Float[np.ndarray, "head"]


def _fit(
    delta: Float[np.ndarray, "head window"],
    predicted: Float[np.ndarray, "head window"],
    measured: Bool[np.ndarray, "head window"],
    num_tokens: Int[np.ndarray, "window"],
) -> _Fit:
    """Regress the measured effects on the predictions; `delta` is 0 where nothing was measured."""
    tokens = np.broadcast_to(num_tokens.astype(np.float64), delta.shape)
    few = measured * tokens
    total, total_few = tokens.sum(1, keepdims=True), few.sum(1, keepdims=True)
    x, y = _centred(measured * predicted, few), _centred(delta, few)
    xx, xy, yy = ((a * b).sum(1, keepdims=True) for a, b in ((x, x), (x, y), (y, y)))
    beta = _divide(xy, xx)
    leverage = np.minimum(few / total_few + _divide(x**2, xx), _LARGEST_LEVERAGE)
    residual = delta - beta * predicted * measured
    effect = beta * predicted.sum(1, keepdims=True) / total
    effect = effect + residual.sum(1, keepdims=True) / total_few
    psi = beta * _centred(predicted, tokens) / total
    psi = psi + (y - beta * x) / total_few / (1 - leverage)
    return _Fit(effect[:, 0], psi, y / total_few, _divide(xy, np.sqrt(xx * yy))[:, 0])


def _centred(
    nats: Float[np.ndarray, "head window"], tokens: Float[np.ndarray, "head window"]
) -> Float[np.ndarray, "head window"]:
    """Subtract from each window what it would have at the head's mean rate per token."""
    left = nats - nats.sum(1, keepdims=True) / tokens.sum(1, keepdims=True) * tokens
    rounding = 1e-12 * np.abs(nats).max(1, keepdims=True)
    return np.where(np.abs(left) > rounding, left, 0.0)


def _error(sums: Float[np.ndarray, "*head block"]) -> Float[np.ndarray, "*head"]:
    num_blocks = sums.shape[-1]
    return np.sqrt(num_blocks / (num_blocks - 1) * (sums**2).sum(-1))


def _skew(sums: Float[np.ndarray, "head block"]) -> Float[np.ndarray, "head"]:
    """The skewness of the estimate: that of one block over the root of how many there are."""
    return _divide((sums**3).sum(1), (sums**2).sum(1) ** 1.5)


def _bend(
    t: Float[np.ndarray, "head"], skew: Float[np.ndarray, "head"]
) -> Float[np.ndarray, "head"]:
    """The inverse of Hall's cubic transformation: t where there is no skewness."""
    safe = np.where(np.abs(skew) > 1e-4, skew, 1e-4)
    return 3 / safe * (np.cbrt(1 + safe * (t - safe / 6)) - 1)


def _divide(
    above: Float[np.ndarray, "*shape"], below: Float[np.ndarray, "*other"], where_zero: float = 0.0
) -> Float[np.ndarray, "*shape"]:
    below = np.broadcast_to(below, above.shape)
    return np.divide(above, below, out=np.full(above.shape, where_zero), where=below > 0)
