"""Gates are drawn as they should be; training keeps the head that is needed and closes the rest."""

import math
import sys

import numpy as np
import pytest
import torch

from mhaprune.measure.subject import Subject
from mhaprune.model.gating import gate_heads
from mhaprune.model.heads import Head
from mhaprune.scores.learned_gates import (
    GateSweep,
    _hard_concrete,
    learned_gates,
    open_probability,
    train_gates,
)
from mhaprune.text.sample import Sample
from mhaprune.text.windows import Window
from tests.micro import micro_gpt2, output_rows, tiny_model
from tests.subjects import gates, make_subject

NEEDED, HARMFUL = Head(0, 0), Head(0, 1)


def micro_subject() -> Subject:
    """Text A B: the model predicts B from A + 2B + 2C; head 0 has added 2B, head 1 2C.

    Logits are 4 (a, b, c) / length. Without head 0 that of B is 0; without head 1 it is the
    largest.
    """
    sample = Sample.of(torch.tensor([0, 1]), (Window(0, 2, 1),))
    return Subject(micro_gpt2(), sample, (NEEDED, HARMFUL))


def nats_to_predict_b(*stream: float) -> float:
    logits = 4 * np.array(stream) / np.linalg.norm(stream)
    return math.log(2 * np.cosh(logits).sum()) - logits[1]


def logits(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


# ---- the gates


def test_the_probability_of_being_open_is_the_one_on_paper():
    """sigmoid(log alpha + 0.33 ln 11): 11**0.33 = 2.206 to 1 where log alpha is 0."""
    odds = 11**0.33
    found = open_probability(logits(0, math.log(2), -0.33 * math.log(11)))
    expected = [odds / (1 + odds), 2 * odds / (1 + 2 * odds), 0.5]
    assert found[0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("log_alpha", [-3.0, -1.0, 0.0, 0.5, 2.0])
def test_that_share_of_the_gates_is_open_when_they_are_drawn(log_alpha):
    noise = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    drawn = _hard_concrete(logits(log_alpha), noise[:, None, None])
    share = (drawn > 0).double().mean().item()
    assert share == pytest.approx(open_probability(logits(log_alpha)).item(), abs=2e-5)


def test_gates_lie_between_0_and_1_and_reach_both_ends():
    noise = torch.tensor([0, 1e-9, 0.02, 0.5, 0.98, 1 - 1e-9, 1], dtype=torch.float64)
    drawn = _hard_concrete(logits(0), noise[:, None, None]).flatten()
    assert drawn[:3].tolist() == [0, 0, 0] and drawn[-3:].tolist() == [1, 1, 1]
    assert drawn[3].item() == pytest.approx(0.5, abs=1e-12)
    far = _hard_concrete(logits(-100, 100), noise[:, None, None].expand(-1, 1, 2))
    assert far[:, 0, 0].tolist() == [0] * 7 and far[:, 0, 1].tolist() == [1] * 7


def test_noise_of_a_half_draws_the_stretched_sigmoid():
    """log alpha = 0.33 ln 2 gives 2/3, stretched to 1.2 * 2/3 - 0.1 = 0.7."""
    noise = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    assert _hard_concrete(logits(0.33 * math.log(2)), noise).item() == pytest.approx(0.7)


# ---- training


def test_the_needed_head_stays_open_and_the_harmful_one_closes():
    without_needed, without_harmful = nats_to_predict_b(1, 0, 2), nats_to_predict_b(1, 2, 0)
    intact = nats_to_predict_b(1, 2, 2)
    assert without_needed - intact > 1 and without_harmful < intact
    sweep = train_gates(micro_subject(), steps=150, lambdas=(0.03,))
    assert sweep.open_probability[0, 0, 0] > 0.9
    assert sweep.open_probability[0, 0, 1] < 0.1


def test_a_head_that_writes_nothing_closes_and_one_that_is_worth_its_price_does_not():
    subject = micro_subject()
    output_rows(subject.model, HARMFUL).zero_()
    assert nats_to_predict_b(1, 0, 0) - nats_to_predict_b(1, 2, 0) > 1
    sweep = train_gates(subject, steps=150, lambdas=(0.03,))
    assert sweep.open_probability[0, 0, 0] > 0.9
    assert sweep.open_probability[0, 0, 1] < 0.1


def test_a_head_that_is_not_worth_its_price_closes():
    subject = micro_subject()
    output_rows(subject.model, HARMFUL).zero_()
    sweep = train_gates(subject, steps=150, lambdas=(0.03, 100.0))
    assert sweep.open_probability[1].max() < 0.1


def test_a_higher_price_opens_no_more_heads():
    subject = make_subject(tiny_model("gpt2"))
    sweep = train_gates(subject, steps=40, lambdas=(0.003, 0.03, 0.3, 3.0))
    num_open = (sweep.open_probability > 0.5).sum((1, 2))
    expected = sweep.open_probability.sum((1, 2))
    assert (np.diff(num_open) <= 0).all() and (np.diff(expected) <= 0).all()
    assert num_open[0] > num_open[-1]


def test_prices_are_tried_from_the_lowest_on():
    subject = micro_subject()
    found = train_gates(subject, steps=3, lambdas=[0.3, 0.01])
    assert found.lambdas == (0.01, 0.3)
    sorted_already = train_gates(subject, steps=3, lambdas=[0.01, 0.3])
    np.testing.assert_array_equal(found.open_probability, sorted_already.open_probability)


def test_heads_that_were_not_asked_for_are_open_all_the_time(monkeypatch):
    subject, used = make_subject(tiny_model("gpt2"), heads=(Head(1, 2), Head(0, 0))), []
    note_gates(monkeypatch, used)
    sweep = train_gates(subject, steps=20, lambdas=(1.0,))
    others = ~(gates(off=subject.heads)[0] == 0)
    assert (sweep.open_probability[0][others.numpy()] == 1).all()
    assert (sweep.open_probability[0][~others.numpy()] < 0.9).all()
    assert len(used) == 20
    assert all((gate[:, others] == 1).all() for gate in used)
    assert any((gate[:, ~others] < 1).any() for gate in used)


def note_gates(monkeypatch: pytest.MonkeyPatch, used: list[torch.Tensor]) -> None:
    """Put the gates of every pass through a model into `used`."""

    def noting(model, gate, *others):
        used.append(gate.detach())
        return gate_heads(model, gate, *others)

    for name in ("mhaprune.scores.learned_gates", "mhaprune.measure.gradients"):
        if hasattr(sys.modules[name], "gate_heads"):
            monkeypatch.setattr(f"{name}.gate_heads", noting)


def test_the_score_is_the_mean_over_the_prices():
    subject, options = micro_subject(), {"steps": 5, "lambdas": (0.01, 0.1, 1.0)}
    sweep = train_gates(subject, **options)
    assert isinstance(sweep, GateSweep) and sweep.open_probability.shape == (3, 1, 2)
    found = learned_gates(subject, **options)
    np.testing.assert_allclose(found.value, sweep.open_probability.mean(0))
    assert found.standard_error is None


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"lambdas": ()}, r"got \(\) and 60"),
        ({"lambdas": (0.1, 0.0)}, r"got \(0.1, 0.0\) and 60"),
        ({"lambdas": (-1.0,)}, r"got \(-1.0,\) and 60"),
        ({"steps": 0, "lambdas": (0.1,)}, r"got \(0.1,\) and 0"),
    ],
)
def test_prices_and_steps_must_be_positive(options, shown):
    with pytest.raises(ValueError, match="expected positive lambdas and steps, " + shown):
        train_gates(micro_subject(), **options)
