"""The program compare_scores: every estimate of importance, judged by the measured effect."""

from pathlib import Path

from rich.console import Console

from mhaprune.measure.measurer import measure_losses
from mhaprune.model.architectures import head_shape
from mhaprune.model.heads import select_heads
from mhaprune.review.console import print_agreement, print_files, progress, quiet_third_parties, say
from mhaprune.review.index import refresh_index
from mhaprune.run.config import CompareScoresConfig
from mhaprune.run.launch import run_program
from mhaprune.run.prepare import prepare
from mhaprune.run.recording import recorded
from mhaprune.run.scoring import (
    agreement_row,
    check_scores,
    compute_score,
    conclude,
    draw_agreement,
    make_subject,
    on_calibration_text,
    write_scores,
)
from mhaprune.stats.agreement import check_agreement
from mhaprune.tables.csv_files import write_rows
from mhaprune.tables.rows import ScoreAgreement


def compare_scores(config: CompareScoresConfig, directory: Path) -> None:
    """Compute the scores, measure the effects, and write how well they agree."""
    quiet_third_parties()
    console = Console()
    check_scores(config.scores)
    prepared = prepare(config)
    shape = head_shape(prepared.loaded.model)
    heads = select_heads(config.heads, shape.num_layers, shape.num_heads)
    top_k = config.top_k or max(1, len(heads) // 4)
    check_agreement(len(heads), top_k)
    subject = on_calibration_text(make_subject(prepared, heads, config), prepared)
    with recorded("compare_scores", config, prepared, directory, console) as recording:
        with progress(console, f"measuring {len(heads)} heads") as advance:
            losses = measure_losses(prepared, heads, config, directory, advance)
        delta_nats = losses.ablated_nats - losses.intact_nats
        scored = []
        for number, (name, options) in enumerate(config.scores.items(), start=1):
            with progress(console, f"score {number} of {len(config.scores)}: {name}"):
                scored.append(compute_score(name, options, subject))
            say(console, f"{name}: {scored[-1].seconds:.1f} s")
        sample = delta_nats, prepared.num_tokens, prepared.blocks
        rows = [agreement_row(one, heads, *sample, config, top_k) for one in scored]
        summary = {"compare/conclusion": conclude(rows), "compare/num_heads": len(heads)}
        summary |= {f"compare/{row.score}/spearman": row.spearman for row in rows}
        by_head = write_scores(directory, {one.name: one.whole for one in scored}, heads, "")
        write_rows(directory / "agreement.csv", ScoreAgreement, rows)
        effects = delta_nats.sum(1) / prepared.num_tokens.sum()
        draw_agreement(directory, scored, heads, effects, rows)
        recording.finish(summary, {"agreement": rows, "scores": by_head})
    print_agreement(console, rows, config.evaluation.confidence)
    say(console, conclude(rows))
    print_files(console, directory)


def main() -> None:
    """Start from the command line; see `launch.run_program`."""
    run_program(compare_scores, CompareScoresConfig, "compare_scores", refresh_index)
