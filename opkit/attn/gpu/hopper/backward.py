"""The backward kernels for sm_90: which calls they take, and a call of them.

:mod:`opkit.attn.gpu.hopper.device.backward` is for heads of up to 128 channels,
:mod:`opkit.attn.gpu.hopper.device.backward_wide` for wider ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_rows, overwritten, rows
from opkit.attn.calls import GradientCall, dtypes_and_shapes
from opkit.attn.gpu import arguments, plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.hopper.calls import (
    DTYPES,
    LOG2E,
    counters,
    describable,
    evenly,
    has_moderate_factor,
    on_hopper,
    padded,
    processors,
)
from opkit.attn.gpu.plans import MaskShape, Words
from opkit.attn.masks.program import mask_fits, results_fit, shapes_fit
from opkit.errors import KernelError
from opkit.kernels.triton.named import Layout, Named
from opkit.op import torch_private as private
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel, tensor_descriptor
from opkit.op.triton.launch import PreparedLaunch, PreparedSeries, ScratchTensor

_FAR = 2**30  #: further than any two positions are apart
_CACHED = 24 << 20  #: bytes of queries, their gradients and the sums of those that shall stay in the L2 cache
_ALIGNED = 8  #: elements: TMA's strides are multiples of 16 bytes
_MOST = 128  #: rows of a block
_WIDE = 32  #: floats in a row of the sums
_BACKWARD_KERNEL = Named("opkit.attn.gpu.hopper.device.backward", "hopper_backward")
_WIDE_KERNEL = Named("opkit.attn.gpu.hopper.device.backward_wide", "hopper_backward_wide")
_BEGIN_KERNEL = Named("opkit.attn.gpu.hopper.device.backward_rows", "hopper_backward_begin")
_END_KERNEL = Named("opkit.attn.gpu.hopper.device.backward_rows", "hopper_backward_end")
_OF_MASKS = ("listed", "listed_turns", "counts", *plans.TENSORS)
Results = tuple[Tensor, ...]
Run = Callable[..., Results]


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """How the work of a program is laid out.

    Attributes:
        rows: queries of a step.
        grouped: whether numbers of rows lie in memory so that a thread reads four at once.
        apart: whether each thread counts buffers in a register of its own.
        keys: of a program.
        registers: of a thread that multiplies, of the other warps, and of all before they are shared out.
    """

    rows: int
    grouped: bool
    apart: bool
    keys: int = 128
    registers: tuple[int, int, int] = (240, 24, 168)


TILES = {
    64: BackwardTile(128, True, True),
    128: BackwardTile(64, False, False),
    256: BackwardTile(64, False, False, keys=64),
}
"""By the size of the larger head, rounded up. Half of a block's gradient of queries is 64 x 64 in the first two.

