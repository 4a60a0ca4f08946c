"""The program prune_heads: perplexity against heads removed, in several orders."""

from pathlib import Path

from rich.console import Console

from mhaprune.prune.summary import curve_points, removable_rows, summarize
from mhaprune.review.console import (
    print_files,
    print_removable,
    print_savings,
    quiet_third_parties,
)
from mhaprune.review.index import refresh_index
from mhaprune.run.config import PruneHeadsConfig, plain
from mhaprune.run.curves import (
    make_orders,
    measure_curves,
    measure_interactions,
    write_curves,
)
from mhaprune.run.launch import run_program
from mhaprune.run.measuring import make_subject, measuring, with_ablation
from mhaprune.run.prepare import choose_heads, prepare
from mhaprune.run.pruned import check_export, check_pruned, export_pruned, look_at_pruned
from mhaprune.run.recording import recorded
from mhaprune.run.scoring import check_scores, on_calibration_text
from mhaprune.tables.csv_files import write_rows
from mhaprune.tables.manifest import title_of
from mhaprune.tables.rows import Saving


def prune_heads(config: PruneHeadsConfig, directory: Path) -> None:
    """Draw the pruning curves and, if asked to, export a pruned model."""
    quiet_third_parties()
    console = Console()
    for ordering in config.pruning.orderings.values():
        check_scores({ordering.score: ordering.options})
    check_export(config)
    prepared = prepare(config)
    heads = choose_heads(prepared, config)
    check_pruned(config, prepared, heads)
    with recorded("prune_heads", config, prepared, directory, console) as recording:
        progress, bar = recording.progress, recording.terminal.bar
        with bar("orders"):
            subject = make_subject(prepared, heads, config)
            subject = with_ablation(subject, prepared.calibration, config.ablation, progress)
            calibrating = on_calibration_text(subject, prepared.calibration)
            orders = make_orders(config, prepared, calibrating, progress.say)
        with (
            bar(f"{len(orders)} curves"),
            measuring(subject, prepared, config, directory, progress) as measurer,
        ):
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
    export_pruned(config, recording, curves, subject)
    print_files(console, directory)


def main() -> None:
    """Start from the command line; see `launch.run_program`."""
    run_program(prune_heads, PruneHeadsConfig, "prune_heads", refresh_index)
