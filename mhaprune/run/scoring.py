"""Scores of heads on a run's texts: computed, timed and compared with the measured effects."""

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
from jaxtyping import Float

from mhaprune.measure.baselines import Donors
from mhaprune.measure.subject import Subject
from mhaprune.model.heads import Head
from mhaprune.review.console import print_scores
from mhaprune.review.pictures import cost_against_agreement, save_png, score_heatmap, score_scatter
from mhaprune.run.atlas import keep_atlas
from mhaprune.run.config import EvaluationConfig, RankHeadsConfig, plain
from mhaprune.run.measuring import with_ablation
from mhaprune.run.recording import Found, Recording
from mhaprune.scores.catalogue import SCORES
from mhaprune.scores.estimate import Estimate
from mhaprune.stats.agreement import rank_agreement, reliability
from mhaprune.tables.csv_files import write_rows
from mhaprune.tables.manifest import title_of
from mhaprune.tables.rows import HeadScore, ScoreAgreement
from mhaprune.text.sample import Sample

REFERENCE = ("leave_one_out", "adaptive")  # measure the effect instead of estimating it
CHEAP_PASSES = 5
MOST_RESAMPLES = 1000  # of rank correlations: more would not move the interval's second digit


@dataclass(frozen=True)
class Scored:
    """A score of all heads, the same from each half of the windows, and what the whole cost."""

    name: str
    whole: Estimate
    halves: tuple[Estimate, Estimate]
    seconds: float


