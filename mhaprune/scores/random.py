"""A seeded permutation: what a score without any information achieves. Budhraja et al. 2020."""

import numpy as np

from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, only


def random(subject: Subject) -> Estimate:
    """Return the numbers from 0 to 1, one for each head, in an order that depends on the seed."""
    shape = subject.shape
    count = shape.num_layers * shape.num_heads
    order = np.random.default_rng(subject.seed).permutation(count) / max(count - 1, 1)
    return Estimate(only(subject, order.reshape(shape.num_layers, shape.num_heads)), None, 0)
