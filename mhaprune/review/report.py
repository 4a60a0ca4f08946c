"""A run's files -> report.html; a sweep's runs -> index.html. Reads nothing but files."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mhaprune.prune.curves import INCREASES
from mhaprune.review.page import IndexEntry, RunPage, Viewer, render_index, render_page
from mhaprune.roles.sentence import saved_sentence
from mhaprune.run.curves import is_random, removable_rows
from mhaprune.stats.effects import VERDICTS
from mhaprune.tables.csv_files import read_rows
from mhaprune.tables.files import only_one, write_atomically
from mhaprune.tables.manifest import program_of, read_manifest, split_command, title_of
from mhaprune.tables.private import hide_private
from mhaprune.tables.rows import (
    CurvePoint,
    HeadEffect,
    HeadRole,
    HeadScore,
    Interaction,
    Row,
    Saving,
    ScoreAgreement,
)

ROWS_OF = {
    "effects": ("effects.csv", HeadEffect),
    "roles": ("roles.csv", HeadRole),
    "scores": ("scores.csv", HeadScore),
    "agreement": ("agreement.csv", ScoreAgreement),
    "curves": ("curve.csv", CurvePoint),
    "interactions": ("interactions.csv", Interaction),
    "savings": ("savings.csv", Saving),
}
NOT_IN_INDEX = ("intervals/", "heads/num_measured", "pruning/most_heads_at_")  # said otherwise


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
    summary = _summary(directory)
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
        **{name: _rows(directory / file, kind) for name, (file, kind) in ROWS_OF.items()},
    )


def rerun_command(manifest: Mapping[str, Any]) -> str:
    """Return the command line that the run was started with; experiments/*.py in a checkout."""
    started, arguments = split_command(manifest["command"])
    in_checkout = ["python", f"experiments/{Path(started[0]).name}"]
    return shlex.join([*(started if len(started) == 2 else in_checkout), *arguments])


def _rows(path: Path, kind: type[Row]) -> list[Row]:
    return read_rows(path, kind) if path.exists() else []


def _summary(directory: Path) -> dict[str, Any]:
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


# ---- sweeps


def write_index(sweep: Path) -> Path:
    """Write index.html of the runs below a sweep's directory, finished or not; return its path.

    Raises ValueError where there is no run.
    """
    entries = [entry for directory in runs_below(sweep) for entry in _entry(directory, sweep)]
    if not entries:
        raise ValueError(f"no run below {sweep}: expected directories with a manifest.json")
    path = sweep / "index.html"
    write_atomically(path, render_index(entries, f"Sweep {sweep.name}"))
    return path


def refresh_index(directory: Path) -> None:
    """Write the index of the sweep that a job's directory belongs to, if it belongs to one.

    Jobs end side by side: the last to write it has to be the last to read what it shows.
    """
    if (directory.parent / "multirun.yaml").exists():
        with only_one(directory.parent / ".indexing"):
            write_index(directory.parent)


def runs_below(sweep: Path) -> list[Path]:
    """Return the run directories of a sweep, in the order of their job numbers.

    Those of jobs that work on a shard, in a directory that they share, are left out.
    """
    found = [
        path
        for path in sweep.iterdir()
        if (path / ".hydra" / "config.yaml").is_file() and not _works_elsewhere(path)
    ]
    return sorted(found, key=lambda path: (_job_number(path.name), path.name))


def _works_elsewhere(directory: Path) -> bool:
    if (directory / "manifest.json").exists() or (directory / "failed.json").exists():
        return False
    return _saved_config(directory).get("shard", {}).get("count", 1) > 1


def _saved_config(directory: Path) -> dict[str, Any]:
    """Return what a job was started with; nothing as long as Hydra is still writing it."""
    text = (directory / ".hydra" / "config.yaml").read_text(encoding="utf-8")
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _job_number(name: str) -> int:
    digits = name.partition("_")[0]
    return int(digits) if digits.isdigit() else -1


def _entry(directory: Path, sweep: Path) -> Iterator[IndexEntry]:
    failure = directory / "failed.json"
    settings = _settings(hide_private(_saved_config(directory)))
    try:
        manifest = read_manifest(directory)
    except ValueError:
        state = "not finished"
        if failure.exists():
            state = f"failed: {json.loads(failure.read_text(encoding='utf-8'))['error']}"
        yield IndexEntry(directory.name, directory.name, 1, 1, settings | {"state": state})
        return
    summary = _summary(directory)
    numbers = {
        re.sub("[_/]", " ", name.split("/", 1)[-1]): value
        for name, value in summary.items()
        if isinstance(value, int | float) and not name.startswith(NOT_IN_INDEX)
    }
    for increase in INCREASES:
        counts = summary.get(f"heads_removed_at_{increase}", {})
        best = [count for name, count in counts.items() if not is_random(name)]
        if best:
            numbers[f"heads that go at +{increase.removesuffix('pct')}%"] = max(best)
    page = (directory / "report.html").relative_to(sweep)
    yield IndexEntry(
        name=directory.name,
        href=page.as_posix(),
        num_layers=manifest["num_layers"],
        num_heads=manifest["num_heads"],
        settings=settings | {"state": "finished"},
        numbers=numbers,
        effects=_rows(directory / "effects.csv", HeadEffect),
        tolerance_nats=manifest["config"]["evaluation"]["tolerance_nats"],
    )


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return every setting by its dotted name; the index shows those in which the runs differ."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        elif not prefix.startswith("tracker"):
            found[prefix] = str(value)

    walk("", config)
    return found
