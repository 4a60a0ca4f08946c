from dataclasses import fields

import numpy as np
import pytest
from scipy import stats

from mhaprune.stats.effects import Effects, paired_effects, ranking, verdicts


def simulate(rng, num_documents=40, num_heads=8):
    """Skewed losses that documents share -> (arguments of paired_effects, true effects in nats)."""
    blocks = np.repeat(np.arange(num_documents), rng.integers(2, 7, num_documents))
    num_tokens = rng.integers(50, 257, len(blocks))
    difficulty = rng.gamma(4, 1 / 4, num_documents)
    affinity = rng.exponential(1, (num_heads, num_documents))
    true_nats = np.linspace(0, 0.1, num_heads)
    loss = (2.5 + 0.8 * difficulty)[blocks] + rng.normal(0, 0.1, len(blocks))
    delta = true_nats[:, None] * (difficulty / 2 + affinity / 2)[:, blocks]
    delta += rng.normal(0, 0.02, delta.shape)
    return (loss * num_tokens, (loss + delta) * num_tokens, num_tokens, blocks), true_nats


@pytest.fixture
def data():
    return simulate(np.random.default_rng(7))[0]


def assert_equal_effects(actual, expected, *, skip=(), heads=slice(None)):
    for name in {field.name for field in fields(Effects)} - {"method", *skip}:
        wanted = getattr(expected, name)
        wanted = wanted[heads] if isinstance(wanted, np.ndarray) else wanted
        assert getattr(actual, name) == pytest.approx(wanted, rel=1e-7, abs=1e-12), name


def test_three_windows_by_hand():
    # effect 8/40 = 0.2, residuals -1 -2 3, se = sqrt(3/2 * 14)/40; t(97.5%, df 2) = 4.30265.
    num_tokens = np.array([10, 20, 10])
    intact = np.log(4) * num_tokens
    effects = paired_effects(intact, intact + np.array([[1.0, 2.0, 5.0]]), num_tokens, np.arange(3))
    se = np.sqrt(21) / 40
    assert effects.effect_nats == pytest.approx([0.2])
    assert effects.standard_error == pytest.approx([se])
    assert effects.ci_low == pytest.approx([0.2 - 4.30265 * se], rel=1e-5)
    assert effects.ci_high == pytest.approx([0.2 + 4.30265 * se], rel=1e-5)
    assert effects.ppl_intact == pytest.approx(4)
    assert effects.ppl_ablated == pytest.approx([4 * np.exp(0.2)])
    assert effects.delta_ppl == pytest.approx([4 * np.exp(0.2) - 4])
    reach = 4.30265 * 4 * np.exp(0.2) * se
    assert effects.delta_ppl_high - effects.delta_ppl == pytest.approx([reach], rel=1e-5)
    assert effects.delta_ppl - effects.delta_ppl_low == pytest.approx([reach], rel=1e-5)
    assert (effects.ppl_intact_low, effects.ppl_intact_high) == pytest.approx((4, 4))


def test_few_windows_share_the_error_rate_among_the_heads():
    # Two heads at 95% are 97.5% each: t(98.75%, df 2) = 6.20535.
    num_tokens = np.array([10, 20, 10])
    ablated = np.array([[31.0, 62.0, 35.0], [31.0, 62.0, 35.0]])
    effects = paired_effects(3.0 * num_tokens, ablated, num_tokens, np.arange(3))
    reach = effects.simultaneous_high - effects.effect_nats
    assert reach == pytest.approx(6.20535 * effects.standard_error, rel=1e-5)


def test_equal_windows_give_the_paired_t_test():
    rng = np.random.default_rng(3)
    intact = rng.normal(330, 30, 9)
    ablated = intact + rng.normal(2, 5, 9)
    effects = paired_effects(intact, ablated[None], np.full(9, 100), np.arange(9))
    expected = stats.ttest_rel(ablated / 100, intact / 100).confidence_interval(0.95)
    assert (effects.ci_low[0], effects.ci_high[0]) == pytest.approx((expected.low, expected.high))
    plain = np.std((ablated - intact) / 100, ddof=1) / np.sqrt(9)
    assert effects.standard_error[0] == pytest.approx(plain)
    assert effects.simultaneous_high == pytest.approx(effects.ci_high)  # one head: nothing to share


