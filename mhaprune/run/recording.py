"""What every program does around its question: say what runs, keep its files, show it in W&B."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console

from mhaprune.measure.progress import Progress
from mhaprune.review.console import say
from mhaprune.review.progress import Terminal
from mhaprune.review.report import write_report
from mhaprune.run.config import HeadAtlasConfig, MeasureConfig, RankHeadsConfig, plain
from mhaprune.run.measuring import OthersAtWork
from mhaprune.run.prepare import Prepared, keep_manifest
from mhaprune.run.tracking import TrackedProgress, Tracker, track
from mhaprune.tables.files import artifact_files, only_one, pictures_of, write_json
from mhaprune.tables.manifest import is_finished
from mhaprune.tables.private import hide_private

# What ranks heads returns a summary, tables by name, and what prints them.
Found = tuple[dict[str, Any], dict[str, Sequence[Any]], Callable[[], None]]


@dataclass(frozen=True)
class Recording:
    """A run that is going on in a directory; `tracker` is its run in W&B.

    `progress` is shown by both the `terminal` and W&B.
    """

    config: MeasureConfig | HeadAtlasConfig
    prepared: Prepared
    directory: Path
    tracker: Tracker
    terminal: Terminal
    progress: Progress

    def finish(self, summary: Mapping[str, Any], tables: Mapping[str, Sequence[Any]]) -> None:
        """Write summary.json, the finished manifest and report.html; then tell W&B everything.

        `tables` are rows by name, those without rows left out. Pictures and files are those that
        the directory holds by now.
        """
        with only_one(self.directory / ".finishing"):
            if not (is_shared(self.config) and is_finished(self.directory)):
                self._finish(summary, tables)

    def _finish(self, summary: Mapping[str, Any], tables: Mapping[str, Sequence[Any]]) -> None:
        write_json(self.directory / "summary.json", summary)
        keep_manifest(self.directory, self.config, self.prepared, finished=True)
        write_report(self.directory)
        self.tracker.log_results(
            summary,
            {name: rows for name, rows in tables.items() if rows},
            pictures_of(self.directory),
            artifact_files(self.directory),
            weights_hash=self.prepared.loaded.weights_hash,
            tokens_hash=self.prepared.sample.tokens.hash,
        )


def is_shared(config: object) -> TypeGuard[RankHeadsConfig]:
    return isinstance(config, RankHeadsConfig) and config.shard.count > 1


@contextmanager
def recorded(
    program: str,
    config: MeasureConfig | HeadAtlasConfig,
    prepared: Prepared,
    directory: Path,
    console: Console,
) -> Iterator[Recording]:
    """Say the protocol, begin the manifest and the W&B run, and close that on any way out."""
    say(console, f"Protocol: {prepared.protocol}")
    if not (is_shared(config) and is_finished(directory)):  # a late shard has nothing to add
        keep_manifest(directory, config, prepared, finished=False)
    unfinished: OthersAtWork | None = None
    if is_shared(config):
        shard = config.shard
        say(console, f"Shard {shard.index} of {shard.count}, together in {directory}")
    with track(
        **plain(config.tracker),
        job_type=program,
        config=hide_private(plain(config)),
        directory=directory,
        say=lambda line: say(console, line),
    ) as tracker:
        try:
            terminal = Terminal(console)
            progress = Progress((terminal, TrackedProgress(tracker)))
            yield Recording(config, prepared, directory, tracker, terminal, progress)
        except OthersAtWork as error:  # no failure: W&B is not to call it one
            unfinished = error
    if unfinished is not None:
        say(console, f"This shard is done; {unfinished}, and the last of them writes the files")
        raise unfinished
