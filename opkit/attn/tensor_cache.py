"""A cache of values that are computed from tensors; entries live as long as these tensors live and are not written to.

A mask's tensors serve many calls: each layer's, forward and backward. What is computed from them, such as the sequence number of
each token and lists of live tiles, is computed once and found again by the tensors' identity, version and address.

Writes that torch does not see cannot be detected. Memory that NumPy or another process shares is not cached; code that writes
behind torch's back otherwise must call ``torch.autograd.graph.increment_version``.
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
_MAX_TENSORS = 64  # in the cache of `get_or_compute`
_DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class _CacheEntry(NamedTuple, Generic[T]):
    value: T
    sources: _Refs


class TensorCache(Generic[T]):
    """At most ``max_size`` values computed from tensors, evicted by last use; a value is dropped when one of its tensors dies.

    A cached value must not hold the tensors that it was computed from: a view does by its ``_base``, ``view.detach()`` does not.

    >>> sums, x = TensorCache(2), torch.ones(3, dtype=torch.int64)
    >>> sums.get_or_create("sum", [x], lambda: x.sum().item()), sums.get_or_create("sum", [x], lambda: 0)
    (3, 3)
    >>> del x
    >>> len(sums)
    0
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._entries: collections.OrderedDict[_Key, _CacheEntry[T]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._latest = 0  # the id of the entry that was found last
        self._dead_keys: collections.deque[_Key] = collections.deque()  # keys whose tensors died

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()

    def get_or_create(self, name: Hashable, sources: Sequence[Tensor], create: Callable[[], T], stream: int = 0) -> T:
        """Return the value cached for these very tensors in their present state; else create and cache it.

        Args:
            name: identifies the value, with everything that it depends on apart from ``sources``.
            sources: tensors, all :func:`cacheable`.
            create: computes the value; called without the lock.
            stream: the handle from :func:`stream_of` of the stream on which ``create`` works.
        """
        key = (name, stream, *[(id(x), x._version, x.data_ptr(), x.shape) for x in sources])
        entry = self._entries.get(key)
        if entry is None or not all([ref() is x for ref, x in zip(entry.sources, sources, strict=True)]):  # noqa: C419
            on_death = functools.partial(self._invalidate, key)
            entry = _CacheEntry(create(), tuple([weakref.ref(x, on_death) for x in sources]))
            self._store(key, entry)
        elif id(entry) != self._latest:
            self._latest = id(entry)
            with self._lock:
                if key in self._entries:
                    self._entries.move_to_end(key)
        if self._dead_keys:
            self._sweep()
        return entry.value

    def _store(self, key: _Key, entry: _CacheEntry[T]) -> None:
        dropped = []  # destroyed after the lock is released, since other entries may be computed from these values
        with self._lock:
            dropped.append(self._entries.pop(key, None))
            self._entries[key] = entry
            while len(self._entries) > self._max_size:
                dropped.append(self._entries.popitem(last=False))
        self._sweep()

    def _invalidate(self, key: _Key, _: object) -> None:
        """Drop the entry of a tensor that died; if this thread holds the lock just now, its holder sweeps afterwards."""
        self._dead_keys.append(key)
        self._sweep()

    def _sweep(self) -> None:
        while self._dead_keys and self._lock.acquire(blocking=False):
            dropped = []
            try:
                while self._dead_keys:
                    dropped.append(self._entries.pop(self._dead_keys.popleft(), None))
            finally:
                self._lock.release()


def cacheable(x: Tensor) -> bool:
    """Return whether writes to ``x`` are seen: not those to inference tensors, nor to memory shared with NumPy or a process.

    With ``OPKIT_KEEP_MASKS=0`` no tensor is.
    """
    if x.is_inference() or not config.get().keep_masks:
        return False
    storage = x.untyped_storage()
    return storage.resizable() and not (x.is_cpu and storage.is_shared())


def stream_of(device: torch.device) -> int | None:
    """Return the handle of a device's current stream, 0 where it has none; None while a CUDA graph is captured.

    What is computed during a capture belongs to the graph, and is computed again at each replay.
    """
    if device.type != "cuda":
        return 0
    return None if private.capturing() else private.current_stream(device.index)


_tensors: TensorCache[Tensor] = TensorCache(_MAX_TENSORS)


def get_or_compute(name: Hashable, sources: Sequence[Tensor], compute: Callable[[], Tensor]) -> Tensor:
    """Return the result of ``compute``, or the cached one for these very tensors of integers or bools in their present state.

    The cache is bypassed where skipped operations could be noticed (in compilers, under modes and transforms), and where
    ``sources`` are not plain tensors whose writes are seen.

    Args:
        name: identifies the result, with everything that it depends on apart from ``sources``.
        sources: one or more tensors of one device.
        compute: returns a view of one of ``sources``, or a new tensor.
    """
    if torch.compiler.is_compiling() or operations_are_observed():
        return compute()
    for x in sources:
        if type(x) is not Tensor or x.layout is not torch.strided or x.dtype not in _DTYPES or not cacheable(x):
            return compute()
    stream = stream_of(sources[0].device) if sources[0].is_cuda else 0
    if stream is None:
        return compute()
    return _tensors.get_or_create(name, sources, functools.partial(_detached, compute), stream)


def operations_are_observed() -> bool:
    """Return whether something in this thread sees each operation, and may record it."""
    modes = private.dispatch_modes() or private.function_modes() or private.jit_tracing()
    return bool(modes) or private.functorch_level() is not None


def _detached(compute: Callable[[], Tensor]) -> Tensor:
    """Return the result, usable in and out of inference mode, without the base that a view keeps alive."""
    with torch.inference_mode(False):
        return compute().detach()
