"""Cache what a function computed about its recent calls, keyed by a guard on their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from opkit.op import torch_private as private
from opkit.op.dispatch.fastcall import DirectCall
from opkit.op.operator import CustomOp

P = ParamSpec("P")
T = TypeVar("T")
_MAX_ENTRIES, _MAX_COUNTED = 4, 256
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class GuardedResult(DirectCall, Generic[T]):
    """A cached result: it holds for calls whose flags are equal and for whose tensors ``check`` is true."""

    __slots__ = ("check", "flags", "result")

    def __init__(self, flags: Any, check: Callable[..., bool], result: T) -> None:
        super().__init__()
        self.flags, self.check, self.result = flags, check, result


def bind(op: CustomOp[P, Any], binding: DirectCall, *args: P.args, **kwargs: P.kwargs) -> None:
    """Let ``binding`` run plain calls of ``op`` like this one directly, once one has run, until the operator changes."""
    op._dispatcher.fast.bind(binding, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]


class GuardedCache(Generic[T]):
    """A cache of the last few results that depend on sizes, strides, dtypes, devices and dispatch keys, and on flags.

    To look a result up, go through ``entries`` and compare; call :meth:`store` each time that there is none. An entry is a
    :class:`DirectCall` too, for :func:`bind`.

    >>> cache, x, y = GuardedCache(), torch.ones(2), torch.ones(3)
    >>> for _ in range(2):
    ...     cache.store((x, y), "sum", 5)
    >>> [entry.result for entry in cache.entries if entry.flags == "sum" and entry.check(y[:2], y)]
    [5]
    """

    def __init__(self) -> None:
        self.entries: list[GuardedResult[T]] = []
        self._counts: dict[Any, tuple[int, int]] = {}

    def store(self, tensors: Sequence[torch.Tensor], flags: Any, result: T) -> None:
        """Store ``result`` if calls like this one come often; after each eviction twice as many must come."""
        if not all([type(x) in _PLAIN_TYPES and x.layout is torch.strided for x in tensors]):  # noqa: C419
            return
        if len(self._counts) >= _MAX_COUNTED:
            self._counts.clear()
        key = (flags, *[(x.shape, x.dtype) for x in tensors])
        uses, patience = self._counts.get(key, (0, 2))
        self._counts[key] = (uses + 1, patience)
        if uses + 1 >= patience:
            self._counts[key] = (0, 2 * patience)
            check = private.tensor_guard(tensors, True)
            if check(*tensors):  # a guard refuses a tensor that is passed twice
                self.entries[:] = [GuardedResult(flags, check, result), *self.entries[: _MAX_ENTRIES - 1]]
