"""Fill the launcher's table: what Python does for a call of a bound kernel that is unlike any before.

A call that the table has costs 6.4 us, and ``torch.empty_like`` with a launch by Triton's own Python 14.5 us (an H200,
``benchmarks/triton_launch.py``).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opkit.errors import KernelError
from opkit.kernels.facts import Argument
from opkit.kernels.tuning import records, tuning
from opkit.kernels.tuning.configs import Config, prune
from opkit.kernels.tuning.observation import Choice, add_launcher
from opkit.kernels.tuning.record_format import Identity, bucket_of
from opkit.op.layout import program as p
from opkit.op.trace.contract_hash import contract_hash
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.evaluation import Source, TensorInfo, evaluate
from opkit.op.triton.variants import Machine, Memory, Variants

if TYPE_CHECKING:
    from opkit import _core


_DTYPE_NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in p.DTYPES.items()}

_UNSEEN = ("tensor", "tensor_any")  # roles of tensors that no formula reads


def _info(value: Memory | None) -> TensorInfo | None:
    return None if value is None else TensorInfo(_DTYPE_NAMES[value.dtype], value.sizes, value.strides)


_SHOWN = {"tensor": _info, "dtype": _DTYPE_NAMES.get}
"""How formulas see values of some kinds."""


def _served(miss: Callable[[_core.Call], _core.Entry | None] | None, call: _core.Call) -> _core.Entry | None:
    if miss is None:
        raise KernelError("the operator of this kernel was removed")
    return miss(call)


@dataclasses.dataclass
class _Stopwatch:
    """The result of timing a launch: the milliseconds, or why it failed."""

    ms: float | None = None
    error: Exception | None = None


_stopwatch: contextvars.ContextVar[_Stopwatch | None] = contextvars.ContextVar("opkit_stopwatch", default=None)


class Launching:
    """The part of a bound kernel's launcher that fills its table.

    ``module`` is that of the operator, whose package may hold compiled kernels.
    """

    def __init__(self, bound: BoundKernel, machine: Machine, module: str = "") -> None:
        self.bound = bound
        self.machine = machine
        self.variants = Variants(bound, machine, module)
        self.chooser = Chooser(bound, machine, module)
        self.launcher: _core.Launcher | None = None
        self._tensors = [i for i, source in enumerate(bound.sources) if source.kind == "tensor"]
        self._shown = [
            (s.name, i, _SHOWN.get(s.kind)) for i, s in enumerate(bound.sources) if bound.roles[i] not in _UNSEEN
        ]

    def library(self, packed: bool = True) -> _core.KernelLibrary:
        """Return the kernel as the runtime has it: a description, and the launcher.

        ``packed``: tensors are made contiguous but for the strides that the kernel takes.
        """
        from opkit import _core

        bound, cuda = self.bound, self.machine.device == "cuda"
        miss = weakref.WeakMethod(self.miss)  # the launcher lives as long as the process, what fills it as its operator
        self.launcher = _core.Launcher(
            bound.facts.operator, bound.name, list(bound.roles), lambda call: _served(miss(), call), cuda=cuda
        )
        add_launcher(self.launcher)
        return _core.launch_kernel(description(bound, cuda, packed), self.launcher)

    def miss(self, call: _core.Call) -> _core.Entry | None:
        """Return what the launcher is to do for a call whose guard it has not seen; None where it was done."""
        values: list[Any] = call.values
        for i in self._tensors:
            values[i] = None if values[i] is None else Memory._make(values[i])
        named = self.named(values)
        watch = _stopwatch.get()
        if watch is not None:
            return self._timed(watch, call, values, named)
        return self._tuned(call, values, named) if self.bound.kernel.configs else self.entry(call, values, named)

    def time(self, launch: Callable[[], object]) -> float:
        """Return the median milliseconds of the launch that ``launch`` makes, with cold caches. It is made many times.

        What it writes to is not restored. Nothing may be captured meanwhile.

        Raises:
            OpkitError, RuntimeError: it does not compile, or the driver refuses it.
        """
        assert self.launcher is not None
        watch = _Stopwatch()
        token = _stopwatch.set(watch)
        try:
            while watch.ms is None and watch.error is None:  # another thread may fill the table in between
                self.launcher.clear()
                launch()
        finally:
            _stopwatch.reset(token)
        if watch.error is not None:
            raise watch.error
        assert watch.ms is not None
        return watch.ms

    def _timed(self, watch: _Stopwatch, call: _core.Call, values: Sequence[Any], named: dict[str, Any]) -> None:
        try:
            watch.ms = call.time(self.entry(call, values, named))
        except Exception as error:  # on its way through the dispatcher it would lose its class
            watch.error = error

    def entry(self, call: _core.Call, values: Sequence[Any], named: dict[str, Any]) -> _core.Entry:
        """Return what to launch for these values, configs included."""
        return self.variants.entry(values, evaluate(self.bound.where, self.bound.formulas, named), call.device)

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the values of a call and the constants, by name."""
        named = {name: show(values[i]) if show else values[i] for name, i, show in self._shown}
        named.update(self.bound.constants)
        return named

    def _tuned(self, call: _core.Call, values: Sequence[Any], named: dict[str, Any]) -> _core.Entry | None:
        def entry(config: Any) -> _core.Entry:
            return self.entry(call, values, {**named, **config.values})

        def measure(config: Any) -> float:
            return call.time(entry(config), written=self.bound.written)

        choice = self.chooser.choose(named, call.device, measure, call.capturing, load=entry)
        chosen = entry(choice.config)
        if choice.settled:
            return chosen
        call.launch(chosen)  # a later call may know better
        return None


