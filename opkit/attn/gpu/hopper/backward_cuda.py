"""The backward for sm_90a in CUDA C++ (``cuda/backward.cuh``): which calls are for it, and a call of it.

What Gluon cannot express there: that neither warpgroup waits for the other, since the product for the gradient of queries is
made a step late; that numbers of rows come into products by one of their own, in TF32, in place of loads; that a warp frees a
buffer by itself; that sums go to memory from registers while others multiply; and that three warps which would have nothing to do
prepare rows of later heads and round gradients of earlier ones during the products, where other kernels did both before and
after them. Most calls get it, the kernel in Gluon is called for others.

Rows with huge logits are left out, and the last kernel adds their part (``cuda/backward_after.cuh``).

Under ``torch.use_deterministic_algorithms`` tiles take turns at the gradient of queries (``cuda/backward_ordered.cuh``); under
masks that are more than a band and lengths the blocks of queries that a tile visits are listed
(:mod:`opkit.attn.gpu.tile_lists`), with their turns. :mod:`opkit.attn.gpu.hopper.backward_kinds` says what is compiled for which
calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import allocate_scratch, overwritten, rows
from opkit.attn.calls import GradientCall, dtypes_and_shapes, predicate
from opkit.attn.gpu import arguments, plans
from opkit.attn.gpu.functions import Placed
from opkit.attn.gpu.hopper import backward as gluon
from opkit.attn.gpu.hopper import calls, functions, library
from opkit.attn.gpu.hopper.backward_kinds import PART, Kind, is_alone, kind_of, tile_of
from opkit.attn.gpu.hopper.biases import as_functions
from opkit.attn.gpu.hopper.library import Lists, Rows
from opkit.attn.gpu.hopper.masks import Mask, list_building, reader_of, shape_of
from opkit.attn.gpu.portable import backward as portable
from opkit.attn.masks import program
from opkit.errors import KernelError
from opkit.op import torch_private as private
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME, _SOURCE = "hopper_cuda", "backward"
_PRIORITY = 2  # above the kernel in Gluon
_ENOUGH = 512  #: queries, and keys that each sees, of heads of more than 64 from which on it is the faster one
_NARROW = 192  #: channels of queries up to which it is
_SECTOR = 16  #: channels that memory moves at once
_PART_ROWS = 64
_SUM_FLOATS = 8  #: that products read of a row
_CACHED, _CACHED_SHORT, _CACHED_WIDE = 36 << 20, 16 << 20, 24 << 20
"""Bytes of queries, their gradients and the sums of those that shall stay in the L2 cache; of calls of up to 1024 queries fewer.
benchmarks/README.md explains the choice ("The backward for Hopper")."""
_WIDER = {64: 2, 128: 1, 256: 1}
"""Of deterministic calls under windows or segments so many times as many, by the larger head, and once more without a band: the
more heads are interleaved, the less do tiles of one head wait for one another."""
_SHORT = 1024
_AHEAD = 2  #: tiles of each multiprocessor, at least, whose queries' rows are prepared before the products begin
_HELPED = 1024
"""Queries: in shorter calls, whose products leave helpers no time, a kernel of its own prepares all rows; of heads of more than
128 another one rounds all gradients of queries. Of other calls it rounds those of the last section's heads."""
_TURNED = {
    64: 0,
    128: 16,
    256: 32,
}  #: tiles of a head up to which all go from the last queries to the first; by the larger head
_COUNTERS = 3  #: in addition to those of heads
_TENSORS = ("q", "k", "v", "out", "gradient", "of_q", "of_k", "of_v", "lse", "of_lse")
_POINTERS = ("delta", "sums", "total", "counter", "exact", "large", "sinks")
_INTS = (
    "batch", "heads", "key_heads", "queries", "keys", "head_size", "value_size", "lower", "upper", "section",
    "turned", "prepared", "finished", "tiles", "processors", "device",
)  # fmt: skip
_OF_LARGE = 5  #: numbers of rows with huge logits in addition to those of heads
Results = tuple[Tensor, Tensor, Tensor, Tensor]


