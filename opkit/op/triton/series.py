"""Make several launches by hand by one call, for Python kernels of small calls, whose time is the processor's."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opkit.op import torch_private as private
from opkit.op.layout import program as layout_program
from opkit.op.native.unfilled import fills, unfilled
from opkit.op.triton.launch import PreparedLaunch, recorded

if TYPE_CHECKING:
    from opkit import _core


class Scratch(NamedTuple):
    """A tensor that kernels pass one to another and nobody else sees: dense, not filled."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PreparedSeries:
    """Prepared launches that are made one after another, each time the same ones.

    Each takes its tensors by name: from those of the call, none of which is None; from the results; or from the scratch tensors,
    which are allocated for each call and last as long as the launches. A name that is among none of them is None. What is said
    of :class:`~opkit.op.triton.launch.PreparedLaunch` holds for all of them.

    Args:
        launches: in order.
        names: of the tensors of each call, in order.
        results: by name, each a function that makes a tensor, of the same sizes, strides and dtype each time, not filled.
        scratch: by name.
        others: other names of these tensors, where a kernel has one tensor by two names.

    >>> # series = PreparedSeries([square, add], ("x",), {"out": make}, {"squares": Room((1024,), torch.float32)})
    >>> # (out,) = series(x)  # as out = make(); squares = x.new_empty(1024); square(x, squares); add(x, squares, out)
    """

    def __init__(
        self,
        launches: Sequence[PreparedLaunch],
        names: Sequence[str],
        results: Mapping[str, Callable[[], torch.Tensor]],
        scratch: Mapping[str, Scratch],
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

    def _one_by_one(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tensors_by_name = dict(zip(self.names, tensors, strict=True))
        results = {name: make() for name, make in self.results.items()}
        device = tensors[0].device
        scratch = {
            name: unfilled(buffer.shape, None, dtype=buffer.dtype, device=device)
            for name, buffer in self.scratch.items()
        }
        tensors_by_name |= results | scratch
        tensors_by_name |= {other: tensors_by_name[name] for other, name in self.others.items()}
        for launch in self.launches:
            launch(*[tensors_by_name.get(name) for name in launch.names])
        if self._series is None:
            self._gpu = tensors[0].get_device()
            self._series = self._joined(tensors_by_name)  # last: other threads look at it first
        return tuple(results.values())

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
