"""The program rank_heads: mask each head in turn and rank them by the loss that follows."""

from pathlib import Path

from rich.console import Console

from mhaprune.review.console import print_files, quiet_third_parties, say
from mhaprune.review.index import refresh_index
from mhaprune.run.config import RankHeadsConfig
from mhaprune.run.launch import run_program
from mhaprune.run.measuring import make_subject
from mhaprune.run.prepare import choose_heads, prepare
from mhaprune.run.ranking import measure_and_rank
from mhaprune.run.recording import recorded
from mhaprune.run.scoring import check_scores, score_and_rank


def rank_heads(config: RankHeadsConfig, directory: Path) -> None:
    """Measure every selected head, or score it, and write the ranking into the run directory."""
    quiet_third_parties()
    console = Console()
    check_scores({config.score.name: config.score.options})
    prepared = prepare(config)
    heads = choose_heads(prepared, config)
    rank_them = measure_and_rank if config.score.name == "leave_one_out" else score_and_rank
    with recorded("rank_heads", config, prepared, directory, console) as recording:
        subject = make_subject(prepared, heads, config)
        say(console, f"Engine: {subject.engine}, {subject.rows_per_batch} windows at once")
        summary, tables, show = rank_them(recording, subject, config)
        recording.finish(summary, tables)
    show()
    print_files(console, directory)


def main() -> None:
    """Start from the command line; see `launch.run_program`."""
    run_program(rank_heads, RankHeadsConfig, "rank_heads", refresh_index)
