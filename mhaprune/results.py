"""The files of a result: each written whole, or not at all."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


@dataclass(frozen=True)
class HeadEffect:
    """What one head is worth: a row of effects.csv, whose columns are these fields in this order.

    Effect and interval in nats/token, positive when the head was useful; `delta_ppl` in perplexity;
    `rank` counts from 1, most important first. `correlation` and `variance_reduction` say what the
    control variate did for a head that was measured adaptively (`control_variates.Regression`);
    else they are None, and empty in the file. Raises ValueError on NaN and infinity.
    """

    layer: int
    head: int
    effect_nats: float
    ci_low: float
    ci_high: float
    ppl_ablated: float
    delta_ppl: float
    verdict: str
    rank: int
    delta_ppl_low: float
    delta_ppl_high: float
    standard_error: float
    num_windows: int
    correlation: float | None = None
    variance_reduction: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int | float) and not math.isfinite(value):
                raise ValueError(
                    f"L{self.layer}H{self.head}: expected a finite {name}, got {value}"
                )


def _optional(cell: str) -> float | None:
    return float(cell) if cell else None


_COLUMNS: dict[str, Any] = {
    field.name: _optional if field.type == float | None else field.type
    for field in dataclasses.fields(HeadEffect)
}


def write_effects(path: Path, rows: Sequence[HeadEffect]) -> None:
    """Write effects.csv by rank; equal rows give equal bytes, and floats read back exactly."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in sorted(rows, key=lambda row: (row.rank, row.layer, row.head)):
        cells = dataclasses.astuple(row)
        writer.writerow(repr(float(cell)) if isinstance(cell, float) else cell for cell in cells)
    write_atomically(path, text.getvalue())


def read_effects(path: Path) -> list[HeadEffect]:
    """Read effects.csv, in the order of the file. Raises ValueError, naming file and line."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    if not lines or lines[0] != list(_COLUMNS):
        raise ValueError(f"{path}: expected the columns {','.join(_COLUMNS)}, got {lines[:1]}")
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            pairs = zip(_COLUMNS.items(), cells, strict=True)
            rows.append(HeadEffect(**{name: convert(c) for (name, convert), c in pairs}))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows
