"""What the machine allows: how many rows fit into its memory, and how exact its products are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import psutil
import torch

from mhaprune.model.architectures import head_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# More positions at once are no faster, on a CPU, and keep a GPU busy.
POSITIONS_AT_ONCE = {"cpu": 2048}
POSITIONS_AT_ONCE_ELSEWHERE = 65_536
# Activations of a block that exist at once, in widths of the model: stream, its copies, the MLP's.
_WIDTHS = 20


def choose_rows(
    model: "PreTrainedModel", length: int, engine: Literal["replay", "gating"], num_bytes: int
) -> int:
    """Return how many windows of `length` tokens to run at once, using half of `num_bytes` at most.

    Gating holds the logits of a row besides its activations; replay never does.
    """
    shape = head_shape(model)
    numbers = _WIDTHS * shape.num_heads * shape.d_head
    if engine == "gating":
        numbers += 2 * model.config.get_text_config().vocab_size
    wanted = POSITIONS_AT_ONCE.get(model.device.type, POSITIONS_AT_ONCE_ELSEWHERE) // length
    fitting = num_bytes // 2 // (length * numbers * model.dtype.itemsize)
    return max(1, min(wanted, fitting))


def available_bytes(device: torch.device) -> int:
    """Return the memory that is free on a CUDA device, or else in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


@contextmanager
def fast_matmul() -> Iterator[None]:
    """Within this context float32 products may round their factors: to bfloat16 or, on CUDA, TF32.

    On SmolLM2-135M it moved effects by about 2e-4 nats per token, either way.
    """
    cpu = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    cuda = torch.backends.cuda.matmul
    before = cpu.fp32_precision, cuda.fp32_precision
    try:
        cpu.fp32_precision, cuda.fp32_precision = "bf16", "tf32"
        yield
    finally:
        cpu.fp32_precision, cuda.fp32_precision = before
