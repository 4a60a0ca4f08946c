"""What a run left of itself: its manifest, read back."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# `mhaprune COMMAND` -> the program that it starts, by which runs and their directories are named.
PROGRAMS = {
    "rank": "rank_heads",
    "scores": "compare_scores",
    "prune": "prune_heads",
    "atlas": "head_atlas",
}


def program_of(entries: Mapping[str, Any]) -> str:
    """Return the name of the program that made the run: rank_heads, prune_heads ..."""
    started, _ = split_command(entries["command"])
    return PROGRAMS[started[1]] if len(started) == 2 else Path(started[0]).stem


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what starts a program, `mhaprune rank` or a file's path, and its arguments."""
    size = 2 if command[0] == "mhaprune" else 1
    return list(command[:size]), list(command[size:])


def shell_command(command: Sequence[str], arguments: Sequence[str]) -> str:
    """Return a command line for the shell: the program of `command` with other arguments."""
    started, _ = split_command(command)
    python = ["python"] if started[0].endswith(".py") else []
    return shlex.join([*python, *started, *arguments])


def is_finished(directory: Path) -> bool:
    """Say whether the run in the directory has written all of its files."""
    try:
        read_manifest(directory)
    except ValueError:
        return False
    return True


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a run. Raises ValueError where there is no finished run."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not the directory of a run: it has no manifest.json")
    entries = json.loads(path.read_text(encoding="utf-8"))
    if entries.get("finished_utc") is None:
        raise ValueError(f"the run in {directory} is not finished; go on with resume={directory}")
    return entries


def title_of(config: Mapping[str, Any]) -> str:
    """Return what a run's pictures and page are of, in a few words; see `plain`."""
    ablation = f", {config['ablation']['kind']} ablation" if "ablation" in config else ""
    return f"{config['model']['name']} on {config['dataset']['name']}{ablation}"
