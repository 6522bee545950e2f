"""Pages on GPUs: the decoding kernel reads keys and values through a page table, and another one writes them to pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_bytes, dense_rows, like
from opkit.attn.calls import AppendCall, PagedCall, dtypes_and_shapes, predicate
from opkit.attn.gpu import functions, plans
from opkit.attn.gpu.decode import launches as decode_launches
from opkit.attn.gpu.decode.decoding import (
    FAR,
    FLOATS,
    LARGEST_HEAD,
    NAME,
    index_of,
    may_share,
    numbers_of,
    refuse_batch_invariance,
)
from opkit.attn.gpu.decode.launches import DecodeLaunches, Results, divided, tile_search_of
from opkit.attn.gpu.decode.plan import DecodeBlocks, DecodeShape, blocks_of, device_of, power
from opkit.attn.gpu.limits import devices
from opkit.attn.gpu.plans import MaskShape
from opkit.attn.masks import program
from opkit.errors import KernelError
from opkit.kernels.triton.named import Named
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

MOST_SEQUENCES = 16384  #: each program finds its own among all of them at once
_NARROW = (torch.int8, torch.float8_e4m3fn)
MAX_HEAD = 4096  #: elements of a head, which one program holds
_SCALED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what a scale of 1 stands for
_APPEND = Named("opkit.attn.gpu.decode.device.append", "append")


def register_paged(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::paged_attention`` its kernel for GPUs."""
    op.register_kernel(devices(), paged, when=predicate(PagedCall, takes_pages), name=NAME, trusted=True)


def takes_pages(call: PagedCall) -> bool:
    """Return whether :func:`paged` takes a call: its dtypes and sizes, and captured tensors that reach all positions."""
    q, k_pages, v_pages = call[:3]
    fits = k_pages.dtype == v_pages.dtype and k_pages.dtype in (*FLOATS, *_NARROW) and q.dtype in FLOATS
    grouped = k_pages.shape[2] > 0 and q.shape[1] % k_pages.shape[2] == 0
    small = max(q.shape[-1], v_pages.shape[-1]) <= LARGEST_HEAD and call.lengths.shape[0] <= MOST_SEQUENCES
    return (
        (fits and grouped and small and k_pages.shape[0] > 0 and k_pages.shape[1] > 0)
        and program.mask_words_fit(call.mask, call.mask_tensors, call.sizes)
        and program.bias_words_fit(call.bias, call.bias_tensors, call.sizes)
        and _shape_of(call).fits
        and not _shape_of(call).slots
    )


def _shape_of(call: PagedCall) -> MaskShape:
    return plans.shape_of(tuple(call.mask), tuple(call.bias))


def _captured(call: PagedCall) -> dict[str, Tensor]:
    """Return the captured tensors by the kernel's parameters."""
    found = functions.tensors_of(_shape_of(call).functions, call.mask_tensors, call.bias_tensors)
    return {name: x for name, x in zip(functions.TENSORS, found, strict=True) if x is not None}