def check_scores(scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError, before anything is measured, for what a score or an option cannot be."""
    for name, options in scores.items():
        if name not in SCORES:
            raise ValueError(f"score {name!r} is not one of {', '.join(SCORES)}")
        known = dict(list(inspect.signature(SCORES[name]).parameters.items())[1:])
        for option, value in options.items():
            if option not in known:
                raise ValueError(
                    f"score {name} has no option {option!r}; it has {', '.join(known) or 'none'}"
                )
            if (expected := _what_else(known[option].annotation, value)) is not None:
                raise ValueError(
                    f"score {name}: expected {expected} for its option {option}, got {value!r}"
                )


def _what_else(annotation: Any, value: Any) -> str | None:
    """Say what an option of this type takes, if not this value: all numbers are above 0."""
    if choices := get_args(annotation) if get_origin(annotation) is Literal else ():
        return None if value in choices else f"one of {', '.join(choices)}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if annotation is int:
        return None if is_number and isinstance(value, int) else "a whole number above 0"
    if annotation is float:
        return None if is_number else "a number above 0"
    assert get_origin(annotation) is Sequence, annotation
    numbers = list(value) if isinstance(value, list | tuple) else []
    positive = bool(numbers) and all(_what_else(float, each) is None for each in numbers)
    return None if positive else "a list of numbers above 0"


def check_calibration(calibration: Sample) -> None:
    """Raise ValueError where the calibration text is too short for scores and their halves."""
    if len(calibration.windows) < 4:
        raise ValueError(
            f"comparing scores takes at least 4 calibration windows, got "
            f"{len(calibration.windows)}; raise evaluation.calibration_windows or use a longer "
            f"calibration text"
        )


def on_calibration_text(subject: Subject, calibration: Sample) -> Subject:
    """Return the same question about the calibration text; see `check_calibration`."""
    check_calibration(calibration)
    return _with_own_donors(replace(subject, sample=calibration))


def _with_own_donors(subject: Subject) -> Subject:
    """Let each window's donor, if ablation takes donors, be the window after it: never itself."""
    if not isinstance(subject.ablation, Donors):
        return subject
    sample = subject.sample
    first, *others = sample.windows
    return replace(subject, ablation=Donors(sample.ids, (*others, first)))


def compute_score(name: str, options: Mapping[str, Any], subject: Subject) -> Scored:
    """Compute a score on all windows, and once more on every other one and on the rest.

    The halves get seeds of their own, so that a random score does not agree with itself.
    """
    start = time.perf_counter()
    whole = SCORES[name](subject, **options)
    seconds = time.perf_counter() - start
    even, odd = (
        replace(
            subject,
            sample=replace(subject.sample, windows=subject.sample.windows[first::2]),
            seed=subject.seed + 1 + first,
        )
        for first in (0, 1)
    )
    halves = tuple(SCORES[name](_with_own_donors(half), **options) for half in (even, odd))
    return Scored(name, whole, (halves[0], halves[1]), seconds)


def score_rows(name: str, estimate: Estimate, heads: Sequence[Head]) -> list[HeadScore]:
    """Return a row for each head, in the order of the heads."""
    error = estimate.standard_error
    return [
        HeadScore(
            score=name,
            layer=head.layer,
            head=head.head,
            value=float(estimate.value[head.layer, head.head]),
            standard_error=None if error is None else float(error[head.layer, head.head]),
        )
        for head in heads
    ]


def write_scores(
    directory: Path, scored: Mapping[str, Estimate], heads: Sequence[Head], title: str
) -> list[HeadScore]:
    """Write scores.csv, most important head first, and with a title the only score's heatmap."""
    rows = [row for name, one in scored.items() for row in score_rows(name, one, heads)]
    rows.sort(key=lambda row: (list(scored).index(row.score), -row.value))
    write_rows(directory / "scores.csv", HeadScore, rows)
    if title and len(scored) == 1:
        [(name, one)] = scored.items()
        save_png(score_heatmap(one.value, title, name), directory / "heatmap.png")
    return rows


def score_and_rank(recording: Recording, subject: Subject, config: RankHeadsConfig) -> Found:
    """Rank by an estimate: scores.csv. Returns summary, tables and what prints them."""
    name, options, progress = config.score.name, config.score.options, recording.progress
    heads, calibration = subject.heads, recording.prepared.calibration
    with recording.terminal.bar(f"{name} of {len(heads)} heads"):
        subject = with_ablation(subject, calibration, config.ablation, progress)
        progress.begin("score", 0)
        estimate = SCORES[name](subject, **options)
    progress.measured(len(heads), 1)
    rows = write_scores(recording.directory, {name: estimate}, heads, title_of(plain(config)))
    summary = {"score/name": name, "score/forward_equivalents": estimate.forward_equivalents}
    keep_atlas(recording, config.text, config.roles)
    summary |= {"heads/num_measured": len(heads)}
    return summary, {"heads": rows}, lambda: print_scores(recording.terminal.console, rows)


def agreement_row(
    scored: Scored,
    subject: Subject,
    delta_nats: Float[np.ndarray, "head window"],
    config: EvaluationConfig,
    top_k: int,
) -> ScoreAgreement:
    """Judge a score by the measured effects of the subject's heads on its sample."""
    found = rank_agreement(
        scored.whole.at(subject.heads),
        delta_nats,
        subject.sample.num_tokens,
        subject.sample.blocks,
        top_k=top_k,
        confidence=config.confidence,
        num_resamples=min(config.resamples, MOST_RESAMPLES),
        seed=subject.seed,
    )
    first, second = (half.at(subject.heads) for half in scored.halves)
    return ScoreAgreement(
        score=scored.name,
        spearman=found.spearman,
        ci_low=found.ci_low,
        ci_high=found.ci_high,
        kendall=found.kendall,
        top_k_overlap=found.top_k_overlap,
        sign_agreement=found.sign_agreement,
        reliability=reliability(first, second),
        forward_equivalents=float(scored.whole.forward_equivalents),
        seconds=scored.seconds,
        kendall_low=found.kendall_low,
        kendall_high=found.kendall_high,
    )


def draw_agreement(
    directory: Path,
    scored: Sequence[Scored],
    heads: Sequence[Head],
    effects_nats: Float[np.ndarray, "head"],
    rows: Sequence[ScoreAgreement],
) -> None:
    """Write scatter.png, scores against effects, and cost.png, agreement against cost."""
    values = {one.name: one.whole.at(heads) for one in scored}
    save_png(score_scatter(values, effects_nats), directory / "scatter.png")
    passes = {row.score: row.forward_equivalents for row in rows}
    spearman = {row.score: (row.spearman, row.ci_low, row.ci_high) for row in rows}
    save_png(cost_against_agreement(passes, spearman), directory / "cost.png")


def conclude(rows: Sequence[ScoreAgreement]) -> str:
    """Say in one line which score to use when.

    A cheap score takes at most 5 forward passes over the text. A score is of use if the interval of
    its Spearman correlation lies above 0.
    """
    estimates = [row for row in rows if row.score not in (*REFERENCE, "random")]
    useful = sorted((row for row in estimates if row.ci_low > 0), key=lambda row: -row.spearman)
    cheap = [row for row in useful if row.forward_equivalents <= CHEAP_PASSES]
    measured = [row for row in rows if row.score in REFERENCE]
    parts = []
    if cheap:
        parts.append(f"at a glance use {_praise(cheap[0])}")
    if useful and useful[0] not in cheap[:1]:
        parts.append(f"with more time {_praise(useful[0])}")
    if not useful:
        parts.append("no estimate agrees with the measured effects beyond chance")
    if measured:
        parts.append(f"to be sure measure: {_praise(max(measured, key=lambda row: row.spearman))}")
    line = "; ".join(parts)
    return line[0].upper() + line[1:]


def _praise(row: ScoreAgreement) -> str:
    return (
        f"{row.score} (Spearman {row.spearman:.2f} [{row.ci_low:.2f}, {row.ci_high:.2f}], "
        f"{row.forward_equivalents:.0f} passes)"
    )
