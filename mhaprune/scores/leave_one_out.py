"""Leave-one-out as a score: the measured effect of every head."""

from mhaprune.measure.leave_one_out import as_arrays, assemble, measure, plan
from mhaprune.measure.subject import Subject
from mhaprune.scores.estimate import Estimate, estimate_rates, spread


def leave_one_out(subject: Subject, *, windows_per_unit: int = 4) -> Estimate:
    """Return each head's measured effect in nats per token."""
    num_windows = len(subject.sample.windows)
    units = plan(subject.heads, range(num_windows), windows_per_unit)
    found = as_arrays(measure(subject, units))
    intact, ablated = assemble(found, subject.heads, num_windows)
    return estimate_rates(
        subject, spread(subject, ablated - intact), forward_equivalents=1 + len(subject.heads)
    )
