"""Shapley values of the heads: a head's marginal effect, averaged over orders of switching off.

    value_h = E over orders [L(heads before h and h off) - L(heads before h off)]

so that the values sum to L(all off) - L(all on). Held and Yang 2023, arXiv 2210.05709. Orders come
in antithetic pairs: each random order and its reverse (Mitchell et al. 2022, arXiv 2104.12199).
"""

import numpy as np
from jaxtyping import Float, Int

from mhaprune.measure.gradients import baseline_of
from mhaprune.measure.perplexity import row_nats
from mhaprune.measure.subject import Subject
from mhaprune.model.gating import gate_heads, gates_of
from mhaprune.scores.estimate import Estimate, estimate_rates, spread


def shapley(subject: Subject, *, pairs_per_window: int = 1) -> Estimate:
    """Return each head's Shapley value in nats per token; the players are `subject.heads`.

    Every window gets `pairs_per_window` antithetic pairs of orders of its own: drawing new orders
    averages over orders and windows at once, and the standard error over windows covers both.
    Prefixes are not replayed: of k random heads in L layers the first stands in layer L / (k + 1)
    on average, so that over an order of n heads replay would save a share of about ln(n) / n.
    """
    num_orders = 2 * pairs_per_window
    num_heads = len(subject.heads)
    generator = np.random.default_rng(subject.seed)
    nats = np.zeros((num_heads, len(subject.sample.windows)))
    for number in range(len(subject.sample.windows)):
        for _ in range(pairs_per_window):
            order = generator.permutation(num_heads)
            for one in (order, order[::-1]):
                nats[one, number] += np.diff(_losses_on_the_way(subject, number, one))
    per_order = spread(subject, nats / num_orders)
    return estimate_rates(subject, per_order, num_orders * (num_heads + 1))


def _losses_on_the_way(
    subject: Subject, number: int, order: Int[np.ndarray, "head"]
) -> Float[np.ndarray, "steps"]:
    """Return a window's loss with no head off, then the first of the order, the first two, ..."""
    model, device = subject.model, subject.model.device
    inputs, targets = subject.sample.batch([number])
    baseline = baseline_of(subject, [number], inputs.shape[1])
    heads = [subject.heads[index] for index in order]
    gate = gates_of([heads[:count] for count in range(len(heads) + 1)], subject.shape)
    losses = []
    for some in gate.split(subject.rows_per_batch):
        with gate_heads(model, some.to(device), baseline):
            rows = [batch.expand(len(some), -1) for batch in (inputs, targets)]
            losses.append(row_nats(model, *rows).numpy())
    return np.concatenate(losses)
