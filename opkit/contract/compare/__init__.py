"""Comparison with the reference: tolerances, and the choices that extreme numbers leave to correct kernels."""
