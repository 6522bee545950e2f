"""Masks and biases: the algebra, and the programs that kernels read."""
