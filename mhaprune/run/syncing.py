"""`mhaprune sync RUN_DIR`: the W&B run of a finished run, built again from its files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from mhaprune.run.tracking import Tracker, track
from mhaprune.tables.csv_files import read_effects, read_rows, read_table, with_roles
from mhaprune.tables.files import artifact_files, pictures_of
from mhaprune.tables.manifest import program_of, read_manifest
from mhaprune.tables.rows import HeadRole


def sync_run(
    directory: Path, mode: Literal["online", "offline"], say: Callable[[str], object]
) -> bool:
    """Build a new W&B run that shows what the run's program showed; say where it is.

    The configuration, program, weights and texts are those of manifest.json, the summary is
    summary.json, each CSV file is a table, each PNG file a picture, and these files but for the
    pictures, with the page, are the artifact. Curves of progress are in no file and stay out.
    "offline" needs no account.
    Returns False, having said why in one line, if W&B did not take all of it. Raises ValueError
    where there is no finished run.
    """
    directory = directory.resolve()  # it names the run, and "." is no name
    entries = read_manifest(directory)
    summary_file = directory / "summary.json"
    if not summary_file.is_file():
        raise ValueError(f"the run in {directory} has no summary.json; nothing to sync without it")
    summary = json.loads(summary_file.read_text(encoding="utf-8"))
    program = program_of(entries)
    tables = _tables(directory, program)
    troubles: list[str] = []
    with track(
        **entries["config"]["tracker"] | {"mode": mode},
        job_type=program,
        config=entries["config"],
        directory=directory,
        say=troubles.append,
    ) as tracker:
        where = _where(tracker, mode)
        tracker.log_results(
            summary,
            tables,
            pictures_of(directory),
            artifact_files(directory),
            weights_hash=entries["weights_hash"],
            tokens_hash=entries["tokens_hash"],
        )
    for line in troubles or [where]:
        say(line)
    return not troubles


def _where(tracker: Tracker, mode: Literal["online", "offline"]) -> str:
    """What to say of a run that has begun."""
    if tracker.sync_file is None:
        return ""
    if mode == "online":
        return f"W&B: the run is at {tracker.run.url}"
    place = tracker.sync_file.parent
    return f"W&B: the run is in {place}; upload it by: wandb sync {place}"


def _tables(directory: Path, program: str) -> dict[str, Sequence[Any]]:
    """The rows of the CSV files, by the names that the program gives them; not of empty files."""
    tables: dict[str, Sequence[Any]] = {
        path.stem: read_table(path) for path in sorted(directory.glob("*.csv"))
    }
    if program == "rank_heads":
        tables = _of_ranking(directory, tables)
    return {name: rows for name, rows in tables.items() if rows}


def _of_ranking(directory: Path, tables: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The tables as rank_heads names them.

    "heads" is what it ranks by, a score or the effects, to which it adds each head's role; "roles"
    is by_role.csv.
    """
    heads, roles = tables.pop("scores", []), tables.pop("roles", [])
    if tables.pop("effects", None):
        known = read_rows(directory / "roles.csv", HeadRole) if roles else []
        heads = with_roles(read_effects(directory / "effects.csv"), known)
    return {"heads": heads, "roles": tables.pop("by_role", []), **tables}
