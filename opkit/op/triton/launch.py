"""Launches by hand: a kernel called on tensors and numbers by name, by Python kernels that launch several.

Each combination of kinds of values becomes a hidden operator ``opkit_launch::...`` whose kernel is the launcher, so such a
launch costs what a call through torch's dispatcher does. While a program is traced it is recorded in place of that.
A :class:`PreparedSeries` makes several launches by one call, for small calls, whose time is the processor's.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opkit.errors import ArgumentTypeError, DeclarationError, KernelError
from opkit.kernels.facts import Argument, Facts
from opkit.op import torch_private as private
from opkit.op.layout import program as layout_program
from opkit.op.layout.outputs import fills, unfilled
from opkit.op.triton.binding import bind
from opkit.op.triton.function import wrapped
from opkit.op.triton.kernel import TritonKernel, module_of
from opkit.op.triton.launcher_table import Launching
from opkit.op.triton.python import Values, launched_by_triton
from opkit.op.triton.variants import machine_of

if TYPE_CHECKING:
    from opkit import _core


_NAMESPACE = "opkit_launch"
_TYPES = {"tensor": "Tensor(a{}!)", "int": "int", "float": "float", "bool": "bool"}
_KINDS: dict[type, str] = {bool: "bool", int: "int", float: "float", torch.SymInt: "int", torch.SymFloat: "float"}
_count = itertools.count()
recorded: contextvars.ContextVar[list[Values] | None] = contextvars.ContextVar("recorded", default=None)
_lock = threading.Lock()


class LaunchForm:
    """A kernel for values of some kinds."""

    def __init__(self, kernel: TritonKernel, kinds: Mapping[str, str]) -> None:
        arguments = tuple(
            Argument(name, kind, written=kind == "tensor") for name, kind in kinds.items() if kind != "none"
        )
        schema = ", ".join(f"{_TYPES[a.kind].format(i)} {a.name}" for i, a in enumerate(arguments))
        name = f"{_NAMESPACE}::{kernel.name}__{next(_count)}"
        self.schema = f"{name}({schema}) -> ()"
        self.hidden = f"{name.partition('::')[2]}({schema}, *, int[]? opk_layout=None) -> ()"
        absent = {name: None for name, kind in kinds.items() if kind == "none"}
        self.bound = bind(kernel, Facts(kernel.name, self.schema, arguments, ()), absent=absent)
        self.names = tuple(argument.name for argument in arguments)
        self._check_used()
        self._overloads: dict[str, tuple[Callable[..., Any], Launching]] = {}
        self._registrations: list[Any] = []

    def _check_used(self) -> None:
        wanted = {self.names[source.argument] for source in self.bound.sources}
        for name in self.names:
            if name not in wanted:
                raise DeclarationError(
                    f"{self.bound.kernel!r}: it was launched with {name}=, which nothing uses. Its parameters are "
                    f"{', '.join(p.name for p in self.bound.kernel.parameters)}; values in triton_kernel() are fixed."
                )

    def run(self, values: Mapping[str, Any]) -> None:
        """Launch the kernel."""
        arguments = [values[name] for name in self.names]
        records = recorded.get()
        if records is not None:
            records.append(Values(self.bound, arguments, ()))
        elif self.bound.kernel.interpreted or self.bound.kernel.hooked:
            launched_by_triton(Values(self.bound, arguments, ()))
        elif private.dispatch_modes():
            wrapped(Values(self.bound, arguments, ()))
        else:
            self.overload(_first(self.bound.kernel, arguments).device.type)(*arguments)

    def overload(self, device: str) -> Callable[..., Any]:
        """Return a function of the values of :attr:`names` that launches the kernel on a device."""
        return self._served(device)[0]

    def repeated(self, device: str, arguments: Sequence[Any]) -> _core.Repeated | None:
        """Launch the kernel on the values of :attr:`names`; return what repeats it on other addresses."""
        overload, launching = self._served(device)
        assert launching.launcher is not None
        return launching.launcher.repeat(lambda: overload(*arguments))

    def time(self, device: str, arguments: Sequence[Any]) -> float:
        """Return the median milliseconds of a launch on the values of :attr:`names`; see :meth:`Launching.time`."""
        overload, launching = self._served(device)
        return launching.time(lambda: overload(*arguments))

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The places in :attr:`names` of the tensors whose addresses :meth:`repeated` takes."""
        return tuple(source.argument for source in self.bound.sources if source.kind == "tensor")

    def _served(self, device: str) -> tuple[Callable[..., Any], Launching]:
        found = self._overloads.get(device)
        if found is None:
            with _lock:
                found = self._overloads.get(device) or self._registered(device)
        return found

    def _registered(self, device: str) -> tuple[Callable[..., Any], Launching]:
        machine = machine_of(device)
        if machine is None:
            raise KernelError(
                f"{self.bound.kernel.name}: it was launched on {device} tensors. A Triton kernel runs on cuda tensors, and in "
                "the interpreter on the CPU's (opkit.testing.interpret)."
            )
        launching = Launching(self.bound, machine, module_of(self.bound.kernel.function))
        library = launching.library(packed=False)
        name = self.hidden.partition("(")[0]
        fragment = torch.library.Library(_NAMESPACE, "FRAGMENT")
        if not self._overloads:
            fragment.define(self.hidden)
            fragment.impl(name, torch.library.fallthrough_kernel, "Autograd")
            fragment.impl(name, torch.library.fallthrough_kernel, "ADInplaceOrView")
        key = private.dispatch_key_of(device)
        self._registrations += [fragment, library.register(f"{_NAMESPACE}::{name}", key, True)]
        overload = private.builtin(private.hidden_operator(f"{_NAMESPACE}::{name}"))
        self._overloads[device] = functools.partial(overload, opk_layout=[]), launching  # it has no outputs
        return self._overloads[device]


