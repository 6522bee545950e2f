"""Attention of sequences that are divided among processes."""
