"""A short training lowers a pruned model's loss, the same way every time."""

import sys
from typing import Any

import pytest
import torch

from mhaprune.measure.perplexity import row_nats
from mhaprune.measure.progress import Progress
from mhaprune.model.heads import Head
from mhaprune.prune.compaction import compact
from mhaprune.prune.healing import LORA_RANK, heal
from mhaprune.text.sample import Sample, window_batch
from mhaprune.text.windows import make_windows
from tests.micro import tiny_model
from tests.tiny import Bar, tiny_gpt2

HEADS = [*(Head(0, head) for head in range(3)), Head(1, 2)]
IDS = torch.randint(300, (97,), generator=torch.Generator().manual_seed(4))
WINDOWS = make_windows(len(IDS), 16, 16)  # 6 windows


def pruned(dropout: float = 0.0):
    model = compact(tiny_gpt2(), HEADS)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return model


def ids_of(model) -> torch.Tensor:
    return IDS % model.config.vocab_size


def loss(model) -> float:
    """Nats per token of all windows."""
    return float(row_nats(model, *window_batch(ids_of(model), WINDOWS)).sum()) / 96


def trained(model, **changes):
    settings = {"steps": 1, "learning_rate": 1e-3, "windows_per_step": len(WINDOWS)}
    return heal(model, Sample.of(ids_of(model), WINDOWS), **settings | changes)


def test_one_small_step_lowers_the_loss_on_the_windows_it_took_and_many_lower_it_clearly():
    before = loss(pruned())
    once, often = loss(trained(pruned())), loss(trained(pruned(), steps=30, learning_rate=3e-3))
    assert once < before - 0.01
    assert often < before - 1.0


def test_without_a_step_the_model_is_as_it_was():
    expected = pruned().state_dict()
    for name, weight in trained(pruned(), steps=0).state_dict().items():
        assert torch.equal(weight, expected[name]), name


def weights(**changes) -> torch.Tensor:
    healed = trained(pruned(), steps=3, windows_per_step=2, **changes)
    return torch.cat([parameter.flatten() for parameter in healed.parameters()])


def test_a_seed_gives_the_same_weights_and_another_one_others():
    first, second, other = (weights(seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_dropout_follows_the_seed_and_leaves_the_global_generator_alone():
    def healed() -> torch.Tensor:
        return trained(pruned(dropout=0.5), steps=2, seed=5).lm_head.weight

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expected = torch.rand(1)
        torch.manual_seed(1)
        first = healed()
        assert torch.equal(torch.rand(1), expected)
        assert torch.equal(healed(), first)
    assert not torch.equal(trained(pruned(), steps=2, seed=5).lm_head.weight, first)


def test_the_model_is_healed_in_place_and_left_ready_to_be_measured():
    model = pruned()
    assert trained(model, steps=2) is model
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("windows_per_step", "taken"), [(2, 2), (6, 6), (99, 6)])
def test_progress_is_told_of_each_window_it_took(windows_per_step, taken):
    bar = Bar()
    progress = Progress([bar])
    trained(pruned(), steps=3, windows_per_step=windows_per_step, progress=progress)
    assert bar.amounts == [taken] * 3


def test_the_rate_rises_over_a_tenth_of_the_steps_and_falls_to_nearly_nothing(monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def noted(self, *arguments):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    trained(pruned(), steps=20, learning_rate=1e-3)
    assert rates[:3] == pytest.approx([0.5e-3, 1e-3, 1e-3])
    assert rates[11] == pytest.approx(0.5e-3)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 1e-5


def test_a_rate_at_which_training_diverges_is_one_line():
    with pytest.raises(ValueError, match=r"^healing diverged at a learning rate of 1e\+30; use a"):
        trained(pruned(), steps=5, learning_rate=1e30)


def test_low_rank_updates_without_peft_are_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"^heal\.method=lora needs peft; pip install -e '\.\[lo"):
        trained(pruned(), method="lora")


DEPRECATED = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # in peft's own code


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_low_rank_updates_change_projections_by_matrices_of_low_rank_and_nothing_else(model_type):
    removed = [Head(0, 0), Head(0, 1), Head(1, 3)]
    before: Any = compact(tiny_model(model_type), removed)
    model: Any = compact(tiny_model(model_type), removed)
    healed = trained(model, method="lora", steps=10, learning_rate=1e-2)
    assert type(healed) is type(before)
    assert not any(parameter.requires_grad for parameter in healed.parameters())
    assert loss(healed) < loss(before) - 0.01
    expected, changed = before.state_dict(), set()
    assert healed.state_dict().keys() == expected.keys()
    for name, weight in healed.state_dict().items():
        update = weight - expected[name]
        if update.abs().max() > 0:
            changed.add(name.rpartition(".")[0].rpartition(".")[2])
            assert torch.linalg.matrix_rank(update, rtol=1e-4) <= LORA_RANK, name
    assert (
        changed
        == {
            "gpt2": {"c_attn", "c_proj", "c_fc"},
            "llama": {*"q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()},
        }[model_type]
    )
