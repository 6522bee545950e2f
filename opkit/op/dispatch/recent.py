"""What was concluded of a function's last calls, to be found again by a guard on their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from opkit.op import torch_private as private
from opkit.op.dispatch.fastcall import Binding
from opkit.op.operator import CustomOp

P = ParamSpec("P")
T = TypeVar("T")
_MOST, _MOST_COUNTED = 4, 256
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class Known(Binding, Generic[T]):
    """``found`` holds for a call whose flags are equal and for whose tensors ``check`` is true."""

    __slots__ = ("check", "flags", "found")

    def __init__(self, flags: Any, check: Callable[..., bool], found: T) -> None:
        super().__init__()
        self.flags, self.check, self.found = flags, check, found


def bind(op: CustomOp[P, Any], binding: Binding, *args: P.args, **kwargs: P.kwargs) -> None:
    """Let ``binding`` run plain calls of ``op`` like this one directly, once there was one, until the operator changes."""
    op._dispatcher.fast.bind(binding, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]


class Recent(Generic[T]):
    """The last few conclusions from sizes, strides, dtypes, devices and dispatch keys of tensors, and from flags.

    To look one up, go through ``known`` and compare; to add one, :meth:`note` it each time that it was not found. What was
    found is a binding too, for :func:`bind`.

    >>> recent, x, y = Recent(), torch.ones(2), torch.ones(3)
    >>> for _ in range(2):
    ...     recent.note((x, y), "sum", 5)
    >>> [known.found for known in recent.known if known.flags == "sum" and known.check(y[:2], y)]
    [5]
    """

    def __init__(self) -> None:
        self.known: list[Known[T]] = []
        self._counts: dict[Any, tuple[int, int]] = {}

    def note(self, tensors: Sequence[torch.Tensor], flags: Any, found: T) -> None:
        """Remember ``found`` if calls like this one come often: each time it was forgotten, twice as many must come."""
        if not all([type(x) in _PLAIN_TYPES and x.layout is torch.strided for x in tensors]):  # noqa: C419
            return
        if len(self._counts) >= _MOST_COUNTED:
            self._counts.clear()
        key = (flags, *[(x.shape, x.dtype) for x in tensors])
        uses, patience = self._counts.get(key, (0, 2))
        self._counts[key] = (uses + 1, patience)
        if uses + 1 >= patience:
            self._counts[key] = (0, 2 * patience)
            check = private.tensor_guard(tensors, True)
            if check(*tensors):  # a guard refuses a tensor given twice
                self.known[:] = [Known(flags, check, found), *self.known[: _MOST - 1]]