On an H200, causal, TFLOP/s with ``grouped`` and ``apart``, and without: 1 x 16 heads of 64, 16384 queries, 452 and 412; 2 x 16
heads of 128, 8192 queries, 507 and 539.
"""


def takes(call: GradientCall) -> bool:
    """Return whether :func:`backward` takes a call: what it says there, on a GPU of compute capability 9.0."""
    return fits(call) and on_hopper(call.q)


def fits(call: GradientCall) -> bool:
    """Return whether :func:`backward` can compute a call."""
    q, k, v = call[2:5]
    if q.dtype not in DTYPES or not shapes_fit(q, k, v) or 0 in q.shape or 0 in v.shape:
        return False
    if any(size % _ALIGNED or size > max(TILES) for size in (q.shape[3], v.shape[3])):
        return False
    tile = _tile_of(call)
    most = 2**29 if tile.keys == 128 else 2**28  # rows of the sums are counted in 32 bits
    lengths = max(q.shape[2], k.shape[2]) < _FAR and q.shape[0] * q.shape[1] * (q.shape[2] + _MOST) < most
    plain = not call.bias and call.dropout_p == 0 and has_moderate_factor(call)
    return results_fit(call) and lengths and plain and mask_fits(call)


def _tile_of(call: GradientCall) -> BackwardTile:
    """Return the layout that a call gets."""
    return TILES[padded(max(call.q.shape[3], call.v.shape[3]))]


def listed(shape: MaskShape) -> bool:
    """Return whether a mask says more than a band: then the tiles to visit come from a list."""
    return bool(shape.mask or shape.lengths)


@PreparedKernel
def backward(*args: Any) -> Run:
    """Compute the gradients of q, k and v, and delta; the arguments are a :class:`~opkit.attn.calls.GradientCall`.

    It takes bfloat16 and float16; heads of up to 256 channels that 8 divides, those of queries and of values of any two such
    sizes; grouped heads; any numbers of queries and keys but none; every mask; a positive scale; a soft cap; a gradient of the
    log-sum-exp. The factor of logits, which is the cap or else the scale, is at most 1024. It takes no biases and no dropout.

    Rows whose log-sum-exp is beyond 4096 are computed apart, slowly, of logits that are exact to the rounding of products
    (:mod:`opkit.attn.gpu.hopper.device.backward_large`): in probabilities the rounding of a log-sum-exp as large as L, up to
    L / 2^24, would be seen.

    Probabilities and the gradients of logits are rounded to q's dtype before they are multiplied further; sums are in float32.
    Keys, values and queries that are hidden from one another do not reach each other's gradients, whatever they hold. The
    gradients of a row that sees a key or a value that is not finite, and of the keys that such a row sees, may be NaN where the
    reference has numbers, or other numbers. Under a mask that is more than a band, gradients of results do not reach what is
    hidden from their rows either; those of a row that are not finite may make NaN of the gradients of all that it sees.

    Parts of the gradient of queries are added up in memory in any order, so that its last bits differ from run to run, unless
    ``torch.are_deterministic_algorithms_enabled()`` at the time of a call: then they are added up by the order of keys. The
    other gradients are the same in every run.

    Tensors are read as they lie where TMA can follow their strides, and copied where it cannot.

    Raises:
        KernelError: it does not take the call.
    """
    call = GradientCall(*args)
    if not fits(call):
        shapes = dtypes_and_shapes((call.q, call.k, call.v))
        raise KernelError(
            f"opkit::attention_backward: kernel 'hopper' does not take q, k, v of {shapes}, mask={call.mask}, "
            f"bias={call.bias}, scale={call.scale}, dropout_p={call.dropout_p}. Leave the choice to opkit, or force "
            "kernel='reference'."
        )
    return _prepared(call, _tile_of(call))


def _prepared(call: GradientCall, tile: BackwardTile) -> Run:
    roomy = arguments.fit_to_slots(call)
    shape = arguments.shape_of(roomy)
    mask_tensors = _mask_reader(shape, tile, roomy is call) if listed(shape) else None
    as_they_lie, copied = (_series(call, shape, tile) for _ in range(2))  # copies have strides of their own
    described = all(describable(each) for each in (call.gradient, *call[2:5]))
    dense, counter = dense_rows(call.out) is call.out, counters(call.q.device, 2 + call.k.shape[0] * call.k.shape[1])

    def run(*args: Any) -> Results:
        gradient, of_lse, q, k, v, out, lse = args[:7]
        ordered = private.deterministic()
        more = {} if of_lse is None else {"of_lse": of_lse}
        if (sinks := GradientCall(*args).sinks) is not None:
            more["sinks"] = sinks.to(torch.float32).contiguous()
        if mask_tensors is not None:
            more |= mask_tensors(GradientCall(*args), ordered)
        read = [gradient, q, k, v, out if dense else dense_rows(out), lse, counter(), *more.values()]
        at = [each.data_ptr() for each in read]
        if described and not (at[0] | at[1] | at[2] | at[3]) % 16:
            return as_they_lie(ordered, *more).at(read, at)
        read[:4] = [each.clone(memory_format=torch.contiguous_format) for each in read[:4]]
        return copied(ordered, *more)(*read)

    return run


def _mask_reader(shape: MaskShape, tile: BackwardTile, fits: bool) -> Callable[[GradientCall, bool], dict[str, Tensor]]:
    """Return a function that returns a call's lists of tiles, their order if accumulation is ordered, and its mask's tensors.

    ``fits``: the mask's program fits a kernel's slots.
    """
    blocks = BlockSizes(tile.rows, tile.keys, 0, 0)

    def mask_tensors(call: GradientCall, ordered: bool) -> dict[str, Tensor]:
        call = call if fits else arguments.fit_to_slots(call)
        lists, turns = tile_lists.lists_of(call, shape, blocks, by_keys=True), None
        if ordered:
            turns = tile_lists.turns_of_call(lists, call, shape, blocks)
        found = zip(_OF_MASKS, (lists.tiles, turns, lists.counts, *arguments.tensors_of(call, shape)), strict=True)
        return {name: tensor for name, tensor in found if tensor is not None}

    return mask_tensors


def _series(call: GradientCall, shape: MaskShape, tile: BackwardTile) -> Callable[..., PreparedSeries]:
    """Return a function that returns the launches of the three kernels.

    Its arguments are whether accumulation is ordered, and the names of the tensors that a call has in addition to ``_INPUTS``.
    TMA can follow q, k, v and the gradient. The results are the gradients of q, k and v, and delta.
    """
    q, v, of_rows, numbers = call.q, call.v, _row_numbers(call, shape), _numbers(call, shape, tile)
    wide = padded(max(q.shape[3], v.shape[3]))
    begin = PreparedLaunch(
        _begin_kernel(v.shape[3], wide, tile, listed(shape), shape.mask), _BEGIN, {**of_rows, "channels": q.shape[3]}
    )
    kernels = (_kernel(tile, ordered, shape.banded, shape.mask) for ordered in (False, True))
    main = [PreparedLaunch(each, _MAIN + _OF_MASKS, numbers) for each in kernels]
    end = PreparedLaunch(_end_kernel(q.shape[3], wide, tile.rows, shape.mask), _END, {**of_rows, "columns": v.shape[3]})
    made, rooms = _made(call), [_rooms(call, tile, ordered) for ordered in (False, True)]

    @functools.cache
    def series(ordered: bool, *more: str) -> PreparedSeries:
        return PreparedSeries([begin, main[ordered], end], _INPUTS + more, made, rooms[ordered])

    return series


def _made(call: GradientCall) -> dict[str, Callable[[], Tensor]]:
    """Return the results by name, as functions that make them."""
    results = [rows(each, each.shape[3], call.out_is_bshd) for each in call[2:5]]
    delta = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    return {name: overwritten(each) for name, each in zip(_RESULTS, (*results, delta), strict=True)}


def _rooms(call: GradientCall, tile: BackwardTile, ordered: bool) -> dict[str, ScratchTensor]:
    """Return what the kernels pass one to another."""
    (batch, heads, queries, _), wide = call.q.shape, padded(max(call.q.shape[3], call.v.shape[3]))
    blocks = batch * heads * _blocks(queries, tile.rows)
    sums = ScratchTensor((blocks * 2 * tile.rows,), torch.float32)
    total = ScratchTensor((blocks * tile.rows * wide // _WIDE, _WIDE), torch.float32)
    turns = {"turns": ScratchTensor((blocks,), torch.int32)} if ordered else {}
    return {"sums": sums, "total": total, **turns, **_scratch_of_large_rows(call)}


def _scratch_of_large_rows(call: GradientCall) -> dict[str, ScratchTensor]:
    """Two numbers of each row that is kept apart."""
    rows = call.q.shape[0] * call.q.shape[1] * call.q.shape[2]
    return {"apart": ScratchTensor((2 * rows,), torch.float32)} if may_be_large(call) else {}


def _row_numbers(call: GradientCall, shape: MaskShape) -> dict[str, Any]:
    """Return the numbers that the first and the last kernel take."""
    batch, heads, queries, _ = call.q.shape
    return {
        **plans.numbers_of(shape), "programs": batch * heads, "heads": heads, "key_heads": call.k.shape[1],
        "queries": queries, "keys": call.k.shape[2], "scale": call.scale, "APART": may_be_large(call),
    }  # fmt: skip


def may_be_large(call: GradientCall) -> bool:
    """Return whether logits may be so large that rows are computed apart; the least scales are those of no such logits."""
    return call.softcap == 0 and call.scale > arguments.MIN_SCALE


def _numbers(call: GradientCall, shape: MaskShape, tile: BackwardTile) -> dict[str, Any]:
    """Return the numbers that the main kernel takes. The exponents' base is 2."""
    capped = call.softcap > 0
    return {
        **plans.numbers_of(shape),
        "CAPPED": capped,
        "factor": (call.softcap if capped else call.scale) * LOG2E,
        "inner": call.scale / call.softcap if capped else 1.0,
        "scale": call.scale,
        "processors": processors(call.q.device),
    }


