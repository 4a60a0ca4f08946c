"""What models take: sizes by arithmetic, speeds that are speeds, in the order of the models."""

import time
from typing import Any

import pytest
import torch

from mhaprune.model.heads import Head
from mhaprune.prune.compaction import compact
from mhaprune.prune.savings import Savings, measure_savings
from tests.tiny import tiny_gpt2

HEADS = [Head(layer, head) for layer in range(2) for head in range(4)]
# Of d_model 32 and d_head 8: rows of W_Q, W_K and W_V with their biases, and of W_O.
PARAMETERS_OF_A_HEAD = 3 * 8 * (32 + 1) + 8 * 32
KV_BYTES_OF_A_HEAD = 2 * 8 * 4  # float32


@pytest.fixture(scope="module")
def measured() -> dict[int, Savings]:
    """Heads removed -> what is left takes, measured in this order."""
    counts = (5, 0, 2, 8)
    models = [compact(tiny_gpt2(), HEADS[:count]) for count in counts]
    found = measure_savings([*models, tiny_gpt2()], prompt_length=8, new_tokens=4, rounds=2)
    assert found[1].num_parameters == found[-1].num_parameters
    assert found[1].kv_bytes_per_token == found[-1].kv_bytes_per_token
    return dict(zip(counts, found[:-1], strict=True))


@pytest.mark.parametrize("count", [0, 2, 5, 8])
def test_each_head_that_goes_takes_its_parameters_and_cache_with_it(measured, count):
    intact = sum(parameter.numel() for parameter in tiny_gpt2().parameters())
    assert measured[count].num_parameters == intact - count * PARAMETERS_OF_A_HEAD
    assert measured[count].kv_bytes_per_token == (8 - count) * KV_BYTES_OF_A_HEAD


@pytest.mark.parametrize("slower", [1, 2])
def test_speeds_are_tokens_per_second(monkeypatch, slower):
    """On a clock that only the passes move: 2 s for the prompt of 8, half a second a new token."""
    model, now, lengths = tiny_gpt2(), [100.0], []

    def take_time(module: Any, inputs: tuple[torch.Tensor], output: Any) -> None:
        lengths.append(inputs[0].shape[1])
        now[0] += slower * (2.0 if lengths[-1] == 8 else 0.5)

    model.register_forward_hook(take_time)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    [found] = measure_savings([model], prompt_length=8, new_tokens=3, rounds=2)
    assert lengths == [8, 1, 1, 1] * 3
    assert found.prefill_tokens_per_second == 8 / 2 / slower
    assert found.decode_tokens_per_second == 3 / 1.5 / slower


def test_speeds_are_medians_over_the_rounds_but_the_first_which_warms_up(monkeypatch):
    seconds = iter([(9.0, 9.0), (2.0, 1.0), (4.0, 8.0), (3.0, 2.0)])
    monkeypatch.setattr("mhaprune.prune.savings._seconds", lambda *arguments: next(seconds))
    [found] = measure_savings([tiny_gpt2()], prompt_length=6, new_tokens=4, rounds=3)
    assert (found.prefill_tokens_per_second, found.decode_tokens_per_second) == (6 / 3, 4 / 2)


def test_models_take_turns_and_read_the_same_prompt(monkeypatch):
    models, calls = [tiny_gpt2(seed=seed) for seed in (0, 1)], []

    def note(model: Any, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        calls.append((models.index(model), prompt.tolist(), new_tokens))
        return 1.0, 1.0

    monkeypatch.setattr("mhaprune.prune.savings._seconds", note)
    measure_savings(models, prompt_length=6, new_tokens=3, rounds=2, seed=7)
    assert [number for number, _, _ in calls] == [0, 1] * 3
    prompts = [prompt for _, prompt, _ in calls]
    assert all(prompt == prompts[0] for prompt in prompts)
    assert len(prompts[0][0]) == 6
    assert {new_tokens for _, _, new_tokens in calls} == {3}
