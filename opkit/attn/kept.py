"""What was made of tensors, kept while these live and are not written to.

A mask's tensors serve many calls: each layer's, forward and backward. What is derived of them, such as the numbers of packed
documents and lists of live tiles, is made once and found again by the tensors' identity, version and address.

Writes that torch is not told of cannot be seen. Memory that NumPy or another process knows is not trusted; who writes otherwise
behind torch's back says so with ``torch.autograd.graph.increment_version``.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from opkit import config
from opkit.op import torch_private as private

T = TypeVar("T")
_Key = tuple[Hashable, ...]
_Refs = tuple[weakref.ref[Tensor], ...]
_MOST = 64  # derived tensors
_DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class _Entry(NamedTuple, Generic[T]):
    made: T
    sources: _Refs


class Kept(Generic[T]):
    """Things made of tensors, at most ``most``, those found last; each is let go as soon as one of its tensors is.

    What is kept must not hold the tensors it was made of: a view does by its ``_base``, ``view.detach()`` does not.

    >>> sums, x = Kept(2), torch.ones(3, dtype=torch.int64)
    >>> sums.found_or("sum", [x], lambda: x.sum().item()), sums.found_or("sum", [x], lambda: 0)
    (3, 3)
    >>> del x
    >>> len(sums)
    0
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: collections.OrderedDict[_Key, _Entry[T]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._gone: collections.deque[_Key] = collections.deque()  # keys whose tensors died

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Let everything go."""
        with self._lock:
            self._entries.clear()

    def found_or(self, what: Hashable, sources: Sequence[Tensor], make: Callable[[], T], stream: int = 0) -> T:
        """What was made of these very tensors as they are now; else what ``make`` gives.

        Args:
            what: names the thing made, with all that it depends on beside ``sources``.
            sources: tensors, all :func:`trusted`.
            make: makes it; called without a lock.
            stream: that of :func:`stream_of` on which ``make`` works.
        """
        key = (what, stream, *[(id(x), x._version, x.data_ptr(), x.shape) for x in sources])
        found = self._find(key, sources)
        if found is None:
            gone = functools.partial(self._let_go, key)
            found = _Entry(make(), tuple([weakref.ref(x, gone) for x in sources]))
            self._keep(key, found)
        return found.made

    def _find(self, key: _Key, sources: Sequence[Tensor]) -> _Entry[T] | None:
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
        if self._gone:
            self._sweep()
        if found is not None:
            for ref, x in zip(found.sources, sources, strict=True):
                if ref() is not x:
                    return None
        return found

    def _keep(self, key: _Key, entry: _Entry[T]) -> None:
        dropped = []  # dies after the lock is free, since it may be what others were made of
        with self._lock:
            dropped.append(self._entries.pop(key, None))
            self._entries[key] = entry
            while len(self._entries) > self._most:
                dropped.append(self._entries.popitem(last=False))
        self._sweep()

    def _let_go(self, key: _Key, _: object) -> None:
        """A tensor died: perhaps within this thread's own hold of the lock, whose end then sweeps."""
        self._gone.append(key)
        self._sweep()

    def _sweep(self) -> None:
        while self._gone and self._lock.acquire(blocking=False):
            dropped = []
            try:
                while self._gone:
                    dropped.append(self._entries.pop(self._gone.popleft(), None))
            finally:
                self._lock.release()


def trusted(x: Tensor) -> bool:
    """Whether ``x`` says when it is written to: no tensor of inference mode, nor memory that NumPy or another process knows.

    With ``OPKIT_KEEP_MASKS=0`` none is trusted.
    """
    if x.is_inference() or not config.get().keep_masks:
        return False
    storage = x.untyped_storage()
    return storage.resizable() and not (x.is_cpu and storage.is_shared())


def stream_of(device: torch.device) -> int | None:
    """The handle of a device's current stream, 0 where it has none; None while a CUDA graph is captured.

    What is computed then is the graph's own, and is to be computed at each replay.
    """
    if device.type != "cuda":
        return 0
    return None if private.capturing() else private.current_stream(device.index)


_derived: Kept[Tensor] = Kept(_MOST)


def derived(what: Hashable, sources: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` computes, or what it computed of these very tensors of integers or bools as they are now.

    Nothing is kept or found where it could be seen that operations are left out (in compilers, under modes and transforms), or
    where ``sources`` are not plain tensors that say when they are written to.

    Args:
        what: names the result, with all that it depends on beside ``sources``.
        sources: one or more tensors of one device.
        make: computes it; a view of one of ``sources``, or a new tensor.
    """
    if torch.compiler.is_compiling() or _watched():
        return make()
    for x in sources:
        if type(x) is not Tensor or x.layout is not torch.strided or x.dtype not in _DTYPES or not trusted(x):
            return make()
    stream = stream_of(sources[0].device) if sources[0].is_cuda else 0
    return make() if stream is None else _derived.found_or(what, sources, functools.partial(_apart, make), stream)


def _watched() -> bool:
    """Whether something of this thread sees each operation, and perhaps records it."""
    modes = private.dispatch_modes() or private.function_modes() or private.jit_tracing()
    return bool(modes) or private.functorch_level() is not None


def _apart(make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` gives, fit for calls in inference mode and out of it, and without the base that a view keeps alive."""
    with torch.inference_mode(False):
        return make().detach()
