"""Fisher information of a head's gate, per example.

    value_h = 1/2 E_x (dL_x / dgate_h)^2

with L_x the loss of window x in nats per token. Kwon et al. 2022, arXiv 2204.09656. The square is
taken of each window's own gradient: squaring a batch's gradient would depend on the batch size.
"""

import numpy as np

from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, only, slopes


def fisher(subject: Subject) -> Estimate:
    """Return half the mean squared slope of the windows' losses, in (nats per token) squared."""
    _, slope = slopes(subject)
    halves = 0.5 * (slope / subject.sample.num_tokens) ** 2
    n = halves.shape[-1]
    error = only(subject, halves.std(-1, ddof=1) / np.sqrt(n)) if n > 1 else None
    return Estimate(only(subject, halves.mean(-1)), error, forward_equivalents=3)
