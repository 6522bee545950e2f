"""Decoding for sm_90a in CUDA C++ (``cuda/decode.cuh``): which calls are for it, and a call of it.

It is for up to 64 rows of a head of keys, or 32 of wide ones. In the kernel in Triton all warps of a block take part in each
product, and wait for one another. Here, of few rows, each warp has keys of its own, which it loads itself, by TMA, and meets the
others when all is summed up: neither Triton nor Gluon can express that. More rows are the columns of a warpgroup's products
(``cuda/decode_together.cuh``), a warp loads, and products of one step overlap the softmax of the next. Calls that are short
for the GPU's memory gain the most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit import config
from opkit.attn.allocation import allocate_scratch, dense_rows, overwritten, rows
from opkit.attn.calls import AttentionCall, PagedCall, dtypes_and_shapes, predicate
from opkit.attn.gpu import plans
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode.paged import paged as split_paged
from opkit.attn.gpu.hopper import calls, library
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
MOST_SEQUENCES = 1024  #: each warp looks for its own among all of them
_BOX = 16  #: keys that are loaded at once: a page has a multiple
_PAGED_PRIORITY = 1  # above the kernel in Triton
_WHOLE = (torch.int32, torch.int64)


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


class DecodeProblem(ctypes.Structure):
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
    op.register_kernel(
        "cuda", decode, when=predicate(AttentionCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


def takes(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`decode`: few rows, some keys, on sm_90 with a CUDA compiler."""
    if (
        not calls.on_hopper(call.q)
        or config.get().batch_invariant
        or not fits(call)
        or call.k.shape[2] < decoding.MANY
        or not _faster(call)
    ):
        return False
    return all(calls.describable(each) for each in call[:3]) and library.there("decode", call.q.dtype)


def _faster(call: AttentionCall) -> bool:
    """Return whether it is the faster one: of few rows; of more where wide heads are divided, or few tiles of many keys."""
    rows, channels = _height(call), call.q.shape[3]
    if rows <= _FAST_ROWS[channels]:
        return True
    splits, seen = _splits(call), (_seen(call) or (0, 0))[1]
    return splits > 1 if channels == 256 else channels == 128 and splits >= 8 and seen >= splits * _LONG


def _splits(call: AttentionCall) -> int:
    """Splits of each of its tiles."""
    tiles, seen = call.k.shape[0] * call.k.shape[1], (_seen(call) or (0, 0))[1]
    return splits_of(tiles, seen, call.q.shape[3], calls.processors(call.q.device))


def fits(call: AttentionCall) -> bool:
    """Return whether :func:`decode` can compute a call."""
    if not calls.fits(call) or call.q.shape[3] != call.v.shape[3] or call.q.shape[3] not in HEADS:
        return False
    shape = plans.shape_of(tuple(call.mask), ())
    few = _height(call) <= MOST_ROWS[call.q.shape[3]] and max(call.k.shape[:2]) <= MOST
    return (
        few and call.softcap == 0 and not call.bias and not shape.mask and not shape.lengths and _seen(call) is not None
    )


