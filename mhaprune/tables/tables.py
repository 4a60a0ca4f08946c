"""The tables of a run: which file holds which rows, and what their columns are for."""

from dataclasses import dataclass
from typing import Any

from mhaprune.tables.rows import (
    CurvePoint,
    HeadEffect,
    HeadRole,
    HeadScore,
    Interaction,
    RoleEffect,
    Saving,
    ScoreAgreement,
)


@dataclass(frozen=True)
class Table:
    """A CSV file of a run.

    `keys` are the columns that say what a row is about, `timed` those that another run on the same
    machine does not repeat, `shown` those that the page draws, in its order. What is `derived` says
    nothing that other files do not.
    """

    file: str
    row_type: type[Any]
    keys: tuple[str, ...]
    shown: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()
    derived: bool = False


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TABLES = {
    "effects": Table(
        "effects.csv",
        HeadEffect,
        keys=("layer", "head"),
        shown=_names("layer head effect_nats ci_low ci_high delta_ppl verdict rank num_windows"),
    ),
    "roles": Table(
        "roles.csv", HeadRole, keys=("layer", "head"), shown=_names("layer head role score")
    ),
    "scores": Table(
        "scores.csv",
        HeadScore,
        keys=("score", "layer", "head"),
        shown=_names("score layer head value standard_error"),
    ),
    "agreement": Table(
        "agreement.csv",
        ScoreAgreement,
        keys=("score",),
        shown=_names(
            "score spearman ci_low ci_high kendall kendall_low kendall_high top_k_overlap "
            "sign_agreement reliability forward_equivalents seconds"
        ),
        timed=("seconds",),
    ),
    "curves": Table(
        "curve.csv",
        CurvePoint,
        keys=("ordering", "direction", "num_removed"),
        shown=_names("ordering direction num_removed perplexity ci_low ci_high"),
    ),
    "interactions": Table(
        "interactions.csv",
        Interaction,
        keys=("heads",),
        shown=_names(
            "heads joint_nats sum_nats interaction_nats ci_low ci_high redundant_alone "
            "needed_together"
        ),
    ),
    "savings": Table(
        "savings.csv",
        Saving,
        keys=("num_removed",),
        shown=_names(
            "num_removed num_parameters kv_bytes_per_token prefill_tokens_per_second "
            "decode_tokens_per_second"
        ),
        timed=("prefill_tokens_per_second", "decode_tokens_per_second"),
    ),
    "by_role": Table("by_role.csv", RoleEffect, keys=("role",), derived=True),
}
SHOWN = {name: table.shown for name, table in TABLES.items() if table.shown}  # on the page
