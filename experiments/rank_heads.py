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
from mhaprune.config import RankHeadsConfig, plain, run_program
from mhaprune.console import print_files, quiet_third_parties, say
from mhaprune.heads import select_heads
from mhaprune.manifest import hide_private
from mhaprune.measuring import choose_engine, rows_at_once
from mhaprune.ranking import measure_and_rank
from mhaprune.results import write_json
from mhaprune.runs import keep_manifest, prepare
from mhaprune.scoring import check_scores, score_and_rank
from mhaprune.tracking import track

JSON_FILES = ("summary", "manifest")


def rank_heads(config: RankHeadsConfig, directory: Path) -> None:
    """Measure every selected head, or score it, and write the ranking into the run directory."""
    quiet_third_parties()
    console = Console()
    check_scores({config.score.name: config.score.options})
    prepared = prepare(config)
    shape = head_shape(prepared.loaded.model)
    heads = select_heads(config.heads, shape.num_layers, shape.num_heads)
    say(console, f"Protocol: {prepared.protocol}")
    engine = choose_engine(prepared, config.evaluation)
    rows = rows_at_once(prepared, config.evaluation)
    say(console, f"Engine: {engine}, {rows} windows at once")
    keep_manifest(directory, config, prepared, finished=False)
    rank_them = measure_and_rank if config.score.name == "leave_one_out" else score_and_rank
    with track(
        **plain(config.tracker),
        job_type="rank_heads",
        config=hide_private(plain(config)),
        directory=directory,
        say=lambda line: say(console, line),
    ) as tracker:
        summary, rows, show = rank_them(prepared, heads, config, directory, console)
        write_json(directory / "summary.json", summary)  # last: its presence says "finished"
        keep_manifest(directory, config, prepared, finished=True)
        tracker.log_results(
            summary,
            {"heads": rows},
            {"heatmap": directory / "heatmap.png"},
            [*directory.glob("*.csv"), *(directory / f"{name}.json" for name in JSON_FILES)],
            weights_hash=prepared.loaded.weights_hash,
            tokens_hash=prepared.tokens.hash,
        )
    show()
    print_files(console, directory)


if __name__ == "__main__":
    run_program(rank_heads, RankHeadsConfig, "rank_heads")