# ---- the kernels -----------------------------------------------------------------------------------------------------

_BEGIN_REGISTERS, _END_REGISTERS = 32, {64: 40, 128: 40, 256: 96}
"""Of a thread, as many as calls without large rows need: what only those with such rows run has to spill."""
_OF_LARGE_ROWS = ("apart", "counter", *plans.TENSORS)
_BEGIN = ("out", "gradient", "of_lse", "lse", "delta", "sums", "total", "turns", "q", "k", "sinks", *_OF_LARGE_ROWS)
_MAIN = ("q", "k", "v", "gradient", "sums", "total", "of_k", "of_v", "turns", "counter")
_END = ("total", "of_q", "q", "k", "v", "gradient", "lse", "delta", "of_k", "of_v", *_OF_LARGE_ROWS)
_INPUTS = ("gradient", "q", "k", "v", "out", "lse", "counter")
_RESULTS = ("of_q", "of_k", "of_v", "delta")


def _blocks(queries: int, ROWS: int) -> int:
    return -(-queries // ROWS)


@functools.cache
def _begin_kernel(columns: int, wide: int, tile: BackwardTile, listed: bool, mask: Words) -> TritonKernel:
    return triton_kernel(
        _BEGIN_KERNEL, grid=lambda queries, programs, ROWS: (_blocks(queries, ROWS), programs),
        E=columns, E0=wide, D=wide, ROWS=tile.rows, GROUPED=tile.grouped, LISTED=listed, MASK=mask,
        num_warps=8, maxnreg=_BEGIN_REGISTERS,
    )  # fmt: skip


@functools.cache
def _end_kernel(channels: int, wide: int, block: int, mask: Words) -> TritonKernel:
    return triton_kernel(
        _END_KERNEL, grid=lambda queries, programs, ROWS: (_blocks(queries, ROWS), programs),
        E=channels, D=wide, ROWS=block, MASK=mask, num_warps=8, maxnreg=_END_REGISTERS[wide],
    )  # fmt: skip


@functools.cache
def _kernel(tile: BackwardTile, ordered: bool, banded: bool, mask: Words) -> TritonKernel:
    layout = Layout("NVMMASharedLayout", swizzle_byte_width=128, element_bitwidth=16, rank=4)
    of_sums = Layout("NVMMASharedLayout", swizzle_byte_width=0, element_bitwidth=32, rank=1)
    of_total = Layout("NVMMASharedLayout", swizzle_byte_width=128, element_bitwidth=32, rank=2)
    loops, others, all_threads = tile.registers
    half = 64
    of_rows = functools.partial(_block, tile.rows)
    of_keys = functools.partial(_block, half)
    return triton_kernel(
        _BACKWARD_KERNEL if tile.keys == 128 else _WIDE_KERNEL,
        grid=lambda tiles, processors: min(tiles, processors),
        q_desc=tensor_descriptor("q", block=lambda q, v: of_rows(q, v), layout=layout),
        k_desc=tensor_descriptor("k", block=lambda q, v: of_keys(q, v), layout=layout),
        v_desc=tensor_descriptor("v", block=lambda q, v: of_keys(q, v), layout=layout),
        gradient_desc=tensor_descriptor("gradient", block=lambda q, v: of_rows(q, v), layout=layout),
        sums_desc=tensor_descriptor("sums", block=(half,), layout=of_sums),
        sum_desc=tensor_descriptor("total", block=(half * half // _WIDE, _WIDE), layout=of_total),
        of_k_desc=tensor_descriptor("of_k", block=lambda q, v: of_keys(q, v), layout=layout),
        of_v_desc=tensor_descriptor("of_v", block=lambda q, v: of_keys(q, v), layout=layout),
        **_SIZES,
        tiles=lambda k: k.shape[0] * k.shape[1] * -(-k.shape[2] // tile.keys),
        section=lambda q, k, v: _section(q, k, v, tile.rows),
        ROWS=tile.rows,
        BANDED=banded,
        MASK=mask,
        ORDERED=ordered,
        GROUPED=tile.grouped,
        APART=tile.apart,
        REGISTERS=loops,
        OTHER_REGISTERS=others,
        num_warps=4,
        maxnreg=all_threads,
        targets=("sm_90",),
    )


def _block(rows: int, q: Any, v: Any) -> tuple[int, int, int, int]:
    return 1, 1, rows, padded(max(q.shape[3], v.shape[3]))


def _section(q: Any, k: Any, v: Any, block: int) -> int:
    """Return how many heads of keys to interleave: so many that their queries, with what belongs to these, fit into the cache."""
    group = q.shape[1] // k.shape[1]
    of_head = group * q.shape[2] * padded(max(q.shape[3], v.shape[3])) * (2 + 2 + 4)
    return evenly(k.shape[0] * k.shape[1], _CACHED // of_head)


_SIZES: dict[str, Any] = {
    "queries": lambda q: q.shape[2],
    "keys": lambda k: k.shape[2],
    "heads": lambda q: q.shape[1],
    "key_heads": lambda k: k.shape[1],
}
