"""Measurements survive kills and each other, and read back exactly."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhaprune.measure.store import Measurement, MeasurementStore, context_key

ROOT = Path(__file__).parents[2]
INTACT = Measurement("c0", "zero", None, (), (0, 1), ((10.5, 0.1 + 0.2),))
LAYER_2 = Measurement("c0", "zero", 2, (0, 3), (0, 1), ((11.0, 1e-300), (12.25, -0.0)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measurements.jsonl"


def fill(path: Path, *measurements: Measurement) -> None:
    with MeasurementStore(path) as store:
        for measurement in measurements:
            store.append(measurement)


def test_context_key_is_the_sha256_of_the_canonical_parts() -> None:
    # printf '{"dtype":"float32","seed":0}' | sha256sum
    assert context_key(seed=0, dtype="float32") == "468a1d679b3ba183"
    assert context_key(dtype="float32", seed=0) == context_key(seed=0, dtype="float32")
    assert context_key(dtype="float32", seed=1) != context_key(seed=0, dtype="float32")
    with pytest.raises(ValueError, match="expected what the measurements depend on"):
        context_key()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": None}, "layer=None and heads=.. for the intact model"),
        ({"heads": ()}, "expected a layer with its heads"),
        ({"heads": (0,)}, r"expected total_nats of shape \(1, 2\)"),
        ({"windows": (0,)}, r"expected total_nats of shape \(2, 1\)"),
        ({"windows": (), "total_nats": ((), ())}, "expected at least one window"),
        ({"total_nats": ((1.0, 2.0), (3.0, float("nan")))}, "expected finite losses"),
        ({"total_nats": ((1.0, 2.0), (3.0, float("-inf")))}, "expected finite losses"),
    ],
)
def test_a_measurement_that_does_not_fit_together_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAYER_2, **change)


def test_a_line_is_canonical_json_with_the_crc_of_the_rest(path: Path) -> None:
    fill(path, INTACT)
    rest = '"heads":[],"layer":null,"total_nats":[[10.5,0.30000000000000004]],"windows":[0,1]}'
    without_crc = '{"ablation":"zero","context":"c0",' + rest
    crc = f"{zlib.crc32(without_crc.encode()):08x}"
    assert path.read_text() == f'{{"ablation":"zero","context":"c0","crc":"{crc}",{rest}\n'


def test_a_store_without_a_file_is_empty_and_reading_makes_none(path: Path) -> None:
    assert MeasurementStore(path).read() == []
    assert not path.exists()


def test_completed_holds_the_units_of_one_context(path: Path) -> None:
    fill(path, INTACT, LAYER_2, replace(LAYER_2, context="c1"))
    assert MeasurementStore(path).completed("c0") == {
        ("zero", None, (), (0, 1)): INTACT,
        ("zero", 2, (0, 3), (0, 1)): LAYER_2,
    }
    assert MeasurementStore(path).completed("c2") == {}


_nats = st.floats(allow_nan=False, allow_infinity=False)
_numbers = st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True).map(tuple)


# Fields, not measurements: type checks draw from `random`, which strategies may not.
@st.composite
def _fields(draw: st.DrawFn) -> tuple[Any, ...]:
    layer = draw(st.none() | st.integers(0, 47))
    heads = () if layer is None else draw(_numbers)
    windows = draw(_numbers)
    row = st.tuples(*[_nats] * len(windows))
    rows = draw(st.tuples(*[row] * max(1, len(heads))))
    return draw(st.text()), draw(st.text()), layer, heads, windows, rows


@settings(max_examples=40, deadline=None)
@given(st.lists(_fields(), max_size=4, unique_by=lambda fields: fields[:5]))
def test_measurements_read_back_exactly_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Any, ...]]
) -> None:
    measurements = [Measurement(*fields) for fields in drawn]
    path = tmp_path_factory.mktemp("store") / "measurements.jsonl"
    fill(path, *measurements)
    assert repr(MeasurementStore(path).read()) == repr(measurements)  # repr tells -0.0 from 0.0


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 10_000), fields=_fields())
def test_wherever_the_last_line_is_torn_reading_and_appending_go_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int, fields: tuple[Any, ...]
) -> None:
    path = tmp_path_factory.mktemp("store") / "measurements.jsonl"
    measurement = replace(Measurement(*fields), context="c1")
    fill(path, INTACT)
    num_bytes_before = path.stat().st_size
    fill(path, measurement)
    line_bytes = path.stat().st_size - num_bytes_before
    kept_bytes = cut % line_bytes  # the newline at least is lost
    os.truncate(path, num_bytes_before + kept_bytes)
    is_whole = kept_bytes == line_bytes - 1
    survivors = [INTACT, measurement] if is_whole else [INTACT]

    store = MeasurementStore(path)
    assert store.read() == survivors
    assert store.num_torn == (0 if is_whole or kept_bytes == 0 else 1)
    fill(path, LAYER_2)
    assert store.read() == [*survivors, LAYER_2]
    assert store.num_torn == (0 if is_whole or kept_bytes == 0 else 1)


def test_a_line_torn_by_another_process_is_ended_by_one_that_has_the_file_open(path: Path) -> None:
    with MeasurementStore(path) as store:
        store.append(INTACT)
        with path.open("ab") as other:
            other.write(b'{"ablation":"ze')
        store.append(LAYER_2)
        assert store.read() == [INTACT, LAYER_2]
        assert store.num_torn == 1


def test_every_changed_digit_of_a_line_is_noticed(path: Path) -> None:
    fill(path, INTACT, LAYER_2, replace(LAYER_2, context="c1"))
    content = path.read_text()
    second = content.index("\n") + 1
    digits = [i for i in range(second, content.index("\n", second)) if content[i].isdigit()]
    assert len(digits) > 20
    for place in digits:
        changed = "7" if content[place] != "7" else "8"
        path.write_text(content[:place] + changed + content[place + 1 :])
        with pytest.raises(ValueError, match=r"measurements\.jsonl, line 2: "):
            MeasurementStore(path).read()


@pytest.mark.parametrize("line", ["5", "[]", "{}", '{"crc":"99914b93"}', '{"total_nats":1e999}'])
def test_json_that_is_no_measurement_is_an_error_not_a_torn_line(path: Path, line: str) -> None:
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1: "):
        MeasurementStore(path).read()


def test_a_line_with_other_fields_is_refused_though_its_checksum_is_right(path: Path) -> None:
    crc = format(zlib.crc32(b'{"loss":1}'), "08x")
    path.write_text(json.dumps({"loss": 1, "crc": crc}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: expected the fields of a measurement"):
        MeasurementStore(path).read()


def test_bytes_that_are_no_text_are_skipped_and_counted(path: Path) -> None:
    fill(path, INTACT)
    with path.open("ab") as file:
        file.write(b"\0\0\0\0\xff\n")
    fill(path, LAYER_2)
    store = MeasurementStore(path)
    assert (store.read(), store.num_torn) == ([INTACT, LAYER_2], 1)


def test_equal_duplicates_count_once_and_different_ones_are_refused(path: Path) -> None:
    fill(path, INTACT, LAYER_2, INTACT)
    assert MeasurementStore(path).read() == [INTACT, LAYER_2]
    fill(path, replace(INTACT, total_nats=((10.5, 0.3),)))
    with pytest.raises(ValueError, match=r"line 4: expected the numbers that an earlier line has"):
        MeasurementStore(path).read()


def test_a_partly_written_line_raises_and_the_next_one_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with MeasurementStore(path) as store:
        store.append(INTACT)
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.raises(OSError, match=r"cannot append to .*measurements\.jsonl: the disk took"):
            store.append(LAYER_2)
        monkeypatch.undo()
        store.append(LAYER_2)
    assert store.read() == [INTACT, LAYER_2]
    assert store.num_torn == 1


def test_the_disk_is_asked_to_keep_the_data_once_a_second_and_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_seconds, syncs = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_seconds[0])
    monkeypatch.setattr(os, "fsync", syncs.append)
    with MeasurementStore(path) as store:
        for now_seconds[0] in (100.0, 100.5, 100.9, 101.25, 102.0, 102.25):
            store.append(INTACT)
        assert len(syncs) == 3  # at 100.0, 101.25 and 102.25
    assert len(syncs) == 4


# One process for all writers, which forks them: to import is most of their time. It takes a file,
# the number of lines and of windows, and the first layer of each writer; it says which processes
# they are and with which codes they end.
_WRITERS = """
import json
import os
import sys
from pathlib import Path
from mhaprune.measure.store import Measurement, MeasurementStore

