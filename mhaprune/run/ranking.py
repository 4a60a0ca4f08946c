"""Losses -> ranking: effects, intervals, verdicts and ranks, as rows and as files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from mhaprune.measure.measurer import Losses
from mhaprune.measure.perplexity import TokenLoss, sample_loss
from mhaprune.measure.subject import Subject
from mhaprune.model.architectures import HeadShape
from mhaprune.model.heads import Head
from mhaprune.review.console import print_baseline, print_ranking, print_roles
from mhaprune.review.pictures import effect_grid, effect_heatmap, save_png
from mhaprune.roles.atlas import effects_by_role
from mhaprune.run.atlas import keep_atlas
from mhaprune.run.config import EvaluationConfig, RankHeadsConfig, plain
from mhaprune.run.measuring import measure_losses, measuring, with_ablation
from mhaprune.run.recording import Found, Recording
from mhaprune.stats.control_variates import Regression, regression_effects
from mhaprune.stats.effects import VERDICTS, Effects, paired_effects, ranking, verdicts
from mhaprune.tables.csv_files import with_roles, write_effects, write_rows
from mhaprune.tables.manifest import title_of
from mhaprune.tables.rows import HeadEffect, RoleEffect


@dataclass(frozen=True)
class Ranking:
    """A row for each head, in the order of their ranks, and the numbers of the whole run."""

    rows: tuple[HeadEffect, ...]
    summary: dict[str, float | int | str]


def measure_and_rank(recording: Recording, subject: Subject, config: RankHeadsConfig) -> Found:
    """Rank by measured effects: effects.csv. Returns summary, tables and what prints them."""
    prepared, directory, progress = recording.prepared, recording.directory, recording.progress
    with recording.terminal.bar(f"{len(subject.heads)} heads"):
        subject = with_ablation(subject, prepared.calibration, config.ablation, progress)
        shard = (config.shard.index, config.shard.count) if config.shard.count > 1 else None
        with measuring(subject, prepared, config, directory, progress) as measurer:
            losses = measure_losses(measurer, config.evaluation, shard)
    ranking = rank(subject, losses, config.evaluation)
    write_ranking(
        directory, title_of(plain(config)), ranking, subject.shape, config.evaluation.tolerance_nats
    )
    roles = keep_atlas(recording, config.text, config.roles)
    by_role = effects_by_role(ranking.rows, roles) if roles else []
    if by_role:
        write_rows(directory / "by_role.csv", RoleEffect, by_role)

    def show() -> None:
        console = recording.terminal.console
        print_baseline(console, ranking.summary)
        print_ranking(console, ranking.rows, confidence=config.evaluation.confidence)
        if by_role:
            console.print()
            print_roles(console, by_role)

    tables = {"heads": with_roles(ranking.rows, roles), "roles": by_role}
    return ranking.summary, tables, show


def rank(subject: Subject, losses: Losses, config: EvaluationConfig) -> Ranking:
    """Compare the losses of each head's ablation with the intact ones, window by window."""
    intact, ablated, predicted = losses.intact_nats, losses.ablated_nats, losses.predicted_nats
    heads, num_tokens, blocks = subject.heads, subject.sample.num_tokens, subject.sample.blocks
    regression = None
    if predicted is None:
        effects = paired_effects(
            intact,
            ablated,
            num_tokens,
            blocks,
            confidence=config.confidence,
            num_resamples=config.resamples,
            seed=subject.seed,
        )
    else:
        effects, regression = regression_effects(
            intact, ablated, predicted, num_tokens, blocks, confidence=config.confidence
        )
    measured = np.isfinite(ablated).sum(1)
    verdict_of = verdicts(effects, config.tolerance_nats, config.critical_nats)
    rows = head_effects(heads, effects, verdict_of, measured, regression)
    summary = summarize(effects, sample_loss(subject.sample, intact), verdict_of)
    summary["heads/share_of_windows"] = float(measured.mean() / len(intact))
    if losses.matmul_error_nats is not None:
        summary["matmul/error_nats"] = losses.matmul_error_nats
    return Ranking(tuple(rows), summary)


def summarize(
    effects: Effects, loss: TokenLoss, verdict_of: Sequence[str]
) -> dict[str, float | int | str]:
    """Return the headline numbers: the intact loss, and how many heads have which verdict."""
    counts = Counter(verdict_of)
    return {
        "baseline/nats_per_token": loss.nats_per_token,
        "baseline/perplexity": loss.perplexity,
        "baseline/perplexity_low": effects.ppl_intact_low,
        "baseline/perplexity_high": effects.ppl_intact_high,
        "baseline/bits_per_byte": loss.bits_per_byte,
        "heads/num_measured": len(verdict_of),
        **{f"heads/num_{verdict}": counts[verdict] for verdict in VERDICTS},
        "intervals/method": effects.method,
        "intervals/confidence": effects.confidence,
    }


def head_effects(
    heads: Sequence[Head],
    effects: Effects,
    verdict_of: Sequence[str],
    num_windows: Int[np.ndarray, "head"],
    regression: Regression | None = None,
) -> list[HeadEffect]:
    """Return one row for each head, most important first."""
    rank_of = ranking(effects.effect_nats)
    rows = [
        HeadEffect(
            layer=head.layer,
            head=head.head,
            effect_nats=float(effects.effect_nats[n]),
            ci_low=float(effects.ci_low[n]),
            ci_high=float(effects.ci_high[n]),
            ppl_ablated=float(effects.ppl_ablated[n]),
            delta_ppl=float(effects.delta_ppl[n]),
            verdict=verdict_of[n],
            rank=int(rank_of[n]),
            delta_ppl_low=float(effects.delta_ppl_low[n]),
            delta_ppl_high=float(effects.delta_ppl_high[n]),
            standard_error=float(effects.standard_error[n]),
            num_windows=int(num_windows[n]),
            correlation=float(regression.correlation[n]) if regression else None,
            variance_reduction=float(regression.variance_reduction[n]) if regression else None,
        )
        for n, head in enumerate(heads)
    ]
    return sorted(rows, key=lambda row: row.rank)


def write_ranking(
    directory: Path, title: str, ranking: Ranking, shape: HeadShape, tolerance_nats: float
) -> None:
    """Write effects.csv and heatmap.png."""
    rows = ranking.rows
    write_effects(directory / "effects.csv", rows)
    grid = effect_grid(
        np.array([row.layer for row in rows]),
        np.array([row.head for row in rows]),
        np.array([row.effect_nats for row in rows]),
        shape.num_layers,
        shape.num_heads,
    )
    verdict_at = {(row.layer, row.head): row.verdict for row in rows}
    figure = effect_heatmap(grid, verdict_at, title, tolerance_nats)
    save_png(figure, directory / "heatmap.png")
