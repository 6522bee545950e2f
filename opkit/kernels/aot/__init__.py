"""Kernels compiled ahead of time and shipped inside a Python package."""
