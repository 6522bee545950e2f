"""A bound kernel and the launcher that serves it: what Python does for a call unlike any before."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opkit.op import layout_program as p
from opkit.op.triton.binding import Bound
from opkit.op.triton.description import description
from opkit.op.triton.evaluation import TensorInfo, evaluate
from opkit.op.triton.machine import Machine
from opkit.op.triton.names import Source
from opkit.op.triton.variants import Memory, Variants

if TYPE_CHECKING:
    from opkit import _core

_DTYPE_NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in p.DTYPES.items()}


class Launching:
    """Fills the launcher's table."""

    def __init__(self, bound: Bound, machine: Machine) -> None:
        self.bound = bound
        self.machine = machine
        self.variants = Variants(bound, machine)
        self.launcher: _core.Launcher | None = None

    def library(self, packed: bool = True) -> _core.KernelLibrary:
        """The kernel as the runtime has it: a description, and the launcher.

        ``packed``: tensors are made contiguous but for the strides that the kernel is told.
        """
        from opkit import _core

        bound, cuda = self.bound, self.machine.device == "cuda"
        self.launcher = _core.Launcher(bound.facts.operator, bound.name, list(bound.roles), self.miss, cuda=cuda)
        return _core.launch_kernel(description(bound, cuda, packed), self.launcher)

    def miss(self, call: _core.Call) -> _core.Entry:
        """What the launcher is to do for a call whose guard it has not seen."""
        values = [_memory(value) for value in call.values]
        named = evaluate(self.bound.where, self.bound.formulas, self.named(values))
        return self.variants.entry(values, named, call.device)

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """The values of a call and the constants, by name."""
        sources = self.bound.sources
        return {**{s.name: _shown(s, v) for s, v in zip(sources, values, strict=True)}, **self.bound.constants}


def _memory(value: Any) -> Any:
    return Memory(*value) if isinstance(value, tuple) and len(value) == len(Memory._fields) else value


def _shown(source: Source, value: Any) -> Any:
    """A value as formulas see it."""
    if isinstance(value, Memory):
        return TensorInfo(_DTYPE_NAMES[value.dtype], value.sizes, value.strides)
    return _DTYPE_NAMES[value] if source.kind == "dtype" else value
