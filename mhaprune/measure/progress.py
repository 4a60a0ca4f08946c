"""How far a run has come: told by whoever measures, shown by whoever looks on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

Phase = Literal["prepare", "predict", "measure", "look", "score", "prune", "heal"]


@runtime_checkable
class View(Protocol):
    """Shows progress: a bar in the terminal, curves in W&B, a list in a test."""

    def show(self, progress: "Progress") -> object:
        """Called whenever a number has changed."""

    def say(self, line: str) -> object:
        """Called with each line of text."""


@dataclass
class Progress:
    """What is done and what is left; without views it is silent.

    Rows are windows that go through the model, counted over all phases; `rows_left` is what is
    known to come. `heads_done` says for how many heads' worth of windows heads were ablated, in an
    adaptive run how many heads are left as they are; `heads_settled` how many have a verdict there.
    """

    views: Sequence[View] = ()
    phase: Phase | None = None
    rows_done: int = 0
    rows_left: int = 0
    heads_done: int = 0
    heads_settled: int | None = None
    _head_windows: int = field(default=0, repr=False)

    def begin(self, phase: Phase, rows: int) -> None:
        """Enter a phase, or the next round of it, with so many rows to come."""
        self.phase, self.rows_left, self._head_windows = phase, rows, 0
        self._show()

    def advance(self, rows: int) -> None:
        """Count rows as done."""
        self.rows_done += rows
        self.rows_left = max(0, self.rows_left - rows)
        self._show()

    def measured(self, head_windows: int, num_windows: int) -> None:
        """Count windows of ablated heads, of `num_windows` that each head takes."""
        if self.phase == "look":  # where heads take as many windows as their verdicts do
            return
        self._head_windows += head_windows
        if (heads := self._head_windows // num_windows) > self.heads_done:
            self.heads_done = heads
            self._show()

    def look(self, heads_done: int, heads_settled: int, rows_left: int) -> None:
        """Note a look of an adaptive measurement: heads that are left as they are, and why."""
        self.heads_done, self.heads_settled, self.rows_left = heads_done, heads_settled, rows_left
        self._show()

    def say(self, line: str) -> None:
        """Tell one line of text."""
        for view in self.views:
            view.say(line)

    def _show(self) -> None:
        for view in self.views:
            view.show(self)