class BackwardProblem(ctypes.Structure):
    """A call, as ``cuda/backward_call.cuh`` says."""

    _fields_ = (
        *((name, Rows) for name in _TENSORS),
        ("lists", Lists),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _INTS),
        *((name, ctypes.c_float) for name in ("scale", "factor", "inner", "offset")),
        ("mask", Mask),
        ("functions", functions.Functions),
    )


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention_backward`` the kernel."""
    op.register_kernel(
        "cuda", backward, when=predicate(GradientCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


def takes(call: GradientCall) -> bool:
    """Return whether a call is for :func:`backward`: it fits, on sm_90 with a CUDA compiler."""
    given, call = call, as_functions(call)
    if not fits(call) or not calls.on_hopper(call.q) or _is_slower(call) or _has_narrow_positions(given):
        return False
    return library.there(_SOURCE, call.q.dtype, lambda: kind_of(call, private.deterministic()).definitions)


def _has_narrow_positions(call: GradientCall) -> bool:
    """Return whether it has a ``RelativePosition`` in 16 bits and heads of up to 64: the portable kernel is 1.1 times as fast."""
    narrow = calls.padded(max(call.q.shape[3], call.v.shape[3])) == calls.HEADS[0]
    words = program.instructions(call.bias, program.BIAS_OPERANDS)
    return narrow and any(
        opcode == program.BIAS_REL and call.bias_tensors[first].element_size() == 2 for opcode, first, *_ in words
    )


def _is_slower(call: GradientCall) -> bool:
    """Return whether the kernel in Gluon is faster, as measured on an H200.

    It is where a multiprocessor has one tile at most, in short calls of heads of more than 64 with several tiles, and for wide
    heads, whose sums of the gradient of queries are all that the L2 cache can do.
    """
    head, values, shape = call.q.shape[3], call.v.shape[3], shape_of(call)
    if _functions_of(call):  # which that kernel does not call
        return False
    size = calls.padded(max(head, values))
    if call.k.shape[0] * call.k.shape[1] * -(-call.k.shape[2] // tile_of(size)[1]) <= calls.processors(call.q.device):
        return True
    short = (
        min(call.q.shape[2], shape.upper - shape.lower) < _ENOUGH
        and size == calls.HEADS[1]
        and not is_alone(call, shape)
    )
    whole = head % _SECTOR == 0 and values % _SECTOR == 0  # of others it is slow
    return (short and whole and not call.softcap) or (
        head > _NARROW and not (library.of_segments(shape) or shape.lengths)
    )


def _functions_of(call: GradientCall) -> tuple[Placed, ...]:
    """Return users' functions, of masks and of biases."""
    return plans.shape_of(tuple(call.mask), tuple(call.bias)).functions


def fits(call: GradientCall) -> bool:
    """Return whether :func:`backward` can compute a call."""
    return call.q.dtype in calls.DTYPES and calls.gradient_fits(call)


@PreparedKernel
def backward(*args: Any) -> Callable[..., Results]:
    """Compute the gradients of q, k and v, and delta; the arguments are a :class:`~opkit.attn.calls.GradientCall`.

    It takes bfloat16 and float16; heads of up to 256 channels that 8 divides, those of queries and of values of any two such
    sizes; grouped heads; any numbers of queries and keys but none; every mask; biases and users' functions, up to the tensors and
    numbers that there is room for; a positive scale; a soft cap; a gradient of the log-sum-exp. The factor of logits, which is
    the cap or else the scale, is at most 1024. It takes no dropout.

    Rows whose log-sum-exp is beyond 4096 are computed apart, slowly, of logits that are exact to the rounding of products: in
    probabilities the rounding of a log-sum-exp as large as L, up to L / 2^24, would be seen. Of others it is added within the
    products of queries and keys, whose greatest terms it is rounded with.

    Probabilities and the gradients of logits are rounded to q's dtype before they are multiplied further; sums are in float32.
    Keys, values and queries that are hidden from one another do not reach each other's gradients, whatever they hold. The
    gradients of a row that sees a key or a value that is not finite, and of the keys that such a row sees, may be NaN where the
    reference has numbers, or other numbers. Under a mask that is more than a band, gradients of results do not reach what is
    hidden from their rows either; those of a row that are not finite may make NaN of the gradients of all that it sees.

    Parts of the gradient of queries are added up in memory in any order, so that its last bits differ from run to run, unless
    ``torch.are_deterministic_algorithms_enabled()`` at the time of a call: then they are added up by the order of keys, of some
    heads from the first keys to the last, of others from the last. The other gradients are the same in every run.

    Tensors are read as they lie where TMA can follow their strides, and copied where it cannot.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the kernel in Gluon is called.
    """
    call = as_functions(GradientCall(*args))
    if not fits(call):
        shapes = dtypes_and_shapes((call.q, call.k, call.v))
        raise KernelError(
            f"opkit::attention_backward: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}, dropout_p={call.dropout_p}. Leave the choice to opkit, or force "
            "kernel='reference'."
        )
    runs: dict[bool, Callable[..., Results]] = {}  # by whether algorithms are deterministic

    def run(*args: Any) -> Results:
        ordered = private.deterministic()
        if ordered not in runs:
            runs[ordered] = _prepared(as_functions(GradientCall(*args)), ordered)
        return runs[ordered](*args)

    return run


