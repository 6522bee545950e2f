"""The kinds of kernels that ``register_kernel`` takes.

The module of each kind of compiled kernel registers it here. Kernels in Python may be prepared once for all calls of the same
shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from opkit.errors import KernelError
from opkit.kernels.tuning.record_format import Identity
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch.selection import RegisteredKernel


class DeclaredKernel(Protocol):
    """What ``c_kernel``, ``triton_kernel`` and others return."""

    @property
    def name(self) -> str: ...


K = TypeVar("K", bound=Callable[..., Any] | DeclaredKernel)
Maker = Callable[[Operator, Any, str | None, str], RegisteredKernel]
_makers: dict[type, Maker] = {}


def register(kind: type, maker: Maker) -> None:
    """Take objects of class ``kind`` as kernels: ``maker(operator, object, device, name)`` returns the kernel."""
    _makers[kind] = maker


def make(operator: Operator, kernel: Any, device: str | None, name: str | None) -> RegisteredKernel:
    """Return the kernel of ``operator`` on ``device`` for an object that was passed to ``register_kernel``.

    Raises:
        KernelError: the object is not a kernel, or cannot run on that device.
    """
    for kind, maker in _makers.items():
        if isinstance(kernel, kind):
            return maker(operator, kernel, device, name or kernel.name)
    if not callable(kernel):
        raise KernelError(f"{operator.name}: a kernel must be callable, got {kernel!r}")
    chosen = name or operator.kernels.free_name(getattr(kernel, "__name__", ""), device)
    # with flattened arguments, calls of equal shapes can still differ in what the codecs hold
    prepared = isinstance(kernel, PreparedKernel) and not operator.signature.flattened
    return RegisteredKernel(chosen, device, operator.flat(kernel), prepared=prepared)


class PreparedKernel:
    """A kernel whose ``prepare`` takes a call's arguments and returns a function for calls like it.

    Calls are alike if their tensors have the same sizes, strides, dtypes and devices and their other arguments are equal,
    numbers and lists included. ``prepare`` computes once what follows from these. The function that it returns must not hold
    on to the tensors that ``prepare`` received. Register it with ``register_kernel`` as any other kernel.

    Args:
        prepare: the function.
        notes: takes the operator's arguments, and returns what the kernel would choose for the call and why, for ``select``.

    >>> @PreparedKernel
    ... def scaled(x, factor):
    ...     factors = [factor] * len(x)
    ...     return lambda x, _: [a * b for a, b in zip(x, factors)]
    >>> scaled([1, 2], 3)
    [3, 6]
    """

    def __init__(
        self, prepare: Callable[..., Callable[..., Any]], notes: Callable[..., Sequence[str]] = lambda *_: ()
    ) -> None:
        self.prepare, self.notes = prepare, notes
        functools.update_wrapper(self, prepare, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        return self.prepare(*args, **kwargs)(*args, **kwargs)


class TunedKernel(PreparedKernel):
    """A prepared kernel that chooses among configurations by :mod:`opkit.kernels.tuning.tuning`.

    Args:
        prepare, notes: as for :class:`PreparedKernel`.
        examples: the calls that ``opkit tune`` tunes it for, in the form of :func:`opkit.triton_kernel`'s.
        identities: returns the identities under which the results of its Triton kernels are recorded.
    """

    def __init__(
        self,
        prepare: Callable[..., Callable[..., Any]],
        examples: Sequence[Mapping[str, Any]],
        identities: Callable[[], Sequence[Identity]],
        notes: Callable[..., Sequence[str]],
    ) -> None:
        super().__init__(prepare, notes)
        self.examples, self.identities = examples, identities


def devices_of(operator: str, device_types: str | Sequence[str] | None) -> list[str | None]:
    """Return the device types that a kernel is registered for; None stands for every one.

    Raises:
        KernelError: torch knows no such device type.
    """
    listed = [device_types] if device_types is None or isinstance(device_types, str) else device_types
    devices: list[str | None] = list(dict.fromkeys(listed))
    for device in filter(None, devices):
        try:
            private.dispatch_key_of(device)
        except RuntimeError as error:
            raise KernelError(
                f"{operator}: {device!r} is not a device type of torch's. Examples: cpu, cuda."
            ) from error
    return devices
