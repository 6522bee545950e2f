"""Attention: one operator, its mask algebra and its biases, a reference, and the kernels that are registered for it.

:func:`opkit.attention` is the function to call and :mod:`opkit.masks` has the masks; both are imported when first used.
"""
