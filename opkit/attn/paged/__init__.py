"""Attention with a paged KV cache."""
