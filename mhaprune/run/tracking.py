"""A finished run in Weights & Biases: a view of the files, which remain the truth.

Nothing here can lose a result: trouble with W&B is told in one line and the program goes on.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from mhaprune.measure.progress import Progress
from mhaprune.model.heads import Head

FINISH_SECONDS = 600  # for the upload at the end: without a limit a lost network would hold it up
HASH_DIGITS = 16
Mode = Literal["online", "offline", "none"]
Row = Any
"""One head: a dataclass or a dict with `layer`, `head` and whatever else was found out."""


@dataclass
class Tracker:
    """What a program tells about its run; does nothing when `run` is None.

    `say` gets one line for each kind of trouble, unless its reason was told before. `directory`
    holds the files of the run, and W&B's own under `wandb/`.
    """

    directory: Path
    say: Callable[[str], None]
    run: Any = None
    _told: set[str] = field(default_factory=set)

    @property
    def sync_file(self) -> Path | None:
        """The file that W&B records the run in, or None; `wandb sync` takes its directory."""
        return None if self.run is None else Path(self.run.settings.sync_file)

    def log_progress(self, values: Mapping[str, float | int]) -> None:
        """Add one point to the curves of the run. Values are finite."""
        self._try("progress was not logged", lambda run: run.log(_finite(values)))

    def log_results(
        self,
        summary: Mapping[str, object],
        tables: Mapping[str, Sequence[Row]],
        pictures: Mapping[str, Path],
        files: Sequence[Path],
        *,
        weights_hash: str,
        tokens_hash: str,
    ) -> None:
        """Show the results: summary numbers, tables and pictures by name, and the files.

        `files` become an artifact of type "ranking" that is named after the run and carries the two
        hashes. Online, where W&B allows that, its lineage leads to artifacts of type "model" and
        "text" that are named after them. All numbers are finite; the rows of a table have the same
        columns.
        """

        def show(run: Any) -> None:
            contents = {name: _table(rows) for name, rows in tables.items()}
            numbers = _finite(summary)
            import wandb

            run.summary.update(numbers)
            shown: dict[str, Any] = {
                name: wandb.Table(columns=columns, data=cells)
                for name, (columns, cells) in contents.items()
            }
            run.log(shown | {name: wandb.Image(str(path)) for name, path in pictures.items()})
            hashes = {"weights_hash": weights_hash, "tokens_hash": tokens_hash}
            inputs = {} if run.offline else {"model": "weights_hash", "text": "tokens_hash"}
            for kind, name in inputs.items():  # without files, as they stand for what was measured
                source = f"{kind}-{hashes[name][:HASH_DIGITS]}"
                run.use_artifact(wandb.Artifact(source, type=kind, metadata={name: hashes[name]}))
            artifact = wandb.Artifact(_artifact_name(run.name), type="ranking", metadata=hashes)
            for file in files:
                artifact.add_file(str(file), name=file.name)
            run.log_artifact(artifact)

        self._try("the results were not logged", show)

    def finish(self, exit_code: int) -> None:
        """Close the run; 0 means finished, anything else failed."""
        if not self._try("the run was not closed", lambda run: run.finish(exit_code=exit_code)):
            # W&B's process may be gone: without this the next run would look for it too, and W&B
            # itself, with a traceback, when the program ends.
            with contextlib.suppress(Exception):
                import wandb

                wandb.teardown()

    def _try(self, trouble: str, action: Callable[[Any], object]) -> bool:
        """Return whether it worked; say why not, once for each kind of trouble and each reason."""
        if self.run is None:
            return True
        try:
            action(self.run)
        except Exception as error:
            news = {trouble, _reason(error)}
            if not news & self._told:
                self.say(_in_one_line(trouble, error, self.directory))
            self._told |= news
            return False
        return True


class TrackedProgress:
    """Shows progress in W&B: `heads/done`, whenever it grows, and at each look `heads/settled`."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._shown: dict[str, int] = {"heads/done": 0}

    def show(self, progress: Progress) -> None:
        now = {"heads/done": progress.heads_done}
        if progress.heads_settled is not None:
            now["heads/settled"] = progress.heads_settled
        news = {name: count for name, count in now.items() if self._shown.get(name) != count}
        if news:
            self._shown |= news
            self.tracker.log_progress(news)

    def say(self, line: str) -> None:
        """W&B shows numbers only."""


