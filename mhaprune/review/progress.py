"""Progress in the terminal: a bar with the time left, and lines of text."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)

from mhaprune.measure.progress import Progress
from mhaprune.review.console import say


class Terminal:
    """Shows a run's progress on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Bar | None = None
        self._rows_before = self._rows_done = 0

    @contextmanager
    def bar(self, description: str) -> Iterator[None]:
        """Show a bar for the time of a `with` block."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=self.console, transient=True, expand=True) as self._bar:
            self._bar.add_task(description, total=None)
            self._rows_before = self._rows_done
            try:
                yield
            finally:
                self._bar = None

    def show(self, progress: Progress) -> None:
        """Move the bar, if there is one, to the rows done since it began."""
        self._rows_done = progress.rows_done
        if self._bar is None:
            return
        done = progress.rows_done - self._rows_before
        self._bar.update(self._bar.task_ids[0], completed=done, total=done + progress.rows_left)

    def say(self, line: str) -> None:
        """Print one line as it is."""
        say(self.console, line)