def _height(call: AttentionCall) -> int:
    """Rows of a head of keys."""
    return call.q.shape[2] * (call.q.shape[1] // call.k.shape[1])


def _seen(call: AttentionCall) -> tuple[int, int] | None:
    """Return the keys that all queries see: the first, and how many; None where queries see different ones."""
    queries, keys, shape = call.q.shape[2], call.k.shape[2], plans.shape_of(tuple(call.mask), ())
    if not shape.banded or (shape.lower <= 1 - queries and shape.upper >= keys - 1):
        return 0, keys
    first = max(shape.lower, 0)
    return None if queries > 1 else (min(first, keys), max(min(shape.upper + 1, keys) - first, 0))


@PreparedKernel
def decode(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    It takes bfloat16 and float16; heads of 64, 128 and 256; up to 64 queries of heads that share keys, 32 of heads of 256, all
    of which see the same keys, in one piece; a positive scale; sinks. Probabilities are rounded to q's dtype before they are
    multiplied with the values. Keys and values that are hidden are not read. The number of splits follows from shapes and the
    GPU alone, and splits are merged in order: equal calls give equal bits. Nothing waits for the GPU.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the kernel in Triton is called.
    """
    call = AttentionCall(*args)
    decoding.refuse_batch_invariance("opkit::attention", NAME)
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}, dropout_p={call.dropout_p}: it takes heads of {HEADS} and "
            f"as many rows of a head of keys as {MOST_ROWS} says, and queries that see the same keys. Leave the choice to "
            "opkit, or force kernel='split'."
        )
    return _prepared(call)


def _prepared(call: AttentionCall) -> Callable[..., tuple[Tensor, Tensor]]:
    kernels = library.kernels_or_none("decode", call.q.dtype)
    if kernels is None:
        return decoding.decode.prepare(*call)
    described = all(calls.describable(each) for each in call[:3])
    made = rows(call.q, call.v.shape[3], call.out_is_bshd)
    new_out, new_lse = overwritten(made), overwritten(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    common, gpu = _problem(call, made), call.q.get_device()
    launch = kernels.launching(*_steps(kernels, common, call.q.dtype), DecodeProblem, gpu)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sinks, problem = *args[:3], args[5], DecodeProblem.from_buffer_copy(common)
        at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not described or (at[0] | at[1] | at[2]) % 16:
            q, k, v = (each.clone(memory_format=torch.contiguous_format) for each in (q, k, v))
            at = q.data_ptr(), k.data_ptr(), v.data_ptr()
            problem.q, problem.k, problem.v = map(library.rows_of, (q, k, v))
        problem.q.data, problem.k.data, problem.v.data = at
        return launched(launch, problem, new_out(), new_lse(), sinks, gpu)

    return run


_KERNELS = {
    64: ((16, "decode_64_16"), (32, "decode_64_32"), (64, "together_64_64")),
    128: ((16, "decode_128_16"), (32, "decode_128_32"), (64, "together_128_64")),
    256: ((16, "decode_256_16"), (32, "together_256_32")),
}
"""Kernels in ``cuda/decode.cu``, and of how many rows at most their tiles are, by the channels of a head."""
_DIVIDED = {"decode_128_32": "together_128_32", "decode_256_16": "together_256_16"}
"""Those for tiles that are divided, whose blocks have a few steps: a warpgroup multiplies wide ones together."""
_FEW_SPLITS = 32  # that the threads of a smaller block merge


def _steps(
    kernels: library.Kernels, problem: DecodeProblem, dtype: torch.dtype
) -> tuple[list[library.Step], list[library.Map]]:
    """Return the launches of a call, and the maps of k and v."""
    rows, size, pages = problem.group * problem.queries, problem.head_size, problem.pages
    name: str = next(name for most, name in _KERNELS[size] if rows <= most)
    if problem.splits > 1:
        name = _DIVIDED.get(name, name)
    name += "_paged" if pages.count else ""
    _, _, box, boxes = kernels.numbers[name]
    length = pages.size if pages.count else max(problem.first + problem.seen, 1)
    sizes = (pages.count or problem.batch, problem.key_heads, length)
    places = (DecodeProblem.k.offset, DecodeProblem.v.offset)
    steps = [library.Step(name, (problem.key_heads, problem.splits, problem.batch), early=True)]
    if problem.splits > 1:
        merge = f"merge_{size}{'_few' if problem.splits <= _FEW_SPLITS else ''}"
        steps.append(library.Step(merge, (rows, problem.key_heads, problem.batch), early=True))
    return steps, [library.map_of(place, dtype, sizes, size, box, boxes) for place in places]


def launched(
    launch: library.Launcher, problem: DecodeProblem, out: Tensor, lse: Tensor, sinks: Tensor | None, gpu: int
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


def _problem(call: AttentionCall, out: Tensor) -> DecodeProblem:
    """Return what is the same for all calls like this one."""
    q, k, v = call[:3]
    first, seen = _seen(call) or (0, 0)
    numbers = {
        "batch": q.shape[0], "heads": q.shape[1], "key_heads": k.shape[1], "group": q.shape[1] // k.shape[1],
        "queries": q.shape[2], "head_size": q.shape[3], "first": first, "seen": seen, "device": q.get_device(),
        "factor": call.scale * calls.LOG2E, "splits": _splits(call),
    }  # fmt: skip
    return DecodeProblem(*map(library.rows_of, (q, k, v, out)), **numbers)


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


def register_paged(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::paged_attention`` the kernel."""
    when = predicate(PagedCall, takes_pages)
    op.register_kernel("cuda", paged, when=when, name=NAME, priority=_PAGED_PRIORITY, trusted=True)


def takes_pages(call: PagedCall) -> bool:
    """Return whether a call is for :func:`paged`: few queries, some keys, on sm_90 with a CUDA compiler."""
    if not fits_paged(call) or not calls.on_hopper(call.q) or config.get().batch_invariant:
        return False
    some = call.page_table.shape[1] * call.k_pages.shape[1] >= decoding.MANY
    few = call.q.shape[0] <= call.lengths.shape[0]
    return some and few and _described(call.k_pages, call.v_pages) and library.there("decode", call.q.dtype)


def fits_paged(call: PagedCall) -> bool:
    """Return whether :func:`paged` can compute a call, but for the strides of pages."""
    q, k, v, table, lengths, starts = call[:6]
    (tokens, heads, size), (count, page, kv_heads, _) = q.shape, k.shape
    if q.dtype not in calls.DTYPES or not q.dtype == k.dtype == v.dtype or 0 in (*q.shape, *k.shape, *table.shape):
        return False
    same = size == k.shape[3] == v.shape[3] and size in HEADS and heads % kv_heads == 0 and page % _BOX == 0
    few = (
        heads // kv_heads <= MOST_ROWS.get(size, 0)
        and max(tokens, kv_heads) <= MOST
        and 0 < lengths.shape[0] <= MOST_SEQUENCES
    )
    unscaled = call.k_scale is None and call.v_scale is None
    plain = call.softcap == 0 and call.scale > 0 and not call.mask and not call.bias
    whole = all(each.dtype in _WHOLE for each in (table, lengths, starts))
    near = table.shape[1] * page < decoding.FAR and count < decoding.FAR
    return same and few and unscaled and plain and whole and near


def _described(*pages: Tensor) -> bool:
    return all(calls.describable(each) for each in pages)


@PreparedKernel
def paged(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are a :class:`opkit.attn.calls.PagedCall`.

    It takes what :func:`opkit.attn.gpu.hopper.decode_cuda.decode` takes, of pages of a multiple of 16 keys and of q's dtype, one
    or more queries of each sequence, and bands. Lengths, starts and pages are read on the GPU alone, and what of them is out of
    range is taken as the nearest that is not: nothing waits for the GPU, and a CUDA graph of a call serves other lengths. Keys
    and values that are hidden do not reach a result, whatever they hold. Queries that ``starts`` leaves out see nothing.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the kernel in Triton is called.
    """
    call = PagedCall(*args)
    decoding.refuse_batch_invariance("opkit::paged_attention", NAME)
    if not fits_paged(call) or not _described(call.k_pages, call.v_pages):
        shapes = ", ".join(f"{each.dtype} {tuple(each.shape)} with strides {each.stride()}" for each in call[:3])
        raise KernelError(
            f"opkit::paged_attention: kernel {NAME!r} does not take q, k_pages, v_pages of {shapes}, scale={call.scale}, "
            f"softcap={call.softcap}, k_scale={call.k_scale}, v_scale={call.v_scale}, mask={call.mask}, bias={call.bias}: it "
            f"takes pages of q's dtype and of a multiple of {_BOX} keys, heads of {HEADS}, and as many heads to one of keys as "
            f"{MOST_ROWS} says. Leave the choice to opkit, or force kernel='split'."
        )
    return _prepared_paged(call)


def _prepared_paged(call: PagedCall) -> Callable[..., tuple[Tensor, Tensor]]:
    kernels = library.kernels_or_none("decode", call.q.dtype)
    if kernels is None:
        return split_paged.prepare(*call)
    new_out = overwritten(call.q.new_empty(call.q.shape))
    new_lse = overwritten(call.q.new_empty(call.q.shape[:2], dtype=torch.float32))
    common, gpu = _paged_problem(call), call.q.get_device()
    launch = kernels.launching(*_steps(kernels, common, call.q.dtype), DecodeProblem, gpu)
    dense = call.q.stride(2) == 1 and all(stride % 8 == 0 for stride in call.q.stride()[:2])

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, table, lengths, starts, _, _, _, _, sinks, *_ = args
        problem = DecodeProblem.from_buffer_copy(common)
        if not dense or q.data_ptr() % 16:
            q = q.clone(memory_format=torch.contiguous_format)
        if (k.data_ptr() | v.data_ptr()) % 16:
            k, v = (each.clone(memory_format=torch.contiguous_format) for each in (k, v))
            problem.k, problem.v = map(_pages_of, (k, v))
        problem.q, problem.k.data, problem.v.data = Rows(q.data_ptr(), *q.stride()[:2]), k.data_ptr(), v.data_ptr()
        pages = problem.pages
        table, lengths, starts = dense_rows(table), lengths.contiguous(), starts.contiguous()
        pages.table.data, pages.lengths.data = table.data_ptr(), lengths.data_ptr()
        pages.starts.data, pages.row = starts.data_ptr(), table.stride(0)
        return launched(launch, problem, new_out(), new_lse(), sinks, gpu)

    return run


def _paged_problem(call: PagedCall) -> DecodeProblem:
    """Return what is the same for all calls like this one."""
    (tokens, heads, size), (count, page, kv_heads, _) = call.q.shape, call.k_pages.shape
    keys = call.page_table.shape[1] * page
    ends = {"lower": plans.narrow(call.lower), "upper": plans.narrow(call.upper)}
    pages = Pages(sequences=call.lengths.shape[0], count=count, size=page, keys=keys, **ends)
    for name, numbers in (("table", call.page_table), ("lengths", call.lengths), ("starts", call.starts)):
        getattr(pages, name).wide = numbers.dtype == torch.int64
    return DecodeProblem(
        k=_pages_of(call.k_pages), v=_pages_of(call.v_pages), out=Rows(0, heads * size, size), batch=tokens, heads=heads,
        key_heads=kv_heads, group=heads // kv_heads, queries=1, head_size=size, device=call.q.get_device(),
        factor=call.scale * calls.LOG2E, pages=pages,
        splits=splits_of(tokens * kv_heads, keys, size, calls.processors(call.q.device)),
    )  # fmt: skip


def _pages_of(x: Tensor) -> Rows:
    """Pages as batches of heads of keys."""
    return Rows(0, x.stride(0), x.stride(2), x.stride(1))
