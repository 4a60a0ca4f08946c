"""Loss of a text in nats, and what derives from it. Keep sums and counts; divide once."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mhaprune.text.sample import IGNORED, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TokenLoss:
    """A text's summed loss: `total_nats` over `num_tokens` scored tokens of `num_bytes` bytes."""

    total_nats: float
    num_tokens: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or not math.isfinite(self.total_nats):
            raise ValueError(
                f"expected a finite loss over at least one token, "
                f"got {self.total_nats} nats over {self.num_tokens} tokens"
            )

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        return TokenLoss(
            self.total_nats + other.total_nats,
            self.num_tokens + other.num_tokens,
            self.num_bytes + other.num_bytes,
        )

    @property
    def nats_per_token(self) -> float:
        return self.total_nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """total nats / (ln 2 * bytes), whatever the tokenizer. Raises ValueError at 0 bytes."""
        if self.num_bytes < 1:
            raise ValueError("bits per byte needs a text of at least one byte")
        return self.total_nats / (math.log(2) * self.num_bytes)


def sample_loss(sample: Sample, total_nats: Float[np.ndarray, "window"]) -> TokenLoss:
    """Return the loss over all windows of a sample."""
    return TokenLoss(float(total_nats.sum()), int(sample.num_tokens.sum()), sample.num_bytes)


def target_nats(
    logits: Float[Tensor, "row pos vocab"], targets: Int[Tensor, "row pos"], chunk: int = 256
) -> Float[Tensor, "row"]:
    """Return each row's loss in nats, summed in float64 over the positions that are scored.

    Computed `chunk` positions at a time, in float32 (or float64, where the logits are).
    """
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for part, target in zip(logits.split(chunk, 1), targets.split(chunk, 1), strict=True):
        part = part if part.dtype == torch.float64 else part.float()
        nats = F.cross_entropy(
            part.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none"
        )
        total += nats.view(target.shape).sum(1, dtype=torch.float64)
    return total


@torch.no_grad()
def row_nats(
    model: "PreTrainedModel", inputs: Int[Tensor, "row pos"], targets: Int[Tensor, "row pos"]
) -> Float[Tensor, "row"]:
    """Run the model on each row and return its summed loss in nats, in float64."""
    logits = model(inputs.to(model.device), use_cache=False).logits
    return target_nats(logits, targets.to(model.device)).cpu()
