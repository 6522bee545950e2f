"""Compile Triton kernels for any architecture, and cache the binaries. Nothing here imports torch."""
