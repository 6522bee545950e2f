"""Example calls of an operator: written as text, generated from its annotations, or named by its kernels."""
