"""The runs of a sweep -> index.html. Reads nothing but files."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mhaprune.prune.curves import INCREASES
from mhaprune.prune.summary import is_random
from mhaprune.review.page import IndexEntry, render_index
from mhaprune.review.report import read_summary, table_of
from mhaprune.tables.files import only_one, write_atomically
from mhaprune.tables.manifest import read_manifest
from mhaprune.tables.private import hide_private

NOT_IN_INDEX = ("intervals/", "heads/num_measured", "pruning/most_heads_at_")  # said otherwise


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
    summary = read_summary(directory)
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
        effects=table_of(directory, "effects"),
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
