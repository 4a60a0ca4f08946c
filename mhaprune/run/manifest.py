"""What a run was: configuration, code, versions, hashes; without secrets and home directories."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from mhaprune import __version__
from mhaprune.tables.private import hide_private


def manifest(
    *,
    config: Mapping[str, object],
    command: Sequence[str],
    seed: int,
    device: str,
    dtype: str,
    weights_hash: str,
    tokens_hash: str,
    protocol: object,
    started: datetime,
    finished: datetime | None = None,
    **more: object,
) -> dict[str, Any]:
    """Return what it takes to run this run again and to trust its numbers, as plain JSON values.

    `config` is the resolved config, `command` is `sys.argv`, `finished` is None while the program
    runs; `more` adds entries. Secrets and the home directory are hidden (`hide_private`) and the
    environment is not recorded.
    """
    entries = {
        "config": config,
        "command": command,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "weights_hash": weights_hash,
        "tokens_hash": tokens_hash,
        "protocol": protocol,
        "started_utc": _in_utc(started),
        "finished_utc": _in_utc(finished) if finished else None,
    }
    return hide_private({**environment_manifest(), **entries, **more})


def environment_manifest() -> dict[str, Any]:
    """What the code is and runs on: git commit, whether the tree was dirty, versions, platform.

    Commit and dirty are None where this package is not part of a git checkout. A package that is
    not installed has version None. An untracked file makes the tree dirty: it may be imported.
    """
    packages = ("torch", "transformers", "datasets", "hydra-core", "wandb", "numpy")
    versions = {"mhaprune": __version__, "python": platform.python_version()}
    own_file = Path(__file__).name
    # A virtual environment inside somebody's repository is no checkout of ours: is this file known?
    status = (
        _git("status", "--porcelain") if _git("ls-files", "--error-unmatch", own_file) else None
    )
    return {
        "git_commit": None if status is None else _git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "versions": versions | {name: _version(name) for name in packages},
        "platform": platform.platform(),
    }


def _in_utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git prints about the checkout this file is in; None if it fails or takes over 2 s."""
    misleading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set while a git hook runs
    environment = {name: value for name, value in os.environ.items() if name not in misleading}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
