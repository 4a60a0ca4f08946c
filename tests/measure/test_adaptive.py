"""Measuring until settled, with a look-up for a model: what is asked for, when, in what order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from mhaprune.measure.adaptive import Look, Stopping, measure_until_settled
from mhaprune.measure.leave_one_out import Unit
from mhaprune.model.heads import Head
from mhaprune.scores.adaptive import leave_one_out_adaptively
from mhaprune.scores.leave_one_out import leave_one_out
from mhaprune.stats.control_variates import regression_effects
from mhaprune.stats.effects import verdicts
from mhaprune.text.windows import make_windows
from tests.micro import tiny_model
from tests.subjects import IDS, KINDS, looked_up, make_subject

NUM_WINDOWS, SEED = 100, 3
LOOKS = [16, 32, 64, 100]
TOLERANCE, CRITICAL = 0.01, 0.05  # nats per token; a window has 10 tokens
SETTLED_AT = {  # mean effect and its spread over windows, nats per token -> the look that settles
    Head(0, 1): ((0.0, 0.001), 16),  # redundant
    Head(0, 3): ((0.2, 0.01), 16),  # critical
    Head(1, 0): ((-0.2, 0.01), 16),  # harmful
    Head(1, 2): ((0.03, 0.001), 16),  # useful
    Head(2, 0): ((0.0, 0.013), 32),
    Head(2, 1): ((0.06, 0.02), 64),
    Head(3, 3): ((0.0132, 0.01), None),  # near the tolerance: hardly, but not hopeless: never
}
HEADS = list(SETTLED_AT)


@dataclass
class Model:
    """Losses to look up, and the units that were asked for, look by look."""

    intact: np.ndarray
    ablated: np.ndarray
    predicted: np.ndarray
    heads: list[Head]
    asked: list[list[Unit]] = field(default_factory=list)

    def obtain(self, units: Sequence[Unit]) -> dict[Unit, np.ndarray]:
        self.asked.append(list(units))
        return {unit: self.nats(unit) for unit in units}

    def nats(self, unit: Unit) -> np.ndarray:
        windows = list(unit.windows)
        assert unit.layer is not None, "the intact losses are known"
        rows = [self.heads.index(Head(unit.layer, head)) for head in unit.heads]
        return self.ablated[np.ix_(rows, windows)]

    def looks(self, seed: int = SEED, windows_per_unit: int = 4) -> list[Look]:
        self.asked.clear()
        num_windows = len(self.intact)
        return list(
            measure_until_settled(
                looked_up(self.heads, num_windows, 10, seed),
                *(self.intact, self.predicted, np.arange(num_windows)),
                Stopping(windows_per_unit, 0.95, TOLERANCE, CRITICAL),
                self.obtain,
            )
        )

    def windows_asked_for(self, head: Head) -> list[list[int]]:
        """Of a head, look by look, in their order."""
        return [
            [
                window
                for unit in units
                if unit.layer == head.layer and head.head in unit.heads
                for window in unit.windows
            ]
            for units in self.asked
        ]


def make_model(heads: Sequence[Head] = HEADS, num_windows: int = NUM_WINDOWS) -> Model:
    rng = np.random.default_rng(0)
    intact = 30 + rng.normal(size=num_windows)
    # A fixed set of symmetric deviations, shuffled: the same spread whichever windows come first.
    deviations = np.stack([rng.permutation(np.linspace(-1.7, 1.7, num_windows)) for _ in HEADS])
    scale = np.array([parameters for parameters, _ in SETTLED_AT.values()])
    delta = 10 * (scale[:, :1] + scale[:, 1:] * deviations)
    predicted = 0.3 * delta + 10 * 0.5 * scale[:, 1:] * rng.normal(size=delta.shape)
    rows = [HEADS.index(head) for head in heads]
    return Model(intact, intact + delta[rows], predicted[rows], list(heads))


@pytest.fixture
def model() -> Model:
    return make_model()


def order(num_windows: int = NUM_WINDOWS, seed: int = SEED) -> list[int]:
    return np.random.default_rng(seed).permutation(num_windows).tolist()


def test_each_head_is_measured_up_to_the_look_that_settles_it(model):
    looks = model.looks()
    assert [look.num_windows for look in looks] == LOOKS
    for n, (_, settled_at) in enumerate(SETTLED_AT.values()):
        settled = [settled_at is not None and size >= settled_at for size in LOOKS]
        assert [bool(look.settled[n]) for look in looks] == settled, HEADS[n]
        measured = [int(np.isfinite(look.ablated_nats[n]).sum()) for look in looks]
        assert measured == [min(size, settled_at or NUM_WINDOWS) for size in LOOKS]


def test_a_settled_head_is_not_asked_for_again_and_an_open_one_gets_the_next_windows(model):
    model.looks()
    edges = [0, *LOOKS]
    chunks = [order()[first:last] for first, last in zip(edges, LOOKS, strict=False)]
    for head, (_, settled_at) in SETTLED_AT.items():
        num_looks = LOOKS.index(settled_at or NUM_WINDOWS) + 1
        wanted = chunks[:num_looks] + [[]] * (len(LOOKS) - num_looks)
        assert model.windows_asked_for(head) == wanted, head


def test_no_window_of_a_head_is_asked_for_twice_and_none_that_is_not_there(model):
    model.looks(windows_per_unit=3)
    for head in HEADS:
        windows = [w for look in model.windows_asked_for(head) for w in look]
        assert len(set(windows)) == len(windows)
        assert set(windows) <= set(range(NUM_WINDOWS))
    assert max(len(unit.windows) for units in model.asked for unit in units) == 3


def test_the_last_look_has_used_all_windows_where_a_head_stays_open(model):
    last = model.looks()[-1]
    assert last.num_windows == NUM_WINDOWS
    assert not last.settled.all()
    assert np.isfinite(last.ablated_nats[HEADS.index(Head(3, 3))]).all()
    assert last.most_rows == 0


@pytest.mark.parametrize("threshold", [-TOLERANCE, TOLERANCE, CRITICAL])
def test_a_head_at_a_threshold_is_given_up_and_not_called_settled(monkeypatch, threshold):
    head = Head(3, 3)
    monkeypatch.setitem(SETTLED_AT, head, ((threshold, 0.02), None))
    model, n = make_model(), HEADS.index(head)
    looks = model.looks()
    assert [look.num_windows for look in looks] == [16, 32, 64]  # all others have settled by then
    assert all(look.out_of_reach[n] and not look.settled[n] for look in looks)
    assert model.windows_asked_for(head) == [order()[:16], [], []]
    last = looks[-1]
    assert last.most_rows == 0
    assert last.out_of_reach.sum() == 1
    assert (last.settled != last.out_of_reach).all()
    assert np.isfinite(last.ablated_nats[n]).sum() == 16


def test_a_head_that_is_given_up_is_not_asked_for_while_others_go_on(monkeypatch):
    monkeypatch.setitem(SETTLED_AT, Head(2, 1), ((CRITICAL, 0.02), None))
    model, given_up, still_open = make_model(), HEADS.index(Head(2, 1)), HEADS.index(Head(3, 3))
    looks = model.looks()
    assert [look.num_windows for look in looks] == LOOKS
    assert all(look.out_of_reach[given_up] for look in looks)
    assert not any(look.out_of_reach[still_open] or look.settled[still_open] for look in looks)
    assert model.windows_asked_for(Head(2, 1)) == [order()[:16], [], [], []]
    assert model.windows_asked_for(Head(3, 3))[-1] == order()[64:]
    assert looks[2].most_rows == 36  # of the head that is still open


def test_once_all_heads_are_settled_nothing_more_is_measured():
    model = make_model([head for head, (_, look) in SETTLED_AT.items() if look and look <= 32])
    looks = model.looks()
    assert [look.num_windows for look in looks] == [16, 32]
    assert looks[-1].settled.all()
    assert len(model.asked) == 2
    assert looks[-1].most_rows == 0


def test_most_rows_are_those_that_follow_if_no_other_head_settles(model):
    looks = model.looks()
    for look, size in zip(looks[:-1], LOOKS, strict=False):
        num_open = (~look.settled).sum()
        assert look.most_rows == num_open * (NUM_WINDOWS - size)


def test_a_look_holds_what_was_measured_and_nan_where_nothing_was(model):
    for look in model.looks():
        measured = np.isfinite(look.ablated_nats)
        np.testing.assert_array_equal(look.ablated_nats[measured], model.ablated[measured])
        some = np.zeros(NUM_WINDOWS, dtype=bool)
        some[order()[: look.num_windows]] = True
        assert not (measured & ~some).any()


def test_a_settled_heads_effect_and_verdict_stay_as_they_were(model):
    known: dict[Head, tuple[float, str]] = {}
    for look in model.looks():
        effects, _ = regression_effects(
            *(model.intact, look.ablated_nats, model.predicted),
            *(np.full(NUM_WINDOWS, 10), np.arange(NUM_WINDOWS)),
        )
        named = verdicts(effects, TOLERANCE, CRITICAL)
        now = {
            head: (float(effects.effect_nats[n]), named[n])
            for n, head in enumerate(HEADS)
            if look.settled[n]
        }
        for head, (effect, verdict) in known.items():
            assert now[head] == (pytest.approx(effect, rel=1e-12), verdict), head
        known = now
    assert [verdict for _, verdict in known.values()] == [
        *("redundant", "critical", "harmful", "useful", "redundant", "critical")
    ]


def test_the_seed_decides_the_order_and_nothing_else_does():
    first, again = make_model().looks(), make_model().looks()
    other = make_model().looks(seed=SEED + 1)
    for look, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(look.ablated_nats, same.ablated_nats)
        np.testing.assert_array_equal(look.settled, same.settled)
    measured, others = (np.isfinite(looks[0].ablated_nats[0]) for looks in (first, other))
    assert measured.sum() == others.sum() == 16
    assert (measured != others).any()


@pytest.mark.parametrize(("num_windows", "sizes"), [(8, [8]), (16, [16]), (20, [16, 20])])
def test_few_windows_take_few_looks(num_windows, sizes):
    model = make_model([Head(2, 1)], num_windows)
    assert [look.num_windows for look in model.looks()] == sizes


def test_fewer_than_8_windows_are_refused_before_any_is_asked_for():
    model = make_model(num_windows=7)
    with pytest.raises(ValueError, match="adaptive measuring takes at least 8 windows, got 7"):
        model.looks()
    assert model.asked == []


# ---- the score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(Head(1, 3), Head(0, 0)), (Head(0, 0), Head(1, 1), Head(1, 3))])
def test_with_all_windows_measured_the_score_is_that_of_leave_one_out(heads, kind):
    subject = make_subject(tiny_model("gpt2").double(), kind, heads=heads)
    found, expected = leave_one_out_adaptively(subject), leave_one_out(subject)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-6, atol=1e-9)
    assert found.forward_equivalents == 3 + len(heads)


def test_the_score_of_heads_that_settle_early_costs_less_and_is_within_its_error():
    windows = tuple(make_windows(len(IDS), context_length=8, stride=2))
    assert len(windows) == 27
    subject = make_subject(tiny_model("gpt2").double(), windows=windows)
    found = leave_one_out_adaptively(subject, tolerance_nats=10.0, critical_nats=20.0)
    expected = leave_one_out(subject)
    assert found.forward_equivalents == pytest.approx(3 + 16 * 8 / 27)
    assert found.standard_error is not None
    away = abs(found.value - expected.value)
    assert (away > 1e-6).all() and (away < 4 * found.standard_error).all()
