"""Which heads does the model need? Mask each in turn and rank them by the loss that follows.

python experiments/rank_heads.py                                   # the demo model, no network
python experiments/rank_heads.py model=gpt2 dataset=wikitext2      # GPT-2 on WikiText-2
python experiments/rank_heads.py -m ablation=zero,mean,resample    # a sweep
python experiments/rank_heads.py score=gradient                    # rank by an estimate
python experiments/rank_heads.py resume=RUN_DIR                    # go on after an interruption
"""

from pathlib import Path

from rich.console import Console

from mhaprune.architectures import head_shape
from mhaprune.config import RankHeadsConfig
from mhaprune.console import print_files, quiet_third_parties, say
from mhaprune.heads import select_heads
from mhaprune.launch import run_program
from mhaprune.measuring import choose_engine, rows_at_once
from mhaprune.ranking import measure_and_rank
from mhaprune.recording import recorded
from mhaprune.reporting import refresh_index
from mhaprune.runs import prepare
from mhaprune.scoring import check_scores, score_and_rank


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


if __name__ == "__main__":
    run_program(rank_heads, RankHeadsConfig, "rank_heads", refresh_index)
