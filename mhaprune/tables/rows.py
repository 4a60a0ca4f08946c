"""The rows of every table that a program writes: their fields, in order, are the file's columns."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class HeadEffect:
    """What one head is worth: a row of effects.csv, whose columns are these fields in this order.

    Effect and interval in nats/token, positive when the head was useful; `delta_ppl` in perplexity;
    `rank` counts from 1, most important first. `correlation` and `variance_reduction` say what the
    control variate did for a head that was measured adaptively (`control_variates.Regression`);
    else they are None, and empty in the file. Raises ValueError on NaN and infinity.
    """

    layer: int
    head: int
    effect_nats: float
    ci_low: float
    ci_high: float
    ppl_ablated: float
    delta_ppl: float
    verdict: str
    rank: int
    delta_ppl_low: float
    delta_ppl_high: float
    standard_error: float
    num_windows: int
    correlation: float | None = None
    variance_reduction: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int | float) and not math.isfinite(value):
                raise ValueError(
                    f"L{self.layer}H{self.head}: expected a finite {name}, got {value}"
                )


@dataclass(frozen=True)
class HeadScore:
    """What one score says of one head: a row of scores.csv. `standard_error` is None if unknown."""

    score: str
    layer: int
    head: int
    value: float
    standard_error: float | None


@dataclass(frozen=True)
class HeadRole:
    """What one head attends to on average: a row of roles.csv.

    `role` and `score` come from `patterns.roles`, and are None where no rule applies; the other
    columns are those of `patterns.PatternScores`.
    """

    layer: int
    head: int
    role: str | None
    score: float | None
    previous_token: float
    current_token: float
    first_token: float
    induction: float
    duplicate_token: float
    entropy_nats: float
    normalized_entropy: float
    mean_distance: float
    output_norm: float


@dataclass(frozen=True)
class RoleEffect:
    """The effects of all heads of one role: a row of by_role.csv, in nats per token.

    `role` is None for the heads that have none; the heads' names stand in `heads`, the one with the
    largest effect first.
    """

    role: str | None
    num_heads: int
    mean_effect_nats: float
    largest_effect_nats: float
    num_critical: int
    num_useful: int
    num_redundant: int
    num_harmful: int
    num_undetermined: int
    heads: str


@dataclass(frozen=True)
class ScoreAgreement:
    """How one score compares with the measured effect: a row of agreement.csv.

    `ci_*` are of `spearman`; the columns are explained in `agreement.Agreement`. Cost is in forward
    passes over the calibration text, and in seconds on the machine that ran it.
    """

    score: str
    spearman: float
    ci_low: float
    ci_high: float
    kendall: float
    top_k_overlap: float
    sign_agreement: float
    reliability: float
    forward_equivalents: float
    seconds: float
    kendall_low: float
    kendall_high: float


@dataclass(frozen=True)
class CurvePoint:
    """One point of a pruning curve: a row of curve.csv.

    `ci_*` is the interval of the perplexity, paired with the intact one on the same windows.
    """

    ordering: str
    direction: str
    num_removed: int
    nats_per_token: float
    perplexity: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class Interaction:
    """Heads removed together: a row of interactions.csv, in nats per token.

    `interaction_nats` is the joint effect less the sum of the single effects, `ci_*` its interval.
    `redundant_alone`: each head's own interval lies within the tolerance; `needed_together`: the
    joint effect's lies above it.
    """

    heads: str
    joint_nats: float
    sum_nats: float
    interaction_nats: float
    ci_low: float
    ci_high: float
    redundant_alone: bool
    needed_together: bool


@dataclass(frozen=True)
class Saving:
    """What a model with so many heads removed takes (`savings.Savings`): a row of savings.csv."""

    num_removed: int
    num_parameters: int
    kv_bytes_per_token: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


Row = TypeVar(
    "Row",
    HeadEffect,
    HeadScore,
    HeadRole,
    RoleEffect,
    ScoreAgreement,
    CurvePoint,
    Interaction,
    Saving,
)