@PreparedKernel
def paged(*args: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Compute the operator's result and log-sum-exp; the arguments are a :class:`opkit.attn.calls.PagedCall`.

    Lengths, starts and pages are read on the GPU alone, and what of them is out of range is taken as the nearest that is
    not: nothing waits for the GPU, and a CUDA graph of a call serves other lengths. Of queries that ``starts`` leaves out,
    the results are not written.

    Raises:
        KernelError: it was forced on a call that it does not compute, or batch invariance is set.
    """
    call = PagedCall(*args)
    if not takes_pages(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(f"opkit::paged_attention: kernel {NAME!r} does not take q, k_pages, v_pages of {shapes}")
    refuse_batch_invariance("opkit::paged_attention")
    new_out = like(call.q.new_empty((*call.q.shape[:2], call.v_pages.shape[-1])))
    new_lse = like(call.q.new_empty(call.q.shape[:2], dtype=torch.float32))
    if 0 in (*call.q.shape[:2], call.lengths.shape[0]):
        return lambda *_: (new_out().zero_(), new_lse().fill_(-torch.inf))
    optional = {"sinks": call.sinks, "k_scale": call.k_scale, "v_scale": call.v_scale}
    captured = tuple(_captured(call))
    given = (name for name, x in optional.items() if x is not None)
    names = ("q", "k", "v", "table", "lengths", "starts", *given, *captured)
    results = {"out": new_out, "lse": new_lse}
    launches = [_plan(call, shared, names, results) for shared in _shared(call)]
    bytes_of = dense_bytes if call.k_pages.dtype == torch.float8_e4m3fn else dense_rows

    def run(*args: Any) -> tuple[Tensor, ...]:
        q, k, v, table, lengths, starts, _, _, _, _, sinks, k_scale, v_scale, *_ = args
        launch = launches[len(launches) > 1 and k.data_ptr() == v.data_ptr()]
        read = (dense_rows(q), bytes_of(k), bytes_of(v), dense_rows(table), lengths.contiguous(), starts.contiguous())
        sinks = None if sinks is None else sinks.contiguous()
        read += tuple([each for each in (sinks, k_scale, v_scale) if each is not None])
        return launch(*read, *_captured(PagedCall(*args)).values()) if captured else launch(*read)

    return run


def _shared(call: PagedCall) -> tuple[bool, ...]:
    """Return whether values may be the first columns of keys, and then also whether they may not."""
    scaled = call.k_scale is not None or call.v_scale is not None
    return (False, True) if may_share(call.k_pages, call.v_pages) and not scaled else (False,)


def _plan(call: PagedCall, shared: bool, names: Sequence[str], results: Results) -> Callable[..., tuple[Tensor, ...]]:
    masks, biases, found = call.mask_tensors, call.bias_tensors, _shape_of(call)
    of_functions = bool(found.functions)
    (total, heads, d), (_, page, kv_heads, dv) = call.q.shape, call.v_pages.shape
    batch, group, keys = call.lengths.shape[0], heads // kv_heads, call.page_table.shape[1] * page
    gpu = device_of(index_of(call.q))
    computed, numbers = _computed(call), numbers_of(call.lower, call.upper, call.scale, call.softcap)
    mixed = total > 1 and (numbers["lower"] > -FAR or numbers["upper"] < FAR)
    height, stored = group * -(-total // batch), call.k_pages.itemsize
    apart = of_functions or (mixed and group % 64 > 0)
    shape = DecodeShape(
        height, batch * kv_heads, keys, d, dv, computed.itemsize, stored, paged=True, shared=shared, mixed=apart,
        programs=of_functions,
    )  # fmt: skip
    settled = {
        "PAGE": page, "BATCH": power(batch), "SHARED": shared, "CAPPED": call.softcap > 0,
        "SINKS": call.sinks is not None, "NEGATIVE": call.scale < 0, "WHOLE": False,
        "K_SCALED": call.k_scale is not None, "V_SCALED": call.v_scale is not None,
        "FP8": call.k_pages.dtype == torch.float8_e4m3fn,
        "MASK": functions.words_of(found.mask, found.functions, program.FUNCTION, masks),
        "BIAS": functions.words_of(found.bias, found.functions, program.BIAS_FUNCTION, biases),
    }  # fmt: skip
    by_head = any(each.whose == "mask" and "h" in each.variables for each in found.functions)
    if of_functions:
        numbers |= {f"n{i}": None for i in range(plans.NUMBERS)} | functions.numbers_of(found.functions, masks, biases)

    def made(blocks: DecodeBlocks) -> DecodeLaunches:
        constants = decode_launches.constants_of(blocks, group, (d, dv), computed, gpu)
        queries_apart = total > 1 and group % blocks.rows != 0
        constants |= {**settled, "MIXED": mixed and queries_apart}
        constants["APART"] = bool(found.mask) and (queries_apart or (by_head and group > 1))
        slots, tall = total * group // blocks.rows + batch, min(blocks.rows, total * group)
        return decode_launches.launches_of(blocks, constants, slots, kv_heads, tall, {**numbers, "keys": keys})

    asked = tile_search_of(shape, gpu, call.q.device, computed)
    return divided(asked, functools.partial(blocks_of, shape, gpu), made, names, results)


def _computed(call: PagedCall) -> torch.dtype:
    """Return the dtype of products: that of the queries, unless pages of another floating dtype have what it has not."""
    return call.q.dtype if call.k_pages.dtype in (call.q.dtype, *_NARROW) else torch.float32


def register_append(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::append_kv`` its kernel for GPUs."""
    op.register_kernel(devices(), append, when=takes_append, name=NAME, trusted=True)


def takes_append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, lengths_before: Tensor) -> bool:
    """Return whether :func:`append` takes these dtypes and sizes; pages must have dense rows, as they are written to."""
    known = k_pages.dtype == v_pages.dtype and k_pages.dtype in (*FLOATS, *_SCALED_MAX)
    dense = all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in (k_pages, v_pages))
    small = max(k.shape[-1], v.shape[-1]) <= MAX_HEAD and lengths_before.shape[0] <= MOST_SEQUENCES
    there = k_pages.shape[0] > 0 and k_pages.shape[1] > 0
    return known and dense and small and there and k.dtype in FLOATS and v.dtype in FLOATS


