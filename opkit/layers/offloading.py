"""Copies of what a forward keeps for its backward to host memory, and back, while kernels run.

Each call of a layer is a region. What it keeps is copied to pinned memory on a stream of its own, storage by storage, so that
views of one tensor are copied once. The copies may take until the end of the next region, whose kernels run at the same time:
then the stream of the kernels waits for them, and the memory on the GPU is free. The backward of a region first starts the
copies that the region before needs.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from opkit.errors import CheckpointError
from opkit.layers import torch_private as private
from opkit.op.torch_compile import disable_dynamo

MIN_BYTES = 1 << 16
"""Smaller tensors stay on the GPU."""

_MAX_UNUSED = 4  # a storage this much larger than a tensor in it is not moved as a whole
log = logging.getLogger("opkit.layers")


class _Thread(threading.local):
    region: Region | None = None  # that runs
    last: Callable[[], Region | None] = staticmethod(lambda: None)  # the last one that ended, weakly


_thread = _Thread()
_streams: dict[torch.device, torch.cuda.Stream] = {}


def moving(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same, and keeps in host memory what it keeps for its backward."""
    return functools.partial(_run, function)


@private.graph_break
def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = Region(args, kwargs)
    region.begin()
    try:
        with torch.autograd.graph.saved_tensors_hooks(hold, _unpack):
            return function(*args, **kwargs)
    finally:
        region.end()


def last() -> Region | None:
    """Return the region that ended last in this thread, if something keeps it."""
    return _thread.last()


@disable_dynamo
def hold(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Keep a tensor, in host memory if the region says so; return the function that returns it if it was not written to."""
    version = tensor._version
    moved = None if _thread.region is None else _thread.region.keep(tensor)
    held = private.detached(tensor) if moved is None else None  # with its history, the graph would keep itself alive
    original = weakref.ref(tensor)

    def get() -> torch.Tensor:
        now = original() if held is None else held
        if now is not None and now._version != version:
            raise CheckpointError(
                f"a value of shape {tuple(now.shape)} was kept for the backward and has been written to since. "
                "Write to a copy of it, or choose another policy, such as 'recompute_all'."
            )
        return private.detached(held) if held is not None else moved()  # pyright: ignore[reportOptionalCall]

    return get


@disable_dynamo
def _unpack(get: Callable[[], torch.Tensor]) -> torch.Tensor:
    return get()


class Region:
    """A call of a layer, and what it keeps in host memory."""

    @disable_dynamo
    def __init__(self, args: Any, kwargs: Any) -> None:
        self.before, self.outer = _thread.last, _thread.region
        self.moved: dict[tuple[Any, ...], _Moved] = {}
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor) and private.is_plain(t)]
        # others hold these as well, such as masks
        self.stays = {private.storage_address(t) for t in given if t.is_leaf or not t.requires_grad}
        if not any(t.is_cuda for t in given):
            _remark()

    @disable_dynamo
    def begin(self) -> None:
        """Become the region that runs in this thread."""
        _thread.region = self

    def keep(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Move a tensor to the host, and return the function that returns it; None if it stays on the GPU."""
        if not self._moves(tensor):
            return None
        whole, size = tensor.untyped_storage().nbytes(), tensor.element_size()
        start = tensor.storage_offset() * size
        end = start + size * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        if whole <= _MAX_UNUSED * (end - start):  # other views of it are kept, too
            start, end = 0, whole
        key = (private.storage_address(tensor), tensor._version, start, end)
        if key not in self.moved:
            with private.plainly():
                self.moved[key] = _Moved(private.bytes_of(tensor)[start:end])
        moved = self.moved[key]
        moved.views += 1
        moved.waiting += 1
        layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset() - start // size

        def get() -> torch.Tensor:
            before = self.before()
            with private.plainly():
                if before is not None:
                    before.fetch()
                return moved.view(*layout)

        return get

    def _moves(self, tensor: torch.Tensor) -> bool:
        if not private.is_plain(tensor) or not tensor.is_cuda or tensor.nbytes < MIN_BYTES:
            return False
        whole = tensor if tensor._base is None else tensor._base
        is_parameter = whole.is_leaf and whole.requires_grad
        return not is_parameter and private.storage_address(tensor) not in self.stays

    @disable_dynamo
    def end(self) -> None:
        """Wait for the copies of the region before: their memory on the GPU is free from then on."""
        _thread.region = self.outer
        before = self.before()
        if before is not None:
            for moved in before.moved.values():
                moved.release()
        _thread.last = weakref.ref(self)
        self.outer = None

    @property
    def nbytes(self) -> int:
        """The bytes in host memory."""
        return sum(moved.host.nbytes for moved in self.moved.values())

    def fetch(self) -> None:
        """Start the copies to the GPU."""
        for moved in self.moved.values():
            moved.fetch()


class _Moved:
    """Memory of the GPU that is copied to the host.

    Attributes:
        on_gpu: the bytes on the GPU, while they are there.
        host: the bytes on the host.
        copied: the end of the last copy, to the host or back.
        views: how many tensors lie there.
        waiting: how many of them the backward has not asked for.
    """

    def __init__(self, on_gpu: torch.Tensor) -> None:
        self.on_gpu: torch.Tensor | None = on_gpu
        self.device = on_gpu.device
        self.host = torch.empty(on_gpu.shape, dtype=torch.uint8, pin_memory=True)
        self.copied = _copy(self.host, on_gpu, self.device)
        self.views = self.waiting = 0

    def release(self) -> None:
        """Let the current stream wait for the copy, and let go of the memory on the GPU."""
        if self.on_gpu is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.on_gpu = None

    def fetch(self) -> torch.Tensor:
        """Start the copy to the GPU, unless the bytes are there."""
        if self.on_gpu is None:
            self.on_gpu = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
            self.copied = _copy(self.on_gpu, self.host, self.device)
            # if no backward asks for it, the memory is free before the copy has ended
            freed = weakref.finalize(self, torch.cuda.current_stream(self.device).wait_event, self.copied)
            freed.atexit = False
        return self.on_gpu

    def view(self, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], offset: Any) -> torch.Tensor:
        """Return a tensor that lies there."""
        storage = self.fetch().untyped_storage()
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        self.waiting -= 1
        if self.waiting == 0:
            self.waiting, self.on_gpu = self.views, None
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, offset, shape, strides)


def _copy(into: torch.Tensor, of: torch.Tensor, device: torch.device) -> Any:
    """Copy on the stream for copies, after what the current stream does now; return the end of the copy."""
    side = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        into.copy_(of, non_blocking=True)
    return side.record_event()


@functools.cache
def _remark() -> None:
    log.warning("opkit.offload: the tensors are not on a GPU, so nothing is moved to host memory.")
