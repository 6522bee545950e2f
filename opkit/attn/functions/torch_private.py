"""This module holds every private torch name that tracing users' functions needs, as read in torch 2.13.0 and 2.14."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._higher_order_ops.base_hop import BaseHOP as BaseHOP
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from opkit.compiler.capture.conversion import capture
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.target import LoweringTarget

DataDependent = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where a function reads the value of a fake tensor."""


class Writes(Exception):
    """A function writes to a tensor."""


class _NoteReads(TorchFunctionMode):
    """Notes whether a function reads the values of a tensor that is not fake, which another call may change."""

    reads = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads |= getattr(func, "__name__", "") in _READS
        return func(*args, **(kwargs or {}))


_READS = frozenset(
    ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__dlpack__",
     "data_ptr", "is_nonzero", "equal", "allclose")
)  # fmt: skip


class _RefuseWrites(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise Writes(str(func))
        return func(*args, **(kwargs or {}))


def traced_graph(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    tensors: Sequence[Tensor],
    device: torch.device,
) -> tuple[Any, bool]:
    """Return a function's ATen graph, and whether it may depend on the values of tensors that the function reads.

    Args:
        function: takes tensors; real ones that it reads otherwise are constants of the graph.
        shapes: the shapes and dtypes of its first arguments, on ``device``.
        tensors: stand for its other arguments, which are tensors like these.
        device: of the call.
    """
    mode = detect_fake_mode(list(tensors)) or FakeTensorMode()

    noted = _NoteReads()

    def guarded(*arguments: Tensor) -> Any:
        with _RefuseWrites(), noted:
            return function(*arguments)

    known, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with _disable_current_modes(), mode, torch.no_grad():
            arguments = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            arguments += [torch.empty(_sizes(x), dtype=x.dtype, device=x.device) for x in tensors]
            return make_fx(guarded, tracing_mode="real", _allow_non_fake_inputs=True)(*arguments), noted.reads
    finally:
        mode.allow_non_fake_inputs = known


def _sizes(x: Tensor) -> list[int]:
    """Return the sizes of a tensor; of those that are symbolic, examples."""
    return [n if type(n) is int else n.node.hint or 2 for n in x.shape]  # pyright: ignore[reportAttributeAccessIssue]


def lowered(graph: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the compiler's program of a graph, and its constants by name."""
    captured = capture(graph, "a function of attention")
    target = LoweringTarget("cpu" if captured.device.type == "cpu" else "cuda")
    return lower(captured.graph, target), captured.constants
