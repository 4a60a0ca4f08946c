"""Mask attention heads one at a time, measure what each is worth, and say so with intervals."""

__version__ = "0.1.0"
