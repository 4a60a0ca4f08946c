"""Measurements as they come: an append-only file that survives a kill, resumes and merges."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Unit = tuple[str, int | None, tuple[int, ...], tuple[int, ...]]
"""What a measurement measured: (ablation, layer, heads, windows)."""


_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write two bytes for a newline


def _canonical_json(obj: object) -> str:
    """One spelling for equal values: sorted keys, no spaces, shortest exact floats."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)


def context_key(**parts: object) -> str:
    """Name everything a measurement depends on: the first 16 hex digits of a SHA-256.

    `parts` are JSON values: weights hash, tokens hash, protocol, calibration, dtype, seed, ...
    Their order does not matter. Raises ValueError when there are none.
    """
    if not parts:
        raise ValueError("expected what the measurements depend on (weights_hash=..., ...), got {}")
    return hashlib.sha256(_canonical_json(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Measurement:
    """One unit of work: the loss of some heads of one layer, each ablated alone, on some windows.

    `total_nats[i][j]` is the loss summed over the scored tokens of window `windows[j]` while head
    `heads[i]` of `layer` is ablated. The intact model has `layer=None`, `heads=()` and one row.
    `context` is the `context_key` of everything else the numbers depend on.
    Raises ValueError if the table does not fit heads and windows, or holds NaN or infinity.
    """

    context: str
    ablation: str
    layer: int | None
    heads: tuple[int, ...]
    windows: tuple[int, ...]
    total_nats: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if (self.layer is None) != (not self.heads):
            raise ValueError(
                "expected a layer with its heads, or layer=None and heads=() for the intact model, "
                f"got layer={self.layer} and heads={self.heads}"
            )
        if not self.windows:
            raise ValueError(f"expected at least one window, got none for {self._name()}")
        shape = (max(1, len(self.heads)), len(self.windows))
        if len(self.total_nats) != shape[0] or any(len(r) != shape[1] for r in self.total_nats):
            raise ValueError(
                f"expected total_nats of shape {shape} (heads, windows), "
                f"got rows of lengths {[len(row) for row in self.total_nats]}"
            )
        if not all(math.isfinite(nats) for row in self.total_nats for nats in row):
            raise ValueError(f"expected finite losses, got NaN or infinity in {self._name()}")

    @property
    def unit(self) -> Unit:
        """What was measured: (ablation, layer, heads, windows)."""
        return self.ablation, self.layer, self.heads, self.windows

    def _name(self) -> str:
        return f"ablation {self.ablation}, layer {self.layer}, heads {list(self.heads)}"


def _to_line(measurement: Measurement) -> str:
    fields = dataclasses.asdict(measurement)
    return _canonical_json({**fields, "crc": _checksum(fields)})


def _checksum(fields: Mapping[str, object]) -> str:
    return f"{zlib.crc32(_canonical_json(fields).encode()):08x}"


def _from_fields(fields: object) -> Measurement:
    """The measurement in one parsed line. Raises ValueError if that was changed since written."""
    crc = fields.pop("crc", None) if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or crc != _checksum(fields):
        raise ValueError("the checksum does not match: the line was changed after it was written")
    if set(fields) != {field.name for field in dataclasses.fields(Measurement)}:
        raise ValueError(f"expected the fields of a measurement, got {sorted(fields)}")
    rows = tuple(tuple(float(nats) for nats in row) for row in fields.pop("total_nats"))
    heads, windows = tuple(fields.pop("heads")), tuple(fields.pop("windows"))
    return Measurement(**fields, heads=heads, windows=windows, total_nats=rows)


class MeasurementStore:
    """Measurements in an append-only file, one JSON line each, that survives a kill at any moment.

    A line is written by one `write` to a file opened for appending, so several processes may share
    the file. A kill leaves at most a torn last line: the next append ends it, `read` skips it and
    counts it in `num_torn`. The disk is asked to keep the data once a second and on `close`.
    """

    seconds_between_syncs = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_torn = 0
        self._descriptor: int | None = None
        self._last_sync_seconds = -math.inf

    def __enter__(self) -> "MeasurementStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, measurement: Measurement) -> None:
        """Add one measurement. Raises the `OSError` of the failure, naming the file."""
        try:
            self._append_line(_to_line(measurement).encode() + b"\n")
        except OSError as error:
            message = f"cannot append to {self.path}: {error.strerror}; earlier lines are kept"
            raise OSError(error.errno, message) from error

    def _append_line(self, line: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(
                self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _BINARY, 0o666
            )
        # Never truncate a torn line: another process may be writing it at this moment.
        data = line if self._ends_in_newline() else b"\n" + line
        if os.write(self._descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "the disk took only part of the line")
        if time.monotonic() - self._last_sync_seconds >= self.seconds_between_syncs:
            os.fsync(self._descriptor)
            self._last_sync_seconds = time.monotonic()

    def _ends_in_newline(self) -> bool:
        assert self._descriptor is not None
        num_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)  # appending goes by no position
        if num_bytes:
            os.lseek(self._descriptor, num_bytes - 1, os.SEEK_SET)
        return num_bytes == 0 or os.read(self._descriptor, 1) == b"\n"

    def close(self) -> None:
        """Make the disk keep everything and let go of the file; a later append opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read(self) -> list[Measurement]:
        """Every measured unit once, in the order of the file; none if there is no file yet.

        Lines that are not JSON are torn: skipped and counted in `num_torn`. Raises ValueError,
        naming file and line, if a whole line fails its checksum or two lines give one unit
        different numbers.
        """
        self.num_torn = 0
        found: dict[tuple[str, Unit], Measurement] = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        for number, line in enumerate(content.split(b"\n"), start=1):
            try:
                fields = json.loads(line.decode()) if line else None
            except ValueError:
                self.num_torn += 1
                continue
            if line:
                self._keep(found, fields, place=f"{self.path}, line {number}")
        return list(found.values())

    def _keep(self, found: dict[tuple[str, Unit], Measurement], fields: object, place: str) -> None:
        try:
            measurement = _from_fields(fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place}: {error}") from error
        first = found.setdefault((measurement.context, measurement.unit), measurement)
        if first != measurement:
            raise ValueError(
                f"{place}: expected the numbers that an earlier line has for "
                f"{measurement._name()}, got others. The context misses something they depend on, "
                "or the device is not deterministic: keep one of the two lines"
            )

    def completed(self, context: str) -> dict[Unit, Measurement]:
        """What is already measured under `context`, by (ablation, layer, heads, windows)."""
        return {each.unit: each for each in self.read() if each.context == context}
