"""A run's files -> report.html. Reads nothing but files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mhaprune.prune.curves import INCREASES
from mhaprune.prune.summary import is_random, removable_rows
from mhaprune.review.page import RunPage, Viewer, render_page
from mhaprune.roles.sentence import saved_sentence
from mhaprune.stats.effects import VERDICTS
from mhaprune.tables.csv_files import read_rows
from mhaprune.tables.files import write_atomically
from mhaprune.tables.manifest import (
    program_of,
    read_manifest,
    shell_command,
    split_command,
    title_of,
)
from mhaprune.tables.tables import SHOWN, TABLES


def write_report(directory: Path) -> Path:
    """Write report.html of a finished run from its files, and return where it is.

    Raises ValueError where there is no finished run or a file of it is damaged.
    """
    path = directory / "report.html"
    write_atomically(path, render_page(read_page(directory)))
    return path


def read_page(directory: Path) -> RunPage:
    """Read what a finished run found."""
    manifest = read_manifest(directory)
    if "protocol_line" not in manifest:
        raise ValueError(f"{directory} was made by an older version, without what a page shows")
    summary = read_summary(directory)
    config = manifest["config"]
    evaluation, sentence = config["evaluation"], saved_sentence(directory)
    return RunPage(
        title=title_of(config),
        subtitle=f"{program_of(manifest)}, {manifest['finished_utc'][:16].replace('T', ' ')} UTC",
        facts=_facts(summary),
        num_layers=manifest["num_layers"],
        num_heads=manifest["num_heads"],
        confidence=evaluation["confidence"],
        tolerance_nats=evaluation["tolerance_nats"],
        critical_nats=evaluation["critical_nats"],
        ppl_intact=summary.get("baseline/perplexity"),
        removable=removable_rows(summary),
        viewer=Viewer(sentence.tokens, sentence.patterns, sentence.note) if sentence else None,
        protocol=manifest["protocol_line"],
        config_yaml=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        command=rerun_command(manifest),
        details=_details(manifest),
        **{name: table_of(directory, name) for name in SHOWN},
    )


def rerun_command(manifest: Mapping[str, Any]) -> str:
    """Return the command line that the run was started with; experiments/*.py in a checkout."""
    started, arguments = split_command(manifest["command"])
    if len(started) == 1:
        started = [f"experiments/{Path(started[0]).name}"]
    return shell_command(started, arguments)


def table_of(directory: Path, name: str) -> list[Any]:
    """Return the rows of one of a run's `TABLES`; none where it has no such file."""
    path = directory / TABLES[name].file
    return read_rows(path, TABLES[name].row_type) if path.exists() else []


def read_summary(directory: Path) -> dict[str, Any]:
    """Return the numbers of a run; none where there is no summary.json."""
    path = directory / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the headline numbers, in words: what a reader looks for first."""
    facts = []
    if (perplexity := summary.get("baseline/perplexity")) is not None:
        interval = ""
        if (low := summary.get("baseline/perplexity_low")) is not None:
            interval = f" [{low:.3f}, {summary['baseline/perplexity_high']:.3f}]"
        facts.append(("Intact perplexity", f"{perplexity:.3f}{interval}"))
    for verdict in VERDICTS:
        if (count := summary.get(f"heads/num_{verdict}")) is not None:
            facts.append((verdict.capitalize(), str(count)))
    if (conclusion := summary.get("compare/conclusion")) is not None:
        facts.append(("Conclusion", conclusion))
    for increase in INCREASES:
        counts = summary.get(f"heads_removed_at_{increase}", {})
        named = {name: n for name, n in counts.items() if not is_random(name)}
        if named:
            best = max(named, key=lambda name: named[name])
            percent = increase.removesuffix("pct")
            facts.append((f"Heads that can go at +{percent}%", f"{named[best]} ({best})"))
    for name, count in summary.items():
        if name.startswith("roles/"):
            facts.append((f"{name.removeprefix('roles/').capitalize()} heads", str(count)))
    return facts


def _details(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    commit = manifest["git_commit"]
    changed = " with uncommitted changes" if manifest["git_dirty"] else ""
    names = ("weights_hash", "tokens_hash", "device", "dtype", "platform", "seed")
    return [
        ("commit", f"{commit}{changed}" if commit else "not a git checkout"),
        *((name.replace("_", " "), str(manifest[name])) for name in names),
        *((name, version or "not installed") for name, version in manifest["versions"].items()),
    ]
