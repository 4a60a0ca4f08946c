"""Healing: a short training of a pruned model, so that the heads left take over what was lost."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from mhaprune.measure.perplexity import target_nats
from mhaprune.measure.progress import Progress
from mhaprune.text.sample import Sample

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
    sample: Sample,
    *,
    steps: int,
    learning_rate: float,
    windows_per_step: int,
    method: Method = "full",
    seed: int = 0,
    progress: Progress | None = None,
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
        rates = [learning_rate * _rate(step, steps) for step in range(steps)]
        draw = np.random.default_rng(seed)
        _train(trained, sample, rates, windows_per_step, draw, progress or Progress())
    healed = trained.merge_and_unload() if method == "lora" else trained
    return healed.eval().requires_grad_(False)


def _train(
    model: Any,
    sample: Sample,
    rates: Sequence[float],
    windows_per_step: int,
    draw: np.random.Generator,
    progress: Progress,
) -> None:
    """Take a step at each of the rates."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    num_windows = len(sample.windows)
    model.train()
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        size = min(windows_per_step, num_windows)
        chosen = draw.choice(num_windows, size=size, replace=False).tolist()
        inputs, targets = sample.batch(chosen)
        with torch.enable_grad():
            logits = model(inputs.to(model.device), use_cache=False).logits
            nats = target_nats(logits, targets.to(model.device)).sum()
            loss = nats / int(sample.num_tokens[chosen].sum())
        if not torch.isfinite(loss):
            raise ValueError(
                f"healing diverged at a learning rate of {max(rates):g}; use a smaller heal.lr"
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress.advance(len(chosen))
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
