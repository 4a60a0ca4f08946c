"""Killed, out of room or without W&B: a run keeps what it measured and ends with the same bytes.

A run is a process of its own: a server that has imported the programs forks one for each request,
so that a run starts at once and many can be killed in a test. To serve is what this file does when
it is run as a program.
"""

import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import prune_heads, rank_heads
from mhaprune.run.config import PruneHeadsConfig, RankHeadsConfig
from mhaprune.run.launch import run_program

PROGRAMS = {
    "rank_heads": (rank_heads.rank_heads, RankHeadsConfig),
    "prune_heads": (prune_heads.prune_heads, PruneHeadsConfig),
}
SMALL = [
    *("evaluation.context_length=64", "evaluation.windows_per_unit=1", "evaluation.resamples=200"),
    *("evaluation.rows_per_batch=16", "dataset.num_stories=40", "tracker=none"),
]
ARGUMENTS = {
    "rank_heads": [
        *("heads=[L0H*,L3H*]", "evaluation.max_windows=24", "roles.windows=1", "roles.repeats=2"),
        *SMALL,
    ],
    "prune_heads": [
        *("heads=[L0H*]", "evaluation.max_windows=8", "evaluation.calibration_windows=4"),
        *("pruning.random_orders=2", "pruning.step=2", "pruning.pairs=3", *SMALL),
        *("~pruning.orderings.gradient", "~pruning.orderings.activation_norm"),
    ],
}
FILES = {
    "rank_heads": "attention.npz by_role.csv effects.csv heatmap.png report.html roles.csv "
    "summary.json",
    "prune_heads": "curve.csv curves.png interactions.csv pairs.png report.html summary.json",
}
ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"


# ---- runs in processes of their own


