"""Attribution: the effect of every head's ablation to first order, from one backward pass.

With a gate on each head, `z <- gate * z + (1 - gate) * baseline`, the loss changes on the way from
gate 1 to gate 0 by about -dL/dgate = sum (baseline - z) . dL/dz. Attribution patching: Nanda 2023;
Syed, Rager, Conmy 2023, arXiv 2310.10348.
"""

from typing import TYPE_CHECKING

from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, estimate_rates, slopes

if TYPE_CHECKING:
    pass


def attribution(subject: Subject) -> Estimate:
    """Return the predicted effect of each head, signed, in nats per token."""
    _, slope = slopes(subject)
    return estimate_rates(subject, -slope, forward_equivalents=3)
