"""This module holds every private torch name that tracing users' functions needs, as read in torch 2.13.0 and 2.14."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from opkit.compiler.capture.conversion import capture
from opkit.compiler.lower.graph_to_program import lower

DataDependent = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where a function reads the value of a fake tensor."""


class Writes(Exception):
    """A function writes to a tensor."""


class _RefuseWrites(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise Writes(str(func))
        return func(*args, **(kwargs or {}))


def traced_graph(
    function: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> Any:
    """Return a function's ATen graph for fake tensors of these shapes and dtypes; real tensors that it reads are constants."""

    def guarded(*arguments: Tensor) -> Any:
        with _RefuseWrites():
            return function(*arguments)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        arguments = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        return make_fx(guarded, tracing_mode="real", _allow_non_fake_inputs=True)(*arguments)


def lowered(graph: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the compiler's program of a graph, and its constants by name."""
    captured = capture(graph, "a function of attention")
    return lower(captured.graph), captured.constants
