"""The files of a result: each written whole, or not at all."""

import contextlib
import csv
import dataclasses
import fcntl
import io
import json
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar


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
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file.fileno()):
                continue  # it was removed by whoever was in before
            yield
            path.unlink(missing_ok=True)
            return


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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


@dataclass(frozen=True)
class HeadScore:
    """What one score says of one head: a row of scores.csv. `standard_error` is None if unknown."""

    score: str
    layer: int
    head: int
    value: float
    standard_error: float | None


@dataclass(frozen=True)
class HeadRole:
    """What one head attends to on average: a row of roles.csv.

    `role` and `score` come from `patterns.roles`, and are None where no rule applies; the other
    columns are those of `patterns.PatternScores`.
    """

    layer: int
    head: int
    role: str | None
    score: float | None
    previous_token: float
    current_token: float
    first_token: float
    induction: float
    duplicate_token: float
    entropy_nats: float
    normalized_entropy: float
    mean_distance: float
    output_norm: float


@dataclass(frozen=True)
class RoleEffect:
    """The effects of all heads of one role: a row of by_role.csv, in nats per token.

    `role` is None for the heads that have none; the heads' names stand in `heads`, the one with the
    largest effect first.
    """

    role: str | None
    num_heads: int
    mean_effect_nats: float
    largest_effect_nats: float
    num_critical: int
    num_useful: int
    num_redundant: int
    num_harmful: int
    num_undetermined: int
    heads: str


@dataclass(frozen=True)
class ScoreAgreement:
    """How one score compares with the measured effect: a row of agreement.csv.

    `ci_*` are of `spearman`; the columns are explained in `agreement.Agreement`. Cost is in forward
    passes over the calibration text, and in seconds on the machine that ran it.
    """

    score: str
    spearman: float
    ci_low: float
    ci_high: float
    kendall: float
    top_k_overlap: float
    sign_agreement: float
    reliability: float
    forward_equivalents: float
    seconds: float
    kendall_low: float
    kendall_high: float


@dataclass(frozen=True)
class CurvePoint:
    """One point of a pruning curve: a row of curve.csv.

    `ci_*` is the interval of the perplexity, paired with the intact one on the same windows.
    """

    ordering: str
    direction: str
    num_removed: int
    nats_per_token: float
    perplexity: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class Interaction:
    """Heads removed together: a row of interactions.csv, in nats per token.

    `interaction_nats` is the joint effect less the sum of the single effects, `ci_*` its interval.
    `redundant_alone`: each head's own interval lies within the tolerance; `needed_together`: the
    joint effect's lies above it.
    """

    heads: str
    joint_nats: float
    sum_nats: float
    interaction_nats: float
    ci_low: float
    ci_high: float
    redundant_alone: bool
    needed_together: bool


@dataclass(frozen=True)
class Saving:
    """What a model with so many heads removed takes (`savings.Savings`): a row of savings.csv."""

    num_removed: int
    num_parameters: int
    kv_bytes_per_token: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


Row = TypeVar(
    "Row",
    HeadEffect,
    HeadScore,
    HeadRole,
    RoleEffect,
    ScoreAgreement,
    CurvePoint,
    Interaction,
    Saving,
)


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


def artifact_files(directory: Path) -> list[Path]:
    """Return the files of a run that W&B keeps as its artifact: tables, numbers, manifest, page."""
    names = ("summary.json", "manifest.json", "report.html")
    others = [directory / name for name in names if (directory / name).is_file()]
    return [*sorted(directory.glob("*.csv")), *others]


def pictures_of(directory: Path) -> dict[str, Path]:
    """Return the pictures of a run by their names."""
    return {path.stem: path for path in sorted(directory.glob("*.png"))}


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
