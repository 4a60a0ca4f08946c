"""Removing heads: orders, curves, smaller models, their files, healing and savings."""
