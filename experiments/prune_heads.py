"""How many heads can go? Prune in several orders and draw perplexity against heads removed.

python experiments/prune_heads.py                                  # the demo model, no network
python experiments/prune_heads.py pruning=greedy                   # greedy backward elimination
python experiments/prune_heads.py pruning.pairs=28                 # which heads stand in for others
python experiments/prune_heads.py export.dir=pruned export.max_increase=0.05

Orders come from calibration text, curves from evaluation text.
"""

from pathlib import Path

from rich.console import Console

from mhaprune.architectures import head_shape
from mhaprune.config import PruneHeadsConfig, plain, title_of
from mhaprune.console import (
    print_files,
    print_removable,
    print_savings,
    progress,
    quiet_third_parties,
    say,
)
from mhaprune.curves import (
    curve_points,
    make_orders,
    measure_curves,
    measure_interactions,
    removable_rows,
    summarize,
    write_curves,
)
from mhaprune.exporting import check_export, check_pruned, export_pruned, look_at_pruned
from mhaprune.heads import select_heads
from mhaprune.launch import run_program
from mhaprune.measuring import Measurer
from mhaprune.recording import recorded
from mhaprune.reporting import refresh_index
from mhaprune.results import Saving, write_rows
from mhaprune.runs import prepare
from mhaprune.scoring import check_scores, make_subject, on_calibration_text
from mhaprune.store import MeasurementStore


def prune_heads(config: PruneHeadsConfig, directory: Path) -> None:
    """Draw the pruning curves and, if asked to, export a pruned model."""
    quiet_third_parties()
    console = Console()
    for ordering in config.pruning.orderings.values():
        check_scores({ordering.score: ordering.options})
    check_export(config)
    prepared = prepare(config)
    shape = head_shape(prepared.loaded.model)
    heads = select_heads(config.heads, shape.num_layers, shape.num_heads)
    check_pruned(config, prepared, heads)
    with recorded("prune_heads", config, prepared, directory, console) as recording:
        subject = on_calibration_text(make_subject(prepared, heads, config), prepared)
        with progress(console, "orders"):
            orders = make_orders(config, prepared, subject, lambda line: say(console, line))
        with (
            MeasurementStore(directory / "measurements.jsonl") as store,
            progress(console, f"{len(orders)} curves") as advance,
        ):
            measurer = Measurer(prepared, heads, config, store, advance)
            curves = measure_curves(orders, measurer, config)
            together = measure_interactions(config, orders[0].heads, measurer)
            savings, healed = look_at_pruned(config, prepared, curves, measurer)
            curves += healed
        write_curves(directory, curves, together, title_of(plain(config)))
        if savings:
            write_rows(directory / "savings.csv", Saving, savings)
        tables = {"curve": curve_points(curves), "interactions": together, "savings": savings}
        summary = summarize(curves)
        recording.finish(summary, tables)
    if savings:
        print_savings(console, savings)
    print_removable(console, removable_rows(summary))
    export_pruned(config, prepared, curves, measurer.ablation, directory, lambda x: say(console, x))
    print_files(console, directory)


if __name__ == "__main__":
    run_program(prune_heads, PruneHeadsConfig, "prune_heads", refresh_index)
