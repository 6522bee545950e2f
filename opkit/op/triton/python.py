"""Launch kernels through Python: in Triton's interpreter, by Triton's own launcher, or into a traced program.

The launcher in C does the same for the calls that it serves.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opkit.errors import KernelError
from opkit.kernels.triton.named import resolved
from opkit.kernels.tuning.configs import Config
from opkit.op.core import Operator
from opkit.op.dispatch.selection import capturing
from opkit.op.layout.outputs import allocate_outputs, facts_of, operands, sizes_of
from opkit.op.triton.binding import BoundKernel, bind
from opkit.op.triton.evaluation import Source, TensorInfo, as_grid, evaluate
from opkit.op.triton.kernel import TritonKernel, module_of
from opkit.op.triton.launcher_table import Chooser
from opkit.op.triton.variants import machine_of

# ---- the arguments of one launch, for real, fake or symbolic tensors -------------------------------------------------


class LaunchArguments(NamedTuple):
    """One launch: every parameter by name, the compiler's options, and the grid."""

    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[Any, Any, Any]


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
    """Return the launch for the values of a call.

    Raises:
        KernelError: one of the author's functions raised, or its result is no grid.
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
    """Return Triton's tensor descriptor for a parameter."""
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


# ---- launches --------------------------------------------------------------------------------------------------------

Launcher = Callable[[Values], None]
"""What launches a kernel on values."""


class PythonLaunch:
    """A Triton kernel as a Python kernel of its operator: outputs are allocated here, and ``launcher`` runs it."""

    def __init__(self, operator: Operator, kernel: TritonKernel, name: str, launcher: Launcher | None = None) -> None:
        self.operator = operator
        self.bound = bind(kernel, facts_of(operator), name)
        self.launcher = launcher or launched_by_triton
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = allocate_outputs(self.operator, args, kwargs)
        return run(self.operator, self.bound, args, kwargs, outputs, self.launcher)

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what decides what the kernel computes."""
        return self.bound.kernel.contract_parts()


def run(
    operator: Operator,
    bound: BoundKernel,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    new: Sequence[torch.Tensor],
    launcher: Launcher,
) -> Any:
    """Launch a kernel with ``new`` as the outputs that are no arguments; the operator's result."""
    values = operands(operator, args, kwargs)
    fresh = iter(new)
    outputs = [next(fresh) if o.alias is None else values[o.alias] for o in bound.facts.outputs]
    if not _nothing_to_write(bound, values, outputs):
        dense, copies = _dense(bound, [*values, *outputs])
        launcher(Values(bound, dense[: len(values)], dense[len(values) :]))
        for tensor, copy in copies:
            tensor.copy_(copy)
    return outputs[0] if len(outputs) == 1 else tuple(outputs) if outputs else None


def launched_by_triton(values: Values) -> None:
    """Launch a kernel as its author would: zero what is to be zero, call the hooks, and ``function[grid](...)``."""
    _launch(values, chosen(values) if values.bound.kernel.configs else None)


def _launch(values: Values, config: Config | None) -> None:
    kernel = values.bound.kernel
    launch = checked(values, launch_of(values, config and config.values))
    for name in values.bound.zeroed:
        if launch.arguments[name] is not None:
            launch.arguments[name].zero_()
    for hook in (kernel.pre_hook, config and config.pre_hook):
        if hook is not None:
            hook(launch.arguments)
    if all(launch.grid):
        tensors = (value for value in launch.arguments.values() if isinstance(value, torch.Tensor) and value.is_cuda)
        with next((torch.cuda.device(tensor.device) for tensor in tensors), contextlib.nullcontext()):
            kernel.jit[launch.grid](**launch.arguments, **launch.options)


def checked(values: Values, launch: LaunchArguments) -> LaunchArguments:
    """Return the launch, unless it would leave an output unwritten.

    Raises:
        KernelError: its grid is empty.
    """
    empty = any(not isinstance(size, torch.SymInt) and size == 0 for size in launch.grid)
    if empty and any(output.numel() for output in values.outputs):
        raise KernelError(
            f"{values.bound.where}: its grid {launch.grid} is empty, so that its output would be left unwritten. Let the grid "
            "have a program at least, or register the kernel with when= for calls that it can serve."
        )
    return launch


def packed(tensor: torch.Tensor, dims: Sequence[int]) -> bool:
    """Return whether a tensor's strides follow from its sizes and the strides that the kernel takes.

    ``dims`` are the dimensions of those; every other one must enclose the one after it without gaps.
    """
    sizes, strides = tensor.shape, tensor.stride()
    free = {d % len(sizes) for d in dims if -len(sizes) <= d < len(sizes)} if len(sizes) else set[int]()
    expected: Any = 1
    for d in reversed(range(len(sizes))):
        if d not in free and sizes[d] != 1 and strides[d] != expected:
            return False
        expected = sizes[d] * (strides[d] if d in free or sizes[d] != 1 else expected)
    return True


def _dense(bound: BoundKernel, tensors: Sequence[Any]) -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the tensors as the kernel may take them, and those to copy back."""
    dims, facts, count = bound.strided, bound.facts, len(bound.facts.arguments)
    used = {source.argument for source in bound.sources if source.kind == "tensor"}
    dense, back = list(tensors), list[tuple[torch.Tensor, torch.Tensor]]()
    for i, tensor in enumerate(tensors):
        alias = None if i < count else facts.outputs[i - count].alias
        if i not in used or not isinstance(tensor, torch.Tensor) or packed(tensor, dims.get(i, ())):
            continue
        if alias is not None:
            dense[i] = dense[alias]  # an argument that is returned
            continue
        dense[i] = tensor.clone(
            memory_format=torch.contiguous_format
        )  # contiguous() may return strides that the kernel takes
        if i >= count or facts.arguments[i].written:
            back.append((tensor, dense[i]))
    return dense, back


def _nothing_to_write(bound: BoundKernel, operands: Sequence[Any], outputs: Sequence[Any]) -> bool:
    written = [
        *outputs,
        *(v for v, a in zip(operands, bound.facts.arguments, strict=True) if a.written and v is not None),
    ]
    return bool(written) and all(tensor.numel() == 0 for tensor in written)


def chosen(values: Values) -> Config:
    """Return the config of a launch: the fastest on this GPU; the first one in the interpreter, where times mean nothing."""
    tensors = [value for value in values.operands if isinstance(value, torch.Tensor)]
    machine = machine_of(tensors[0].device.type) if tensors else None
    bound = values.bound
    if machine is None or bound.kernel.interpreted:
        return bound.kernel.configs[0]
    named = {**values.named(), **bound.constants}
    chooser = Chooser(bound, machine, module_of(bound.kernel.function))
    device = tensors[0].device.index

    def measure(config: Config) -> float:
        return _measured(values, config)

    return chooser.choose(named, device, measure, capturing(), load=measure).config


def _measured(values: Values, config: Config) -> float:
    """Return the milliseconds of a launch with its hooks; tensors that the operator writes to are as before afterwards."""
    from triton.testing import do_bench  # pyright: ignore[reportMissingTypeStubs]

    written = [values.tensor(values.bound.sources[i]) for i in values.bound.written]
    saved = [tensor.clone() for tensor in written]
    try:
        median: Any = do_bench(lambda: _launch(values, config), return_mode="median")
        return float(median)
    finally:
        for tensor, before in zip(written, saved, strict=True):
            tensor.copy_(before)
