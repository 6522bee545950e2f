"""Triton kernels of operators: declared, bound by name, launched from C, and seen by torch.compile."""