def slow_bootstrap(intact, ablated, tokens, counts):
    """Loss, effect and delta_ppl [3, head] with their errors, for blocks repeated one by one."""
    drawn = np.repeat(np.arange(len(tokens)), counts)
    i, a, t = intact[drawn], ablated[:, drawn], tokens[drawn]
    loss, losses = i.sum() / t.sum(), a.sum(axis=1, keepdims=True) / t.sum()
    intact_residual, residual = i - loss * t, a - losses * t
    ppl_residual = np.exp(losses) * residual - np.exp(loss) * intact_residual
    parts = [np.broadcast_to(intact_residual, a.shape), residual - intact_residual, ppl_residual]
    points = [np.full(len(a), loss), (losses - loss)[:, 0], (np.exp(losses) - np.exp(loss))[:, 0]]
    errors = [np.std(part, axis=1, ddof=1) * np.sqrt(len(t)) / t.sum() for part in parts]
    return np.array(points), np.array(errors)


def test_intervals_are_those_of_the_bootstrap_written_as_a_loop(data):
    intact, ablated, num_tokens, blocks = data
    effects = paired_effects(*data, num_resamples=500, seed=11)
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    i, a, t = (np.add.reduceat(x, starts, axis=-1) for x in (intact, ablated, num_tokens))
    point, error = slow_bootstrap(i, a, t, np.ones(40, dtype=int))
    all_counts = np.random.default_rng(11).multinomial(40, [1 / 40] * 40, size=500)
    draws = [slow_bootstrap(i, a, t, counts) for counts in all_counts]
    t_star = np.array([(p - point) / e for p, e in draws])

    low = point - np.quantile(t_star, 0.975, axis=0) * error
    high = point - np.quantile(t_star, 0.025, axis=0) * error
    assert effects.standard_error == pytest.approx(error[1])
    assert (effects.ci_low, effects.ci_high) == (pytest.approx(low[1]), pytest.approx(high[1]))
    assert effects.delta_ppl_low == pytest.approx(low[2])
    assert effects.delta_ppl_high == pytest.approx(high[2])
    assert effects.ppl_intact_low == pytest.approx(np.exp(low[0, 0]))
    assert effects.ppl_intact_high == pytest.approx(np.exp(high[0, 0]))
    reach = np.quantile(np.abs(t_star[:, 1]).max(axis=1), 0.95) * error[1]
    assert effects.simultaneous_low == pytest.approx(point[1] - reach)
    assert effects.simultaneous_high == pytest.approx(point[1] + reach)


