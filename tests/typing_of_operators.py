"""What a type checker and an editor see of an operator. Read by pyright (see pyproject.toml), never run."""

# pyright: basic, reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import torch
from torch import Tensor

import opkit
from opkit.op.dispatch.selection import Selection


@opkit.custom_op("typing::scaled", mutates_args=())
def scaled(x: Tensor, k: float = 1.0) -> Tensor:
    """Scale ``x``."""
    return x * k


@scaled.register_kernel("cpu", when=lambda x: x.dim() == 1)
def scaled_cpu(x: Tensor, k: float = 1.0) -> Tensor:
    """The same."""
    return x * k


in_c = scaled.register_kernel("cpu", opkit.c_kernel("void scaled(const T* x, double k, T* out, int64_t x_numel) {}"))
assert_type(in_c.name, str)
scaled.register_kernel("cpu", 3)  # pyright: ignore[reportCallIssue, reportArgumentType]
assert_type(scaled(torch.ones(1), k=2.0), Tensor)
assert_type(scaled.select(torch.ones(1)), Selection)
assert_type(scaled_cpu(torch.ones(1)), Tensor)
scaled("a word")  # pyright: ignore[reportArgumentType]
scaled(torch.ones(1), scale=2.0)  # pyright: ignore[reportCallIssue]