def _prepared(call: GradientCall, ordered: bool) -> Callable[..., Results]:
    kind = kind_of(call, ordered)
    lists = list_building(call, kind.asked, kind.tile, by_keys=True, in_order=ordered)
    kernels = library.kernels_or_none(_SOURCE, call.q.dtype, kind.definitions, lists)
    if kernels is None:
        return portable.prepare_backward(call) if _functions_of(call) else gluon.backward.prepare(*call)
    shape, fitted = shape_of(call), arguments.fit_to_slots(call)
    fits_slots, captured = fitted is call, functions.places_of(call)
    masked = shape.mask or shape.lengths
    read_mask = reader_of(fitted, shape, kind.asked, kind.tile, by_keys=True, in_order=ordered) if masked else None
    made = [rows(each, each.shape[3], call.out_is_bshd) for each in call[2:5]]
    delta = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    new = [overwritten(each) for each in (*made, delta)]
    common, gpu, large = _problem(call, kind), call.q.get_device(), may_be_large(call)
    inputs = (call.q, call.k, call.v, call.out, call.gradient)
    described = all(map(calls.describable, inputs))
    _set_rows(common, (*inputs, *made, call.lse, call.of_lse))
    launch = kernels.launching(*_steps(kernels, call, common, kind), BackwardProblem, gpu)
    total, sums, exact, counts = _room(call, kind)
    counter = calls.counters(call.q.device, _OF_LARGE + call.k.shape[0] * call.k.shape[1])

    def run(*args: Any) -> Results:
        gradient, of_lse, q, k, v, out, lse = args[:7]
        results = [each() for each in new]
        room = allocate_scratch(q, total + sums + exact + counts, torch.float32)
        inputs, problem = (q, k, v, out, gradient), BackwardProblem.from_buffer_copy(common)
        if not described or any(each.data_ptr() % 16 for each in inputs):
            inputs = [readable(each) for each in inputs]
            _set_rows(problem, inputs)
        for name, tensor in zip(_TENSORS, (*inputs, *results[:3], lse, of_lse), strict=False):
            if tensor is not None:
                getattr(problem, name).data = tensor.data_ptr()
        held: list[Any] = []  # until the launch
        if read_mask is not None:
            of_mask = GradientCall(*args) if fits_slots else arguments.fit_to_slots(GradientCall(*args))
            problem.mask, problem.lists, read = read_mask(of_mask)
            held += [of_mask, read]
        if captured:
            functions.set_addresses(problem.functions, captured, *args[7:9])
        at = room.data_ptr()
        problem.delta, problem.total, problem.sums = results[3].data_ptr(), at, at + 4 * total
        problem.counter = at + 4 * (total + sums + exact)
        if large:
            held.append(counter())
            problem.exact, problem.large = at + 4 * (total + sums), held[-1].data_ptr()
            if (sinks := GradientCall(*args).sinks) is not None:
                held.append(sinks.to(torch.float32).contiguous())
                problem.sinks = held[-1].data_ptr()
        launch(problem, private.current_stream(gpu))
        return results[0], results[1], results[2], results[3]

    return run


def may_be_large(call: GradientCall) -> bool:
    """Return whether logits may be so large that rows are computed apart."""
    return call.softcap == 0


