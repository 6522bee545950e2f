"""Register Triton kernels with operators, and show their launches to torch.compile.

They are launched from C, through a table that Python fills. torch.compile sees the launch itself, as
``torch.library.wrap_triton`` shows it: a rule for AOTAutograd's functionalisation puts an allocation for each output and the
launch into the program in place of the operator, so that Inductor autotunes the kernel, compiles it ahead of time and reuses
memory around it. Kernels that torch cannot represent stay units: the program calls the operator.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import KernelError
from opkit.kernels.facts import Facts
from opkit.kernels.tuning.configs import Config, prune
from opkit.kernels.tuning.record_format import Identity
from opkit.op import kernel_kinds, torch_compile
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch.planning import choose
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.layout.outputs import facts_of
from opkit.op.native.compiled import CompiledFunction
from opkit.op.triton.binding import BoundKernel, bind
from opkit.op.triton.evaluation import exact
from opkit.op.triton.kernel import TritonKernel, module_of, unwrapped
from opkit.op.triton.launcher_table import Chooser, Launching
from opkit.op.triton.python import PythonLaunch, Values, checked, launch_of, run
from opkit.op.triton.variants import Machine, machine_of

if TYPE_CHECKING:
    from opkit import _core


class TritonFunction(CompiledFunction):
    """A Triton kernel as the function of a :class:`opkit.op.dispatch.selection.RegisteredKernel`."""

    def __init__(self, operator: Operator, kernel: TritonKernel, name: str, machine: Machine) -> None:
        super().__init__(operator, name)
        self.kernel = kernel
        self.machine = machine
        self.bound: BoundKernel = bind(kernel, facts_of(operator), name)
        self.launching = Launching(self.bound, machine, str(getattr(operator.function, "__module__", "")))

    @property
    def device(self) -> str:
        """The device type that it runs on."""
        return self.machine.device

    @property
    def facts(self) -> Facts:
        """The operator as the kernel sees it."""
        return self.bound.facts

    @property
    def visible(self) -> BoundKernel | None:
        """The kernel, if torch.compile can see its launch."""
        return None if graph_refusal(self.bound) else self.bound

    @property
    def examples(self) -> Sequence[Mapping[str, Any]]:
        """The author's example arguments, to compile and tune for."""
        return self.kernel.examples

    def identities(self) -> Sequence[Identity]:
        """Return the kernel as its tuning results are recorded; nothing where there is nothing to choose."""
        return [self.launching.chooser.identity] if self.kernel.configs else []

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what decides what the kernel computes."""
        return self.kernel.contract_parts()

    def refusal(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return why the kernel does not take a call; empty where it does."""
        for name, tensor in self.operator.named_tensors(args, kwargs):
            if tensor.layout is not torch.strided:
                return f"{name} is {tensor.layout}; it takes dense tensors"
            if tensor.is_complex():
                return f"{name} has {tensor.dtype}, which Triton does not have"
        return ""

    def ready(self) -> bool:
        """Put the kernel into the dispatcher."""
        self.load()
        return True

    def open(self) -> _core.KernelLibrary:
        """Return the kernel as the runtime has it: a description, and the launcher."""
        return self.launching.library()


def _kernel(operator: Operator, kernel: TritonKernel, device: str | None, name: str) -> RegisteredKernel:
    if kernel.interpreted:  # with TRITON_INTERPRET=1 a kernel for the GPU runs on the CPU
        return RegisteredKernel(name, "cpu", PythonLaunch(operator, kernel, name))
    machine = machine_of(device)
    if machine is None:
        raise KernelError(
            f"{operator.name}: {name} is a Triton kernel, which runs on cuda tensors (of NVIDIA's and AMD's GPUs); register it "
            f'with register_kernel("cuda", ...), not for {device!r}. On the CPU it runs with opkit.testing.interpret.'
        )
    if kernel.hooked:
        return RegisteredKernel(name, device, PythonLaunch(operator, kernel, name))
    return RegisteredKernel(name, device, TritonFunction(operator, kernel, name, machine), native=True)


kernel_kinds.register(TritonKernel, _kernel)


# ---- what torch.compile sees -----------------------------------------------------------------------------------------


_MAX_ELEMENTS = 2**31 - 1
_REPRESENTED = {"num_warps", "num_stages"}
"""The options that torch records with a launch."""


def graph_refusal(bound: BoundKernel) -> str:
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
    """Return whether an option has Triton's own default everywhere, as ``triton.Config`` sets it for every kernel."""
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
    fixed: list[dict[str, Any]] = []
    for launch in launches:  # where a constexpr is symbolic, the program is for its present value alone
        chosen = {name: launch.arguments[name] for name in constexprs}
        fixed.append({name: int(v) if isinstance(v, torch.SymInt) else v for name, v in chosen.items()})
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
