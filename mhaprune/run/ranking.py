"""Losses -> ranking: effects, intervals, verdicts and ranks, as rows and as files."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from rich.console import Console

from mhaprune.measure.measurer import Losses, measure_losses
from mhaprune.model.architectures import HeadShape, head_shape
from mhaprune.model.heads import Head
from mhaprune.review.console import print_baseline, print_ranking, print_roles, progress, say
from mhaprune.review.pictures import effect_grid, effect_heatmap, save_png
from mhaprune.roles.atlas import effects_by_role, write_atlas
from mhaprune.run.config import EvaluationConfig, RankHeadsConfig, plain
from mhaprune.run.prepare import Prepared
from mhaprune.stats.control_variates import Regression, regression_effects
from mhaprune.stats.effects import VERDICTS, Effects, paired_effects, ranking, verdicts
from mhaprune.tables.csv_files import with_roles, write_effects, write_rows
from mhaprune.tables.manifest import title_of
from mhaprune.tables.rows import HeadEffect, RoleEffect

# Summary, tables by name, and what prints them.
Found = tuple[dict[str, Any], dict[str, Sequence[Any]], Callable[[], None]]


@dataclass(frozen=True)
class Ranking:
    """A row for each head, in the order of their ranks, and the numbers of the whole run."""

    rows: tuple[HeadEffect, ...]
    summary: dict[str, float | int | str]


def measure_and_rank(
    prepared: Prepared,
    heads: Sequence[Head],
    config: RankHeadsConfig,
    directory: Path,
    console: Console,
    log: Callable[[dict[str, int]], object] = lambda numbers: None,
) -> Found:
    """Rank by measured effects: effects.csv. Returns summary, tables and what prints them.

    `log` gets how many heads are done and settled, while they are measured.
    """
    with progress(console, f"{len(heads)} heads") as advance:
        tell, parts = partial(say, console), config.shard
        shard = (parts.index, parts.count) if parts.count > 1 else None
        losses = measure_losses(prepared, heads, config, directory, advance, tell, shard, log)
    ranking = rank(prepared, heads, losses, config.evaluation, config.seed)
    shape = head_shape(prepared.loaded.model)
    write_ranking(
        directory, title_of(plain(config)), ranking, shape, config.evaluation.tolerance_nats
    )

    roles = write_atlas(directory, prepared, config.text, config.roles, config.seed, tell)
    by_role = effects_by_role(ranking.rows, roles) if roles else []
    if by_role:
        write_rows(directory / "by_role.csv", RoleEffect, by_role)

    def show() -> None:
        print_baseline(console, ranking.summary)
        print_ranking(console, ranking.rows, confidence=config.evaluation.confidence)
        if by_role:
            console.print()
            print_roles(console, by_role)

    tables = {"heads": with_roles(ranking.rows, roles), "roles": by_role}
    return ranking.summary, tables, show


def rank(
    prepared: Prepared, heads: Sequence[Head], losses: Losses, config: EvaluationConfig, seed: int
) -> Ranking:
    """Compare the losses of each head's ablation with the intact ones, window by window."""
    intact, ablated, predicted = losses.intact_nats, losses.ablated_nats, losses.predicted_nats
    sample = prepared.num_tokens, prepared.blocks
    regression = None
    if predicted is None:
        effects = paired_effects(
            *(intact, ablated, *sample),
            confidence=config.confidence,
            num_resamples=config.resamples,
            seed=seed,
        )
    else:
        effects, regression = regression_effects(
            *(intact, ablated, predicted, *sample), confidence=config.confidence
        )
    verdict_of = verdicts(effects, config.tolerance_nats, config.critical_nats)
    measured = np.isfinite(ablated).sum(1)
    loss = prepared.loss(intact)
    counts = Counter(verdict_of)
    summary = {
        "baseline/nats_per_token": loss.nats_per_token,
        "baseline/perplexity": loss.perplexity,
        "baseline/perplexity_low": effects.ppl_intact_low,
        "baseline/perplexity_high": effects.ppl_intact_high,
        "baseline/bits_per_byte": loss.bits_per_byte,
        "heads/num_measured": len(heads),
        **{f"heads/num_{verdict}": counts[verdict] for verdict in VERDICTS},
        "heads/share_of_windows": float(measured.mean() / len(intact)),
        "intervals/method": effects.method,
        "intervals/confidence": config.confidence,
    }
    if losses.matmul_error_nats is not None:
        summary["matmul/error_nats"] = losses.matmul_error_nats
    return Ranking(tuple(head_effects(heads, effects, verdict_of, measured, regression)), summary)


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