def _steps(
    kernels: library.Kernels, call: GradientCall, problem: BackwardProblem, kind: Kind
) -> tuple[list[library.Step], list[library.Map]]:
    """Return the launches of a call, and the maps of ``cuda/backward_call.cuh``; set how many tiles the problem has."""
    q, k, v = call[2:5]
    _, _, block, keys, boxes, piece = kernels.numbers["gradients"]
    problem.tiles, batch_heads = -(-k.shape[2] // keys) * k.shape[0] * k.shape[1], q.shape[0] * q.shape[1]
    parts = (  # a tensor's name, another one of its sizes, rows of a box, and boxes
        ("q", q, block, boxes), ("k", k, keys, boxes), ("v", v, keys, boxes),
        *((name, call.out, rows, boxes) for name, rows in (("gradient", block), ("out", piece), ("gradient", piece))),
        ("of_q", q, _PART_ROWS, 1),
    )  # fmt: skip
    maps = [
        library.map_of(getattr(BackwardProblem, name).offset, q.dtype, x.shape[:3], x.shape[3], rows, at_once)
        for name, x, rows, at_once in parts
    ]
    steps = [
        library.Step("rows", (-(-q.shape[2] // block) * problem.prepared, 1, 1), early=True),
        library.Step("gradients", (min(problem.tiles, problem.processors), 1, 1), early=True),
    ]
    items = 0 if kind.alone else (batch_heads - problem.finished) * -(-q.shape[2] // block) * kind.parts
    at_once = kernels.numbers["after_products"][2]
    after = min(max(-(-items // at_once), problem.processors), 2 * problem.processors)
    steps.append(library.Step("after_products", (after, 1, 1), early=True))
    return steps, maps


def _set_rows(problem: BackwardProblem, tensors: Sequence[Tensor | None]) -> None:
    """Set the strides of the first of ``_TENSORS``."""
    for name, tensor in zip(_TENSORS, tensors, strict=False):
        setattr(problem, name, Rows() if tensor is None else library.rows_of(tensor))


def readable(x: Tensor) -> Tensor:
    """Return the same where TMA can follow its strides and it is aligned; else a copy."""
    if calls.describable(x) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _room(call: GradientCall, kind: Kind) -> tuple[int, int, int, int]:
    """Return how many floats the kernels pass one to another: the gradient of queries, and numbers of rows; and counts."""
    batch, heads, queries, _ = call.q.shape
    blocks = batch * heads * -(-queries // kind.rows)
    counts = _COUNTERS + batch * (heads + call.k.shape[1]) + (blocks if kind.ordered else 0)
    exact = 2 * batch * heads * queries if may_be_large(call) else 0
    return 0 if kind.alone else blocks * kind.parts * PART, blocks * kind.rows * _SUM_FLOATS, exact, counts


def _problem(call: GradientCall, kind: Kind) -> BackwardProblem:
    """Return what is the same for all calls like this one, but for tensors."""
    q, k, v = call[2:5]
    shape, group, processors = shape_of(call), q.shape[1] // k.shape[1], calls.processors(q.device)
    all_heads, tiles = k.shape[0] * k.shape[1], -(-k.shape[2] // kind.keys)
    section = calls.evenly(all_heads, _cached(call, shape, kind) // (group * q.shape[2] * kind.size * 8))
    ahead, finished = max(section, -(-_AHEAD * processors // tiles)), (all_heads - 1) // section * section
    if q.shape[2] < _HELPED:
        ahead = all_heads
        finished = 0 if kind.size > calls.HEADS[1] else finished
    if kind.alone:
        finished = 0
    numbers = {
        "batch": q.shape[0], "heads": q.shape[1], "key_heads": k.shape[1], "queries": q.shape[2], "keys": k.shape[2],
        "head_size": q.shape[3], "value_size": v.shape[3], "lower": shape.lower, "upper": shape.upper,
        "section": section, "turned": _turned(call, shape, section, kind), "prepared": group * min(ahead, all_heads),
        "finished": group * finished,
        "processors": processors, "device": q.get_device(), "scale": call.scale, "factor": call.scale * calls.LOG2E,
    }  # fmt: skip
    if call.softcap:  # as in the forward
        offset = call.softcap * calls.LOG2E
        numbers |= {"factor": 2 * offset, "inner": 2 * calls.LOG2E * call.scale / call.softcap, "offset": offset}
    if call.bias:
        numbers |= {"factor": calls.LOG2E, "inner": call.scale}
    if _functions_of(call):
        numbers["functions"] = functions.captured(call)
    return BackwardProblem(**numbers)


def _cached(call: GradientCall, shape: plans.MaskShape, kind: Kind) -> int:
    """Bytes that the heads of a section have, at most."""
    cached = _CACHED_WIDE if kind.size > 128 else _CACHED
    if call.q.shape[2] <= _SHORT:
        cached = _CACHED_SHORT
    if not (kind.ordered and _local(call, shape)):
        return cached
    return cached * (_WIDER[kind.size] + (not shape.banded))


def _local(call: GradientCall, shape: plans.MaskShape) -> bool:
    """Return whether keys are seen by the queries near them alone: in a window, or, as a rule, in segments."""
    return bool(shape.mask) or shape.lower > -call.q.shape[2]


def _turned(call: GradientCall, shape: plans.MaskShape, section: int, kind: Kind) -> int:
    """Return, for ordered sums, how many tiles come before those that visit queries from the last to the first.

    Others, which go on from the keys of one to those before them, have tiles of the same queries two steps apart where a query
    sees what is before it. But then the longest ones come last, and multiprocessors have nothing to do meanwhile.
    """
    all_heads, tiles = call.k.shape[0] * call.k.shape[1], -(-call.k.shape[2] // kind.keys)
    if _local(call, shape):  # no tile is much longer than others, and lists have turns of that order alone
        return all_heads * tiles
    if tiles <= _TURNED[kind.size]:
        return 0
    return (all_heads - 1) // section * section * tiles