def serve() -> int:
    """Fork a run for each line of stdin; print its process id, then the code it exits with."""
    import wandb  # noqa: F401 (once for all, too)

    print(os.getpid(), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return be_a_run(**json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return 0


def be_a_run(
    program: str, arguments: list[str], place: str, environment: dict[str, str], dies_at: str | None
) -> int:
    """Run a program in `place`, which gets its files out and err; die just before one is replaced.

    The file `dies_at` is then written under its temporary name, and not yet under its own.
    """
    os.chdir(place)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.update(environment)
    sys.argv = [f"{program}.py", *arguments]
    replace = Path.replace

    def replace_or_die(self: Path, target: Any) -> Path:
        if Path(target).name == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = replace_or_die
    task, schema = PROGRAMS[program]
    run_program(task, schema, program)
    return 0


class Runs:
    """Starts runs, one at a time, and waits for them."""

    def __init__(self) -> None:
        theirs = {name: value for name, value in os.environ.items() if "WANDB" not in name}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=theirs | {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._read()

    def _read(self) -> int:
        assert self.process.stdout
        return int(self.process.stdout.readline())

    def start(
        self,
        program: str,
        arguments: list[str],
        place: Path,
        dies_at: str | None = None,
        **env: str,
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        request = program, arguments, str(place), env, dies_at
        names = ("program", "arguments", "place", "environment", "dies_at")
        assert self.process.stdin
        line = json.dumps(dict(zip(names, request, strict=True)))
        self.process.stdin.write(line.encode() + b"\n")
        self.pid = self._read()

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit code; a run that is not at its end by then is killed."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            os.kill(self.pid, signal.SIGKILL)
        return self._read()

    def finish(self, *arguments: Any, **more: Any) -> int:
        self.start(*arguments, **more)
        return self.wait(300)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.process.kill()
    made.process.communicate()


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run of a program: its directory, and when it had written all files."""

    directory: Path
    seconds: float


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    made: dict[str, Whole] = {}

    def whole(program: str) -> Whole:
        if program not in made:
            place = tmp_path_factory.mktemp(f"whole_{program}")
            begin = time.time()
            assert runs.finish(program, new(program), place) == 0
            last = (place / "run" / "report.html").stat().st_mtime
            made[program] = Whole(place / "run", last - begin)
            assert visible(place / "run") == {
                *FILES[program].split(),
                *("manifest.json", "measurements.jsonl"),
            }
        return made[program]

    return whole


def new(program: str, directory: Path | str = "run") -> list[str]:
    return [*ARGUMENTS[program], f"hydra.run.dir={directory}"]


def go_on(program: str, directory: Path) -> list[str]:
    """Resume the run; start it again if it was ended before there was anything to resume."""
    if (directory / "manifest.json").exists():
        return [f"resume={directory.name}"]
    return new(program, directory.name)


def visible(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file() and path.name[0] != "."}


def results_in(directory: Path, program: str) -> dict[str, bytes]:
    """The files of a result; of the page what is not about when, how and from which commit."""
    found = {name: (directory / name).read_bytes() for name in FILES[program].split()}
    about = rb", [\d-]+ [\d:]+ UTC<|<code>python experiments/.*?</code>|<dd>[0-9a-f]{40}\b.*?<"
    found["report.html"] = re.sub(about, b"", found["report.html"])
    return found


def records(directory: Path) -> list[str]:
    """The whole lines of measurements.jsonl, sorted."""
    path = directory / "measurements.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(line for line in lines if line.startswith("{") and line.endswith("}"))


def assert_same(directory: Path, whole: Path, program: str = "rank_heads") -> None:
    """The result is that of an uninterrupted run, and nothing was measured twice."""
    assert results_in(directory, program) == results_in(whole, program)
    assert records(directory) == records(whole)
    assert visible(directory) == visible(whole)


# ---- kills


def tear(directory: Path, generator: np.random.Generator) -> None:
    """Cut measurements.jsonl at some byte inside its last line."""
    path = directory / "measurements.jsonl"
    content = path.read_bytes() if path.exists() else b""
    if content:
        start = content.rstrip(b"\n").rfind(b"\n") + 1
        os.truncate(path, int(generator.integers(start + 1, len(content))))


def time_of(file: Path) -> int | None:
    """When the file was last replaced."""
    return file.stat().st_mtime_ns if file.exists() else None


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)


def kill_and_resume(
    runs: Runs, program: str, place: Path, num_kills: int, seconds: float, seed: int
) -> Iterator[Path]:
    """Kill runs at random moments and go on; yield the directories of those that came to an end.

    `seconds` is what a whole run takes. Every other moment counts from when the run begins to
    measure, and half its time; a run killed then loses a part of its last line as well. When a run
    has written its last file it is let alone, and the next begins, until there were enough kills.
    """
    generator, kills = np.random.default_rng(seed), 0
    for number in itertools.count():
        here = place / str(number)
        manifest, page = (here / "run" / name for name in ("manifest.json", "report.html"))
        while True:
            late, mortal = kills % 2 == 0, kills < num_kills and not page.exists()
            begun = time_of(manifest)
            runs.start(program, go_on(program, here / "run"), here)
            if mortal and late:
                wait_for(lambda file=manifest, before=begun: time_of(file) != before)
            most = seconds / 2 if late else seconds
            code = runs.wait(generator.uniform(0, most) if mortal else 300)
            if code == 0:
                break
            assert code == -signal.SIGKILL, (here / "err").read_text()
            kills += 1
            if late:
                tear(here / "run", generator)
        yield here / "run"
        if kills == num_kills:
            return


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_killed_at_three_moments_ends_with_the_same_bytes(runs, whole, tmp_path, program):
    wanted, seconds = whole(program).directory, whole(program).seconds
    ends = list(kill_and_resume(runs, program, tmp_path, 3, seconds, seed=0))
    assert ends
    for directory in ends:
        assert_same(directory, wanted, program)


@pytest.mark.slow
def test_runs_killed_at_twenty_moments_of_their_life_end_with_the_same_bytes(runs, whole, tmp_path):
    """Two of the moments lie in the start of a process that nobody forked, among its imports."""
    for number, seconds in enumerate(np.random.default_rng(1).uniform(0, 5, size=2)):
        (tmp_path / str(number)).mkdir()
        process = subprocess.Popen(
            [sys.executable, rank_heads.__file__, *new("rank_heads")],
            cwd=tmp_path / str(number),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        time.sleep(seconds)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    reference = whole("rank_heads")
    ends = list(kill_and_resume(runs, "rank_heads", tmp_path, 18, reference.seconds, seed=2))
    for directory in ends:
        assert_same(directory, reference.directory, "rank_heads")


@pytest.mark.slow
def test_a_run_killed_at_each_of_its_last_files_in_turn_ends_with_the_same_bytes(
    runs, whole, tmp_path
):
    """Killed when the file is written and has not got its name."""
    names = "manifest.json effects.csv heatmap.png attention.npz roles.csv by_role.csv summary.json"
    for name in [*names.split(), "report.html"]:
        arguments = go_on("rank_heads", tmp_path / "run")
        code = runs.finish("rank_heads", arguments, tmp_path, dies_at=name)
        assert code == -signal.SIGKILL
        assert not (tmp_path / "run" / name).exists()
    assert runs.finish("rank_heads", go_on("rank_heads", tmp_path / "run"), tmp_path) == 0
    assert_same(tmp_path / "run", whole("rank_heads").directory, "rank_heads")


def test_a_resumed_run_says_by_which_command_it_was_started(runs, whole, tmp_path):
    shutil.copytree(whole("rank_heads").directory, tmp_path / "run")
    assert runs.finish("rank_heads", ["resume=run"], tmp_path) == 0
    command = json.loads((tmp_path / "run" / "manifest.json").read_text())["command"]
    assert command == ["rank_heads.py", *new("rank_heads")]
    assert "evaluation.max_windows=24 " in (tmp_path / "run" / "report.html").read_text()


# ---- a full disk, a disk that cannot be written to


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a disk in memory with the options given, or change those of the one there is."""
    disk = tmp_path / "disk"

    def mount(options: str) -> Path:
        again = disk.exists()
        disk.mkdir(exist_ok=True)
        options = f"remount,{options}" if again else options
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        subprocess.run(command, check=True, capture_output=True)
        return disk

    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small disk takes root and Linux")
    try:
        mount("size=1m")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no small disk can be mounted here: {error.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(disk)], check=True)


def refusal(place: Path) -> str:
    """The one line with which the run in `place` ended."""
    [line] = (place / "err").read_text().splitlines()
    return line


@pytest.mark.parametrize(
    ("kib", "line"),
    [
        pytest.param(8, "No space left on device", id="configuration", marks=pytest.mark.slow),
        pytest.param(28, "cannot append to {run}/measurements.jsonl: ", id="measurements"),
        pytest.param(56, "cannot write {run}/heatmap.png: ", id="picture", marks=pytest.mark.slow),
        pytest.param(140, "cannot write {run}/report.html: ", id="page", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_one_line_and_loses_nothing(runs, whole, mount, tmp_path, kib, line):
    run = mount(f"size={kib}k") / "run"
    assert runs.finish("rank_heads", new("rank_heads", run), tmp_path) == 2
    said, before = refusal(tmp_path), records(run)
    mount("size=1m")
    arguments = [f"resume={run}"]
    assert runs.finish("rank_heads", arguments, tmp_path) == 0
    assert_same(run, whole("rank_heads").directory)
    assert {*before} <= {*records(run)}
    assert bool(before) == (kib > 8)
    assert said.startswith("error: ") and line.format(run=run) in said


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_is_one_line_and_loses_nothing(runs, whole, mount, tmp_path):
    run = mount("size=28k") / "run"
    assert runs.finish("rank_heads", new("rank_heads", run), tmp_path) == 2
    before = (run / "measurements.jsonl").read_bytes()
    mount("ro")
    assert runs.finish("rank_heads", [f"resume={run}"], tmp_path) == 2
    named = f"cannot write {run}/manifest.json: Read-only file system; what was there before"
    assert named in refusal(tmp_path)
    assert runs.finish("rank_heads", new("rank_heads", run.with_name("new")), tmp_path) == 2
    assert f"Read-only file system: '{run.with_name('new')}" in refusal(tmp_path)
    mount("rw,size=1m")
    assert (run / "measurements.jsonl").read_bytes() == before
    assert runs.finish("rank_heads", [f"resume={run}"], tmp_path) == 0
    assert_same(run, whole("rank_heads").directory)


# ---- W&B out of order


@dataclass(frozen=True)
class Untracked:
    """How a run ended that W&B failed: where, with which code, after how long."""

    place: Path
    code: int
    seconds: float


def descendants(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            yield child
            yield from descendants(child)


def kill_w_and_b(run: int, directory: Path) -> None:
    """End W&B's own process once some heads are measured."""
    wait_for(lambda: len(records(directory)) >= 5)
    cores = [
        pid
        for pid in descendants(run)
        if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(cores) == 1
    os.kill(cores[0], signal.SIGKILL)


REFUSING = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}  # nobody listens there
TROUBLES: dict[str, tuple[str, dict[str, str]]] = {
    "a bad key": ("online", {"WANDB_API_KEY": "xxx"}),
    "its directory is a file": ("offline", {}),
    "its process dies": ("offline", {}),
    "no network": ("online", REFUSING),
    "silence": ("online", REFUSING),
}
SLOW = ("its directory is a file", "no network", "silence")
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in TROUBLES]


@pytest.fixture(scope="module")
def untracked(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Untracked]]:
    """Run the program once with each kind of trouble."""
    made: dict[str, Untracked] = {}
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers

    def untracked(kind: str) -> Untracked:
        if kind not in made:
            made[kind] = run_with(kind, tmp_path_factory.mktemp("untracked"))
        return made[kind]

    def run_with(kind: str, place: Path) -> Untracked:
        mode, environment = TROUBLES[kind]
        (place / "run").mkdir()
        if kind == "its directory is a file":
            (place / "run" / "wandb").touch()
        if kind == "silence":
            port = silent.getsockname()[1]
            environment = environment | {"WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        begin = time.monotonic()
        arguments = [*new("rank_heads"), f"tracker={mode}"]
        runs.start("rank_heads", arguments, place, HOME=str(place), **environment)
        if kind == "its process dies":
            kill_w_and_b(runs.pid, place / "run")
        code = runs.wait(300)
        return Untracked(place, code, time.monotonic() - begin)

    yield untracked
    silent.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds W&B's process in /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_trouble_with_w_and_b_costs_no_file_and_no_minute(untracked, whole, kind):
    found, reference = untracked(kind), whole("rank_heads")
    assert found.code == 0
    results, wanted = (
        results_in(directory, "rank_heads")
        for directory in (found.place / "run", reference.directory)
    )
    del results["report.html"], wanted["report.html"]  # which says that it was to be tracked
    assert results == wanted
    assert json.loads((found.place / "run" / "manifest.json").read_text())["finished_utc"]
    assert found.seconds < 60 + 3 * reference.seconds


@pytest.mark.parametrize("kind", KINDS)
def test_trouble_with_w_and_b_is_one_line_that_says_how_to_show_the_run_later(untracked, kind):
    place = untracked(kind).place
    output = (place / "out").read_text()
    [line] = [line for line in output.splitlines() if line.startswith("W&B: ")]
    assert f"mhaprune sync {place / 'run'}" in line
    assert "Traceback" not in (place / "err").read_text()


if __name__ == "__main__":
    sys.exit(serve())