@PreparedKernel
def append(*args: Any) -> Callable[..., None]:
    """Write the tokens; those without a page of the table are written nowhere, as the GPU cannot refuse them.

    Raises:
        KernelError: it was forced on a call that it does not compute.
    """
    call = AppendCall(*args)
    if not takes_append(call.k, call.v, call.k_pages, call.v_pages, call.lengths_before):
        shapes = dtypes_and_shapes(call[:4])
        raise KernelError(f"opkit::append_kv: kernel {NAME!r} does not take k, v, k_pages, v_pages of {shapes}")
    if 0 in call.k.shape[:2] or call.lengths_before.shape[0] == 0:
        return lambda *_: None
    constants = {
        "D": call.k.shape[2], "DV": call.v.shape[2], "D_WIDE": power(call.k.shape[2]), "DV_WIDE": power(call.v.shape[2]),
        "PAGE": call.k_pages.shape[1], "BATCH": power(call.lengths_before.shape[0]),
        "LARGEST": _SCALED_MAX.get(call.k_pages.dtype, 1.0), "FP8": call.k_pages.dtype == torch.float8_e4m3fn,
        "INT8": call.k_pages.dtype == torch.int8,
    }  # fmt: skip
    return _append_run(append_kernel(call.k_scale is not None, call.v_scale is not None, tuple(constants.items())))


def _append_run(kernel: Any) -> Callable[..., None]:
    def run(*args: Any) -> None:
        call = AppendCall(*args)
        kernel(
            k=dense_rows(call.k), v=dense_rows(call.v), k_pages=_as_bytes(call.k_pages), v_pages=_as_bytes(call.v_pages),
            table=dense_rows(call.page_table), lengths=call.lengths_before.contiguous(), starts=call.starts.contiguous(),
            k_scale=call.k_scale, v_scale=call.v_scale, programs=call.k.shape[0] * call.k.shape[1],
        )  # fmt: skip

    return run


def _as_bytes(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


@functools.cache
def append_kernel(k_scaled: bool, v_scaled: bool, constants: tuple[tuple[str, Any], ...]) -> TritonKernel:
    """Return the kernel for a set of constants."""
    bound = {"batch": "lengths_size_0", "kv_heads": "k_size_1", "pages": "k_pages_size_0", "width": "table_size_1"}
    bound |= {"table_b": "table_stride_0"}
    bound |= {f"{x}_{d}": f"{x}_stride_{n}" for x in "kv" for n, d in enumerate("th")}
    bound |= {f"{x}p_{d}": f"{x}_pages_stride_{n}" for x in "kv" for n, d in enumerate("bth")}
    unused: dict[str, Any] = {"K_SCALED": k_scaled, "V_SCALED": v_scaled}
    for x, scaled in (("k", k_scaled), ("v", v_scaled)):
        strides = {f"{x}s_{d}": f"{x}_scale_stride_{n}" for n, d in enumerate("bth")}
        bound |= strides if scaled else {}
        unused |= {} if scaled else dict.fromkeys(strides, 0)
    return triton_kernel(_APPEND, grid=_programs, bind=bound, num_warps=1, **dict(constants), **unused)


def _programs(programs: int) -> int:
    return programs
