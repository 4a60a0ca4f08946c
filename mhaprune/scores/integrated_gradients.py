"""Integrated gradients over the gates of all heads, from all off to all on.

    value_h = - integral over a from 0 to 1 of dL/dgate_h at (a, ..., a)

so that the values sum to L(all off) - L(all on). Sundararajan, Taly, Yan 2017, arXiv 1703.01365.
"""

import numpy as np

from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, estimate_rates, slopes


def integrated_gradients(subject: Subject, *, steps: int = 16) -> Estimate:
    """Return each head's share of the loss that switching all heads off costs, in nats per token.

    The integral is taken by Gauss and Legendre's rule with `steps` nodes. All heads move together,
    also those that were not asked for.
    """
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    nats = np.zeros(
        (subject.shape.num_layers, subject.shape.num_heads, len(subject.sample.windows))
    )
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        nats -= weight * slopes(subject, float(node))[1]
    return estimate_rates(subject, nats, forward_equivalents=3 * steps)