def _first(kernel: TritonKernel, arguments: Sequence[Any]) -> torch.Tensor:
    """Return the first tensor; the launch runs on its device."""
    for value in arguments:
        if isinstance(value, torch.Tensor):
            return value
    raise ArgumentTypeError(
        f"{kernel.name}: it was launched without a tensor, so that there is no device to run it on."
    )


@contextlib.contextmanager
def recording() -> Generator[list[Values]]:
    """Record the launches of this thread instead of making them."""
    found: list[Values] = []
    token = recorded.set(found)
    try:
        yield found
    finally:
        recorded.reset(token)


def is_recorded() -> bool:
    """Return whether launches of this thread are recorded instead of made."""
    return recorded.get() is not None


def launch(kernel: TritonKernel, values: Mapping[str, Any]) -> None:
    """Launch a kernel on values by name.

    Raises:
        ArgumentTypeError: a value is no tensor, number or None.
        DeclarationError: a parameter is left without a value, or nothing uses one of ``values``.
    """
    _form(kernel, values).run(values)


def _form(kernel: TritonKernel, values: Mapping[str, Any]) -> LaunchForm:
    """Return the kernel for values of these kinds."""
    kinds = tuple((name, _kind(kernel, name, value)) for name, value in values.items())
    found = kernel.forms.get(kinds)
    if found is None:
        found = kernel.forms[kinds] = LaunchForm(kernel, dict(kinds))
    return found


