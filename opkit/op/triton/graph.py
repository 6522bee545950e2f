"""What torch.compile sees of a Triton kernel: the launch itself, as ``torch.library.wrap_triton`` shows it.

A rule for AOTAutograd's functionalisation puts an allocation for each output and the launch into the program in place of
the operator, so that Inductor autotunes the kernel, compiles it ahead of time and reuses memory around it. Kernels that
torch cannot represent stay units: the program calls the operator.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.kernels.tuning.configs import Config, prune
from opkit.op import torch_compile
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch.planning import choose
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.evaluation import exact
from opkit.op.triton.kernel import module_of, unwrapped
from opkit.op.triton.launcher_table import Chooser
from opkit.op.triton.machine import machine_of
from opkit.op.triton.python import Values, checked, launch_of, run

_MAX_ELEMENTS = 2**31 - 1
_REPRESENTED = {"num_warps", "num_stages"}
"""The options that torch records with a launch."""


def refusal(bound: BoundKernel) -> str:
    """Return why torch cannot represent a kernel's launch; empty where it can."""
    kernel = bound.kernel
    if kernel.gluon:
        return "it is in Gluon"
    if kernel.hooked or kernel.reset_to_zero:
        return "something runs before its launch"
    if bound.descriptors:
        return "it takes tensor descriptors"
    varying = [p.name for p in kernel.parameters if not p.constexpr and p.name in bound.varying]
    if varying:
        return f"its configs decide on {varying[0]}, which is no constexpr"
    other = sorted(name for name in bound.options - _REPRESENTED if not _usual(bound, name))
    if other:
        return f"its option {other[0]} is not recorded by torch"
    floats = _floats(bound)
    if floats and torch_compile.inductor_widens_floats():
        return f"Inductor would pass {floats[0]} as a float64"
    missing = left_out(unwrapped(kernel.function))
    return f"Inductor would leave out {missing}" if missing else ""


def _floats(bound: BoundKernel) -> list[str]:
    """Return the parameters that receive Python floats, which Triton takes for float32."""
    numbers = [name for name, source in bound.runtime.items() if bound.sources[source].kind == "float"]
    fixed = [name for name, value in bound.constants.items() if isinstance(value, float)]
    compiled = {parameter.name for parameter in bound.kernel.parameters if parameter.constexpr}
    return [name for name in (*numbers, *fixed) if name not in compiled]


def _usual(bound: BoundKernel, name: str) -> bool:
    """Return whether an option is nowhere other than Triton's own default, as ``triton.Config`` says it of every kernel."""
    values = [bound.kernel.options.get(name), *(config.options.get(name) for config in bound.kernel.configs)]
    return name == "num_ctas" and all(value in (None, 1) for value in values)


def functional_rule(operator: Operator) -> Callable[..., Any]:
    """Return the rule of ``operator`` for ``FunctionalTensorMode``."""

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        visible = _visible(operator, args, kwargs or {}) if torch_compile.compiling() else None
        if visible is None:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return visible(*args, **(kwargs or {}))

    return rule


def _visible(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the chosen kernel of a call as a function to trace; None where the call stays a unit."""
    if operator.forced or any(kernel.autotune for kernel in operator.kernels.kernels):
        return None
    kernel, _ = choose(operator, args, kwargs)
    if kernel is None or _beyond(pytree.tree_leaves((tuple(args), kwargs))):
        return None
    if kernel.traceable:
        return kernel.function
    bound: Any = getattr(kernel.function, "visible", None)
    if bound is None:
        return None
    shapes = _fake_outputs(operator, args, kwargs)
    return None if _beyond(shapes) else _traced(operator, bound, shapes)


def _beyond(values: Sequence[Any]) -> bool:
    """Whether 32 bits do not count the offsets in some tensor, for which opkit compiles its kernels otherwise, or may not.

    Of sizes that depend on data nothing is known, not even whether there is anything to launch.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(private.sizes_depend_on_data(tensor) or _large(tensor) for tensor in tensors)


def _large(tensor: torch.Tensor) -> bool:
    last: Any = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel() > _MAX_ELEMENTS) or bool(last >= _MAX_ELEMENTS)


def _traced(operator: Operator, bound: BoundKernel, shapes: Sequence[torch.Tensor]) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        new = [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device=s.device) for s in shapes]
        return run(operator, bound, args, kwargs, new, wrapped)

    return traced


