"""Healing: a short training of a pruned model, so that the heads left take over what was lost."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from mhaprune.measure.perplexity import target_nats, window_batch
from mhaprune.text.windows import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Method = Literal["full", "lora"]
LORA_RANK = 8


def check_method(method: Method) -> None:
    """Raise ValueError where the method needs what is not installed."""
    if method == "lora" and find_spec("peft") is None:
        raise ValueError("heal.method=lora needs peft; pip install -e '.[lora]'")


def heal(
    model: "PreTrainedModel",
    ids: Int[Tensor, "token"],
    windows: Sequence[Window],
    *,
    steps: int,
    learning_rate: float,
    windows_per_step: int,
    method: Method = "full",
    seed: int = 0,
    advance: Callable[[int], object] = lambda windows: None,
) -> "PreTrainedModel":
    """Train the model, in place, on windows of calibration text; return it ready to be measured.

    AdamW without weight decay, with the rate rising over the first tenth of the steps and falling
    to 0 by a cosine. "lora" trains low-rank updates of all linear layers (Hu et al. 2021, arXiv
    2106.09685) through peft, merged into the weights at the end. Raises ValueError where peft is
    not installed, and where the loss stops being finite.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)  # dropout and low-rank updates draw from the global generator
        trained: Any = _with_lora(model) if method == "lora" else model.requires_grad_(True)
        _train(trained, ids, windows, steps, learning_rate, windows_per_step, seed, advance)
    healed = trained.merge_and_unload() if method == "lora" else trained
    return healed.eval().requires_grad_(False)


def _train(
    model: Any,
    ids: Int[Tensor, "token"],
    windows: Sequence[Window],
    steps: int,
    learning_rate: float,
    windows_per_step: int,
    seed: int,
    advance: Callable[[int], object],
) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    generator = np.random.default_rng(seed)
    model.train()
    for _ in range(steps):
        chosen = generator.choice(
            len(windows), size=min(windows_per_step, len(windows)), replace=False
        )
        inputs, targets = window_batch(ids, [windows[number] for number in chosen])
        with torch.enable_grad():
            logits = model(inputs.to(model.device), use_cache=False).logits
            nats = target_nats(logits, targets.to(model.device)).sum()
            loss = nats / sum(windows[number].num_scored for number in chosen)
        if not torch.isfinite(loss):
            raise ValueError(
                f"healing diverged at a learning rate of {learning_rate:g}; use a smaller heal.lr"
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        advance(len(chosen))
    optimizer.zero_grad()  # or the gradients would stay in memory


def _rate(step: int, steps: int) -> float:
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + float(np.cos(np.pi * (step - warmup) / max(1, steps - warmup))))


def _with_lora(model: "PreTrainedModel") -> Any:
    """Return the model with trainable low-rank updates, its own weights frozen."""
    check_method("lora")
    from peft import LoraConfig, get_peft_model

    inputs_first = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2's weights
    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules="all-linear",
        fan_in_fan_out=inputs_first,
    )
    return get_peft_model(model, config)
