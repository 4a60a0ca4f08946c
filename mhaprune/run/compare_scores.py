"""The program compare_scores: every estimate of importance, judged by the measured effect."""

from pathlib import Path

from rich.console import Console

from mhaprune.review.console import print_agreement, print_files, quiet_third_parties, say
from mhaprune.review.index import refresh_index
from mhaprune.run.config import CompareScoresConfig
from mhaprune.run.launch import run_program
from mhaprune.run.measuring import make_subject, measure_losses, measuring, with_ablation
from mhaprune.run.prepare import choose_heads, prepare
from mhaprune.run.recording import recorded
from mhaprune.run.scoring import (
    agreement_row,
    check_calibration,
    check_scores,
    compute_score,
    conclude,
    draw_agreement,
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
    heads = choose_heads(prepared, config)
    top_k = config.top_k or max(1, len(heads) // 4)
    check_agreement(len(heads), top_k)
    check_calibration(prepared.calibration)
    with recorded("compare_scores", config, prepared, directory, console) as recording:
        progress, bar = recording.progress, recording.terminal.bar
        with bar(f"measuring {len(heads)} heads"):
            subject = make_subject(prepared, heads, config)
            subject = with_ablation(subject, prepared.calibration, config.ablation, progress)
            calibrating = on_calibration_text(subject, prepared.calibration)
            with measuring(subject, prepared, config, directory, progress) as measurer:
                losses = measure_losses(measurer, config.evaluation)
        delta_nats = losses.ablated_nats - losses.intact_nats
        scored = []
        progress.begin("score", 0)
        for number, (name, options) in enumerate(config.scores.items(), start=1):
            with bar(f"score {number} of {len(config.scores)}: {name}"):
                scored.append(compute_score(name, options, calibrating))
            say(console, f"{name}: {scored[-1].seconds:.1f} s")
        rows = [agreement_row(one, subject, delta_nats, config.evaluation, top_k) for one in scored]
        summary = {"compare/conclusion": conclude(rows), "compare/num_heads": len(heads)}
        summary |= {f"compare/{row.score}/spearman": row.spearman for row in rows}
        by_head = write_scores(directory, {one.name: one.whole for one in scored}, heads, "")
        write_rows(directory / "agreement.csv", ScoreAgreement, rows)
        effects = delta_nats.sum(1) / subject.sample.num_tokens.sum()
        draw_agreement(directory, scored, heads, effects, rows)
        recording.finish(summary, {"agreement": rows, "scores": by_head})
    print_agreement(console, rows, config.evaluation.confidence)
    say(console, conclude(rows))
    print_files(console, directory)


def main() -> None:
    """Start from the command line; see `launch.run_program`."""
    run_program(compare_scores, CompareScoresConfig, "compare_scores", refresh_index)