def _fake_outputs(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the new outputs' sizes and strides, symbolic ones too; what finds them leaves no trace in the program."""
    fake_args, fake_kwargs = pytree.tree_map_only(
        torch.Tensor, torch_compile.without_functional_wrapper, (tuple(args), kwargs)
    )
    mode = private.fake_mode_of(fake_args, fake_kwargs)
    with private.no_modes(), mode, torch.no_grad():
        returned = operator.overload(*fake_args, **fake_kwargs)
    outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned or ())
    return [output for output, item in zip(outputs, operator.schema.returns, strict=True) if item.alias_info is None]


def wrapped(values: Values) -> None:
    """Record a launch in the program that is being traced."""
    from torch.library import wrap_triton

    kernel = values.bound.kernel
    if kernel.configs:
        function, grid, arguments = _with_configs(values)
        wrap_triton(function)[grid](**arguments)
        return
    launch = checked(values, launch_of(values))
    options = {name: value for name, value in launch.options.items() if name in _REPRESENTED}
    wrap_triton(kernel.jit)[launch.grid](**launch.arguments, **options)


def _with_configs(values: Values) -> tuple[Any, Callable[[Any], Any], dict[str, Any]]:
    """Return a kernel with its configs as ``triton.autotune`` has them: what differs between launches is the config's."""
    import triton

    kernel = values.bound.kernel
    launches = [launch_of(values, config.values) for config in _candidates(values)]
    constexprs = [p.name for p in kernel.parameters if p.constexpr and p.name in launches[0].arguments]
    fixed = [{name: _specialised(launch.arguments[name]) for name in constexprs} for launch in launches]
    varying = [name for name in constexprs if len({exact([values[name]]) for values in fixed}) > 1]
    grids: dict[tuple[Any, ...], Any] = {}
    configs: list[Any] = []
    for chosen, launch in zip(fixed, launches, strict=True):
        kwargs = {name: chosen[name] for name in varying}
        if grids.setdefault(tuple(kwargs.values()), launch.grid) == launch.grid:  # else torch cannot distinguish them
            configs.append(triton.Config(kwargs, **launch.options))
    common = {name: value for name, value in launches[0].arguments.items() if name not in varying}
    return (
        triton.autotune(configs, key=[])(kernel.jit),
        lambda meta: grids[tuple(meta[n] for n in varying)],
        common,
    )


def _candidates(values: Values) -> list[Config]:
    """The configs for Inductor to choose from; one of them, where the sizes are numbers and it is known to be the fastest."""
    bound, named = values.bound, {**values.named(), **values.bound.constants}
    tensors = [value for value in values.operands if isinstance(value, torch.Tensor)]
    machine = machine_of(tensors[0].device.type) if tensors else None
    if machine is None or any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
        return prune(bound.kernel.configs, bound.kernel.prune, named)
    chooser = Chooser(bound, machine, module_of(bound.kernel.function))
    found = chooser.recorded(named, tensors[0].device.index or 0)
    return chooser.candidates(named) if found is None else [found]


def _specialised(value: Any) -> Any:
    """Return a constexpr's value; the program is for this value alone where it was symbolic."""
    return int(value) if isinstance(value, torch.SymInt) else value


_IMPORTED = {"tl", "triton", "libdevice", "tl_math", "triton_helpers"}  # at the head of every file that Inductor writes
_WRITTEN = (int, str, bool)


def left_out(function: Any) -> str:
    """Return what a kernel refers to and Inductor leaves out, or "".

    Args:
        function: the kernel as Python has it, without ``triton.jit``.
    """
    return next(_missing(function, set()), "")


def _missing(function: Any, seen: set[Any]) -> Iterator[str]:
    seen.add(function)
    for name, value in _globals(function):
        if _is_helper(value):
            if value.fn.__name__ != name:
                yield f"{name}, whose own name is {value.fn.__name__}"
            elif value.fn not in seen:
                yield from _missing(value.fn, seen)
        elif name not in _IMPORTED and not _is_written(value):
            yield name


def _globals(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads of its module, by name."""
    names = {each.argval for each in dis.Bytecode(function) if each.opname == "LOAD_GLOBAL"}
    yield from ((name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__)


def _is_helper(value: Any) -> bool:
    from triton.runtime import jit

    return isinstance(value, (jit.JITFunction, getattr(jit, "ConstexprFunction", jit.JITFunction)))


def _is_written(value: Any) -> bool:
    from triton.language import constexpr

    known = isinstance(value, (*_WRITTEN, constexpr))
    return known or str(getattr(value, "__module__", "")).startswith("triton")
