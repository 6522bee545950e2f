"""Decoding for sm_90a in CUDA C++ (``cuda/decode.cuh``): which calls are for it, and a call of it.

It is for up to 64 rows of a head of keys, or 32 of wide ones. In the kernel in Triton all warps of a block take part in each
product, and wait for one another. Here, of few rows, each warp has keys of its own, which it loads itself, by TMA, and meets the
others when all is summed up: neither Triton nor Gluon can express that. More rows are the columns of a warpgroup's products
(``cuda/decode_together.cuh``), a warp loads, and products of one step go on beside the softmax of the next. Calls that are short
for the GPU's memory gain the most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit import config
from opkit.attn.allocation import allocate_scratch, overwritten, rows
from opkit.attn.calls import Call, dtypes_and_shapes, predicate
from opkit.attn.gpu import plans
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.hopper import forward as hopper
from opkit.attn.gpu.hopper import library
from opkit.attn.gpu.hopper.library import Rows
from opkit.errors import KernelError
from opkit.op import torch_private as private
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME = "split_cuda"
HEADS = (64, 128, 256)  #: channels
MOST_ROWS = {64: 64, 128: 64, 256: 32}
"""Of a head of keys, its queries' heads times their queries, by the channels of a head."""
_FAST_ROWS = {64: 32, 128: 16, 256: 16}
"""Up to how many it is the faster one, of keys that do not lie in pages; of others see :func:`_faster`."""
_LONG = 1024  #: keys of a split that are many
MOST_SPLITS = 128
MOST = 65535  #: heads of keys, and sequences
_PRIORITY = 3  # above the kernel in Triton
_WARPS = 8  #: of a block
_STEP = 4096  #: elements of the keys that a warp reads at once
_INTS = ("batch", "heads", "key_heads", "group", "queries", "head_size", "first", "seen", "splits", "device")


class Numbers(ctypes.Structure):
    """Whole numbers, and whether they have 64 bits."""

    _fields_ = (("data", ctypes.c_void_p), ("wide", ctypes.c_int))


class Pages(ctypes.Structure):
    """The pages of a call; none without."""

    _fields_ = (
        *((name, Numbers) for name in ("table", "lengths", "starts")),
        ("row", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("sequences", "count", "size", "keys", "lower", "upper")),
    )


class Problem(ctypes.Structure):
    """A call, as ``cuda/decode_parts.cuh`` says."""

    _fields_ = (
        *((name, Rows) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("lse", "sinks", "partial")),
        *((name, ctypes.c_int) for name in _INTS),
        ("factor", ctypes.c_float),
        ("pages", Pages),
    )


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel."""
    op.register_kernel("cuda", decode, when=predicate(Call, takes), name=NAME, priority=_PRIORITY, trusted=True)


def takes(call: Call) -> bool:
    """Whether a call is for :func:`decode`: few rows and some keys, on a GPU of compute capability 9.0 beside an nvcc."""
    if (
        not hopper.on_hopper(call.q)
        or config.get().batch_invariant
        or not fits(call)
        or call.k.shape[2] < decoding.MANY
        or not _faster(call)
    ):
        return False
    return all(hopper.describable(each) for each in call[:3]) and library.there("decode", call.q.dtype)


def _faster(call: Call) -> bool:
    """Whether it is the faster one: of few rows; of more where wide heads are divided, or few tiles of many keys."""
    rows, channels = _height(call), call.q.shape[3]
    if rows <= _FAST_ROWS[channels]:
        return True
    splits, seen = _splits(call), (_seen(call) or (0, 0))[1]
    return splits > 1 if channels == 256 else channels == 128 and splits >= 8 and seen >= splits * _LONG


def _splits(call: Call) -> int:
    """Splits of each of its tiles."""
    tiles, seen = call.k.shape[0] * call.k.shape[1], (_seen(call) or (0, 0))[1]
    return splits_of(tiles, seen, call.q.shape[3], hopper.processors(call.q.device))


def fits(call: Call) -> bool:
    """Whether :func:`decode` can compute a call."""
    if not hopper.fits(call) or call.q.shape[3] != call.v.shape[3] or call.q.shape[3] not in HEADS:
        return False
    shape = plans.shape_of(tuple(call.mask), ())
    few = _height(call) <= MOST_ROWS[call.q.shape[3]] and max(call.k.shape[:2]) <= MOST
    return few and call.softcap == 0 and not shape.mask and not shape.lengths and _seen(call) is not None


def _height(call: Call) -> int:
    """Rows of a head of keys."""
    return call.q.shape[2] * (call.q.shape[1] // call.k.shape[1])


def _seen(call: Call) -> tuple[int, int] | None:
    """The keys that all queries see: the first, and how many; None where queries see different ones."""
    queries, keys, shape = call.q.shape[2], call.k.shape[2], plans.shape_of(tuple(call.mask), ())
    if not shape.banded or (shape.lower <= 1 - queries and shape.upper >= keys - 1):
        return 0, keys
    first = max(shape.lower, 0)
    return None if queries > 1 else (min(first, keys), max(min(shape.upper + 1, keys) - first, 0))


@PreparedKernel
def decode(*given: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator's result and log-sum-exp, of its own arguments.

    It takes bfloat16 and float16; heads of 64, 128 and 256; up to 64 queries of heads that share keys, 32 of heads of 256, all
    of which see the same keys, in one piece; a positive scale; sinks. Probabilities are rounded to q's dtype before they are
    multiplied with the values. Keys and values that are hidden are not read. The number of splits follows from shapes and the
    GPU alone, and splits are merged in order: equal calls give equal bits. Nothing waits for the GPU.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no nvcc. One that refuses the source is warned of, and the kernel in Triton is called.
    """
    call = Call(*given)
    decoding.refuse_batch_invariance("opkit::attention")
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}, dropout_p={call.dropout_p}: it takes heads of {HEADS} and "
            f"as many rows of a head of keys as {MOST_ROWS} says, and queries that see the same keys. Leave the choice to "
            "opkit, or force kernel='split'."
        )
    return _prepared(call)


