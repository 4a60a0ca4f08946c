"""Texts, from the hub, from files or made here, as tokens and as windows of tokens."""
