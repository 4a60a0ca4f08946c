"""What a run says in the terminal: progress with time left, protocol, ranking, files."""

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mhaprune.tables.rows import HeadEffect, HeadScore, RoleEffect, Saving, ScoreAgreement

VERDICT_STYLES = {
    "critical": "bold red",
    "useful": "yellow",
    "redundant": "green",
    "harmful": "magenta",
    "undetermined": "dim",
}


def quiet_third_parties() -> None:
    """Keep the libraries' chatter and progress bars off the console; errors still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("transformers", "datasets", "huggingface_hub", "httpx", "wandb", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:  # nothing to quieten, and slow to import, where it is not
        sys.modules["transformers"].logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(transformers|datasets|wandb|torch)\b")


def say(console: Console, line: str) -> None:
    """Print one line as it is: no markup, and not broken where the terminal ends."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_baseline(console: Console, summary: Mapping[str, float | int | str]) -> None:
    """Print the intact model's perplexity, and over what the intervals are taken."""
    say(
        console,
        f"Intact perplexity {summary['baseline/perplexity']:.3f} "
        f"[{summary['baseline/perplexity_low']:.3f}, {summary['baseline/perplexity_high']:.3f}], "
        f"{summary['baseline/nats_per_token']:.4f} nats/token, "
        f"{summary['baseline/bits_per_byte']:.3f} bits/byte; "
        f"intervals by {summary['intervals/method']}",
    )
    console.print()


def print_ranking(
    console: Console, rows: Sequence[HeadEffect], confidence: float = 0.95, count: int = 10
) -> None:
    """Print the `count` most important and most redundant heads, and how many have which verdict.

    `confidence` is that of the intervals, between 0 and 1. Every row fits into 80 columns.
    """
    ranked = sorted(rows, key=lambda row: row.rank)
    redundant = sorted(
        (row for row in ranked if row.verdict == "redundant"), key=lambda row: abs(row.effect_nats)
    )
    _print_heads(console, "Most important heads", ranked[:count], confidence)
    if redundant:
        _print_heads(console, "Most redundant heads", redundant[:count], confidence)
    counts = Counter(row.verdict for row in rows)
    parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICT_STYLES if counts[verdict]]
    say(console, f"{len(rows)} heads: {', '.join(parts)}")


def _print_heads(
    console: Console, title: str, rows: Sequence[HeadEffect], confidence: float
) -> None:
    adaptive = any(row.correlation is not None for row in rows)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rank", justify="right")
    table.add_column("head")
    table.add_column("nats/token", justify="right")
    table.add_column(f"{100 * confidence:g}% interval", justify="right")
    for name in ("windows", "corr.") if adaptive else ("perplexity",):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            str(row.rank),
            f"L{row.layer}H{row.head}",
            f"{row.effect_nats:+.4f}",
            f"[{row.ci_low:+.4f}, {row.ci_high:+.4f}]".replace("[", r"\["),
            *_measured_cells(row),
            f"[{VERDICT_STYLES[row.verdict]}]{row.verdict}[/]",
        )
    console.print(table)
    console.print()


def _measured_cells(row: HeadEffect) -> list[str]:
    """Windows and correlation of a head that was measured adaptively, else its perplexity."""
    if row.correlation is None:
        return [f"{row.delta_ppl:+.3f}"]
    return [str(row.num_windows), f"{row.correlation:.2f}"]


def print_scores(console: Console, rows: Sequence[HeadScore], count: int = 10) -> None:
    """Print the `count` heads that score highest; rows are in that order."""
    say(console, f"Highest by {rows[0].score}, of {len(rows)} heads")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rank", justify="right")
    table.add_column("head")
    table.add_column("score", justify="right")
    table.add_column("standard error", justify="right")
    for rank, row in enumerate(rows[:count], start=1):
        error = "" if row.standard_error is None else f"{row.standard_error:.2g}"
        table.add_row(str(rank), f"L{row.layer}H{row.head}", f"{row.value:+.4g}", error)
    console.print(table)
    console.print()


def print_agreement(console: Console, rows: Sequence[ScoreAgreement], confidence: float) -> None:
    """Print how each score agrees with the measured effect, best first, within 80 columns."""
    title = "Agreement with the measured effect"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("score")
    table.add_column("Spearman", justify="right")
    for name in (f"{100 * confidence:g}% interval", "top k", "signs", "self", "passes", "s"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: -row.spearman):
        table.add_row(
            row.score,
            f"{row.spearman:.2f}",
            f"[{row.ci_low:.2f}, {row.ci_high:.2f}]".replace("[", r"\["),
            f"{row.top_k_overlap:.0%}",
            f"{row.sign_agreement:.0%}",
            f"{row.reliability:.2f}",
            f"{row.forward_equivalents:.0f}",
            f"{row.seconds:.1f}",
        )
    console.print(table)
    console.print()


def print_removable(console: Console, rows: Sequence[tuple[str, Sequence[str], str]]) -> None:
    """Print how many heads can go by each order at +1%, +5% and +10% perplexity, and the area."""
    say(console, "Heads that can go at more perplexity")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("order")
    for name in ("+1%", "+5%", "+10%", "area"):
        table.add_column(name, justify="right")
    for name, counts, area in rows:
        table.add_row(name, *counts, area)
    console.print(table)
    console.print()


def print_savings(console: Console, rows: Sequence[Saving]) -> None:
    """Print what models with heads removed take, beside the intact one."""
    say(console, "What removing heads buys")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("heads removed", "parameters", "KV bytes/token", "prefill tok/s", "decode tok/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_removed),
            f"{row.num_parameters:,}",
            f"{row.kv_bytes_per_token:,}",
            f"{row.prefill_tokens_per_second:,.0f}",
            f"{row.decode_tokens_per_second:,.0f}",
        )
    console.print(table)
    console.print()


def print_roles(console: Console, rows: Sequence[RoleEffect]) -> None:
    """Print what the heads of each role are worth, within 80 columns."""
    say(console, "Effects by role")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("role")
    for name in ("heads", "mean effect", "critical", "redundant"):
        table.add_column(name, justify="right")
    table.add_column("most important", no_wrap=True)
    for row in rows:
        table.add_row(
            row.role or "none",
            str(row.num_heads),
            f"{row.mean_effect_nats:+.4f}",
            str(row.num_critical),
            str(row.num_redundant),
            " ".join(row.heads.split()[:3]),
        )
    console.print(table)
    console.print()


def print_heads_by_role(
    console: Console, heads: Mapping[str, Sequence[str]], count: int = 8
) -> None:
    """Print the first `count` heads that have each role, and how many more there are."""
    for role, names in heads.items():
        more = f" and {len(names) - count} more" if len(names) > count else ""
        say(console, f"{role}: {', '.join(names[:count]) or 'no head'}{more}")
    console.print()


def print_files(console: Console, directory: Path) -> None:
    """Say which files the run directory holds, and last, where its page is."""
    names = sorted(
        path.name
        for path in directory.iterdir()
        if path.is_file() and not path.name.startswith(".")  # such as a kill leaves behind
    )
    say(console, f"Files in {directory}: {', '.join(names)}")
    if (page := directory / "report.html").exists():
        say(console, f"Page: {page}")
