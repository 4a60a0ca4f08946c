"""Rows in CSV files: written so that equal rows give equal bytes and floats read back exactly."""

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhaprune.tables.files import write_atomically
from mhaprune.tables.rows import HeadEffect, HeadRole, Row


def write_rows(path: Path, kind: type[Row], rows: Sequence[Row]) -> None:
    """Write rows as CSV: the columns are the fields of `kind`, and floats read back exactly.

    None is an empty cell. Raises ValueError on NaN and infinity.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(kind))
    for row in rows:
        for name, value in dataclasses.asdict(row).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{path}: expected a finite {name} in every row, got {row}")
        cells = dataclasses.astuple(row)
        writer.writerow(repr(float(cell)) if isinstance(cell, float) else cell for cell in cells)
    write_atomically(path, text.getvalue())


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Read the rows of a CSV file, in its order. Raises ValueError, naming file and line."""
    columns = {field.name: field.type for field in dataclasses.fields(kind)}
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    if not lines or lines[0] != list(columns):
        raise ValueError(f"{path}: expected the columns {','.join(columns)}, got {lines[:1]}")
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            pairs = zip(columns.items(), cells, strict=True)
            rows.append(kind(**{name: _read_cell(cell, type_) for (name, type_), cell in pairs}))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def _read_cell(cell: str, type_: Any) -> Any:
    if type_ in (float | None, str | None):
        return (float(cell) if type_ == float | None else cell) if cell else None
    return cell == "True" if type_ is bool else type_(cell)


def with_roles(effects: Sequence[HeadEffect], roles: Sequence[HeadRole]) -> list[dict[str, Any]]:
    """Return a mapping for each effect: its columns, and the head's role ("" where it has none)."""
    role_of = {(row.layer, row.head): row.role for row in roles}
    return [
        dataclasses.asdict(row) | {"role": role_of.get((row.layer, row.head)) or ""}
        for row in effects
    ]


def write_effects(path: Path, rows: Sequence[HeadEffect]) -> None:
    """Write effects.csv by rank; equal rows give equal bytes."""
    write_rows(path, HeadEffect, sorted(rows, key=lambda row: (row.rank, row.layer, row.head)))


def read_effects(path: Path) -> list[HeadEffect]:
    """Read effects.csv, in the order of the file. Raises ValueError, naming file and line."""
    return read_rows(path, HeadEffect)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read any CSV file with a header: a dict for each row.

    A column is of integers, of floats, of truth values (True, False), or else of text, whichever
    comes first that fits each of its cells; an empty cell is None. So what `write_rows`
    wrote comes back, of whichever kind. Raises ValueError for rows of different lengths.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    header, rows = lines[0] if lines else [], lines[1:]
    for number, cells in enumerate(rows, start=2):
        if len(cells) != len(header):
            raise ValueError(
                f"{path}, line {number}: expected {len(header)} cells, got {len(cells)}"
            )
    columns = [_values([cells[n] for cells in rows]) for n in range(len(header))]
    return [dict(zip(header, values, strict=True)) for values in zip(*columns, strict=True)]


def _values(cells: Sequence[str]) -> list[Any]:
    """The cells of one column as values."""
    for read in (int, float, _truth):
        try:
            return [read(cell) if cell else None for cell in cells]
        except ValueError:
            continue
    return [cell or None for cell in cells]


def _truth(cell: str) -> bool:
    if cell not in ("True", "False"):
        raise ValueError(f"expected True or False, got {cell}")
    return cell == "True"
