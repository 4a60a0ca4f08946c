"""The program rank_heads: mask each head in turn and rank them by the loss that follows."""

from pathlib import Path

from rich.console import Console

from mhaprune.measure.measurer import choose_engine, rows_at_once
from mhaprune.model.architectures import head_shape
from mhaprune.model.heads import select_heads
from mhaprune.review.console import print_files, quiet_third_parties, say
from mhaprune.review.index import refresh_index
from mhaprune.run.config import RankHeadsConfig
from mhaprune.run.launch import run_program
from mhaprune.run.prepare import prepare
from mhaprune.run.ranking import measure_and_rank
from mhaprune.run.recording import recorded
from mhaprune.run.scoring import check_scores, score_and_rank


def rank_heads(config: RankHeadsConfig, directory: Path) -> None:
    """Measure every selected head, or score it, and write the ranking into the run directory."""
    quiet_third_parties()
    console = Console()
    check_scores({config.score.name: config.score.options})
    prepared = prepare(config)
    shape = head_shape(prepared.loaded.model)
    heads = select_heads(config.heads, shape.num_layers, shape.num_heads)
    rank_them = measure_and_rank if config.score.name == "leave_one_out" else score_and_rank
    with recorded("rank_heads", config, prepared, directory, console) as recording:
        rows = rows_at_once(prepared, config.evaluation)
        engine = choose_engine(prepared, config.evaluation)
        say(console, f"Engine: {engine}, {rows} windows at once")
        summary, tables, show = rank_them(
            prepared, heads, config, directory, console, recording.tracker.log_progress
        )
        recording.finish(summary, tables)
    show()
    print_files(console, directory)


def main() -> None:
    """Start from the command line; see `launch.run_program`."""
    run_program(rank_heads, RankHeadsConfig, "rank_heads", refresh_index)
