"""Triton kernels, without torch: compiled for any architecture, timed, and their results kept."""
