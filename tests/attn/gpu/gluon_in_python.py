"""Gluon kernels for Hopper in Python: warps are threads, buffers tensors, and products are made as late as they may be.

Gluon has no interpreter. What the backward for sm_90 uses of it is done here in float32 or as the kernel rounds, in a process of
its own, since modules of Triton's are replaced before the kernel is imported, under :func:`installed`. What is checked beside
numbers: that no result of a product is read before it was waited for, that TMA brings as many bytes as are expected, and that the
buffers of a product hold the same when it is begun and when it is waited for. TMA is late: what it loads is there some time after
it was begun, and until then something else; what it stores it reads when that is waited for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from ints_in_python import ADDRESSED, Int, number

_TURN = 2e-4  # seconds for which who arrives at a barrier lets others go on, as if its next step took long
_LATE = 4e-4  # seconds that TMA takes
_SLOW = 20.0  # seconds after which a barrier that is waited for is an error
_OTHER = 77  # what is in buffers that were not filled
_lock = threading.RLock()
_here = threading.local()


# ---- shared memory, barriers -----------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier."""

    def __init__(self, count):
        self.count = self.left = count
        self.bytes, self.phase = 0, 0
        self.changed = threading.Condition()

    def arrive(self, count=1, size=0):
        with self.changed:
            self.left -= count
            self.bytes += size
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.count, self.phase + 1
                self.changed.notify_all()
        time.sleep(_TURN)

    def wait(self, parity):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, _SLOW), "a barrier is waited for in vain"


class Shared:
    """A buffer in shared memory."""

    def __init__(self, x, barriers=None):
        self.x, self.barriers = x, barriers

    layout = None
    shape = property(lambda self: [Int(n) for n in self.x.shape])
    dtype = property(lambda self: self.x.dtype)

    def index(self, i):
        assert 0 <= i < self.x.shape[0]
        return self.barriers[int(i)] if self.barriers is not None else Shared(self.x[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, int(start), int(length)))

    def reshape(self, shape):
        return Shared(self.x.view(shape))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.x.view(-1).view(dtype).view([int(n) for n in shape]))

    def permute(self, order):
        return Shared(self.x.permute(order))

    def load(self, layout=None):
        return self.x.clone()

    def store(self, x):
        assert (x.dtype, x.shape) == (self.x.dtype, self.x.shape)
        self.x.copy_(x)


def _allocate(dtype, shape, layout):
    if layout == "barrier":
        return _Barriers(int(shape[0]))
    return Shared(torch.full([int(n) for n in shape], _OTHER, dtype=dtype))


class _Barriers(Shared):
    """A buffer of barriers, which are made when they are initialised."""

    def __init__(self, count):
        super().__init__(torch.empty(count, 1), [Barrier(1) for _ in range(count)])


def _init(barrier, count):
    barrier.__init__(int(count))


# ---- products --------------------------------------------------------------------------------------------------------


class Pending:
    """The result of a product that was begun."""

    def __init__(self, make):
        self.make, self.found = make, None
        _here.begun = [*getattr(_here, "begun", []), self]

    def finish(self):
        if self.make is not None:
            self.found, self.make = self.make(), None


def _settled(x):
    if isinstance(x, Pending):
        x.finish()
        return x.found
    return x


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    left = a.x if isinstance(a, Shared) else a.clone()
    begun = [_finite(x) for x in (left, b.x)]

    def make():
        before = _settled(acc)
        assert all(map(torch.equal, begun, (_finite(left), _finite(b.x)))), (
            "the buffers of a product are filled while it is made"
        )
        found = left.float() @ b.x.float()
        assert before.shape == found.shape
        return found + before if use_acc else found

    return Pending(make)


def _finite(x):
    """A copy with zeros in place of what is not finite, as kernels do it while products are made of that."""
    return torch.where(x.isfinite(), x, 0)


def warpgroup_mma_wait(count, deps):
    begun = _here.begun
    for each in begun[: len(begun) - int(count)]:
        each.finish()
    _here.begun = begun[len(begun) - int(count) :] if count else []
    for each in deps:
        assert not isinstance(each, Pending) or each.make is None, "a result is read that was not waited for"
    found = [_settled(each) for each in deps]
    return found[0] if len(found) == 1 else found