# ---- the kernel in the numbers of ``opkit.h`` ----------------------------------------------------------------------


def description(bound: BoundKernel, cuda: bool, packed: bool = True) -> dict[str, Any]:
    """Return a kernel as ``opkit._core.launch_kernel`` takes it."""
    facts = bound.facts
    return {
        "operator": facts.operator,
        "kernel": bound.name,
        "schema": facts.schema,
        "cuda": cuda,
        "arguments": [_argument(argument) for argument in facts.arguments],
        "outputs": [{"name": output.name, "alias": output.alias} for output in facts.outputs],
        "size_names": list(facts.sizes),
        "sources": [_source(bound, source, packed) for source in bound.sources],
    }


def _argument(argument: Argument) -> dict[str, Any]:
    shape = argument.shape
    return {
        "name": argument.name,
        "kind": argument.kind,
        "optional": argument.optional,
        "written": argument.written,
        "shape": None if shape is None else {"before": shape.before, "variadic": shape.variadic, "after": shape.after},
    }


def _source(bound: BoundKernel, source: Source, packed: bool) -> tuple[str, int, int, int, int]:
    origin, detail = source.origin, source.detail
    if source.kind == "tensor" and packed:
        dims = bound.strided.get(source.argument, ())
        origin, detail = "PACKED_TENSOR", sum(1 << (d if d >= 0 else 15 - d) for d in dims)
    return origin, source.argument, detail, -1, 0


# ---- configs ---------------------------------------------------------------------------------------------------------


class Chooser:
    """The choice among the configs of a bound kernel. ``module`` defines its operator; its package may have results."""

    def __init__(self, bound: BoundKernel, machine: Machine, module: str) -> None:
        self.bound = bound
        self.machine = machine
        self.module = module

    @functools.cached_property
    def identity(self) -> Identity:
        """The kernel as its results are recorded."""
        hashed = contract_hash(self.bound.kernel.launch_parts())
        return Identity(self.bound.facts.operator, self.bound.name, hashed)

    @functools.cached_property
    def folders(self) -> tuple[Path, ...]:
        """The folders in which the operator's package may have results."""
        return records.packaged(self.module)

    def choose(
        self,
        named: Mapping[str, Any],
        device: int,
        measure: Callable[[Config], float],
        capturing: bool,
        load: Callable[[Config], object] | None = None,
    ) -> Choice:
        """Return the config for a call with these values."""
        configs = self.candidates(named)
        model = self.machine.model(device)
        return tuning.decide(self.identity, configs, model, self.bucket(named), measure, capturing, self.folders, load)

    def candidates(self, named: Mapping[str, Any]) -> list[Config]:
        """Return the configs that the author's ``prune`` leaves for a call."""
        return prune(self.bound.kernel.configs, self.bound.kernel.prune, named)

    def recorded(self, named: Mapping[str, Any], device: int) -> Config | None:
        """Return the config that was found to be the fastest for such a call, if that is known."""
        model, configs = self.machine.model(device), self.candidates(named)
        return records.lookup(self.identity, configs, model, self.bucket(named), self.folders).config

    def bucket(self, named: Mapping[str, Any]) -> str:
        """The bucket of a call: by its named sizes, or the tensors' where none have names, and integers that formulas read."""
        count = len(self.bound.facts.arguments)
        by_number = {s.argument: s for s in reversed(self.bound.sources) if s.kind == "tensor" and s.argument < count}
        tensors = sorted(by_number.values(), key=self.bound.sources.index)
        infos = {s.name: named[s.name] for s in tensors if isinstance(named[s.name], TensorInfo)}
        counted = zip(self.bound.sources, self.bound.roles, strict=True)
        integers = {s.name: named[s.name] for s, role in counted if s.kind == "int" and role == "exact"}
        sizes = {name: value for name, value in integers.items() if type(value) is int}
        if not self.bound.facts.sizes:
            sizes |= {f"{name}_{d}": size for name, info in infos.items() for d, size in enumerate(info.shape)}
        return bucket_of(sizes, [info.dtype for info in infos.values()])
