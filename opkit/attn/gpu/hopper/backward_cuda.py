"""The backward for sm_90a in CUDA C++ (``cuda/backward.cuh``): which calls are for it, and a call of it.

What Gluon cannot express there: that neither warpgroup waits for the other, since the product for the gradient of queries is
made a step late; that numbers of rows come into products by one of their own, in TF32, in place of loads; that a warp frees a
buffer by itself; that sums go to memory from registers while others multiply; and that three warps which would have nothing to do
prepare rows of later heads and round gradients of earlier ones during the products, where other kernels did both before and
after them. Long calls get it, the kernel in Gluon is called for others.

Rows with huge logits are left out; two short launches look for them and add their part, as the kernel in Gluon does
(:func:`opkit.attn.gpu.hopper.backward.large_rows`).

Under ``torch.use_deterministic_algorithms`` tiles take turns at the gradient of queries (``cuda/backward_ordered.cuh``); under
segments the blocks of queries that a tile visits are listed (:mod:`opkit.attn.gpu.tile_lists`), with their turns. The source
is compiled for each way, when it is first needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import allocate_scratch, overwritten, rows
from opkit.attn.calls import GradientCall, dtypes_and_shapes, predicate
from opkit.attn.gpu import plans
from opkit.attn.gpu.hopper import backward as gluon
from opkit.attn.gpu.hopper import calls, library
from opkit.attn.gpu.hopper.library import Lists, Rows, lists_of, of_segments
from opkit.errors import KernelError
from opkit.op import torch_private as private
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME = "hopper_cuda"
HEADS = (64, 128)  #: channels
_PRIORITY = 2  # above the kernel in Gluon
_FROM = {64: 1024, 128: 512}  #: queries from which on it is the faster one, and keys that each sees; by the larger head
_PART_ROWS = 64
_PART = _PART_ROWS * 64  #: floats of a warpgroup's part of the gradient of a block of queries
_CACHED, _CACHED_SHORT = 36 << 20, 16 << 20
"""Bytes of queries, their gradients and the sums of those that shall stay in the L2 cache; of calls of up to 1024 queries fewer.
benchmarks/README.md explains the choice ("The backward for Hopper")."""
_WIDER = {64: 2, 128: 1}
"""Of deterministic calls under windows or segments so many times as many, by the larger head, and once more without a band: the
more heads are interleaved, the less do tiles of one head wait for one another."""
_SHORT = 1024
_KEYS = 128  #: of a tile
_AHEAD = 2  #: tiles of each multiprocessor, at least, whose queries' rows are prepared before the products begin
_ALL_AHEAD = 1024  #: queries: of calls with fewer all rows are, since their products leave helpers no time for any
_TURNED = {64: 0, 128: 16}  #: tiles of a head up to which all go from the last queries to the first; by the larger head
_COUNTERS = 3  #: in addition to those of heads
_MOST = 65535  #: heads of all batches
_TENSORS = ("q", "k", "v", "out", "gradient", "of_q", "of_k", "of_v", "lse", "of_lse")
_POINTERS = ("delta", "sums", "total", "counter")
_INTS = (
    "batch", "heads", "key_heads", "queries", "keys", "head_size", "value_size", "lower", "upper", "banded", "section",
    "turned", "prepared", "tiles", "processors", "device",
)  # fmt: skip
Results = tuple[Tensor, Tensor, Tensor, Tensor]


class BackwardProblem(ctypes.Structure):
    """A call, as ``cuda/backward_tiles.cuh`` says."""

    _fields_ = (
        *((name, Rows) for name in _TENSORS),
        ("lists", Lists),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _INTS),
        ("scale", ctypes.c_float),
        ("factor", ctypes.c_float),
    )


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention_backward`` the kernel."""
    op.register_kernel(
        "cuda", backward, when=predicate(GradientCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


def takes(call: GradientCall) -> bool:
    """Return whether a call is for :func:`backward`: long, on sm_90 with a CUDA compiler."""
    return fits(call) and _long(call) and gluon.takes(call) and library.there("backward", call.q.dtype)


def fits(call: GradientCall) -> bool:
    """Return whether :func:`backward` can compute a call."""
    shape = plans.shape_of(tuple(call.mask), ())
    plain = gluon.may_be_large(call) and not shape.lengths and (not shape.mask or of_segments(shape))
    heads = call.q.shape[3] in HEADS and call.v.shape[3] in HEADS
    return gluon.fits(call) and plain and heads and call.q.shape[0] * call.q.shape[1] <= _MOST


def _long(call: GradientCall) -> bool:
    shape = plans.shape_of(tuple(call.mask), ())
    seen = min(call.k.shape[2], shape.upper - shape.lower)
    return min(call.q.shape[2], seen) >= _FROM[_widest(call)]


def _widest(call: GradientCall) -> int:
    return max(call.q.shape[3], call.v.shape[3])


@PreparedKernel
def backward(*args: Any) -> Callable[..., Results]:
    """Compute the gradients of q, k and v, and delta; the arguments are a :class:`~opkit.attn.calls.GradientCall`.

    It takes bfloat16 and float16; heads of 64 and 128, those of queries and of values of any two; grouped heads; any numbers of
    queries and keys but none; no mask, a band, segments or both; a positive scale; a gradient of the log-sum-exp. What
    :func:`opkit.attn.gpu.hopper.backward.backward` says of rounding, of what is hidden, of the order of sums and of strides holds
    here too, but that with deterministic algorithms some heads' parts are added up from the first keys to the last.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the kernel in Gluon is called.
    """
    call = GradientCall(*args)
    if not fits(call):
        shapes = dtypes_and_shapes((call.q, call.k, call.v))
        raise KernelError(
            f"opkit::attention_backward: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}, dropout_p={call.dropout_p}: it takes heads of 64 and 128, under bands "
            "and segments or no mask. Leave the choice to opkit, or force kernel='hopper'."
        )
    runs: dict[
        bool, Callable[..., Results]
    ] = {}  # by whether algorithms are deterministic; as a rule one of them is compiled

    def run(*args: Any) -> Results:
        ordered = private.deterministic()
        if ordered not in runs:
            runs[ordered] = _prepared(GradientCall(*args), ordered)
        return runs[ordered](*args)

    return run


def _prepared(call: GradientCall, ordered: bool) -> Callable[..., Results]:
    listed = bool(plans.shape_of(tuple(call.mask), ()).mask)
    name = f"backward{'_of_lists' if listed else ''}{'_in_order' if ordered else ''}"
    kernels = library.kernels_or_none(name, call.q.dtype)
    if kernels is None:
        return gluon.backward.prepare(*call)
    made = [rows(each, each.shape[3], call.out_is_bshd) for each in call[2:5]]
    delta = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    new = [overwritten(each) for each in (*made, delta)]
    common, gpu = _problem(call, ordered), call.q.get_device()
    launch = kernels.launching(*_steps(kernels, call, common), BackwardProblem, gpu)
    sums, total, counts = _room(call, ordered)
    tile = _rows(call), _KEYS
    as_they_lie, copied = (gluon.large_rows(call) for _ in range(2))  # copies have strides of their own

    def run(*args: Any) -> Results:
        gradient, of_lse, q, k, v, out, lse = args[:7]
        results = [each() for each in new]
        room = allocate_scratch(q, sums + total + counts, torch.float32)
        inputs = [readable(each) for each in (q, k, v, out, gradient)]
        problem = BackwardProblem.from_buffer_copy(common)
        for name, tensor in zip(_TENSORS, (*inputs, *results[:3], lse, of_lse), strict=True):
            setattr(problem, name, Rows() if tensor is None else library.rows_of(tensor, tensor.data_ptr()))
        if listed:
            # What is read is held until the launch.
            problem.lists, _read = lists_of(GradientCall(*args), *tile, by_keys=True, in_order=ordered)
        problem.delta, problem.total = results[3].data_ptr(), room.data_ptr()
        problem.sums, problem.counter = room.data_ptr() + 4 * total, room.data_ptr() + 4 * (total + sums)
        launch(problem, private.current_stream(gpu))
        q, k, v, _, gradient = inputs
        same = gradient is args[0] and all(x is y for x, y in zip(inputs[:3], args[2:5], strict=True))
        add_large_rows = as_they_lie if same else copied
        add_large_rows(GradientCall(*args)._replace(gradient=gradient, q=q, k=k, v=v), *results)
        return results[0], results[1], results[2], results[3]

    return run


def _steps(
    kernels: library.Kernels, call: GradientCall, problem: BackwardProblem
) -> tuple[list[library.Step], list[library.Map]]:
    """Return the launches of a call, and the maps of ``cuda/backward_tiles.cuh``; set how many tiles the problem has."""
    q, k, v = call[2:5]
    shape, size = plans.shape_of(tuple(call.mask), ()), HEADS[_widest(call) > HEADS[0]]
    name = f"gradients_{size}{'_banded' if shape.banded or shape.mask else ''}"
    _, _, block, keys, boxes = kernels.numbers[name]
    problem.tiles = -(-k.shape[2] // keys) * k.shape[0] * k.shape[1]
    parts = (  # a tensor's name, another one of its sizes, rows of a box, and boxes
        ("q", q, block, boxes), ("k", k, keys, boxes), ("v", v, keys, boxes),
        *((name, call.out, rows, boxes) for name, rows in (("gradient", block), ("out", block // 2), ("gradient", block // 2))),
        ("of_q", q, _PART_ROWS, 1),
    )  # fmt: skip
    maps = [
        library.map_of(getattr(BackwardProblem, name).offset, q.dtype, x.shape[:3], x.shape[3], rows, at_once)
        for name, x, rows, at_once in parts
    ]
    return [
        library.Step(f"rows_{size}", (-(-q.shape[2] // block), problem.prepared, 1)),
        library.Step(name, (min(problem.tiles, problem.processors), 1, 1)),
    ], maps


def _rows(call: GradientCall) -> int:
    """Queries of a block."""
    return 2 * _PART // _widest(call)


def readable(x: Tensor) -> Tensor:
    """Return the same where TMA can follow its strides and it is aligned; else a copy."""
    if calls.describable(x) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _room(call: GradientCall, ordered: bool) -> tuple[int, int, int]:
    """Return how many floats the kernels pass one to another: numbers of rows, and the gradient of queries; and counts."""
    batch, heads, queries, _ = call.q.shape
    block = _rows(call)
    blocks = batch * heads * -(-queries // block)
    counts = _COUNTERS + batch * (heads + call.k.shape[1]) + (blocks if ordered else 0)
    return blocks * block * 8, blocks * 2 * _PART, counts


def _problem(call: GradientCall, ordered: bool) -> BackwardProblem:
    """Return what is the same for all calls like this one, but for tensors."""
    q, k, v = call[2:5]
    shape = plans.shape_of(tuple(call.mask), ())
    group, processors = q.shape[1] // k.shape[1], calls.processors(q.device)
    all_heads, tiles = k.shape[0] * k.shape[1], -(-k.shape[2] // _KEYS)
    section = calls.evenly(all_heads, _cached(call, shape, ordered) // (group * q.shape[2] * _widest(call) * 8))
    ahead = all_heads if q.shape[2] < _ALL_AHEAD else max(section, -(-_AHEAD * processors // tiles))
    numbers = {
        "batch": q.shape[0], "heads": q.shape[1], "key_heads": k.shape[1], "queries": q.shape[2], "keys": k.shape[2],
        "head_size": q.shape[3], "value_size": v.shape[3], "lower": shape.lower, "upper": shape.upper, "banded": shape.banded,
        "section": section, "turned": _turned(call, shape, section), "prepared": group * min(ahead, all_heads),
        "processors": processors, "device": q.get_device(), "scale": call.scale, "factor": call.scale * calls.LOG2E,
    }  # fmt: skip
    return BackwardProblem(**numbers)


def _cached(call: GradientCall, shape: plans.MaskShape, ordered: bool) -> int:
    """Bytes that the heads of a section have, at most."""
    cached = _CACHED_SHORT if call.q.shape[2] <= _SHORT else _CACHED
    if not (ordered and _local(call, shape)):
        return cached
    return cached * (_WIDER[_widest(call)] + (not shape.banded))


def _local(call: GradientCall, shape: plans.MaskShape) -> bool:
    """Return whether keys are seen by the queries near them alone: in a window, or, as a rule, in segments."""
    return bool(shape.mask) or shape.lower > -call.q.shape[2]


def _turned(call: GradientCall, shape: plans.MaskShape, section: int) -> int:
    """Return, for ordered sums, how many tiles come before those that visit queries from the last to the first.

    Others, which go on from the keys of one to those before them, have tiles of the same queries two steps apart where a query
    sees what is before it. But then the longest ones come last, and multiprocessors have nothing to do meanwhile.
    """
    all_heads, tiles = call.k.shape[0] * call.k.shape[1], -(-call.k.shape[2] // _KEYS)
    if _local(call, shape):  # no tile is much longer than others, and lists have turns of that order alone
        return all_heads * tiles
    if tiles <= _TURNED[_widest(call)]:
        return 0
    return (all_heads - 1) // section * section * tiles
