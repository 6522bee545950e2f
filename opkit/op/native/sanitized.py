"""Run a debug build of a kernel in a child process, under the sanitizers (``opkit.kernels.sanitizer``)."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import KernelError
from opkit.kernels import sanitizer
from opkit.kernels.binding import Bound, Slot
from opkit.kernels.sanitizer import DebugBuffer, TensorValue, Value
from opkit.op.core import Operator
from opkit.op.layout.outputs import allocate_outputs, operands, sizes_of
from opkit.op.layout.program import dtype_number

_TYPECODES = {"ints": "q", "floats": "d", "bools": "B"}
_POINTEES = {"int": "q", "float": "d", "bool": "B", "dtype": "i"}


@dataclasses.dataclass(frozen=True)
class SanitizedKernel:
    """A debug build of a kernel: each call runs in a child process, and what the sanitizers find there is raised."""

    operator: Operator
    name: str
    bound: Bound
    variables: Mapping[str, Sequence[str]]
    build: Callable[[], Path]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _SanitizedCall(self, args, kwargs).run()


class _SanitizedCall:
    """One call in a child process."""

    def __init__(self, kernel: SanitizedKernel, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.kernel, self.bound, self.operator = kernel, kernel.bound, kernel.operator
        self.values = operands(self.operator, args, kwargs)
        self.outputs = allocate_outputs(self.operator, args, kwargs)
        self.sizes = sizes_of(self.bound.facts, self.values)
        self.written = self._written()
        self.buffers: dict[tuple[int, bool], DebugBuffer] = {}  # by tensor, and whether it is passed contiguous
        self.tensors: dict[str, tuple[torch.Tensor, bool]] = {}  # by buffer's name: the tensors that take the results

    def run(self) -> Any:
        listed = [(slot.name, _VALUES[slot.source](self, slot)) for slot in self.bound.slots]
        result = sanitizer.run(
            self.kernel.build(),
            operator=self.operator.name,
            kernel=self.kernel.name,
            instance=self._instance(),
            values=listed,
            described=self._described(),
        )
        if result.message or result.code:
            reason = result.message or f"it returned the error code {result.code}"
            raise KernelError(f"{self.operator.name} (kernel {self.kernel.name}): {reason}")
        self._write_back(result.written)
        return self._returned()

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def _written(self) -> list[Any]:
        """Return the tensors that the operator writes to, even where they are passed as another argument, too."""
        pairs = zip(self.bound.facts.arguments, self.values, strict=True)
        return [tensor for argument, value in pairs if argument.written for tensor in pytree.tree_leaves(value)]

    def _tensors_of(self, slot: Slot) -> Any:
        count = len(self.values)
        if slot.argument < count:
            return self.values[slot.argument]
        new = [number for number, output in enumerate(self.bound.facts.outputs) if output.alias is None]
        return self.outputs[new.index(slot.argument - count)]

    def _buffer(self, name: str, tensor: torch.Tensor | None, slot: Slot, pointed: bool) -> DebugBuffer | None:
        if tensor is None:
            return None
        key = (id(tensor), pointed)
        if key not in self.buffers:
            fresh = any(tensor is output for output in self.outputs)
            writable = fresh or any(tensor is written for written in self.written)
            content = _bytes(_memory(tensor, pointed))
            self.buffers[key] = DebugBuffer(name, content, writable=writable, poison=fresh)
            self.tensors[name] = (tensor, pointed)
        return self.buffers[key]

    def _described_tensor(self, name: str, tensor: torch.Tensor | None, slot: Slot) -> TensorValue | None:
        buffer = self._buffer(name, tensor, slot, False)
        if tensor is None or buffer is None:
            return None
        return TensorValue(buffer, tensor.shape, tensor.stride(), dtype_number(tensor.dtype))

    def _write_back(self, written: dict[str, Any]) -> None:
        for name, (tensor, pointed) in self.tensors.items():
            content = written.get(name)
            if content and tensor.numel():
                memory = _memory(tensor, pointed)
                memory.copy_(torch.frombuffer(bytearray(content), dtype=tensor.dtype).view(memory.shape))
                if pointed and memory.data_ptr() != tensor.data_ptr():
                    tensor.copy_(memory)

    def _returned(self) -> Any:
        new = iter(self.outputs)
        results = [next(new) if o.alias is None else self.values[o.alias] for o in self.bound.facts.outputs]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    # ---- values ----------------------------------------------------------------------------------------------------

    def _data_list(self, slot: Slot) -> Value:
        listed = self._tensors_of(slot)
        return (
            None if listed is None else [self._buffer(f"{slot.name}[{i}]", t, slot, True) for i, t in enumerate(listed)]
        )

    def _tensor_list(self, slot: Slot) -> Value:
        listed = self._tensors_of(slot)
        return (
            None
            if listed is None
            else [self._described_tensor(f"{slot.name}[{i}]", t, slot) for i, t in enumerate(listed)]
        )

    def _scalar(self, slot: Slot) -> Value:
        value = self.values[slot.argument]
        if isinstance(value, torch.dtype):
            return dtype_number(value)
        return float(value) if slot.member == "f" else int(value)

    def _scalar_pointer(self, slot: Slot) -> Value:
        value = self.values[slot.argument]
        if value is None:
            return None
        number = dtype_number(value) if isinstance(value, torch.dtype) else value
        code = _POINTEES[self.bound.facts.arguments[slot.argument].kind]
        return DebugBuffer(slot.name, array.array(code, [number]).tobytes())

    def _list(self, slot: Slot) -> Value:
        value = self.values[slot.argument]
        code = _TYPECODES[self.bound.facts.arguments[slot.argument].kind]
        return None if value is None else DebugBuffer(slot.name, array.array(code, value).tobytes())

    def _length(self, slot: Slot) -> Value:
        value = self.values[slot.argument]
        return 0 if value is None else len(value.encode() if isinstance(value, str) else value)

    def _measure(self, slot: Slot) -> Value:
        tensor = self._tensors_of(slot)
        return 0 if tensor is None else _MEASURES[slot.source](tensor, slot.detail)

    def _instance(self) -> int:
        chosen: dict[int, str] = {}
        for slot in self.bound.slots:
            if slot.dtype <= -2 and slot.source in ("DATA", "TENSOR", "DATA_LIST", "TENSOR_LIST"):
                tensors = self._tensors_of(slot)
                for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                    if tensor is not None:
                        chosen[-2 - slot.dtype] = str(tensor.dtype).removeprefix("torch.")
        variables = [self.kernel.variables[name] for name in self.bound.variables]
        wanted = [chosen.get(number, "") for number in range(len(variables))]
        choices = list(itertools.product(*variables))
        return next(i for i, c in enumerate(choices) if all(w in ("", t) for w, t in zip(wanted, c, strict=True)))

    def _described(self) -> str:
        named = zip(self.bound.facts.arguments, self.values, strict=True)
        return ", ".join(f"{argument.name}={_shown(value)}" for argument, value in named)


_VALUES: dict[str, Callable[[_SanitizedCall, Slot], Value]] = {
    "DATA": lambda call, slot: call._buffer(slot.name, call._tensors_of(slot), slot, True),  # pyright: ignore[reportPrivateUsage]
    "TENSOR": lambda call, slot: call._described_tensor(slot.name, call._tensors_of(slot), slot),  # pyright: ignore[reportPrivateUsage]
    "DATA_LIST": _SanitizedCall._data_list,  # pyright: ignore[reportPrivateUsage]
    "TENSOR_LIST": _SanitizedCall._tensor_list,  # pyright: ignore[reportPrivateUsage]
    "SCALAR": _SanitizedCall._scalar,  # pyright: ignore[reportPrivateUsage]
    "SCALAR_POINTER": _SanitizedCall._scalar_pointer,  # pyright: ignore[reportPrivateUsage]
    "STRING": lambda call, slot: call.values[slot.argument],
    "VALUES": _SanitizedCall._list,  # pyright: ignore[reportPrivateUsage]
    "LENGTH": _SanitizedCall._length,  # pyright: ignore[reportPrivateUsage]
    "NAMED_SIZE": lambda call, slot: call.sizes.get(call.bound.facts.sizes[slot.detail], 0),
    **dict.fromkeys(("NUMEL", "RANK", "SIZE", "STRIDE"), _SanitizedCall._measure),  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys(("INT_CONSTANT", "FLOAT_CONSTANT"), lambda call, slot: slot.constant),
}
_MEASURES: dict[str, Callable[[torch.Tensor, int], int]] = {
    "NUMEL": lambda tensor, _: tensor.numel(),
    "RANK": lambda tensor, _: tensor.ndim,
    "SIZE": lambda tensor, dim: tensor.shape[dim],
    "STRIDE": lambda tensor, dim: tensor.stride(dim),
}


def _memory(tensor: torch.Tensor, pointed: bool) -> torch.Tensor:
    """Return the elements that the kernel may reach: a row-major tensor (a copy if needed), or all from first to last."""
    if pointed:
        return tensor.detach().contiguous()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
    return tensor.detach().as_strided((span,), (1,))


def _bytes(memory: torch.Tensor) -> bytes:
    if memory.numel() == 0:
        return b""
    return memory.reshape(-1).view(torch.uint8).numpy().tobytes()


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = "" if value.is_contiguous() else f" strides {value.stride()}"
        return f"{tuple(value.shape)} {value.dtype}{strides}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
