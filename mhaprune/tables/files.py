"""The files of a result: each written whole, or not at all."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace the file at `path` by `data`; a reader sees all of the old or all of the new.

    The data go to a temporary file in the same directory, to the disk, and then over the old file.
    Raises the `OSError` of the failure (disk full, directory missing or read-only), naming `path`;
    then the old file is as it was and the temporary one is gone.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}; what was there before is unchanged"
        raise OSError(error.errno, message) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, obj: object) -> None:
    """Write `obj` as indented JSON with sorted keys. Raises ValueError on NaN and infinity."""
    try:
        text = json.dumps(obj, sort_keys=True, indent=2, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path}: expected finite numbers only, got {error}") from error
    write_atomically(path, text + "\n")


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Let one process at a time in; a process that dies lets the next one in."""
    with FileLock(path):
        yield
        # whoever waits for the removed file finds so, and waits for the next one
        with contextlib.suppress(PermissionError):  # Windows keeps what is open
            path.unlink(missing_ok=True)


def artifact_files(directory: Path) -> list[Path]:
    """Return the files of a run that W&B keeps as its artifact: tables, numbers, manifest, page."""
    names = ("summary.json", "manifest.json", "report.html")
    others = [directory / name for name in names if (directory / name).is_file()]
    return [*sorted(directory.glob("*.csv")), *others]


def pictures_of(directory: Path) -> dict[str, Path]:
    """Return the pictures of a run by their names."""
    return {path.stem: path for path in sorted(directory.glob("*.png"))}
