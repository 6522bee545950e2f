"""Compute the arguments of one launch of a bound kernel in Python, on real, fake or symbolic tensors.

The launcher in C does the same for the calls that it serves. This module is for Triton's interpreter, for kernels before
whose launch Python runs, and for torch.compile.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opkit.errors import KernelError
from opkit.kernels.facts import Facts, Shape
from opkit.kernels.triton.named import resolved
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.evaluation import TensorInfo, as_grid, evaluate
from opkit.op.triton.names import Source


class LaunchArguments(NamedTuple):
    """One launch: every parameter by name, the compiler's options, and the grid."""

    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[Any, Any, Any]


def product(sizes: Sequence[Any]) -> Any:
    """Return the product of sizes, symbolic ones too."""
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def sizes_of(facts: Facts, operands: Sequence[Any]) -> dict[str, Any]:
    """Return the value of each named size in a call."""
    found: dict[str, Any] = {}
    for argument, value in zip(facts.arguments, operands, strict=True):
        if argument.shape is None or value is None:
            continue
        for tensor in value if argument.kind == "tensors" else (value,):
            for name, size in _named(argument.shape, tensor.shape):
                found.setdefault(name, size)
    return found


def _named(shape: Shape, sizes: Sequence[Any]) -> list[tuple[str, Any]]:
    last = len(sizes) - len(shape.after)
    pairs = [*zip(shape.before, sizes, strict=False), *zip(shape.after, sizes[last:], strict=False)]
    listed = [(name, size) for name, size in pairs if isinstance(name, str)]
    return [*listed, (shape.variadic, product(sizes[len(shape.before) : last]))] if shape.variadic else listed


class Values:
    """The values of a bound kernel's sources in one call.

    ``operands`` has the value of each schema argument, ``outputs`` each output, ``device`` where the call is.
    """

    def __init__(self, bound: BoundKernel, operands: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.bound = bound
        self.operands = operands
        self.outputs = outputs
        self.sizes = sizes_of(bound.facts, operands)

    def of(self, source: Source) -> Any:
        """Return one source's value: a tensor, a number, a string, a list."""
        return _READERS[source.origin](self, source)

    def tensor(self, source: Source) -> Any:
        """Return the tensor that a source is about."""
        count = len(self.operands)
        return self.operands[source.argument] if source.argument < count else self.outputs[source.argument - count]

    def named(self) -> dict[str, Any]:
        """Return every source's value by name, as formulas see it."""
        return {source.name: shown(self.of(source)) for source in self.bound.sources}

    def dimension(self, source: Source, of: Callable[[Any], Sequence[Any]], missing: int) -> Any:
        """Return a size or stride of a tensor; ``missing`` of a leading dimension that it does not have."""
        tensor = self.tensor(source)
        if tensor is None:
            return 0
        if source.detail < -tensor.dim():
            return missing
        if source.detail >= tensor.dim():
            raise KernelError(
                f"{self.bound.where}: {source.name} asks for dimension {source.detail} of a tensor that has {tensor.dim()}."
            )
        return of(tensor)[source.detail]

    def size(self, source: Source) -> Any:
        """Return a named size; 0 where no tensor that has it was passed."""
        return self.sizes.get(self.bound.facts.sizes[source.detail], 0)


_READERS: Mapping[str, Callable[[Values, Source], Any]] = {
    "TENSOR": Values.tensor,
    "SCALAR": Values.tensor,
    "SCALAR_POINTER": Values.tensor,
    "STRING": Values.tensor,
    "VALUES": Values.tensor,
    "NAMED_SIZE": Values.size,
    "NUMEL": lambda values, source: 0 if values.tensor(source) is None else values.tensor(source).numel(),
    "RANK": lambda values, source: 0 if values.tensor(source) is None else values.tensor(source).dim(),
    "SIZE": lambda values, source: values.dimension(source, lambda tensor: tensor.shape, 1),
    "STRIDE": lambda values, source: values.dimension(source, lambda tensor: tensor.stride(), 0),
    "LENGTH": lambda values, source: 0 if values.tensor(source) is None else len(values.tensor(source)),
}


def shown(value: Any) -> Any:
    """Return a value as formulas see it."""
    if isinstance(value, torch.Tensor):
        return TensorInfo(str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(value.stride()))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return tuple(value) if isinstance(value, list) else value


def launch_of(values: Values, config: Mapping[str, Any] | None = None) -> LaunchArguments:
    """Work out a launch.

    Raises:
        KernelError: a function that the author gave raised, or the grid is none.
    """
    bound = values.bound
    named = {**values.named(), **bound.constants, **(config or {})}
    evaluate(bound.where, bound.formulas, named)
    arguments = {p.name: resolved(named[p.name]) for p in bound.kernel.parameters if p.name in named}
    for name, number in bound.runtime.items():
        arguments[name] = values.of(bound.sources[number])
    for name in bound.descriptors:
        arguments[name] = descriptor(values, name, named)
    options = {name: value for name, value in named.items() if name in bound.options}
    return LaunchArguments(arguments, options, as_grid(bound.where, named["grid"]))


def descriptor(values: Values, name: str, named: Mapping[str, Any]) -> Any:
    """Triton's tensor descriptor for a parameter."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    declared = values.bound.descriptors[name]
    source = next(s for s in values.bound.sources if s.name == declared.tensor and s.kind == "tensor")
    tensor = values.tensor(source)
    shape = named.get(f"{name}.shape", declared.shape)
    viewed = tensor if shape is None else tensor.view(tuple(shape))
    block = list(named.get(f"{name}.block", declared.block))
    if declared.layout is None:
        return TensorDescriptor.from_tensor(viewed, block, padding=declared.padding)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor.from_tensor(viewed, block, resolved(declared.layout), padding=declared.padding)
