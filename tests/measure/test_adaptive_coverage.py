"""Adaptive measuring on the demo model, many times over: are its intervals and verdicts honest?"""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from mhaprune.measure.adaptive import Stopping, measure_until_settled
from mhaprune.measure.leave_one_out import Unit, assemble, measure, plan
from mhaprune.measure.prediction import predict
from mhaprune.model.heads import Head, select_heads
from mhaprune.model.load import load_model
from mhaprune.stats.control_variates import regression_effects
from mhaprune.stats.effects import verdicts
from mhaprune.text.stories import story_texts
from mhaprune.text.tokens import Text, tokenize
from mhaprune.text.windows import make_windows
from tests.subjects import looked_up, subject_on

POOL_SEED = 79  # of stories that nothing else reads
CONTEXT, POOL_SIZE, SAMPLE_SIZE, NUM_DRAWS = 256, 600, 128, 300
CONFIDENCE, TOLERANCE, CRITICAL = 0.95, 0.01, 0.05
HEADS = select_heads(["L*H*"], 4, 8)
Nats = NDArray[np.float64]


@pytest.fixture(scope="module")
def pool() -> tuple[Nats, Nats, Nats]:
    """Intact, ablated and predicted nats of all windows and heads: minutes of measuring."""
    nowhere = {"hub_id": None, "revision": None, "path": None, "gguf_file": None}
    loaded = load_model("demo", **nowhere, dtype="float32", device="cpu")
    text = Text(story_texts(POOL_SEED, 1100), "", "stories")
    ids = tokenize(loaded.tokenizer, text, bos=False, separator="eos").ids
    windows = make_windows(len(ids), CONTEXT, CONTEXT)[:POOL_SIZE]
    assert {window.num_scored for window in windows} == {CONTEXT} and len(windows) == POOL_SIZE
    units = plan(HEADS, range(POOL_SIZE), 4)

    def arranged(found: object) -> tuple[Nats, Nats]:
        assert isinstance(found, dict)
        return assemble({unit: nats.numpy() for unit, nats in found.items()}, HEADS, POOL_SIZE)

    subject = subject_on(loaded.model, ids, windows, None, 16, "replay")
    intact, ablated = arranged(dict(measure(subject, units)))
    _, predicted = arranged(dict(predict(subject, units)))
    return intact, ablated, predicted


class Draw:
    """A text of windows drawn from the pool at random, measured until all heads are settled."""

    def __init__(self, pool: tuple[Nats, Nats, Nats], seed: int) -> None:
        drawn = np.random.default_rng(seed).integers(POOL_SIZE, size=SAMPLE_SIZE)
        self.intact, self.ablated, predicted = (part[..., drawn] for part in pool)
        sample = np.full(SAMPLE_SIZE, CONTEXT), np.arange(SAMPLE_SIZE)
        *_, last = measure_until_settled(
            looked_up(HEADS, SAMPLE_SIZE, CONTEXT, seed),
            *(self.intact, predicted, np.arange(SAMPLE_SIZE)),
            Stopping(4, CONFIDENCE, TOLERANCE, CRITICAL),
            self.look_up,
        )
        self.effects, self.fit = regression_effects(
            *(self.intact, last.ablated_nats, predicted, *sample), confidence=CONFIDENCE
        )
        self.verdicts = np.array(verdicts(self.effects, TOLERANCE, CRITICAL))

    def look_up(self, units: Sequence[Unit]) -> dict[Unit, Nats]:
        return {
            unit: self.ablated[
                np.ix_([HEADS.index(Head(unit.layer, head)) for head in unit.heads], unit.windows)
            ]
            for unit in units
            if unit.layer is not None
        }

    def covers(self, truth: Nats) -> NDArray[np.bool_]:
        return (self.effects.ci_low <= truth) & (truth <= self.effects.ci_high)

    def contradicts(self, truth: Nats) -> NDArray[np.bool_]:
        """Where the verdict is not true of the head's effect over the whole pool."""
        untrue = {
            "redundant": np.abs(truth) > TOLERANCE,
            "critical": truth <= CRITICAL,
            "useful": truth <= TOLERANCE,
            "harmful": truth >= -TOLERANCE,
            "undetermined": np.zeros(len(HEADS), dtype=bool),
        }
        return np.array([untrue[verdict][head] for head, verdict in enumerate(self.verdicts)])


@pytest.mark.slow
def test_intervals_cover_verdicts_are_true_and_windows_are_saved(
    pool: tuple[Nats, Nats, Nats],
) -> None:
    """The text of a run is a sample; the truth is the effect on all that it was drawn from."""
    intact, ablated, _ = pool
    truth = (ablated - intact).sum(1) / (POOL_SIZE * CONTEXT)
    draws = [Draw(pool, seed) for seed in range(NUM_DRAWS)]
    covered = np.array([draw.covers(truth) for draw in draws])
    untrue = np.array([draw.contradicts(truth) for draw in draws])
    num_windows = np.array([draw.fit.num_windows for draw in draws])
    print(f"\ncoverage {covered.mean():.3f}, of the worst head {covered.mean(0).min():.3f}")
    print(f"untrue verdicts {untrue.mean():.5f}, draws with one {untrue.any(1).mean():.4f}")
    print(f"windows {num_windows.mean():.1f} of {SAMPLE_SIZE}")
    assert 0.92 <= covered.mean() <= 0.98
    assert untrue.mean() <= 0.05
    assert untrue.any(axis=1).mean() <= 0.05  # simultaneous: over all heads of a text at once
    assert num_windows.mean() * 1.3 <= SAMPLE_SIZE