class PreparedLaunch:
    """Prepared launches of a kernel by hand with the same numbers each time: what they have in common is computed once.

    Tensors may differ from launch to launch in their addresses only: a launch on tensors of other sizes, strides, dtypes or
    devices reads and writes as if they were like the first. A :class:`~opkit.op.kernel_kinds.PreparedKernel` checks that.

    Args:
        kernel: the result of :func:`opkit.triton_kernel`.
        names: of the tensors of each launch, in order.
        numbers: all other values, by name.

    >>> # add = PreparedLaunch(kernel, ("x", "y", "out"), {"n": 1024})
    >>> # add(x, y, out)      # as kernel(x=x, y=y, out=out, n=1024)
    """

    def __init__(self, kernel: TritonKernel, names: Sequence[str], numbers: Mapping[str, Any]) -> None:
        self.kernel, self.names, self.numbers = kernel, tuple(names), dict(numbers)
        self._launches: dict[tuple[bool, ...], _Launch] = {}
        self._by_triton = kernel.interpreted or kernel.hooked

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch the kernel on these tensors, some of which may be None."""
        if self._by_triton or recorded.get() is not None or private.dispatch_modes():
            launch(self.kernel, {**dict(zip(self.names, tensors, strict=True)), **self.numbers})
            return
        present = tuple([tensor is not None for tensor in tensors])
        found = self._launches.get(present)
        if found is None:
            found = self._launches[present] = _Launch(self, tensors)
        found(tensors)

    def repeated(self, *tensors: torch.Tensor | None) -> tuple[_core.Repeated | None, list[str]]:
        """Return what repeats a launch with the same tensors present, and the names of the tensors whose addresses it takes.

        None: there was no such launch yet, or those that come pass torch's dispatcher, each of them.
        """
        found = self._launches.get(tuple([tensor is not None for tensor in tensors]))
        return (None, []) if found is None else (found.repeated, [self.names[place] for place in found.addressed])

    def time(self, *tensors: torch.Tensor | None) -> float:
        """Return the median milliseconds that a launch on these tensors takes, with cold caches; it waits for the GPU.

        The kernel is launched many times, and what it writes to is not restored.

        Raises:
            OpkitError, RuntimeError: it does not compile, the driver refuses it, or the stream is being captured.
        """
        return _Launch(self, tensors).time(tensors)


class _Launch:
    """The launches of some tensors that are there and others that are None, on the device of the first.

    The first one passes torch's dispatcher, and is remembered; later ones only give the launcher addresses.
    """

    def __init__(self, prepared: PreparedLaunch, tensors: Sequence[torch.Tensor | None]) -> None:
        names, numbers = prepared.names, prepared.numbers
        present = {name: i for i, name in enumerate(names) if tensors[i] is not None}
        self._form = _form(prepared.kernel, {**dict(zip(names, tensors, strict=True)), **numbers})
        self._arguments = [(present.get(name, -1), numbers.get(name)) for name in self._form.names]
        self.addressed = [present[self._form.names[argument]] for argument in self._form.order]
        first = _first(prepared.kernel, tensors)
        self._device, self._index = first.device.type, first.get_device()
        self.repeated: _core.Repeated | None = None

    def __call__(self, tensors: Sequence[Any]) -> None:
        index = self._index
        if self.repeated is not None and (index < 0 or private.current_gpu() == index):
            self.repeated([tensors[i].data_ptr() for i in self.addressed], private.current_stream(index))
            return
        self.repeated = self._form.repeated(self._device, self._values(tensors))

    def time(self, tensors: Sequence[Any]) -> float:
        return self._form.time(self._device, self._values(tensors))

    def _values(self, tensors: Sequence[Any]) -> list[Any]:
        return [value if place < 0 else tensors[place] for place, value in self._arguments]


def _kind(kernel: TritonKernel, name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    kind = "none" if value is None else _KINDS.get(type(value))
    if kind is None:
        raise ArgumentTypeError(
            f"{kernel.name}: the value {value!r} for {name} is {type(value).__name__}. A launch takes tensors, numbers and None; "
            "give triton_kernel() what never changes."
        )
    return kind


# ---- several launches by one call ------------------------------------------------------------------------------------


class ScratchTensor(NamedTuple):
    """A dense tensor that one kernel writes and a later one reads, and that nothing else uses; it is not filled."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PreparedSeries:
    """A series of prepared launches that are made one after another by one call.

    Each takes its tensors by name: from those of the call, none of which is None; from the results; or from the scratch tensors,
    which are allocated for each call and last as long as the launches. Any other name is None. The conditions
    of :class:`PreparedLaunch` hold for all of them.

    Args:
        launches: in order.
        names: of the tensors of each call, in order.
        results: by name, each a function that makes a tensor, of the same sizes, strides and dtype each time, not filled.
        scratch: by name.
        others: other names of these tensors, where a kernel has one tensor by two names.

    >>> # series = PreparedSeries([square, add], ("x",), {"out": make}, {"squares": ScratchTensor((1024,), torch.float32)})
    >>> # (out,) = series(x)  # as out = make(); squares = x.new_empty(1024); square(x, squares); add(x, squares, out)
    """

    def __init__(
        self,
        launches: Sequence[PreparedLaunch],
        names: Sequence[str],
        results: Mapping[str, Callable[[], torch.Tensor]],
        scratch: Mapping[str, ScratchTensor],
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.launches, self.names = list(launches), tuple(names)
        self.results, self.scratch, self.others = dict(results), dict(scratch), dict(others or {})
        self._series: _core.Series | None = None
        self._gpu = -1

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Launch the kernels on these tensors; the results."""
        return self.at(tensors, [each.data_ptr() for each in tensors])

    def at(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return the same for tensors whose addresses are known."""
        series, gpu = self._series, self._gpu
        if series is None or recorded.get() is not None or private.dispatch_modes() or fills():
            return self._one_by_one(tensors)
        if gpu >= 0 and private.current_gpu() != gpu:
            return self._one_by_one(tensors)
        try:
            handles = series(addresses, private.current_stream(gpu))
        except MemoryError:  # torch raises a better error when it allocates
            return self._one_by_one(tensors)
        return tuple(private.tensors_of_handles(handles))

    def time(self, *tensors: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Return the sum of what :meth:`PreparedLaunch.time` returns of each launch, and the results."""
        named, results = self._named(tensors)
        return sum(launch.time(*map(named.get, launch.names)) for launch in self.launches), results

    def _named(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return the tensors of a call by name, with new results and scratch tensors; and the results."""
        tensors_by_name = dict(zip(self.names, tensors, strict=True))
        results = {name: make() for name, make in self.results.items()}
        device = tensors[0].device
        scratch = {
            name: unfilled(buffer.shape, None, dtype=buffer.dtype, device=device)
            for name, buffer in self.scratch.items()
        }
        tensors_by_name |= results | scratch
        tensors_by_name |= {other: tensors_by_name[name] for other, name in self.others.items()}
        return tensors_by_name, tuple(results.values())

    def _one_by_one(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        named, results = self._named(tensors)
        for launch in self.launches:
            launch(*map(named.get, launch.names))
        if self._series is None:
            self._gpu = tensors[0].get_device()
            self._series = self._joined(named)  # last: other threads look at it first
        return results

    def _joined(self, tensors_by_name: Mapping[str, torch.Tensor]) -> _core.Series | None:
        """Return the launches that were just made as one; None where one of them cannot be repeated."""
        from opkit import _core

        places = {name: place for place, name in enumerate(tensors_by_name)}
        places |= {other: places[name] for other, name in self.others.items()}
        steps: list[tuple[_core.Repeated, list[int]]] = []
        for launch in self.launches:
            call, names = launch.repeated(*[tensors_by_name.get(name) for name in launch.names])
            if call is None:
                return None
            steps.append((call, [places[name] for name in names]))
        results = [_layout(tensors_by_name[name]) for name in self.results]
        memory = [buffer.bytes for buffer in self.scratch.values()]
        device = next(iter(tensors_by_name.values())).get_device()
        return _core.Series(steps, addresses=len(self.names), results=results, memory=memory, device=device)


def _layout(x: torch.Tensor) -> tuple[Any, Any, int]:
    return tuple(x.shape), x.stride(), layout_program.DTYPES[x.dtype]
