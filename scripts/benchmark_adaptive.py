"""Adaptive measuring beside exhaustive measuring of the same heads, and how the cost grows."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir

from mhaprune.measure.measurer import Losses
from mhaprune.measure.progress import Progress
from mhaprune.measure.subject import Subject
from mhaprune.model.heads import Head
from mhaprune.run.config import CONF_DIR, RankHeadsConfig, validate
from mhaprune.run.measuring import make_subject, measure_losses, measuring, with_ablation
from mhaprune.run.prepare import Prepared, choose_heads, prepare
from mhaprune.run.ranking import rank


def make_config(overrides: Sequence[str]) -> RankHeadsConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return validate(compose("rank_heads", list(overrides)), RankHeadsConfig)


class Counter:
    """Shows how many rows are done."""

    def __init__(self, name: str) -> None:
        self.name = name

    def show(self, progress: Progress) -> None:
        whole = progress.rows_done + progress.rows_left
        line = f"\r{self.name}: {progress.rows_done} of {whole}"
        print(line, end="", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Only numbers are shown."""


def measured(
    prepared: Prepared, heads: Sequence[Head], config: RankHeadsConfig, progress: Progress
) -> tuple[Subject, Losses]:
    """Measure as `rank_heads` does, in a directory that is gone afterwards."""
    subject = make_subject(prepared, heads, config)
    subject = with_ablation(subject, prepared.calibration, config.ablation, progress)
    with (
        tempfile.TemporaryDirectory() as directory,
        measuring(subject, prepared, config, Path(directory), progress) as measurer,
    ):
        return subject, measure_losses(measurer, config.evaluation)


def timed_verdicts(
    prepared: Prepared, heads: Sequence[Head], config: RankHeadsConfig, sampling: str
) -> tuple[float, dict[Head, str], float]:
    """Seconds for a whole measurement, each head's verdict, and the share of windows it took."""
    config = replace(config, evaluation=replace(config.evaluation, sampling=sampling))
    start = time.perf_counter()
    subject, losses = measured(prepared, heads, config, Progress([Counter(sampling)]))
    ranking = rank(subject, losses, config.evaluation)
    seconds = time.perf_counter() - start
    print(file=sys.stderr)
    verdict_of = {Head(row.layer, row.head): row.verdict for row in ranking.rows}
    return seconds, verdict_of, float(ranking.summary["heads/share_of_windows"])


def measure_adaptive(overrides: Sequence[str]) -> dict[str, float]:
    """Compare both ways to the same verdicts, on what `rank_heads` would run with `overrides`."""
    config = make_config([*overrides, "tracker=none"])
    prepared = prepare(config)
    heads = choose_heads(prepared, config)
    exhaustive, verdict_of, _ = timed_verdicts(prepared, heads, config, "exhaustive")
    adaptive, adaptive_verdict_of, share = timed_verdicts(prepared, heads, config, "adaptive")
    settled = [
        head
        for head in heads
        if "undetermined" not in (verdict_of[head], adaptive_verdict_of[head])
    ]
    same = sum(verdict_of[head] == adaptive_verdict_of[head] for head in settled)
    return {
        "adaptive.num_heads": len(heads),
        "adaptive.num_windows": len(prepared.sample.windows),
        "adaptive.exhaustive_seconds": exhaustive,
        "adaptive.adaptive_seconds": adaptive,
        "adaptive.exhaustive_over_adaptive": exhaustive / adaptive,
        "adaptive.share_of_windows": share,
        "adaptive.num_settled_by_exhaustive": count_settled(verdict_of),
        "adaptive.num_settled_by_adaptive": count_settled(adaptive_verdict_of),
        "adaptive.num_settled_by_both": len(settled),
        "adaptive.verdict_agreement": same / len(settled) if settled else 1.0,
    }


def count_settled(verdict_of: dict[Head, str]) -> int:
    return sum(verdict != "undetermined" for verdict in verdict_of.values())


def measure_growth() -> dict[str, list[tuple[int, float]]]:
    """Seconds on the demo model against the number of windows, and against that of heads."""
    config = make_config(["tracker=none"])
    prepared = prepare(config)
    every = [Head(layer, head) for layer in range(4) for head in range(8)]

    def seconds(heads: Sequence[Head], num_windows: int) -> float:
        sample = replace(prepared.sample, windows=prepared.sample.windows[:num_windows])
        few = replace(prepared, sample=sample)
        start = time.perf_counter()
        measured(few, heads, config, Progress())
        return time.perf_counter() - start

    seconds(every, 4)
    return {
        "windows": [(n, seconds(every, n)) for n in (8, 16, 32, 64)],
        "heads": [(4 * n, seconds(_spread(n), 16)) for n in (1, 2, 4, 8)],
    }


def _spread(heads_per_layer: int) -> list[Head]:
    return [Head(layer, head) for layer in range(4) for head in range(heads_per_layer)]
