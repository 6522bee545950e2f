"""The table of an operator's kernels, and the selection of the kernel for a call.

Kernels are tried by falling priority, the most recently registered first among equals. The first whose device, dtypes
and predicate fit is chosen; the reference runs if there is none. Every refusal carries its reason.

Of several autotuned kernels the fastest for a bucket of shapes is chosen. Each of them is one configuration of
:mod:`opkit.kernels.tuning.tuning`, which times them once, records the result and finds it in later processes. The hash that a
result is recorded with covers the kernels and torch's version, and the bucket has the sizes rounded up to powers of two, so that
an edited kernel or another machine is timed afresh.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import os
import platform
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit import page
from opkit.errors import KernelError
from opkit.kernels.tuning import tuning
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity
from opkit.op.trace.contract_hash import contract_hash

REFERENCE = "reference"
Flat = tuple[Sequence[Any], dict[str, Any]]
_NOTHING_FORCED: Mapping[str, str] = types.MappingProxyType({})
forced_kernels: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("forced", default=_NOTHING_FORCED)


@dataclasses.dataclass(frozen=True, eq=False)
class RegisteredKernel:
    """One way to compute an operator on one device type (None: on all)."""

    name: str
    device: str | None
    function: Callable[..., Any]
    when: Callable[..., Any] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    priority: int = 0
    autotune: bool = False
    order: int = 0
    predicate_names: tuple[str, ...] = ()
    native: bool = False
    traceable: bool = False
    prepared: bool = False
    trusted: bool = False

    @property
    def unconditional(self) -> bool:
        """Whether the author registered it without ``when``, ``dtypes``, ``priority`` and ``autotune``."""
        return self.when is None and self.dtypes is None and self.priority == 0 and not self.autotune

    @property
    def plain(self) -> bool:
        """Whether it takes every call on its device, as torch.library's kernels do."""
        return self.unconditional and not self.native

    def replaces(self, earlier: RegisteredKernel) -> bool:
        """Return whether it replaces ``earlier``: a plain kernel any plain one, a native kernel the one of its name."""
        if self.device != earlier.device:
            return False
        if self.native:
            return earlier.native and self.unconditional and earlier.unconditional and self.name == earlier.name
        return self.plain and earlier.plain

    @property
    def condition(self) -> str:
        """The name of the predicate, for messages; empty where there is none."""
        return "" if self.when is None else getattr(self.when, "__qualname__", repr(self.when))


@dataclasses.dataclass(frozen=True)
class Refused:
    """What a ``when=`` predicate may return in place of False: the reason, which ``select`` shows."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Selection:
    """The kernel that a call gets, why each other one was refused, and notes on what the kernel itself chooses."""

    operator: str
    kernel: str
    refused: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.operator}: {self.kernel}", *(f"  {note}" for note in self.notes)]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        rows = [(self.kernel, "chosen", "; ".join(self.notes))]
        rows += [(name, "refused", reason) for name, reason in self.refused.items()]
        return page.fragment(
            f"<p><strong>{escape(self.operator)}</strong></p>", page.table(("kernel", "", "why"), rows)
        )


def predicate_names(when: Callable[..., Any] | None, parameters: Sequence[str], op: str) -> tuple[str, ...]:
    """Return the names of the operator's parameters that a predicate takes.

    Raises:
        KernelError: it is not callable, or takes a parameter that the operator does not have.
    """
    if when is None:
        return ()
    if not callable(when):
        raise KernelError(f"{op}: when= must be a function of the operator's arguments, got {when!r}")
    names = tuple(inspect.signature(when).parameters)
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise KernelError(f"{op}: when= takes {', '.join(unknown)}; the operator has {', '.join(parameters)}.")
    return names


def leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return a call's arguments with lists flattened; schemas have no lists of lists."""
    items: list[Any] = []
    for value in (*args, *kwargs.values()):
        items += value if type(value) is list or type(value) is tuple else (value,)
    return items


