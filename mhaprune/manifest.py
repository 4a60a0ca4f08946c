"""What a run was: configuration, code, versions, hashes; without secrets and home directories."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from mhaprune import __version__

HIDDEN = "[hidden]"


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


_SECRET_KEY = re.compile(r"secret|passw|passphrase|credential|(api|access|private) ?key|\btoken$")
_SPECIAL_TOKEN = re.compile(r"\b(bos|eos|pad|unk|sep|cls|mask|per|first) token$")
_KEY_IN_TEXT = re.compile(r"([\w.-]+)=|[{,]\s*(\w+)\s*:")


def hide_private(value: object, key: str = "") -> Any:
    """`value` as plain JSON values, fit to be published: no secrets and no home directory.

    What stands under a key such as api_key, hf_token, password or client_secret becomes "[hidden]",
    also in overrides ("tracker.api_key=..."); so do credentials in a URL. The user's home becomes
    "~". Counts and hashes (num_tokens, tokens_hash) and special tokens (bos_token) stay.
    """
    if _is_secret(key) and not (value is None or isinstance(value, bool)):
        is_number = isinstance(value, int | float) and key.lower().endswith("token")
        return value if is_number else HIDDEN
    if isinstance(value, Mapping):
        return {str(name): hide_private(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide_private(each) for each in value]
    return _hide_in_text(str(value)) if isinstance(value, str | Path) else value


def _is_secret(key: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", key).lower()
    return bool(_SECRET_KEY.search(words)) and not _SPECIAL_TOKEN.search(words)


def _hide_in_text(text: str) -> str:
    for match in _KEY_IN_TEXT.finditer(text):
        if _is_secret(match[1] or match[2]):
            text = text[: match.end()] + HIDDEN
            break
    text = re.sub(r"://[^/@\s]+@", f"://{HIDDEN}@", text)
    return _home_pattern().sub("~", text)


def _home_pattern() -> re.Pattern[str]:
    """Matches the home directory at the start of a path, as spelled and with links resolved."""
    try:
        homes = {str(Path.home()), str(Path.home().resolve())} - {"/"}
    except RuntimeError:  # this user has no home
        homes = set()
    spelled = "|".join(re.escape(home) for home in sorted(homes)) or "(?!)"
    return re.compile(rf"(?<![\w.~-])(?:{spelled})(?![\w-])")


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
