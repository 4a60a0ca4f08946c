"""Attention heads by name: `Head(4, 11)` in code, "L4H11" on the command line and in files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PATTERN = re.compile(r"L(\*|[0-9]+)H(\*|[0-9]+)")


@dataclass(frozen=True, order=True)
class Head:
    """One attention head, numbered from 0; sorts by layer, then by head."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, name: str) -> "Head":
        """Read "L4H11" back. Raises ValueError for anything else, "L4H*" included."""
        layer, head = _split(name)
        if "*" in (layer, head):
            raise ValueError(f"expected the name of one head such as 'L4H11', got {name!r}")
        return cls(int(layer), int(head))


HeadSet = tuple[Head, ...]


def select_heads(patterns: Sequence[str], num_layers: int, heads_per_layer: int) -> list[Head]:
    """The heads that any of the patterns names, each once, in order.

    A pattern is a head's name in which `*` may stand for every number: "L4H11", "L2H*", "L*H3",
    "L*H*". Raises ValueError for bad syntax, a number the model does not have, and no patterns.
    """
    if not patterns:
        raise ValueError("no heads were selected; give at least one pattern, 'L*H*' for all heads")
    selected: set[Head] = set()
    for pattern in patterns:
        layer, head = _split(pattern)
        layers = _numbers(layer, num_layers, f"layer in {pattern!r}")
        heads = _numbers(head, heads_per_layer, f"head in {pattern!r}")
        selected |= {Head(layer, head) for layer in layers for head in heads}
    return sorted(selected)


def _split(pattern: str) -> tuple[str, str]:
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise ValueError(f"expected a head such as 'L4H11', 'L2H*' or 'L*H3', got {pattern!r}")
    return match[1], match[2]


def _numbers(text: str, count: int, what: str) -> range:
    if text == "*":
        return range(count)
    number = int(text)
    if number >= count:
        raise ValueError(f"{what} is out of range: this model has 0 to {count - 1}, got {number}")
    return range(number, number + 1)