def _prepared(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    launch = library.launcher_or_none("decode", call.q.dtype)
    if launch is None:
        return decoding.decode.prepare(*call)
    described = all(hopper.describable(each) for each in call[:3])
    made = rows(call.q, call.v.shape[3], call.out_is_bshd)
    new_out, new_lse = overwritten(made), overwritten(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    common, gpu = _problem(call, made), call.q.get_device()

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sinks, problem = *given[:3], given[5], Problem.from_buffer_copy(common)
        at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not described or (at[0] | at[1] | at[2]) % 16:
            q, k, v = (each.clone(memory_format=torch.contiguous_format) for each in (q, k, v))
            at = q.data_ptr(), k.data_ptr(), v.data_ptr()
            problem.q, problem.k, problem.v = map(library.rows_of, (q, k, v))
        problem.q.data, problem.k.data, problem.v.data = at
        return launched(launch, problem, new_out(), new_lse(), sinks, gpu)

    return run


def launched(
    launch: library.Launcher, problem: Problem, out: Tensor, lse: Tensor, sinks: Tensor | None, gpu: int
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse``, written by a launch; ``problem`` has what else it needs, but for the room of what is merged."""
    problem.out.data, problem.lse = out.data_ptr(), lse.data_ptr()
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
        problem.sinks = sinks.data_ptr()
    if problem.splits > 1:  # of each row and split its sums, its maximum and the sum of its weights
        partial = allocate_scratch(lse, problem.splits * lse.numel() * (problem.head_size + 2))
        problem.partial = partial.data_ptr()
    launch(problem, private.current_stream(gpu))
    return out, lse


def _problem(call: Call, out: Tensor) -> Problem:
    """What is the same for all calls like this one."""
    q, k, v = call[:3]
    first, seen = _seen(call) or (0, 0)
    numbers = {
        "batch": q.shape[0], "heads": q.shape[1], "key_heads": k.shape[1], "group": q.shape[1] // k.shape[1],
        "queries": q.shape[2], "head_size": q.shape[3], "first": first, "seen": seen, "device": q.get_device(),
        "factor": call.scale * hopper.LOG2E, "splits": _splits(call),
    }  # fmt: skip
    return Problem(*map(library.rows_of, (q, k, v, out)), **numbers)


def splits_of(tiles: int, seen: int, channels: int, processors: int) -> int:
    """Splits of a tile: as many as the GPU has multiprocessors for, but no more than all warps of them have keys for.

    Two where one each would leave more than a sixth of the multiprocessors without a tile; one of more tiles than there are
    multiprocessors.

    >>> splits_of(8, 8192, 128, 132), splits_of(8, 1024, 128, 132), splits_of(1, 256, 128, 132)
    (16, 4, 1)
    >>> splits_of(72, 8192, 128, 132), splits_of(128, 8192, 128, 132)
    (2, 1)
    """
    room = max(processors // tiles, 2 if 6 * tiles < 5 * processors else 1)
    return max(1, min(room, seen * channels // (_WARPS * _STEP), MOST_SPLITS))
