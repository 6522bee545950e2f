"""Attention in plain Triton: the same source for every GPU, and for the interpreter."""
