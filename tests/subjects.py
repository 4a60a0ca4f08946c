"""Tiny subjects for the tests of scores, and their losses by slow and plain means."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mhaprune.measure.baselines import Ablation, donor_z, mean_z
from mhaprune.measure.leave_one_out import Donors
from mhaprune.measure.subject import Engine, Subject
from mhaprune.model.gating import gate_heads
from mhaprune.model.heads import Head
from mhaprune.scores.estimate import Estimate
from mhaprune.text.sample import Sample
from mhaprune.text.windows import Window, make_windows
from tests.micro import micro_gpt2

IDS = torch.randint(64, (60,), generator=torch.Generator().manual_seed(4))
# 8 windows; the first scores 12 tokens, the last reads only 10 and scores 5, the others 7.
WINDOWS = tuple(make_windows(len(IDS), context_length=13, stride=7, first_token="unscored"))
NUM_TOKENS = np.array([12, 7, 7, 7, 7, 7, 7, 5])
HEADS = tuple(Head(layer, head) for layer in range(2) for head in range(4))
DONORS = Donors(IDS.flip(0), (Window(0, 13, 1), Window(4, 20, 5), Window(20, 34, 21)))
KINDS = ("zero", "constant", "donors")


def make_subject(model: Any, kind: str = "zero", **changes: Any) -> Subject:
    """All heads of the model, or those in `changes`, on the windows above."""
    mean = mean_z(model, Sample.of(IDS, WINDOWS), rows_per_batch=2) if kind == "constant" else None
    ablation = {"zero": None, "constant": mean, "donors": DONORS}[kind]
    values = {"windows": WINDOWS, "heads": HEADS, "ablation": ablation} | changes
    return Subject(model, Sample.of(IDS, values.pop("windows")), **values)


def subject_on(
    model: Any,
    ids: torch.Tensor,
    windows: Sequence[Window],
    ablation: Ablation = None,
    rows_per_batch: int = 16,
    engine: Engine = "gating",
    heads: Sequence[Head] = (),
) -> Subject:
    """Windows of bare ids; no heads, where the units say which are ablated."""
    sample = Sample.of(ids, windows)
    return Subject(model, sample, tuple(heads), ablation, rows_per_batch, engine)


def looked_up(heads: Sequence[Head], num_windows: int, tokens: int, seed: int) -> Subject:
    """A subject whose losses are looked up: its model stands for any, its windows are all alike."""
    sample = Sample.of(
        torch.zeros(1 + tokens, dtype=torch.long), num_windows * [Window(0, 1 + tokens, 1)]
    )
    return Subject(micro_gpt2(), sample, tuple(heads), seed=seed)


def gates(off: tuple[Head, ...] = ()) -> torch.Tensor:
    """Gates of one variant, `1 layer head`: open but for the heads that are off."""
    gate = torch.ones(1, 2, 4, dtype=torch.float64)
    for head in off:
        gate[0, head.layer, head.head] = 0
    return gate


def gated_nats(subject: Subject, number: int, gate: torch.Tensor) -> np.ndarray:
    """One window's loss under each of the gates, `variant layer head`, the window on its own."""
    window = subject.sample.windows[number]
    inputs = subject.sample.ids[None, window.start : window.stop - 1]
    baseline: Any = subject.ablation
    if isinstance(baseline, Donors):
        donor = baseline.windows[number % len(baseline.windows)]
        donor_ids = baseline.ids[None, donor.start : donor.stop - 1][:, : inputs.shape[1]]
        baseline = [donor_z(subject.model, donor_ids, layer) for layer in range(2)]
    with torch.no_grad(), gate_heads(subject.model, gate, baseline):
        logits = subject.model(inputs.expand(len(gate), -1), use_cache=False).logits
    targets = subject.sample.ids[window.first_scored : window.stop].expand(len(gate), -1)
    scored = logits[:, -targets.shape[1] :].double().transpose(1, 2)
    return F.cross_entropy(scored, targets, reduction="none").sum(1).numpy()


def all_nats(subject: Subject, off: tuple[Head, ...] = ()) -> np.ndarray:
    """Each window's loss with some heads off."""
    numbers = range(len(subject.sample.windows))
    return np.array([gated_nats(subject, number, gates(off))[0] for number in numbers])


def slopes_by_differences(subject: Subject, level: float, step: float = 1e-5) -> np.ndarray:
    """The loss's slope by each gate, all gates at `level`: `layer head window`."""
    steps = step * torch.eye(8, dtype=torch.float64).unflatten(-1, (2, 4))
    gate = torch.cat([level + steps, level - steps])
    losses = np.stack(
        [gated_nats(subject, n, gate) for n in range(len(subject.sample.windows))], -1
    )
    return ((losses[:8] - losses[8:]) / (2 * step)).reshape(2, 4, -1)


def assert_same_estimate(
    found: Estimate, expected: Estimate, rtol: float = 1e-9, atol: float = 0.0
) -> None:
    """The same values and standard errors, NaN in the same places."""
    np.testing.assert_allclose(found.value, expected.value, rtol, atol)
    assert (found.standard_error is None) == (expected.standard_error is None)
    if found.standard_error is not None and expected.standard_error is not None:
        np.testing.assert_allclose(found.standard_error, expected.standard_error, rtol, atol)