# ---- TMA and memory --------------------------------------------------------------------------------------------------


class Descriptor:
    """A tensor that TMA moves blocks of."""

    def __init__(self, x, block):
        self.x, self.dtype, self.layout = x, x.dtype, None
        size = torch.Size(block).numel() * x.element_size()
        self.block_type = types.SimpleNamespace(shape=[Int(n) for n in block], nbytes=size)

    def part(self, at):
        pairs = list(zip(map(int, at), self.block_type.shape, self.x.shape, strict=True))
        there = tuple(slice(min(a, n), max(min(a + size, n), 0)) for a, size, n in pairs)
        return self.x[there], tuple(slice(0, max(0, min(size, n - a))) for a, size, n in pairs)


_loads = ThreadPoolExecutor(16)


def _to_shared(descriptor, at, barrier, buffer):
    found, there = descriptor.part(at)
    buffer.x.fill_(_OTHER)

    def load():
        time.sleep(_LATE)
        brought = torch.zeros(descriptor.block_type.shape, dtype=descriptor.dtype)
        brought[there] = found
        buffer.x.copy_(brought.view(buffer.x.shape))
        barrier.arrive(0, -descriptor.block_type.nbytes)

    _loads.submit(load)


def _to_global(descriptor, at, buffer):
    found, there = descriptor.part(at)
    _here.stores.append(lambda: found.copy_(buffer.x.view(descriptor.block_type.shape)[there]))


def reduce_add(descriptor, at, buffer):
    found, there = descriptor.part(at)
    _here.stores.append(lambda: found.add_(buffer.x[there]))


def _store_wait(pendings):
    count = len(_here.stores) - int(pendings)
    time.sleep(_LATE if count > 0 else 0)
    for each in _here.stores[: max(count, 0)]:
        with _lock:
            each()
    _here.stores = _here.stores[max(count, 0) :]


class Pointer:
    """A place in a tensor's memory, or places."""

    def __init__(self, x, at=0):
        self.x, self.at = x, at

    def __add__(self, n):
        return Pointer(self.x, self.at + n)

    def to(self, dtype):
        """As a number."""
        with _lock:
            found = next(
                (n for n, each in ADDRESSED.items() if each.x is self.x and each.at == self.at), len(ADDRESSED)
            )
            return ADDRESSED.setdefault(Int(found), self) and Int(found)


def pointer(x):
    """The address of a tensor, of any strides."""
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return Pointer(x.as_strided((size,), (1,)))


def _load(pointer, mask=None, other=None, volatile=False):
    at = torch.as_tensor(pointer.at)
    there = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask, dtype=torch.bool)
    at, there = torch.broadcast_tensors(at, there)
    assert ((at >= 0) & (at < len(pointer.x)))[there].all(), "what is read is not in memory"
    found = torch.where(there, pointer.x[torch.where(there, at, 0).long()], 0 if other is None else int(other))
    return Int(found.item()) if found.ndim == 0 else found


def _atomic_add(pointer, by, sem=None):
    with _lock:
        found = Int(pointer.x[pointer.at].item())
        pointer.x[pointer.at] += by
        return found


def _store(pointer, value):
    with _lock:
        pointer.x[pointer.at] = value


# ---- the language ----------------------------------------------------------------------------------------------------


def _asm(text, registers, given, dtype=None, is_pure=None, pack=None):
    if "ex2" in text:
        return torch.exp2(given[0])
    if "bar.sync 8" in text:
        _here.meeting.wait(_SLOW)
    if "wait_group" in text:
        _store_wait(0)
    return Int(0)


def _specialize(partitions, warps, registers):
    kept = {name: getattr(_here, name) for name in ("program", "programs")}
    meeting, wrong = threading.Barrier(2), []

    def run(function, given):
        _here.__dict__.update(kept, meeting=meeting, begun=[], stores=[])
        try:
            function(*given)
            assert not _here.stores
            assert not _here.begun or all(each.make is None for each in _here.begun)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _SLOW)
        assert not thread.is_alive()
    _here.wrong += wrong


def _where(condition, a, b):
    if isinstance(condition, torch.Tensor):
        return torch.where(condition != 0, a, b)
    return number(a) if condition else number(b)


