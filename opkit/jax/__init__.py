"""Operators as JAX functions: ``opkit.to_jax``."""