def call_device(args: Sequence[Any], kwargs: Mapping[str, Any], device: object = None) -> str:
    """Return the device type of a call: its first tensor's, else that of its device argument, else the CPU."""
    for leaf in leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            return leaf.device.type
    return torch.device(device).type if isinstance(device, (str, torch.device)) else "cpu"


def call_dtypes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[torch.dtype]:
    """Return the dtypes that ``dtypes=`` is compared with: those of floating and complex tensors, or of all if none is."""
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, torch.Tensor)}
    return {d for d in dtypes if d.is_floating_point or d.is_complex} or dtypes


class KernelTable:
    """The kernels of one operator."""

    def __init__(self, operator: str, parameters: Sequence[str]) -> None:
        self.operator = operator
        self.parameters = tuple(parameters)
        self.kernels: list[RegisteredKernel] = []
        self.disabled: set[str | None] = set()
        self._registered = 0

    def add(self, kernel: RegisteredKernel) -> RegisteredKernel:
        """Add ``kernel``; a plain kernel replaces an earlier plain one of its device, as in torch.library.

        Raises:
            KernelError: the name is taken on that device.
        """
        self.check_free(kernel)
        self.kernels = [k for k in self.kernels if not kernel.replaces(k)]
        self._registered += 1
        kernel = dataclasses.replace(kernel, order=self._registered)
        self.kernels = sorted([*self.kernels, kernel], key=lambda k: (-k.priority, k.plain, -k.order))
        return kernel

    def check_free(self, kernel: RegisteredKernel) -> None:
        """Raise a KernelError if the name is taken on the kernel's device; on different devices kernels share names."""
        taken = any(
            k.name == kernel.name
            and (None in (k.device, kernel.device) or k.device == kernel.device)
            and not kernel.replaces(k)
            for k in self.kernels
        )
        if taken or kernel.name == REFERENCE:
            raise KernelError(
                f"{self.operator}: there is a kernel named {kernel.name!r} already. Give it another name=."
            )

    def free_name(self, own: str, device: str | None) -> str:
        """Return a name for a kernel registered without one, whose function is called ``own``."""
        name = own if own.isidentifier() and own not in ("_", REFERENCE) else f"{device or 'any'}_kernel"
        taken = {k.name for k in self.kernels if not (k.plain and k.device == device)}
        return next(n for n in [name, *(f"{name}_{i}" for i in range(2, 10_000))] if n not in taken)

    def named(self, name: str) -> RegisteredKernel:
        """Return the kernel of that name.

        Raises:
            KernelError: there is none.
        """
        kernel = next((k for k in self.kernels if k.name == name), None)
        if kernel is None:
            names = ", ".join([REFERENCE, *(k.name for k in self.kernels)])
            raise KernelError(f"{self.operator}: there is no kernel named {name!r}. There are: {names}.")
        return kernel

    def serves(self, device: str) -> bool:
        """Return whether an enabled kernel runs on ``device``."""
        return any(k.device in (None, device) and k.device not in self.disabled for k in self.kernels)

    def refusal(
        self, kernel: RegisteredKernel, args: Sequence[Any], kwargs: Mapping[str, Any], device: str, flat: Flat
    ) -> str:
        """Return why ``kernel`` does not take this call; empty if it does. ``flat`` is the call through the schema."""
        if kernel.device not in (None, device):
            return f"it runs on {kernel.device}, the arguments are on {device}"
        if kernel.device in self.disabled:
            return f"kernels for {kernel.device} are disabled"
        if kernel.dtypes is not None and not call_dtypes(args, kwargs) <= kernel.dtypes:
            have, want = (", ".join(sorted(map(str, dtypes))) for dtypes in (call_dtypes(args, kwargs), kernel.dtypes))
            return f"the arguments have {have}; it takes {want}"
        if kernel.when is not None:
            named = dict(zip(self.parameters, args, strict=False)) | dict(kwargs)
            taken = kernel.when(**{name: named[name] for name in kernel.predicate_names})
            if not taken:
                return taken.reason if isinstance(taken, Refused) else f"its condition {kernel.condition} is false"
        return kernel.function.refusal(*flat) if kernel.native else ""  # type: ignore[attr-defined]  # pyright: ignore

    def eligible(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: str, flat: Flat
    ) -> tuple[list[RegisteredKernel], dict[str, str]]:
        """Return the kernels that take the call, the preferred one first, and the reason of each that does not.

        ``args`` and ``kwargs`` are the Python call's, ``flat`` those of the call through the schema.
        """
        forced = forced_kernels.get().get(self.operator)
        if forced is not None:
            return self._forced(forced, device)
        reasons = [(k, self.refusal(k, args, kwargs, device, flat)) for k in self.kernels]
        fit = [k for k, reason in reasons if not reason]
        names = {k.name for k in fit}
        return fit, {k.name: reason for k, reason in reasons if reason and k.name not in names}

    def _forced(self, name: str, device: str) -> tuple[list[RegisteredKernel], dict[str, str]]:
        refused = {k.name: f"{name} is forced by opkit.use_kernel" for k in self.kernels if k.name != name}
        if name == REFERENCE:
            return [], refused
        kernel = self.named(name)
        fit = next((k for k in self.kernels if k.name == name and k.device in (None, device)), None)
        if fit is None:
            raise KernelError(
                f"{self.operator}: opkit.use_kernel forces {name!r}, which runs on {kernel.device}, but the arguments are "
                f"on {device}."
            )
        return [fit], refused


