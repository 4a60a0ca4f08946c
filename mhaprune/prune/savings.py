"""What removing heads buys: parameters, KV cache and speed, side by side."""

import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mhaprune.prune.compaction import kv_cache_bytes_per_token, num_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Savings:
    """What one model takes: speeds in tokens per second, for one sequence."""

    num_parameters: int
    kv_bytes_per_token: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@torch.no_grad()
def measure_savings(
    models: Sequence["PreTrainedModel"],
    *,
    prompt_length: int,
    new_tokens: int = 32,
    rounds: int = 5,
    seed: int = 0,
) -> list[Savings]:
    """Measure models of one vocabulary in turn, round after round; speeds are medians.

    Prefill reads a random prompt of `prompt_length` tokens; decoding then goes on token by token
    with the KV cache.
    """
    vocabulary = models[0].config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(vocabulary, (1, prompt_length), generator=generator)
    times: list[list[tuple[float, float]]] = [[] for _ in models]
    for turn in range(rounds + 1):
        for model, found in zip(models, times, strict=True):
            taken = _seconds(model, prompt.to(model.device), new_tokens)
            if turn > 0:  # the first warms up
                found.append(taken)
    return [
        Savings(
            num_parameters=num_parameters(model),
            kv_bytes_per_token=kv_cache_bytes_per_token(model),
            prefill_tokens_per_second=prompt_length / statistics.median(t[0] for t in found),
            decode_tokens_per_second=new_tokens / statistics.median(t[1] for t in found),
        )
        for model, found in zip(models, times, strict=True)
    ]


def _seconds(
    model: "PreTrainedModel", prompt: torch.Tensor, new_tokens: int
) -> tuple[float, float]:
    """Return the seconds that reading the prompt and that decoding takes."""
    from transformers import DynamicCache

    # The argument's name changed in transformers 5.24.
    takes = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in takes else "past_key_values"
    cached = {name: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
    start = time.perf_counter()
    token = model(prompt, **cached).logits[:, -1:].argmax(-1)
    _wait(model)
    read = time.perf_counter()
    for _ in range(new_tokens):
        token = model(token, **cached).logits[:, -1:].argmax(-1)
    _wait(model)
    return read - start, time.perf_counter() - read


def _wait(model: "PreTrainedModel") -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
