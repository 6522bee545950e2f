"""Triton kernels: configurations, tuning and its records."""