def append(path, count, num_windows, first):
    windows = tuple(range(num_windows))
    with MeasurementStore(Path(path)) as store:
        os.read(gate, 1)  # returns when the gate is closed, for all at once
        for layer in range(first, first + count):
            row = tuple(layer + window / 7 for window in windows)
            store.append(Measurement("c0", "zero", layer, (0,), windows, (row,)))

for line in sys.stdin:
    path, count, num_windows, *each = json.loads(line)
    gate, keeper = os.pipe()
    writers = []
    for first in each:
        if not (writer := os.fork()):
            os.close(keeper)
            append(path, count, num_windows, first)
            os._exit(0)
        writers.append(writer)
    print(*writers, flush=True)
    os.close(keeper)
    os.close(gate)
    ends = [os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) for writer in writers]
    print(*ends, flush=True)
"""


class Writers:
    """Starts writers, some at a time, in processes of their own."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _WRITERS]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, bufsize=1, **pipes)

    def start(self, path: Path, count: int, num_windows: int, *first: int) -> list[int]:
        """Start a writer for each first layer, all at once; return their process ids."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([str(path), count, num_windows, *first]) + "\n")
        return self.numbers()

    def numbers(self) -> list[int]:
        """The process ids of the writers, or, asked again, the codes they exit with."""
        assert self.process.stdout
        return [int(number) for number in self.process.stdout.readline().split()]


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    made = Writers()
    yield made
    made.process.communicate()
    assert made.process.returncode == 0


def written(layer: int, num_windows: int) -> Measurement:
    row = tuple(layer + window / 7 for window in range(num_windows))
    return Measurement("c0", "zero", layer, (0,), tuple(range(num_windows)), (row,))


def test_after_kill_9_all_that_is_read_was_written_in_order_and_appending_goes_on(
    path: Path, writers: Writers
) -> None:
    rounds, count, num_windows = 4, 100_000, 200
    for i in range(rounds):  # one after another
        num_bytes_before = path.stat().st_size if path.exists() else 0
        [writer] = writers.start(path, count, num_windows, i * count)
        while not path.exists() or path.stat().st_size == num_bytes_before:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.1))
        os.kill(writer, signal.SIGKILL)
        assert writers.numbers() == [-signal.SIGKILL]
    found = MeasurementStore(path).read()
    layers = [measurement.layer for measurement in found]
    for i in range(rounds):
        of_round = [layer for layer in layers if layer is not None and layer // count == i]
        assert of_round == list(range(i * count, i * count + len(of_round)))
        assert 0 < len(of_round) < count
    assert layers == sorted(layer for layer in layers if layer is not None)
    assert found == [written(layer or 0, num_windows) for layer in layers]
    fill(path, INTACT)
    assert MeasurementStore(path).read() == [*found, INTACT]


def test_four_processes_append_whole_lines_to_one_file(path: Path, writers: Writers) -> None:
    assert len(set(writers.start(path, 150, 300, *(1000 * i for i in range(4))))) == 4
    assert writers.numbers() == [0] * 4
    store = MeasurementStore(path)
    found = {measurement.layer: measurement for measurement in store.read()}
    assert store.num_torn == 0
    expected = [1000 * i + layer for i in range(4) for layer in range(150)]
    assert found == {layer: written(layer, 300) for layer in expected}
