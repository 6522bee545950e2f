"""Attention on GPUs: kernels in Triton, and in Gluon for Hopper."""
