"""Which heads does the model need? Mask each in turn and rank them by the loss that follows.

python experiments/rank_heads.py                                   # the demo model, no network
python experiments/rank_heads.py model=gpt2 dataset=wikitext2      # GPT-2 on WikiText-2
python experiments/rank_heads.py -m ablation=zero,mean,resample    # a sweep
python experiments/rank_heads.py resume=RUN_DIR                    # go on after an interruption
"""

from pathlib import Path

from rich.console import Console

from mhaprune.architectures import head_shape
from mhaprune.config import RankHeadsConfig, plain, run_program
from mhaprune.console import (
    print_baseline,
    print_files,
    print_ranking,
    progress,
    quiet_third_parties,
    say,
)
from mhaprune.heads import select_heads
from mhaprune.manifest import hide_private
from mhaprune.measuring import choose_engine, measure_losses, rows_at_once
from mhaprune.ranking import rank, write_ranking
from mhaprune.runs import keep_manifest, prepare
from mhaprune.tracking import track


def rank_heads(config: RankHeadsConfig, directory: Path) -> None:
    """Measure every selected head and write the ranking into the run directory."""
    quiet_third_parties()
    console = Console()
    prepared = prepare(config)
    shape = head_shape(prepared.loaded.model)
    heads = select_heads(config.heads, shape.num_layers, shape.num_heads)
    say(console, f"Protocol: {prepared.protocol}")
    engine = choose_engine(prepared, config.evaluation)
    rows = rows_at_once(prepared, config.evaluation)
    say(console, f"Engine: {engine}, {rows} windows at once")
    keep_manifest(directory, config, prepared, finished=False)
    with track(
        **plain(config.tracker),
        job_type="rank_heads",
        config=hide_private(plain(config)),
        directory=directory,
        say=lambda line: say(console, line),
    ) as tracker:
        with progress(console, f"{len(heads)} heads") as advance:
            losses = measure_losses(
                prepared, heads, config, directory, advance, lambda line: say(console, line)
            )
        ranking = rank(prepared, heads, losses, config.evaluation, config.seed)
        title = f"{config.model.name} on {config.dataset.name}, {config.ablation.kind} ablation"
        write_ranking(directory, title, ranking, shape, config.evaluation.tolerance_nats)
        keep_manifest(directory, config, prepared, finished=True)
        tracker.log_results(
            ranking.summary,
            ranking.rows,
            directory / "heatmap.png",
            [directory / name for name in ("effects.csv", "summary.json", "manifest.json")],
            weights_hash=prepared.loaded.weights_hash,
            tokens_hash=prepared.tokens.hash,
        )
    print_baseline(console, ranking.summary)
    print_ranking(console, ranking.rows, confidence=config.evaluation.confidence)
    print_files(console, directory)


if __name__ == "__main__":
    run_program(rank_heads, RankHeadsConfig, "rank_heads")
