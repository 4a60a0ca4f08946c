"""What a run left of itself: its manifest, read back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def program_of(entries: Mapping[str, Any]) -> str:
    """Return the name of the program that made the run: rank_heads, prune_heads ..."""
    return Path(entries["command"][0]).stem


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
