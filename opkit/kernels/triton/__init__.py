"""Triton and Gluon kernels as kernels of an operator."""
