"""How far finished runs of rank_heads agree, and what differs in what was run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mhaprune.model.heads import Head
from mhaprune.stats.agreement import rank_correlations
from mhaprune.tables.csv_files import read_effects, read_rows
from mhaprune.tables.manifest import read_manifest
from mhaprune.tables.rows import HeadEffect, HeadScore

RULE = (
    "Two effects agree where their intervals overlap. Two verdicts contradict each other where one "
    "is critical or useful and the other redundant or harmful."
)
NEEDED, NOT_NEEDED = {"critical", "useful"}, {"redundant", "harmful"}
FEWEST_HEADS = 3
HASHES = ("weights_hash", "tokens_hash", "calibration_hash")
SIZES = ("context_length", "stride", "num_windows", "num_tokens", "num_scored")
HASH_DIGITS = 12


@dataclass(frozen=True)
class RankedRun:
    """A finished run of rank_heads: what ranks its heads and, if it measured them, their effects.

    `effects` is empty where heads were ranked by another score than the measured effect.
    """

    directory: Path
    manifest: dict[str, Any]
    importance: dict[Head, float]
    effects: list[HeadEffect]


@dataclass(frozen=True)
class EffectPair:
    """One head's effect in two runs. For when they agree, see `RULE`."""

    head: Head
    first: HeadEffect
    other: HeadEffect

    @property
    def difference_nats(self) -> float:
        return self.other.effect_nats - self.first.effect_nats

    @property
    def overlaps(self) -> bool:
        low = max(self.first.ci_low, self.other.ci_low)
        return low <= min(self.first.ci_high, self.other.ci_high)

    @property
    def verdict_changed(self) -> bool:
        return self.first.verdict != self.other.verdict

    @property
    def contradicts(self) -> bool:
        both = {self.first.verdict, self.other.verdict}
        return bool(both & NEEDED and both & NOT_NEEDED)


@dataclass(frozen=True)
class Comparison:
    """Two runs: rank agreement over the heads that both have, effects, and what was run otherwise.

    `pairs` has these heads in order; it is empty where a run is ranked by another score than the
    effect. `differences` are lines such as "model.name: gpt2 -> distilgpt2".
    """

    first: Path
    other: Path
    num_common: int
    spearman: float
    kendall: float
    pairs: tuple[EffectPair, ...]
    differences: tuple[str, ...]


def compare_runs(directories: Sequence[Path]) -> list[Comparison]:
    """Compare finished runs of rank_heads with the first of them, one by one.

    Raises ValueError for fewer than two, for a directory without such a run or with one that is not
    finished, and for runs with fewer than 3 heads in common.
    """
    if len(directories) < 2:
        raise ValueError(f"comparing takes at least two run directories, got {len(directories)}")
    first, *others = [read_run(directory) for directory in directories]
    return [compare(first, other) for other in others]


def read_run(directory: Path) -> RankedRun:
    """Read what a run of rank_heads found; ValueError, naming it, where there is no such run."""
    manifest = read_manifest(directory)
    effects_file, scores_file = directory / "effects.csv", directory / "scores.csv"
    if effects_file.is_file():
        effects = read_effects(effects_file)
        importance = {head: row.effect_nats for head, row in by_head(effects).items()}
        return RankedRun(directory, manifest, importance, effects)
    if not scores_file.is_file():
        raise ValueError(
            f"{directory} is not a run of rank_heads: it has neither effects.csv nor scores.csv"
        )
    rows = read_rows(scores_file, HeadScore)
    names = sorted({row.score for row in rows})
    if len(names) > 1:
        raise ValueError(
            f"{directory} is not a run of rank_heads: its scores.csv holds {', '.join(names)}"
        )
    importance = {Head(row.layer, row.head): row.value for row in rows}
    return RankedRun(directory, manifest, importance, effects=[])


def compare(first: RankedRun, other: RankedRun) -> Comparison:
    """Compare two runs; ValueError for fewer than 3 heads in common."""
    common = sorted(first.importance.keys() & other.importance.keys())
    if len(common) < FEWEST_HEADS:
        raise ValueError(
            f"{first.directory} and {other.directory} have {len(common)} heads in common; rank "
            f"agreement takes at least {FEWEST_HEADS}"
        )
    spearman, kendall = rank_correlations(
        *(np.array([run.importance[head] for head in common]) for run in (first, other))
    )
    return Comparison(
        first=first.directory,
        other=other.directory,
        num_common=len(common),
        spearman=spearman,
        kendall=kendall,
        pairs=pair_effects(first.effects, other.effects),
        differences=what_differs(first.manifest, other.manifest),
    )


def pair_effects(
    first: Sequence[HeadEffect], other: Sequence[HeadEffect]
) -> tuple[EffectPair, ...]:
    """Return the effects of the heads that both runs have, in order of the heads."""
    ours, theirs = by_head(first), by_head(other)
    return tuple(
        EffectPair(head, ours[head], theirs[head]) for head in sorted(ours.keys() & theirs.keys())
    )