def _minimum(a, b):
    if isinstance(b, torch.Tensor):
        return b.clamp(max=int(a))
    return Int(min(a, b))


def _decorator(function=None, **options):
    return (lambda f: f) if function is None else function


def _language():
    def full(shape, value, dtype, layout=None):
        return torch.full([int(n) for n in shape], value, dtype=dtype)

    layouts = (
        "NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout", "DistributedLinearLayout",
        "SwizzledSharedLayout", "NVMMASharedLayout",
    )  # fmt: skip
    gl = types.ModuleType("gl")
    gl.__dict__.update(
        {name: lambda *a, **k: "layout" for name in layouts},
        constexpr=number, tensor=object, shared_memory_descriptor=object, pointer_type=lambda t: t,
        float32=torch.float32, int8=torch.int8, int32=torch.int32, int64=torch.int64,
        program_id=lambda axis: Int(_here.program), num_programs=lambda axis: Int(_here.programs),
        static_range=range, to_tensor=number, full=full, barrier=lambda: None,
        zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
        arange=lambda a, b, layout=None: torch.arange(int(a), int(b), dtype=torch.int32),
        where=_where, abs=torch.abs, max=lambda x, axis: Int(x.max().item()), sum=lambda x, axis: Int(x.sum().item()),
        minimum=_minimum, maximum=lambda a, b: Int(max(a, b)),
        convert_layout=lambda x, layout, assert_trivial=False: x, split=lambda x: x.unbind(-1),
        allocate_shared_memory=_allocate, warp_specialize=_specialize, inline_asm_elementwise=_asm,
        atomic_add=_atomic_add, store=_store, load=_load,
    )  # fmt: skip
    return gl


def _modules():
    """Gluon's modules by name."""
    gl, gluon = _language(), types.ModuleType("gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = _decorator, _decorator, gl
    hopper, inner = types.ModuleType("hopper"), types.ModuleType("_core")
    hopper.mbarrier = types.SimpleNamespace(
        init=_init, MBarrierLayout=lambda: "barrier", arrive=lambda barrier, count: barrier.arrive(int(count)),
        wait=lambda barrier, parity, pred=True: barrier.wait(int(parity)) if pred else None,
        expect=lambda barrier, size: barrier.arrive(1, int(size)),
    )  # fmt: skip
    hopper.tma = types.SimpleNamespace(
        async_copy_global_to_shared=_to_shared, async_copy_shared_to_global=_to_global, store_wait=_store_wait
    )
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = warpgroup_mma, warpgroup_mma_wait
    inner.builtin = _decorator
    names = {"": gluon, ".language": gl, ".language._core": inner, ".language.nvidia.hopper": hopper}
    return {f"triton.experimental.gluon{name}": module for name, module in names.items()}


@contextlib.contextmanager
def installed():
    """Modules that are imported meanwhile find these functions in the place of Gluon's. For a process of its own."""
    import triton.experimental.gluon.language.nvidia.hopper
    import triton.language.core as core

    modules = _modules()
    kept, aggregate, package = {name: sys.modules[name] for name in modules}, core._aggregate, triton.experimental
    sys.modules.update(modules)
    package.gluon, core._aggregate = modules["triton.experimental.gluon"], _decorator
    try:
        yield
    finally:
        sys.modules.update(kept)
        package.gluon, core._aggregate = kept["triton.experimental.gluon"], aggregate
    torch.Tensor.type = property(lambda x: types.SimpleNamespace(layout="layout"))


def plain(function, **others):
    """A function of Triton's as one of Python, which finds ``others`` by their names, and this language as ``tl``."""
    python = function.fn
    known = {**python.__globals__, "tl": _language(), **others}
    return types.FunctionType(python.__code__, known, python.__name__, python.__defaults__)


def run(kernel, programs, **given: Any):
    """Run all programs of a kernel at once."""
    wrong: list[BaseException] = []

    def one(program):
        _here.__dict__.update(program=program, programs=programs, wrong=wrong)
        kernel(**given)

    threads = [threading.Thread(target=one, args=(program,), daemon=True) for program in range(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * _SLOW)
        assert not thread.is_alive()
    if wrong:
        raise wrong[0]