# ---- autotuning ------------------------------------------------------------------------------------------------------


_RECORDED_AS = "(kernels)"
_REPEATS = 5
_SECONDS = 0.01


def bucket(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the shapes, dtypes and flags of a call with every size rounded up to a power of two.

    >>> bucket([torch.zeros(3, 100), True], {})
    'float32[4x128] True'
    """
    return " ".join(_described(leaf) for leaf in pytree.tree_leaves((tuple(args), kwargs)))


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return str(leaf) if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__
    sizes = "x".join(str(1 << max(0, size - 1).bit_length()) for size in leaf.shape)
    return f"{str(leaf.dtype).removeprefix('torch.')}[{sizes}]"


def device_name(device: str) -> str:
    """Return the model of the processor or accelerator of a device type."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{device} {platform.machine()} {os.cpu_count()} threads={torch.get_num_threads()}"


def capturing() -> bool:
    """Return whether a CUDA graph is being captured, when nothing may be timed; False in a forked process, which has no CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def fastest(
    operator: str, kernels: Sequence[RegisteredKernel], args: Sequence[Any], kwargs: dict[str, Any], device: str
) -> RegisteredKernel:
    """Return the fastest of ``kernels`` for this call, from the record or by timing them now.

    Raises:
        KernelError: a kernel failed while it was timed, otherwise than for want of memory.
    """
    if len(kernels) == 1:
        return kernels[0]
    by_name = {kernel.name: kernel for kernel in kernels}
    hashed = contract_hash([("torch", torch.__version__), *((kernel.name, kernel.function) for kernel in kernels)])

    def milliseconds(config: Config) -> float:
        kernel = by_name[config.constexprs["kernel"]]
        function: Any = kernel.function
        runnable = function.prepare(args, kwargs) if kernel.native else function
        return 1e3 * measure(runnable, args, kwargs, device)

    choice = tuning.decide(
        Identity(operator, _RECORDED_AS, hashed), [Config({"kernel": name}) for name in by_name], device_name(device),
        bucket(args, kwargs), milliseconds, capturing(),
    )  # fmt: skip
    return by_name[choice.config.constexprs["kernel"]]


def measure(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], device: str) -> float:
    """Return the median seconds of one call, on copies of the arguments, so that the caller's tensors are not written to."""
    copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (tuple(args), kwargs))
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def once(calls: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function(*copies[0], **copies[1])
        synchronize()
        return (time.perf_counter() - start) / calls

    with torch.no_grad():
        calls = max(1, int(_SECONDS / max(once(1), once(1), 1e-6)))
        return statistics.median(once(calls) for _ in range(_REPEATS))
