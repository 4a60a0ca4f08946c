"""Mask attention heads one at a time, measure what each is worth, and say so with intervals."""

from mhaprune.prune import modeling_pruned  # noqa: F401 - so that transformers loads exported models

__version__ = "0.1.0"
