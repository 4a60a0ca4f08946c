"""Tokens -> windows: a long text for a model of limited context, each token scored once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Window:
    """One forward pass: read `tokens[start:stop-1]`, score `tokens[first_scored:stop]`.

    The window's last token is only a target, so the model need not read it.
    Invariant: start < first_scored < stop, so a window never lacks a context or a target.
    """

    start: int
    stop: int
    first_scored: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.first_scored < self.stop, self

    @property
    def num_inputs(self) -> int:
        return self.stop - 1 - self.start

    @property
    def num_scored(self) -> int:
        return self.stop - self.first_scored


def make_windows(
    num_tokens: int,
    context_length: int,
    stride: int,
    *,
    first_token: Literal["scored", "unscored"] = "scored",
) -> list[Window]:
    """Cut a text of `num_tokens` tokens into windows in which no token is scored twice.

    "scored": the first window scores tokens 1 to context_length, each later one the next `stride`
    tokens, with as many tokens before them as fit in `context_length` inputs. So every token but
    the text's first, which nothing predicts, is scored exactly once, and token t has at least
    min(t, context_length - stride + 1) tokens of context. At stride == context_length two windows
    share one token: the last target of one is the first input of the next.

    "unscored": the convention of Hugging Face's "Perplexity of fixed-length models", for comparing
    with published numbers. Windows of `context_length` tokens begin every `stride` tokens and score
    those not scored before, except their own first token. So at stride == context_length a window's
    first token is never scored: GPT-2 small's published 29.94 on WikiText-2 (287,644 tokens, both
    1024) averages over 281 windows and 287,363 tokens. At a smaller stride only the text's first
    token is unscored.

    Raises ValueError unless 1 <= stride <= context_length and the text fills at least one window.
    """
    _check(num_tokens, context_length, stride, first_token)
    cut = {"scored": _cut_by_targets, "unscored": _cut_by_inputs}[first_token]
    return cut(num_tokens, context_length, stride)


def _cut_by_targets(num_tokens: int, context_length: int, stride: int) -> list[Window]:
    windows = [Window(start=0, stop=context_length + 1, first_scored=1)]
    while (scored_to := windows[-1].stop) < num_tokens:
        stop = min(scored_to + stride, num_tokens)
        windows.append(Window(start=stop - 1 - context_length, stop=stop, first_scored=scored_to))
    return windows


def _cut_by_inputs(num_tokens: int, context_length: int, stride: int) -> list[Window]:
    windows = [Window(start=0, stop=context_length, first_scored=1)]
    while (scored_to := windows[-1].stop) < num_tokens:
        start = windows[-1].start + stride
        first_scored = max(scored_to, start + 1)
        if first_scored == num_tokens:  # the text's last token opens this window: nothing to score
            break
        stop = min(start + context_length, num_tokens)
        windows.append(Window(start, stop, first_scored))
    return windows


def _check(num_tokens: int, context_length: int, stride: int, first_token: str) -> None:
    shortest_context = 1 if first_token == "scored" else 2
    if context_length < shortest_context:
        raise ValueError(
            f"context_length must be at least {shortest_context} when the first token of a window "
            f"is {first_token}, got {context_length}"
        )
    if not 1 <= stride <= context_length:
        raise ValueError(
            f"stride must be from 1 to the context_length {context_length}, or tokens would be "
            f"scored twice or skipped; got {stride}"
        )
    if num_tokens < 2:
        raise ValueError(
            f"the text is empty: it has {num_tokens} token(s), and predicting one takes at least 2"
        )
    shortest_text = context_length + 1 if first_token == "scored" else context_length
    if num_tokens < shortest_text:
        raise ValueError(
            f"the text has {num_tokens} tokens, but one window takes {shortest_text}; use a longer "
            f"text or a smaller evaluation.context_length (now {context_length})"
        )
