"""Scores of heads, one file for each estimator, and the catalogue that names them."""