def test_the_standard_error_is_near_that_of_scipys_bootstrap():
    intact, ablated, num_tokens, blocks = simulate(np.random.default_rng(2), num_documents=300)[0]
    effects = paired_effects(intact, ablated, num_tokens, blocks, num_resamples=100)
    delta, tokens = np.bincount(blocks, ablated[7] - intact), np.bincount(blocks, num_tokens)
    expected = stats.bootstrap(
        (delta, tokens),
        lambda d, t, axis: d.sum(axis=axis) / t.sum(axis=axis),
        paired=True,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    assert effects.standard_error[7] == pytest.approx(expected.standard_error, rel=0.08)


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng, num_simulations = np.random.default_rng(1), 300
    effect, everywhere, delta_ppl, ppl_intact = [], [], [], []
    for seed in range(num_simulations):
        arguments, true_nats = simulate(rng)
        e = paired_effects(*arguments, num_resamples=999, seed=seed)
        true_ppl = np.exp(2.5 + 0.8)
        true_change = true_ppl * np.expm1(true_nats)
        effect.append((e.ci_low <= true_nats) & (true_nats <= e.ci_high))
        simultaneous = (e.simultaneous_low <= true_nats) & (true_nats <= e.simultaneous_high)
        everywhere.append(simultaneous.all())
        delta_ppl.append((e.delta_ppl_low <= true_change) & (true_change <= e.delta_ppl_high))
        ppl_intact.append(e.ppl_intact_low <= true_ppl <= e.ppl_intact_high)
    assert 0.92 <= np.mean(effect) <= 0.98
    assert 0.93 <= np.mean(everywhere) <= 0.99
    assert 0.92 <= np.mean(delta_ppl) <= 0.98
    assert 0.92 <= np.mean(ppl_intact) <= 0.98


def test_the_order_of_the_windows_does_not_matter(data):
    intact, ablated, num_tokens, blocks = data
    order = np.random.default_rng(0).permutation(len(blocks))
    shuffled = paired_effects(intact[order], ablated[:, order], num_tokens[order], blocks[order])
    assert_equal_effects(shuffled, paired_effects(*data))


def test_how_a_document_is_cut_into_windows_does_not_matter(data):
    intact, ablated, num_tokens, blocks = data
    whole = [np.bincount(blocks, x) for x in (intact, num_tokens)]
    ablated_whole = np.stack([np.bincount(blocks, row) for row in ablated])
    merged = paired_effects(whole[0], ablated_whole, whole[1].astype(int), np.arange(40))
    assert_equal_effects(merged, paired_effects(*data))


def test_a_head_has_the_same_interval_alone_and_among_many(data):
    intact, ablated, num_tokens, blocks = data
    many = np.concatenate([ablated + shift for shift in range(20)])  # 160 heads
    among = paired_effects(intact, many, num_tokens, blocks, num_resamples=500)
    for head in (0, 63, 64, 159):
        alone = paired_effects(intact, many[[head]], num_tokens, blocks, num_resamples=500)
        joint = {"simultaneous_low", "simultaneous_high"}
        assert_equal_effects(alone, among, skip=joint, heads=slice(head, head + 1))


def test_the_seed_decides_the_intervals_and_nothing_else(data):
    first, again, other = (paired_effects(*data, num_resamples=200, seed=s) for s in (0, 0, 1))
    assert np.array_equal(first.ci_low, again.ci_low)
    assert not np.array_equal(first.ci_low, other.ci_low)
    assert np.array_equal(first.standard_error, other.standard_error)


def test_heads_without_spread_get_their_point_and_leave_the_others_alone(data):
    intact, ablated, num_tokens, blocks = data
    constant = np.stack([intact, intact + 0.1 * num_tokens])
    without = paired_effects(*data)
    effects = paired_effects(intact, np.vstack([constant, ablated]), num_tokens, blocks)
    points = pytest.approx([0, 0.1], abs=1e-12)
    for name in ("effect_nats", "ci_low", "ci_high", "simultaneous_low", "simultaneous_high"):
        assert getattr(effects, name)[:2] == points
        assert getattr(effects, name)[2:] == pytest.approx(getattr(without, name))
    assert effects.delta_ppl_low[0] == effects.delta_ppl_high[0] == 0
    assert effects.delta_ppl_low[1] < effects.delta_ppl[1] < effects.delta_ppl_high[1]


def test_no_head_with_spread_is_no_trouble():
    num_tokens = np.full(20, 100)
    intact = np.linspace(300, 400, 20)
    effects = paired_effects(intact, intact[None], num_tokens, np.arange(20))
    assert (effects.simultaneous_low, effects.simultaneous_high) == (0, 0)
    assert effects.ppl_intact_low < np.exp(3.5) < effects.ppl_intact_high


def test_a_head_that_matters_in_one_document_keeps_finite_intervals():
    # A third of the resamples lack that document, and with it all spread: t* is then -effect/se.
    num_tokens = np.full(20, 100)
    intact = np.linspace(300, 400, 20)
    ablated = intact + 50 * np.eye(20)[:1]
    effects = paired_effects(intact, ablated, num_tokens, np.arange(20))
    assert effects.effect_nats == pytest.approx([0.025])
    assert effects.standard_error == pytest.approx(
        [0.025]
    )  # sqrt(20/19 * (47.5^2 + 19*2.5^2))/2000
    assert effects.ci_high == pytest.approx([0.05])
    assert effects.ci_low < 0


@pytest.mark.parametrize(
    ("num_windows", "num_blocks", "method", "used"),
    [
        (30, 30, "bootstrap-t over 30 blocks", 30),
        (30, 10, "bootstrap-t over 10 blocks", 10),
        (30, 9, "bootstrap-t over 30 windows, taken as independent (blocks: 9)", 30),
        (10, 1, "bootstrap-t over 10 windows, taken as independent (blocks: 1)", 10),
        (9, 3, "Student t over 9 windows, taken as independent (blocks: 3)", 9),
        (9, 9, "Student t over 9 windows", 9),
    ],
)
def test_the_method_follows_from_how_many_blocks_there_are(num_windows, num_blocks, method, used):
    intact = np.random.default_rng(0).normal(300, 10, num_windows)
    ablated = intact + np.random.default_rng(1).normal(1, 1, (2, num_windows))
    num_tokens = np.full(num_windows, 100)
    blocks = np.sort(np.arange(num_windows) % num_blocks)
    effects = paired_effects(intact, ablated, num_tokens, blocks, num_resamples=100)
    assert (effects.method, effects.num_blocks) == (method, used)


@pytest.mark.parametrize(
    ("num_windows", "options", "message"),
    [
        (1, {}, "at least 2 windows, got 1; measure more windows"),
        (12, {"confidence": 95.0}, "a confidence between 0 and 1 such as 0.95, got 95.0"),
        (12, {"num_resamples": 30}, "confidence 0.95 takes at least 40 resamples, got 30"),
    ],
)
def test_what_gives_no_interval_is_refused_in_one_line(num_windows, options, message):
    intact = np.linspace(300, 310, num_windows)
    num_tokens = np.full(num_windows, 100)
    with pytest.raises(ValueError, match=message) as error:
        paired_effects(intact, intact[None] + 1, num_tokens, np.arange(num_windows), **options)
    assert "\n" not in str(error.value)


def test_a_loss_that_is_not_finite_is_refused_by_name(data):
    intact, ablated, num_tokens, blocks = data
    ablated[3, 5] = np.inf
    with pytest.raises(ValueError, match="ablated loss of head number 3 is not finite in window 5"):
        paired_effects(intact, ablated, num_tokens, blocks)
    intact[2] = np.nan
    with pytest.raises(ValueError, match="the intact loss is not finite in window 2"):
        paired_effects(intact, ablated, num_tokens, blocks)


def with_intervals(*bounds):
    low, high = np.array(bounds, dtype=np.float64).T
    return Effects(
        effect_nats=(low + high) / 2,
        standard_error=high - low,
        ci_low=low + np.inf,  # a verdict must not look at the interval of one head
        ci_high=low - np.inf,
        simultaneous_low=low,
        simultaneous_high=high,
        ppl_intact=1.0,
        ppl_intact_low=1.0,
        ppl_intact_high=1.0,
        ppl_ablated=low,
        delta_ppl=low,
        delta_ppl_low=low,
        delta_ppl_high=low,
        num_blocks=40,
        method="",
        confidence=0.95,
    )


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.005, 0.005, "redundant"),
        (-0.01, 0.01, "redundant"),
        (0.006, 0.008, "redundant"),
        (0.02, 0.05, "useful"),
        (0.02, 0.5, "useful"),
        (0.11, 0.5, "critical"),
        (-0.5, -0.02, "harmful"),
        (-0.02, 0.005, "undetermined"),
        (0.005, 0.5, "undetermined"),
        (-0.5, 0.5, "undetermined"),
    ],
)
def test_verdicts_read_the_simultaneous_interval(low, high, verdict):
    effects = with_intervals((low, high), (-1, 1))
    assert verdicts(effects, 0.01, 0.1) == [verdict, "undetermined"]


@pytest.mark.parametrize(("tolerance", "critical"), [(0.0, 0.1), (-0.01, 0.1), (0.2, 0.1)])
def test_thresholds_out_of_order_are_refused(tolerance, critical):
    with pytest.raises(ValueError, match="expected 0 < tolerance_nats <= critical_nats, got"):
        verdicts(with_intervals((0, 1)), tolerance, critical)


def test_the_largest_effect_ranks_first_and_equals_rank_by_position():
    assert ranking(np.array([0.1, 0.5, -0.2, 0.1, 0.3])).tolist() == [3, 1, 5, 4, 2]
