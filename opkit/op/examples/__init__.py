"""Example calls of an operator: written as text, made from its annotations, or named by its kernels."""