@contextmanager
def track(
    mode: Mode,
    *,
    project: str,
    name: str | None,
    group: str | None,
    job_type: str | None,
    tags: Sequence[str],
    config: Mapping[str, object],
    directory: Path,
    say: Callable[[str], None],
) -> Iterator[Tracker]:
    """A W&B run for the time of a `with` block, finished with exit code 0, or 1 on any exception.

    "offline" needs no account and no network; "none" does nothing and does not import wandb.
    A run without a name is called after its directory. If the run cannot start, `say` gets one line
    and the tracker does nothing. `config` is published as it is: hide secrets in it first. W&B
    keeps its files under `directory`/wandb.
    """
    tracker = Tracker(directory, say)
    if mode == "none":
        yield tracker
        return
    with _staging_in(directory / "wandb"):
        try:
            tracker.run = _start(
                mode=mode,
                project=project,
                name=name or directory.name,
                group=group,
                job_type=job_type,
                tags=list(tags),
                config=_finite(config),
                dir=str(directory),
            )
        except Exception as error:
            say(_in_one_line("this run is not tracked", error, directory))
        try:
            yield tracker
        except BaseException:
            tracker.finish(exit_code=1)
            raise
        tracker.finish(exit_code=0)


def _start(**arguments: Any) -> Any:
    """Start a run that prints nothing. Raises whatever wandb raises, RuntimeError if it gave up."""
    import wandb

    # Whoever is online but not logged in is asked for a key: not for ever, the heads are waiting.
    settings = wandb.Settings(
        console="off",
        silent=True,
        init_timeout=30,
        login_timeout=30,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
    )
    run = wandb.init(settings=settings, **arguments)
    if run.disabled:
        raise RuntimeError("nobody logged in; run `wandb login` first")
    return run


@contextmanager
def _staging_in(directory: Path) -> Iterator[None]:
    """Let W&B copy tables and artifacts to `directory`, not to the home, unless the user chose."""
    variable = "WANDB_DATA_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str(directory.resolve())
    try:
        yield
    finally:
        with contextlib.suppress(KeyError):
            del os.environ[variable]


def _table(rows: Sequence[Row]) -> tuple[list[Any], list[Any]]:
    """Columns and cells of a table: a head's name "L4H11", if rows are of heads, then the fields.

    Raises ValueError for no rows, for rows with different columns and for NaN and infinity.
    """
    fields = [dict(row) if isinstance(row, Mapping) else dataclasses.asdict(row) for row in rows]
    if not fields:
        raise ValueError("expected at least one row for each table, got none")
    columns = list(fields[0])
    for row in fields:
        if list(row) != columns:
            raise ValueError(f"expected the columns {columns} in every row, got {list(row)}")
    cells = [list(_finite(row).values()) for row in fields]
    if not {"layer", "head"} <= set(columns):
        return columns, cells
    names = [str(Head(row["layer"], row["head"])) for row in fields]
    return ["name", *columns], [[name, *row] for name, row in zip(names, cells, strict=True)]


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `values`. Raises ValueError on NaN and infinity, which W&B would publish."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _finite(value)
        elif isinstance(value, Real) and not math.isfinite(value):
            raise ValueError(f"expected a finite number for {name}, got {value}")
    return dict(values)


def _artifact_name(run_name: str) -> str:
    """The run's name in the letters that W&B allows for artifacts, 128 at most."""
    return re.sub(r"[^\w.-]", "-", run_name, flags=re.ASCII)[:128]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _in_one_line(trouble: str, error: Exception, directory: Path) -> str:
    return (
        f"W&B: {trouble} ({_reason(error)}). The files in {directory} are complete without it; "
        f"mhaprune sync {directory} shows them there later."
    )