def by_head(rows: Sequence[HeadEffect]) -> dict[Head, HeadEffect]:
    return {Head(row.layer, row.head): row for row in rows}


def disagreements(first: Sequence[HeadEffect], other: Sequence[HeadEffect]) -> list[str]:
    """Return, a line each, the heads that one run lacks and what does not agree, by `RULE`."""
    lone = sorted(by_head(first).keys() ^ by_head(other).keys())
    found = [f"{head}: in one of the runs only" for head in lone]
    for pair in pair_effects(first, other):
        a, b = pair.first, pair.other
        if not pair.overlaps:
            found.append(
                f"{pair.head}: intervals do not overlap: {a.effect_nats:+.4f} [{a.ci_low:+.4f}, "
                f"{a.ci_high:+.4f}] -> {b.effect_nats:+.4f} [{b.ci_low:+.4f}, {b.ci_high:+.4f}]"
            )
        if pair.contradicts:
            found.append(f"{pair.head}: verdicts contradict: {a.verdict} -> {b.verdict}")
    return found


def largest_difference(pairs: Sequence[EffectPair]) -> EffectPair:
    """Return the head whose effects differ the most, either way."""
    return max(pairs, key=lambda pair: abs(pair.difference_nats))


def what_differs(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what differs between two manifests, as "what: first -> other".

    Compared are configuration, hashes, sizes of the evaluation, versions, device, platform and
    commit; not when and with which words a run was started, nor where it is tracked.
    """
    ours, theirs = _what_was_run(first), _what_was_run(other)
    return tuple(
        f"{name}: {ours.get(name, 'absent')} -> {theirs.get(name, 'absent')}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    )


def _what_was_run(manifest: Mapping[str, Any]) -> dict[str, str]:
    apart = ("tracker", "shard")  # neither moves a number
    config = {name: value for name, value in manifest["config"].items() if name not in apart}
    hashes = {name: manifest[name][:HASH_DIGITS] for name in HASHES}
    sizes = {name: manifest["protocol"][name] for name in SIZES}
    code = {
        "device": manifest["device"],
        "num_threads": manifest.get("num_threads"),
        "platform": manifest["platform"],
        "git_commit": manifest["git_commit"] and manifest["git_commit"][:HASH_DIGITS],
        "git_dirty": manifest["git_dirty"],
    }
    return _flat({**config, **hashes, **sizes, "versions": manifest["versions"], **code})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Name every value by its dotted key and spell it as on the command line."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def print_comparisons(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print each comparison, as wide as the console at most, and when effects agree."""
    for comparison in comparisons:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, min_width=len("largest difference"))
        table.add_column(overflow="fold")
        for name, value in _lines(comparison):
            table.add_row(name, Text(value))
        console.print(table)
        console.print()
    if any(comparison.pairs for comparison in comparisons):
        console.print(RULE, markup=False, highlight=False)


def _lines(comparison: Comparison) -> list[tuple[str, str]]:
    lines = [
        ("first", str(comparison.first)),
        ("other", str(comparison.other)),
        ("heads in common", str(comparison.num_common)),
        ("rank agreement", f"Spearman {comparison.spearman:.3f}, Kendall {comparison.kendall:.3f}"),
    ]
    if comparison.pairs:
        lines += _effect_lines(comparison.pairs)
    else:
        lines.append(("effects", "not compared: a run is ranked by another score"))
    differences = comparison.differences or ("nothing that is recorded",)
    return lines + _under("what differs", differences)


def _effect_lines(pairs: Sequence[EffectPair]) -> list[tuple[str, str]]:
    largest = largest_difference(pairs)
    apart = [str(pair.head) for pair in pairs if not pair.overlaps]
    changed = [pair for pair in pairs if pair.verdict_changed]
    contradicting = [str(pair.head) for pair in pairs if pair.contradicts]
    verdicts = [f"{len(changed)} of {len(pairs)} changed"]
    if contradicting:
        verdicts[0] += f"; contradicting: {', '.join(contradicting)}"
    verdicts += [f"{pair.head}: {pair.first.verdict} -> {pair.other.verdict}" for pair in changed]
    return [
        ("largest difference", describe_difference(largest)),
        ("intervals", f"apart: {', '.join(apart)}" if apart else f"all {len(pairs)} overlap"),
        *_under("verdicts", verdicts),
    ]


def describe_difference(pair: EffectPair) -> str:
    """Return by how much a head's effects differ, and from what to what, in a few words."""
    first, other = pair.first.effect_nats, pair.other.effect_nats
    return f"{abs(pair.difference_nats):.2g} nats/token ({pair.head}: {first:+.4f} -> {other:+.4f})"


def _under(name: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Put a name before the first of some lines, and nothing before the others."""
    return [("" if number else name, line) for number, line in enumerate(lines)]
