"""A sample: the windows of a text that a measurement reads, and what is scored in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mhaprune.text.tokens import Tokens
from mhaprune.text.windows import Window

IGNORED = -100  # the target of a position that is not scored


@dataclass(frozen=True)
class Protocol:
    """How a perplexity was measured; without it the number means little.

    `num_scored` of the text's `num_tokens` tokens count, in `num_windows` windows.
    """

    text: str
    joiner: str
    bos: bool
    context_length: int
    stride: int
    first_token: str
    num_windows: int
    num_scored: int
    num_tokens: int
    tokens_hash: str

    def __str__(self) -> str:
        joined = f"joined by {self.joiner!r}" if self.joiner else "in one piece"
        return (
            f"{self.text}, {joined}, {'with' if self.bos else 'no'} BOS; "
            f"{self.num_windows} windows of {self.context_length} tokens, stride {self.stride}, "
            f"first token {self.first_token}; {self.num_scored:,} of {self.num_tokens:,} tokens "
            f"scored; tokens {self.tokens_hash[:12]}"
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """Windows of a text's tokens; `protocol` says how they were cut, where that is known."""

    tokens: Tokens
    windows: tuple[Window, ...]
    protocol: Protocol | None = None

    @classmethod
    def of(cls, ids: Int[Tensor, "token"], windows: Sequence[Window]) -> "Sample":
        """Return windows of tokens that come without a text: one document of no bytes."""
        nothing = torch.zeros_like(ids)
        return cls(Tokens(ids, nothing, nothing, hash=""), tuple(windows))

    @property
    def ids(self) -> Int[Tensor, "token"]:
        return self.tokens.ids

    @property
    def num_tokens(self) -> Int[np.ndarray, "window"]:
        """Scored tokens of each window."""
        return np.array([window.num_scored for window in self.windows])

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all scored tokens."""
        return sum(
            int(self.tokens.num_bytes[window.first_scored : window.stop].sum())
            for window in self.windows
        )

    @property
    def blocks(self) -> Int[np.ndarray, "window"]:
        """The document in which each window's first scored token lies; its number if unknown."""
        first = torch.tensor([window.first_scored for window in self.windows])
        documents = self.tokens.document[first].numpy()
        return documents if self.tokens.document.any() else np.arange(len(self.windows))

    def longest(self, numbers: Sequence[int] | None = None) -> int:
        """Return the inputs of the longest of the windows `numbers`, or of all."""
        chosen = range(len(self.windows)) if numbers is None else numbers
        return max(self.windows[number].num_inputs for number in chosen)

    def batch(
        self, numbers: Sequence[int]
    ) -> tuple[Int[Tensor, "window pos"], Int[Tensor, "window pos"]]:
        """Return inputs and targets of the windows `numbers`; see `window_batch`."""
        return window_batch(self.ids, [self.windows[number] for number in numbers])


def window_batch(
    ids: Int[Tensor, "token"], windows: Sequence[Window]
) -> tuple[Int[Tensor, "window pos"], Int[Tensor, "window pos"]]:
    """Return the windows' inputs, padded on the right, and their targets.

    A target is IGNORED where a position is padding or its token is scored by another window. In a
    causal model padding on the right changes nothing before it.
    """
    length = max(window.num_inputs for window in windows)
    inputs = ids.new_zeros(len(windows), length)
    targets = ids.new_full((len(windows), length), IGNORED)
    for row, window in enumerate(windows):
        inputs[row, : window.num_inputs] = ids[window.start : window.stop - 1]
        first = window.first_scored - window.start - 1
        targets[row, first : window.num_inputs] = ids[window.first_scored : window.stop]
    return inputs, targets
