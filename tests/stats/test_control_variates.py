"""The control variate by arithmetic, against a loop and by its properties; its intervals cover."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mhaprune.stats.control_variates import (
    LEAST_CHANCE,
    Regression,
    _bend,
    chance_of_verdict,
    is_settled,
    look_sizes,
    regression_effects,
)
from mhaprune.stats.effects import Effects

NUM_WINDOWS = 24
Sample = tuple[Any, Any, Any, Any, Any]  # intact, ablated, predicted, num_tokens, blocks
PER_HEAD = [field.name for field in fields(Effects) if field.name not in ("method", "confidence")]


def simulate(seed=0, num_heads=3, num_windows=NUM_WINDOWS, num_measured=None) -> Sample:
    """Skewed effects and predictions that go with them -> arguments of `regression_effects`.

    A head is measured on `num_measured` windows at random, by default on 8, 14, 20 of 24.
    """
    rng = np.random.default_rng(seed)
    num_tokens = rng.integers(50, 257, num_windows)
    predicted = rng.exponential(0.1, (num_heads, num_windows)) * num_tokens
    noise = rng.normal(0, 0.03, predicted.shape) * num_tokens
    delta = (0.02 * num_tokens + np.arange(1, num_heads + 1)[:, None] * predicted + noise) / 2
    intact = rng.normal(3, 0.3, num_windows) * num_tokens
    ablated = intact + delta
    for head in range(num_heads):
        keep = num_measured if num_measured is not None else 8 + 6 * head
        ablated[head, rng.permutation(num_windows)[keep:]] = np.nan
    return intact, ablated, predicted, num_tokens, np.arange(num_windows)


def one_head(delta, predicted, num_tokens=None, intact=None, blocks=None, **options):
    """Effects of a head whose measured effects are `delta`, NaN where it was not measured."""
    num_tokens = np.full(len(delta), 4) if num_tokens is None else np.asarray(num_tokens)
    intact = 2.0 * num_tokens if intact is None else intact
    blocks = np.arange(len(delta)) if blocks is None else blocks
    ablated = (intact + delta)[None]
    return regression_effects(
        intact, ablated, np.asarray(predicted)[None], num_tokens, blocks, **options
    )


# ---- how many windows a look takes


@pytest.mark.parametrize(
    ("num_windows", "sizes"),
    [
        (8, [8]),
        (16, [16]),
        (17, [16, 17]),
        (64, [16, 32, 64]),
        (227, [16, 32, 64, 128, 227]),
    ],
)
def test_each_look_doubles_the_windows_and_the_last_takes_all(num_windows, sizes):
    assert look_sizes(num_windows) == sizes


def test_fewer_than_8_windows_are_too_few_to_look_at():
    with pytest.raises(ValueError) as error:
        look_sizes(7)
    assert str(error.value) == (
        "adaptive measuring takes at least 8 windows, got 7; use a longer text or "
        "evaluation=exhaustive"
    )


def test_fewer_than_8_measured_windows_of_one_head_are_refused():
    intact, ablated, predicted, num_tokens, blocks = simulate(num_measured=9)
    ablated[1, np.flatnonzero(np.isfinite(ablated[1]))[7:]] = np.nan
    with pytest.raises(ValueError) as error:
        regression_effects(intact, ablated, predicted, num_tokens, blocks)
    assert str(error.value) == "a regression takes at least 8 measured windows, got 7"


# ---- the estimate


def loop(intact, ablated, predicted, num_tokens, blocks, head):
    """Estimate, psi of each window, correlation and plain psi of a head, window by window."""
    windows = range(len(intact))
    few = [w for w in windows if np.isfinite(ablated[head, w])]
    d = {w: ablated[head, w] - intact[w] for w in few}
    g, t = predicted[head], num_tokens
    total, total_few = sum(t), sum(t[w] for w in few)
    rate_g, rate_d = sum(g[w] for w in few) / total_few, sum(d.values()) / total_few
    x, y = {w: g[w] - rate_g * t[w] for w in few}, {w: d[w] - rate_d * t[w] for w in few}
    xx = sum(x[w] ** 2 for w in few)
    beta = sum(x[w] * y[w] for w in few) / xx
    mean_r = rate_d - beta * rate_g
    effect = beta * sum(g) / total + mean_r
    psi = np.zeros(len(intact))
    for w in windows:
        psi[w] = beta * (g[w] - sum(g) / total * t[w]) / total
        if w in d:
            leverage = min(t[w] / total_few + x[w] ** 2 / xx, 0.9)
            psi[w] += (d[w] - beta * g[w] - mean_r * t[w]) / total_few / (1 - leverage)
    correlation = np.sum([x[w] * y[w] for w in few])
    correlation /= np.sqrt(xx * sum(y[w] ** 2 for w in few))
    plain = [y[w] / total_few if w in d else 0 for w in windows]
    sums = [sum(psi[blocks == block]) for block in np.unique(blocks)]
    plain_sums = [sum(np.array(plain)[blocks == block]) for block in np.unique(blocks)]
    return effect, np.array(sums), np.array(plain_sums), correlation, psi


@pytest.mark.parametrize("num_blocks", [NUM_WINDOWS, 12])
def test_estimate_error_and_gain_are_those_of_a_loop_over_windows(num_blocks):
    blocks = np.sort(np.arange(NUM_WINDOWS) % num_blocks)
    arguments = (*simulate()[:-1], blocks)
    effects, regression = regression_effects(*arguments)
    for head in range(3):
        effect, sums, plain, correlation, _ = loop(*arguments, head)
        grow = num_blocks / (num_blocks - 1)
        assert effects.effect_nats[head] == pytest.approx(effect, rel=1e-12)
        assert effects.standard_error[head] == pytest.approx(np.sqrt(grow * sum(sums**2)))
        assert regression.correlation[head] == pytest.approx(correlation)
        gain = sum(plain**2) / sum(sums**2)
        assert regression.variance_reduction[head] == pytest.approx(gain)
    assert effects.num_blocks == num_blocks


def test_intervals_are_students_t_with_the_measured_blocks_bent_by_hall():
    """Heads measured in 8, 14 and 20 blocks; 3 heads at looks of 16 and 24 windows: 6 intervals."""
    arguments = simulate()
    effects, _ = regression_effects(*arguments, confidence=0.9)
    for head, num_measured in enumerate((8, 14, 20)):
        effect, sums, *_ = loop(*arguments, head)
        error = np.sqrt(24 / 23 * sum(sums**2))
        skew = sum(sums**3) / sum(sums**2) ** 1.5
        assert abs(skew) > 1e-3

        def bent(t, skew=skew):
            return 3 / skew * (np.cbrt(1 + skew * (t - skew / 6)) - 1)

        t = stats.t.ppf(0.95, num_measured - 2)
        assert effects.ci_low[head] == pytest.approx(effect - bent(t) * error)
        assert effects.ci_high[head] == pytest.approx(effect - bent(-t) * error)
        t = stats.t.ppf(1 - 0.05 / 6, num_measured - 2)
        low, high = max(bent(t), t), max(-bent(-t), t)
        assert effects.simultaneous_low[head] == pytest.approx(effect - low * error)
        assert effects.simultaneous_high[head] == pytest.approx(effect + high * error)


def test_perplexities_follow_the_losses_by_the_delta_method():
    arguments = simulate()
    intact, _, _, num_tokens, _ = arguments
    effects, _ = regression_effects(*arguments)
    loss = sum(intact) / sum(num_tokens)
    assert effects.ppl_intact == pytest.approx(np.exp(loss))
    assert effects.ppl_ablated == pytest.approx(np.exp(loss + effects.effect_nats))
    assert effects.delta_ppl == pytest.approx(effects.ppl_ablated - effects.ppl_intact)
    psi_loss = (intact - loss * num_tokens) / sum(num_tokens)
    reach = stats.t.ppf(0.975, 23) * np.sqrt(24 / 23 * sum(psi_loss**2))
    assert effects.ppl_intact_low == pytest.approx(np.exp(loss - reach))
    assert effects.ppl_intact_high == pytest.approx(np.exp(loss + reach))
    for head, num_measured in enumerate((8, 14, 20)):
        *_, psi = loop(*arguments, head)
        with_head = np.exp(loss + effects.effect_nats[head])
        psi_ppl = with_head * (psi_loss + psi) - np.exp(loss) * psi_loss
        error = np.sqrt(24 / 23 * sum(psi_ppl**2))
        skew = sum(psi_ppl**3) / sum(psi_ppl**2) ** 1.5
        t = stats.t.ppf(0.975, num_measured - 2)
        low, high = (3 / skew * (np.cbrt(1 + skew * (x - skew / 6)) - 1) for x in (t, -t))
        assert effects.delta_ppl_low[head] == pytest.approx(effects.delta_ppl[head] - low * error)
        assert effects.delta_ppl_high[head] == pytest.approx(effects.delta_ppl[head] - high * error)


def test_once_all_windows_are_measured_the_effect_is_the_plain_one_whatever_was_predicted():
    intact, ablated, predicted, num_tokens, blocks = simulate(num_measured=NUM_WINDOWS)
    plain = (ablated - intact).sum(1) / num_tokens.sum()
    for guess in (predicted, predicted**2, np.random.default_rng(1).normal(9, 50, (3, 24))):
        effects, _ = regression_effects(intact, ablated, guess, num_tokens, blocks)
        assert effects.effect_nats == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("scale", [0.1, 3.0, -2.0])
def test_a_prediction_in_proportion_to_the_effect_tells_what_was_not_measured(scale):
    """d = c g, measured on 8 windows of 16: the effect is c times the mean of all g."""
    predicted = np.arange(16.0) ** 2  # sum 1240
    delta = scale * predicted
    delta[[0, 2, 3, 5, 8, 10, 12, 13]] = np.nan
    effects, regression = one_head(delta, predicted)
    assert effects.effect_nats[0] == pytest.approx(scale * 1240 / 64)
    assert regression.correlation[0] == pytest.approx(np.sign(scale))
    # What is left is how the windows differ: the residuals of the regression are nothing.
    psi = scale * (predicted - 1240 / 16) / 64
    assert effects.standard_error[0] == pytest.approx(np.sqrt(16 / 15 * sum(psi**2)))


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1 / 3])
def test_a_prediction_that_is_the_same_for_every_token_changes_nothing(rate):
    intact, ablated, _, num_tokens, blocks = simulate()
    predicted = np.broadcast_to(rate * num_tokens, ablated.shape)
    effects, regression = regression_effects(intact, ablated, predicted, num_tokens, blocks)
    measured = np.isfinite(ablated)
    plain = np.nansum(ablated - intact, axis=1) / (measured * num_tokens).sum(1)
    assert effects.effect_nats == pytest.approx(plain, rel=1e-9)
    assert regression.correlation == pytest.approx(0, abs=1e-6)
    assert (regression.variance_reduction <= 1).all()  # below 1 by what the leverages add


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3),
)
def test_the_scale_and_sign_of_the_predictions_do_not_matter(seed, scale):
    intact, ablated, predicted, num_tokens, blocks = simulate(seed)
    expected, fit = regression_effects(intact, ablated, predicted, num_tokens, blocks)
    found, other_fit = regression_effects(intact, ablated, scale * predicted, num_tokens, blocks)
    for name in PER_HEAD:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-8), name
    assert other_fit.correlation == pytest.approx(np.sign(scale) * fit.correlation)
    assert other_fit.variance_reduction == pytest.approx(fit.variance_reduction)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), rate=st.floats(-10, 10))
def test_what_is_added_to_the_predictions_of_all_tokens_does_not_matter(seed, rate):
    intact, ablated, predicted, num_tokens, blocks = simulate(seed)
    expected, _ = regression_effects(intact, ablated, predicted, num_tokens, blocks)
    moved = predicted + rate * num_tokens
    found, _ = regression_effects(intact, ablated, moved, num_tokens, blocks)
    for name in PER_HEAD:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-8), name


def test_correlation_is_that_of_numpy_and_the_gain_is_near_what_it_promises():
    """Equal windows, 300 of 1200 measured: var few / var = 1 / (1 - rho^2 + rho^2 / 4)."""
    rng = np.random.default_rng(5)
    predicted = rng.normal(2, 1, 1200)
    delta = 0.7 * predicted + rng.normal(0, 0.4, 1200)
    delta[rng.permutation(1200)[300:]] = np.nan
    few = np.isfinite(delta)
    _, regression = one_head(delta, predicted)
    correlation = np.corrcoef(delta[few], predicted[few])[0, 1]
    assert regression.correlation[0] == pytest.approx(correlation)
    promised = 1 / (1 - correlation**2 + correlation**2 / 4)
    assert regression.variance_reduction[0] == pytest.approx(promised, rel=0.05)


def test_windows_are_counted_for_each_head():
    _, regression = regression_effects(*simulate())
    assert regression.num_windows.tolist() == [8, 14, 20]


def test_a_heads_numbers_are_its_own_but_for_the_simultaneous_interval():
    intact, ablated, predicted, *sample = simulate()
    together, fit = regression_effects(intact, ablated, predicted, *sample)
    for head in range(3):
        only = slice(head, head + 1)
        alone, own_fit = regression_effects(intact, ablated[only], predicted[only], *sample)
        for name in PER_HEAD:
            expected = getattr(together, name)
            expected = expected[only] if isinstance(expected, np.ndarray) else expected
            if name.startswith("simultaneous"):
                assert abs(getattr(alone, name) - alone.effect_nats) < abs(
                    expected - alone.effect_nats
                )
            else:
                assert getattr(alone, name) == pytest.approx(expected, rel=1e-12), name
        assert own_fit.correlation == pytest.approx(fit.correlation[only])
        assert own_fit.variance_reduction == pytest.approx(fit.variance_reduction[only])


# ---- the intervals

SYMMETRIC = np.tile([-3.0, -1.0, 1.0, 3.0], 4)  # no prediction, no skewness


@pytest.mark.parametrize(("num_heads", "confidence"), [(1, 0.95), (5, 0.95), (5, 0.8)])
def test_without_skewness_the_intervals_are_students_t(num_heads, confidence):
    """16 equal windows of 4 tokens, h = 1/16: psi = d / 64 * 16/15; one look, so n comparisons."""
    intact, ablated = np.full(16, 8.0), np.tile(8.0 + SYMMETRIC, (num_heads, 1))
    effects, _ = regression_effects(
        *(intact, ablated, np.zeros_like(ablated), np.full(16, 4), np.arange(16)),
        confidence=confidence,
    )
    error = np.sqrt(16 / 15 * 80) / 64 * 16 / 15
    assert effects.effect_nats == pytest.approx(0)
    assert effects.standard_error == pytest.approx(error)
    reach = stats.t.ppf((1 + confidence) / 2, df=14) * error
    assert (effects.ci_high, effects.ci_low) == pytest.approx((reach, -reach), rel=1e-3)
    reach = stats.t.ppf(1 - (1 - confidence) / 2 / num_heads, df=14) * error
    assert effects.simultaneous_high == pytest.approx(reach, rel=1e-3)
    assert effects.simultaneous_low == pytest.approx(-reach, rel=1e-3)


@pytest.mark.parametrize(("num_windows", "num_looks"), [(16, 1), (32, 2), (36, 3), (64, 3)])
def test_the_simultaneous_interval_counts_the_looks_that_there_may_be(num_windows, num_looks):
    delta = np.resize(SYMMETRIC, num_windows)
    delta[16:] = np.nan
    effects, _ = one_head(delta, np.zeros(num_windows))
    reach = stats.t.ppf(1 - 0.025 / num_looks, df=14) * effects.standard_error
    assert effects.simultaneous_high == pytest.approx(reach, rel=1e-3)


@pytest.mark.parametrize("skew", [-0.9, -0.3, -0.01, 0.01, 0.2, 0.5, 1.1])
def test_bending_is_the_inverse_of_halls_transformation(skew):
    t = np.linspace(-5, 5, 21)
    bent = _bend(t, np.full(21, skew))
    hall = bent + skew * bent**2 / 3 + skew**2 * bent**3 / 27 + skew / 6
    assert hall == pytest.approx(t, abs=1e-9)
    assert (np.diff(bent) > 0).all()


def test_without_skewness_nothing_is_bent():
    t = np.linspace(-8, 8, 17)
    assert _bend(t, np.zeros(17)) == pytest.approx(t, abs=3e-3)


def test_skewed_effects_shift_the_interval_to_the_right_but_never_narrow_the_simultaneous_one():
    delta = np.full(32, 0.1)
    delta[[3, 17, 25]] = 4, 2, 1
    effects, _ = one_head(delta, np.zeros(32))
    t, wide = stats.t.ppf([0.975, 1 - 0.025 / 2], df=30)[:, None] * effects.standard_error
    below, above = effects.effect_nats - effects.ci_low, effects.ci_high - effects.effect_nats
    assert 0 < below < t < above
    assert effects.effect_nats - effects.simultaneous_low == pytest.approx(wide)
    assert effects.simultaneous_high - effects.effect_nats > 1.1 * wide
    mirrored, _ = one_head(-delta, np.zeros(32))
    assert mirrored.ci_low == pytest.approx(-effects.ci_high)
    assert mirrored.ci_high == pytest.approx(-effects.ci_low)
    assert mirrored.simultaneous_low == pytest.approx(-effects.simultaneous_high)


def test_a_window_twice_in_its_block_does_not_shrink_the_error():
    """But for the leverages, which are halved: they are 2/16 on average, to begin with."""
    intact, ablated, predicted, num_tokens, blocks = simulate(num_measured=16)
    once, _ = regression_effects(intact, ablated, predicted, num_tokens, blocks)
    twice = tuple(np.repeat(part, 2, axis=-1) for part in (intact, ablated, predicted, num_tokens))
    same_block, fit = regression_effects(*twice, blocks=np.repeat(blocks, 2))
    as_independent, _ = regression_effects(*twice, blocks=np.arange(48))
    assert same_block.effect_nats == pytest.approx(once.effect_nats)
    assert same_block.standard_error == pytest.approx(once.standard_error, rel=0.15)
    assert same_block.standard_error / as_independent.standard_error == pytest.approx(
        np.sqrt(2 * (24 / 23) / (48 / 47))
    )
    assert fit.num_windows.tolist() == [32, 32, 32]
    # Degrees of freedom count blocks, 16 measured. One end is not bent; 3 heads, 3 looks.
    below = same_block.effect_nats - same_block.simultaneous_low
    above = same_block.simultaneous_high - same_block.effect_nats
    reach = stats.t.ppf(1 - 0.025 / 9, df=14) * same_block.standard_error
    assert np.minimum(below, above) == pytest.approx(reach)


def test_fewer_than_10_blocks_are_not_used_and_it_is_said():
    arguments = simulate()[:-1]
    effects, _ = regression_effects(*arguments, np.arange(24) // 3)
    independent, _ = regression_effects(*arguments, np.arange(24))
    assert effects.method == (
        "control variates, Student t over 24 windows, taken as independent (blocks: 8)"
    )
    assert independent.method == "control variates, Student t over 24 blocks"
    for name in PER_HEAD:
        assert getattr(effects, name) == pytest.approx(getattr(independent, name)), name


def test_95_percent_intervals_hold_the_truth_about_95_times_in_100():
    """Log-normal effects, correlated 0.8 with predictions, 24 measured of 128 windows."""
    rng, num_draws, num_windows = np.random.default_rng(8), 200, 128
    shared = rng.normal(size=(num_draws, num_windows))
    predicted, delta = (
        np.exp(0.5 * (0.9 * shared + np.sqrt(1 - 0.81) * rng.normal(size=shared.shape)))
        for _ in range(2)
    )
    delta[:, 24:] = np.nan  # draws are independent, so any windows are a random choice
    truth = np.exp(0.5**2 / 2)  # mean of a log-normal
    num_tokens = np.ones(num_windows, dtype=int)
    effects, fit = regression_effects(
        *(3.0 * num_tokens, 3 + delta, predicted, num_tokens, np.arange(num_windows))
    )
    assert 0.7 < fit.correlation.mean() < 0.9
    covered = (effects.ci_low <= truth) & (truth <= effects.ci_high)
    assert 0.90 <= covered.mean() <= 0.99


# ---- what settles a head


def with_interval(low, high):
    effects, _ = one_head(np.arange(16.0), np.zeros(16))
    return replace(effects, simultaneous_low=np.array([low]), simultaneous_high=np.array([high]))


@pytest.mark.parametrize(
    ("low", "high", "settled"),
    [
        (-0.009, 0.009, True),  # redundant
        (0.06, 0.2, True),  # critical
        (-0.3, -0.02, True),  # harmful
        (0.02, 0.04, True),  # useful and not critical
        (0.02, 0.05, True),
        (0.02, 0.051, False),  # useful, perhaps critical
        (0.0, 0.02, False),  # the rest are undetermined
        (-0.02, 0.0, False),
        (-0.1, 0.1, False),
        (0.005, 0.3, False),
    ],
)
def test_a_head_is_settled_when_its_interval_allows_one_verdict(low, high, settled):
    assert is_settled(with_interval(low, high), 0.01, 0.05).tolist() == [settled]


# ---- what can hardly be settled

ARRAYS = [name for name in PER_HEAD if not name.startswith("ppl_intact") and name != "num_blocks"]
REACH = float(stats.norm.isf(0.025 / 3))  # one head at looks of 16, 32 and 64 windows: 2.39
THRESHOLDS = [-0.01, 0.01, 0.05]


def of_heads(num_heads, **values):
    """Effects of as many heads, whose fields but for these values do not matter."""
    one, _ = one_head(np.arange(16.0), np.zeros(16))
    arrays = {name: getattr(one, name).repeat(num_heads) for name in ARRAYS}
    given = {name: value * np.ones(num_heads) for name, value in values.items()}
    return replace(one, **arrays | given)


def chance(effect, error=0.004, gain=4.0, num_measured=16, num_windows=64, num_heads=1):
    """Of heads with this estimate, standard error and variance reduction."""
    ones = np.ones(num_heads)
    fit = Regression(0.5 * ones, gain * ones, np.full(num_heads, num_measured))
    effects = of_heads(num_heads, effect_nats=effect, standard_error=error)
    found = chance_of_verdict(effects, fit, num_windows, 0.01, 0.05)
    assert found.shape == (num_heads,) and len(set(found.tolist())) == 1
    return float(found[0])


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_an_estimate_that_cannot_move_any_more_decides_by_its_distance_to_the_threshold(threshold):
    """Without the control variate the error is 0.004 sqrt(4); on 4 times the windows, half that."""
    final = REACH * 0.004 * np.sqrt(4) * np.sqrt(16 / 64)
    for way in (-1, 1):
        assert chance(threshold + way * 0.999 * final) == pytest.approx(0, abs=1e-12)
        assert chance(threshold + way * 1.001 * final) == pytest.approx(1)
    all_measured = {"error": 0.002, "gain": 1, "num_measured": 64}
    assert chance(threshold + 0.999 * REACH * 0.002, **all_measured) == pytest.approx(0, abs=1e-12)
    assert chance(threshold + 1.001 * REACH * 0.002, **all_measured) == pytest.approx(1)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_at_a_threshold_the_chance_is_that_of_moving_far_enough_from_it(threshold):
    """The final error is 0.004 / 2, so that the estimate still moves by 0.004 sqrt(3) / 2."""
    beyond = stats.norm.sf(REACH * 0.002 / (0.004 * np.sqrt(3) / 2))
    assert chance(threshold, gain=1) == pytest.approx(2 * beyond, rel=1e-4)
    assert chance(threshold, gain=1) < LEAST_CHANCE
    assert chance(threshold, gain=1, num_windows=1024) > LEAST_CHANCE


@pytest.mark.parametrize("effect", [-0.2, 0.0, 0.03, 0.2])
def test_a_head_far_from_every_threshold_will_be_settled(effect):
    assert chance(effect, error=0.002, gain=1) > 0.95


def test_the_chance_is_how_often_drawn_estimates_are_settled():
    effect, error, final = 0.012, 0.006, 0.003
    moved = np.sqrt(error**2 - final**2) * np.random.default_rng(0).normal(size=100_000)
    ends = {"low": effect + moved - REACH * final, "high": effect + moved + REACH * final}
    drawn = of_heads(100_000, **{f"simultaneous_{side}": end for side, end in ends.items()})
    share = is_settled(drawn, 0.01, 0.05).mean()
    assert 0.05 < share < 0.95
    assert chance(effect, error, gain=1) == pytest.approx(share, abs=0.005)


def test_no_interval_wider_than_the_tolerance_makes_a_head_redundant():
    assert chance(0.0, error=0.01, gain=4) == 0


def test_among_more_heads_intervals_are_wider_and_chances_smaller():
    wide = 0.004 * float(stats.norm.isf(0.025 / 3 / 100))
    assert wide > 1.5 * REACH * 0.004
    assert chance(0.05 + 0.99 * wide) == pytest.approx(1)
    assert chance(0.05 + 0.99 * wide, num_heads=100) == pytest.approx(0, abs=1e-12)
    assert chance(0.05 + 1.01 * wide, num_heads=100) == pytest.approx(1)
