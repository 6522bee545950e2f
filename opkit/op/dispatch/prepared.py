"""Kernels that are made ready once for all calls of the same shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opkit.kernels.tuning.record_format import Identity


class PreparedKernel:
    """A kernel whose ``prepare`` takes a call's arguments and gives a function for calls like it.

    Alike are calls whose tensors have the same sizes, strides, dtypes and devices and whose other arguments are equal, numbers
    and lists included: so that what follows from these need not be found again. The function may keep none of the tensors
    that ``prepare`` was given. Register it with ``register_kernel`` as any other kernel.

    >>> @PreparedKernel
    ... def scaled(x, factor):
    ...     factors = [factor] * len(x)
    ...     return lambda x, _: [a * b for a, b in zip(x, factors)]
    >>> scaled([1, 2], 3)
    [3, 6]
    """

    def __init__(self, prepare: Callable[..., Callable[..., Any]]) -> None:
        self.prepare = prepare
        functools.update_wrapper(self, prepare, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        return self.prepare(*args, **kwargs)(*args, **kwargs)


class TunedKernel(PreparedKernel):
    """A prepared kernel that chooses among configurations by :mod:`opkit.kernels.tuning.tuning`.

    Args:
        prepare: as of any prepared kernel.
        examples: calls for which ``opkit tune`` has it choose, as those of :func:`opkit.triton_kernel`.
        identities: gives the Triton kernels that it chooses for, as their results are recorded.
        notes: says of a call, by the operator's arguments, what would be chosen and why; for ``select``.
    """

    def __init__(
        self,
        prepare: Callable[..., Callable[..., Any]],
        examples: Sequence[Mapping[str, Any]],
        identities: Callable[[], Sequence[Identity]],
        notes: Callable[..., Sequence[str]],
    ) -> None:
        super().__init__(prepare)
        self.examples, self.identities, self.notes = examples, identities, notes
