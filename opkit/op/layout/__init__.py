"""Sizes, strides and dtypes of outputs, derived from the reference as small programs."""
