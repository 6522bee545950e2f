"""The forward for sm_90a in CUDA C++ (``cuda/forward.cu``): which calls are for it, and a call of it.

One thread of a block loads by TMA, and warpgroups multiply, 64 queries each. A block takes tiles, some queries of one head each,
from a counter until there are no more. The method is that of FlashAttention-3 (Shah et al., 2024).
:mod:`opkit.attn.gpu.hopper.forward_kinds` says what a kernel is compiled for.

Under segments whose numbers are in order, as those of packed sequences are, a tile's steps begin where its first sequence does,
and a row's span of keys is computed before: to hide other keys takes as little as a band. Under other masks the blocks of keys
that a tile visits are listed. Both are in :mod:`opkit.attn.gpu.tile_lists`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import overwritten, rows
from opkit.attn.calls import AttentionCall, Float8Call, dtypes_and_shapes, predicate
from opkit.attn.gpu import arguments, plans
from opkit.attn.gpu.hopper import calls, functions, library
from opkit.attn.gpu.hopper.biases import as_functions
from opkit.attn.gpu.hopper.forward_kinds import ROWS, Kind, Layout, kind_of
from opkit.attn.gpu.hopper.library import Lists, Rows
from opkit.attn.gpu.hopper.masks import Mask, list_building, reader_of, shape_of
from opkit.attn.gpu.portable import forward as portable
from opkit.errors import KernelError
from opkit.op import torch_private as private
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME = "hopper_cuda"
_PRIORITY = 1  # above the portable kernel
_FROM = {
    64: ((512, 512), (512, 128)),
    128: ((1024, 1024), (384, 128)),
    256: ((1024, 1024), (512, 512)),
}
"""From how many queries, and keys that each sees, it is the faster one in float8, by the channels of a head: without and with a
band."""
_INTERLEAVED = {64: 64 << 20, 128: 32 << 20, 256: 16 << 20}
_INTERLEAVED_SHORT = {64: (), 128: ((512, 8 << 20), (1024, 16 << 20)), 256: ((1024, 16 << 20),)}
"""Bytes of keys and values of the heads that are interleaved, by the size of the larger head, as measured: what the L2 cache
holds, which has 50 MB, or less. And up to so many keys it is fewer: queries and results take as much of the cache, and tiles of
all lengths are to be under way at once, since those that come first read from memory. benchmarks/README.md explains the choice
("The forward for Hopper")."""
_SOURCE, _KERNEL = "forward", "attention"
_OWNERS = 4  #: marks of a program in addition to those of its tiles
_INTS = (
    "batch", "heads", "group", "queries", "keys", "head_size", "value_size", "lower", "upper", "section",
    "blocks", "tiles", "processors", "device",
)  # fmt: skip
_RESULT_ROWS = 16  #: of a warp
_DESCALES = ("q_by", "k_by", "v_by")
_FLOAT8_PRIORITY = 1  # above the portable kernel
_MAX_BLOCKS = 65535  #: blocks of threads by a dimension, which are heads of keys and batches


class ForwardProblem(ctypes.Structure):
    """A call, as ``cuda/forward.cu`` says."""

    _fields_ = (
        *((name, Rows) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in _INTS),
        ("factor", ctypes.c_float),
        ("lists", Lists),
        ("narrow", Rows),
        *((name, ctypes.c_void_p) for name in _DESCALES),
        ("sinks", ctypes.c_void_p),
        ("inner", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("mask", Mask),
        ("functions", functions.Functions),
    )


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel."""
    op.register_kernel(
        "cuda", forward, when=predicate(AttentionCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


def takes(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`forward`: it fits, on sm_90 with a CUDA compiler."""
    call = as_functions(call)
    fits = calls.fits(call) and calls.applies(call)
    return fits and library.there(_SOURCE, call.q.dtype, lambda: kind_of(call).definitions)


def _notes(*args: Any) -> list[str]:
    return plans.live_tiles(shape_of(AttentionCall(*args)))


@functools.partial(PreparedKernel, notes=_notes)
def forward(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    It takes bfloat16 and float16; heads of up to 256 channels that 8 divides, those of queries and of values of any two such
    sizes; grouped heads; any numbers of queries and keys but none; every mask; a positive scale; a soft cap; sinks; biases and
    users' functions, up to the tensors and numbers that there is room for. The factor of logits, which is the cap or else the
    scale, is at most 1024. It takes no dropout.

    Probabilities are rounded to q's dtype before they are multiplied with the values. Keys and values that are hidden do not
    reach a result, whatever they hold: 64 rows with a result that is not a number are computed once more, slowly, of what they
    see alone. So are 64 rows if the greatest logit of one of them is beyond 1e7 or below -1e7: then differences of logits are
    taken before these are scaled. Where a visible logit is infinite, or a value, results and log-sum-exp may be NaN where the
    reference has an infinity. A call's results do not depend on other calls, nor on the GPU's multiprocessors.

    Tensors are read as they lie where TMA can follow their strides, and copied where it cannot.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the portable kernel is called.
    """
    call = as_functions(AttentionCall(*args))
    if not calls.fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, dropout_p={call.dropout_p}. Leave the choice to opkit, or force kernel='reference'."
        )
    return _prepared(call)


def _prepared(call: AttentionCall) -> Callable[..., tuple[Tensor, Tensor]]:
    kind = kind_of(call)
    lists = list_building(call, kind.asked, kind.layout.tile, by_keys=False)
    kernels = library.kernels_or_none(_SOURCE, call.q.dtype, kind.definitions, lists)
    return portable.prepare_forward(call) if kernels is None else launching(kernels, kind, call, call.q)


def launching(
    kernels: library.Kernels, kind: Kind, call: AttentionCall, like: Tensor
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that launches for calls like ``call``; results are of the dtype of ``like``, which is as q is.

    Where queries and keys are float8 it takes ``by``: three of float32, (batch, key heads) and dense, that their numbers and
    those of the values are multiplied by.
    """
    roomy = arguments.fit_to_slots(call)
    fits, shape, layout = roomy is call, shape_of(call), kind.layout
    masked = shape.mask or shape.lengths
    read_mask = reader_of(roomy, shape, kind.asked, layout.tile, by_keys=False) if masked else None
    captured = functions.places_of(call)
    described = all(calls.describable(each) for each in call[:3])
    counter = calls.counters(call.q.device, _marks(call, layout))
    made = rows(like, call.v.shape[3], call.out_is_bshd)
    new_out, new_lse = overwritten(made), overwritten(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    common, gpu = _problem(roomy, shape, made), call.q.get_device()
    launch = kernels.launching(*_steps(kernels, roomy, common), ForwardProblem, gpu)

    def run(*args: Any, by: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        inputs, problem = args[:3], ForwardProblem.from_buffer_copy(common)
        if not described or any(each.data_ptr() % 16 for each in inputs):
            inputs = [each.clone(memory_format=torch.contiguous_format) for each in inputs]
            problem.q, problem.k, problem.v = map(library.rows_of, inputs)
        out, lse, marks = new_out(), new_lse(), counter()
        for of, tensor in zip((problem.q, problem.k, problem.v, problem.out), (*inputs, out), strict=True):
            of.data = tensor.data_ptr()
        problem.lse, problem.counter = lse.data_ptr(), marks.data_ptr()
        held: list[Any] = []  # until the launch
        if by:
            held.append(_set_float8(problem, inputs[2], by))
        if (sinks := args[5]) is not None:
            held.append(sinks.to(torch.float32).contiguous())
            problem.sinks = held[-1].data_ptr()
        if read_mask is not None:
            of_mask = AttentionCall(*args) if fits else arguments.fit_to_slots(AttentionCall(*args))
            problem.mask, problem.lists, read = read_mask(of_mask)
            held += [of_mask, read]
        if captured:
            functions.set_addresses(problem.functions, captured, *args[3:5])
        launch(problem, private.current_stream(gpu))
        return out, lse

    return run


def _problem(call: AttentionCall, shape: plans.MaskShape, out: Tensor) -> ForwardProblem:
    """Return what is the same for all calls like this one."""
    q, k, v = call[:3]
    numbers: dict[str, Any] = {
        "batch": q.shape[0], "heads": q.shape[1], "group": q.shape[1] // k.shape[1], "queries": q.shape[2],
        "keys": k.shape[2], "head_size": q.shape[3], "value_size": v.shape[3], "lower": shape.lower, "upper": shape.upper,
        "section": _section(q, k, v),
        "processors": calls.processors(q.device), "device": q.get_device(), "factor": call.scale * calls.LOG2E,
    }  # fmt: skip
    if call.softcap:  # tanh is 1 + 2 x, x being what the kernel's ``capped`` returns
        offset = call.softcap * calls.LOG2E
        numbers |= {"factor": 2 * offset, "inner": 2 * calls.LOG2E * call.scale / call.softcap, "offset": offset}
    if call.bias:
        numbers |= {"factor": calls.LOG2E, "inner": call.scale}
    if plans.shape_of(tuple(call.mask), tuple(call.bias)).functions:
        numbers["functions"] = functions.captured(call)
    return ForwardProblem(*map(library.rows_of, (q, k, v, out)), **numbers)


def _steps(
    kernels: library.Kernels, call: AttentionCall, problem: ForwardProblem
) -> tuple[list[library.Step], list[library.Map]]:
    """Return the launches of a call, and the maps of its tensors; set how many tiles the problem has."""
    q, k, v = call[:3]
    float8 = q.dtype not in calls.DTYPES
    _, _, rows, keys, key_boxes, value_boxes = kernels.numbers[_KERNEL]
    problem.blocks = -(-q.shape[2] // rows)
    problem.tiles = q.shape[0] * q.shape[1] * problem.blocks
    of_v, of_out = (torch.float16, torch.bfloat16) if float8 else (v.dtype, q.dtype)
    parts = (  # a tensor, its sizes, dtype, rows of a box, and boxes
        ("q", q.shape, q.dtype, rows, key_boxes), ("k", k.shape, k.dtype, keys, key_boxes),
        ("v", v.shape, of_v, keys, value_boxes), ("out", (*q.shape[:3], v.shape[3]), of_out, _RESULT_ROWS, 1),
    )  # fmt: skip
    maps = [
        library.map_of(getattr(ForwardProblem, name).offset, dtype, sizes[:3], sizes[3], box, boxes)
        for name, sizes, dtype, box, boxes in parts
    ]
    steps = [library.Step(_KERNEL, (min(problem.tiles, problem.processors), 1, 1), early=True)]
    if float8:
        threads, _, piece, at_once = kernels.numbers["widen_values"]
        blocks = -(-k.shape[2] // (threads // (v.shape[3] // piece) * at_once))
        steps.insert(0, library.Step("widen_values", (blocks, k.shape[1], k.shape[0]), early=True))
    return steps, maps


def _set_float8(problem: ForwardProblem, v: Tensor, by: Sequence[Tensor]) -> Tensor:
    """Tell of descales, and of room for values in 16 bits, which it gives."""
    for name, each in zip(_DESCALES, by, strict=True):
        setattr(problem, name, each.data_ptr())
    wide = v.new_empty(v.shape, dtype=torch.float16)
    problem.narrow, problem.v = library.rows_of(v, v.data_ptr()), library.rows_of(wide, wide.data_ptr())
    return wide


def _section(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return how many heads of queries to interleave."""
    size = calls.padded(max(q.shape[3], v.shape[3]))
    short = next((limit for most, limit in _INTERLEAVED_SHORT[size] if k.shape[2] <= most), None)
    return calls.heads_within(short or _INTERLEAVED[size], q, k, v)


def _marks(call: AttentionCall, layout: Layout) -> int:
    """Return how many numbers a launch counts and marks with, as ``cuda/forward.cu`` lays them out."""
    batch, heads, queries, _ = call.q.shape
    tiles = batch * heads * -(-queries // (layout.groups * ROWS))
    return 2 + _OWNERS * calls.processors(call.q.device) + tiles * layout.groups


def register_float8(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention_float8`` the kernel."""
    op.register_kernel(
        "cuda",
        forward_float8,
        when=predicate(Float8Call, takes_float8),
        name=NAME,
        priority=_FLOAT8_PRIORITY,
        trusted=True,
    )


def takes_float8(call: Float8Call) -> bool:
    """Return whether a call is for :func:`forward_float8`: long, on sm_90 with a CUDA compiler."""
    if not fits_float8(call) or not _long(call.plain) or not calls.applies(call.plain):
        return False
    return library.there(_SOURCE, call.q.dtype, lambda: kind_of(call.plain).definitions)


def _long(call: AttentionCall) -> bool:
    """Return whether there are so many queries and keys that it is faster than the portable kernel in float8."""
    shape = plans.shape_of(tuple(call.mask), ())
    queries, enough = _FROM[call.q.shape[3]][shape.banded]
    return call.q.shape[2] >= queries and min(call.k.shape[2], shape.upper - shape.lower) >= enough


def _float8_has(call: AttentionCall) -> bool:
    """Return whether the kernels in float8 have what a call asks for."""
    asked = kind_of(call).asked
    heads = calls.HEADS[:2] if asked.listed else calls.HEADS
    return call.q.shape[3] == call.v.shape[3] in heads and not any((*asked.flags, *asked.functions, *asked.tile))


def fits_float8(call: Float8Call) -> bool:
    """Return whether :func:`forward_float8` can compute a call."""
    blocks = max(call.k.shape[:2]) <= _MAX_BLOCKS
    return blocks and portable.takes_float8(call) and calls.sizes_fit(call.plain) and _float8_has(call.plain)


@PreparedKernel
def forward_float8(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    It takes float8_e4m3fn and float8_e5m2; heads of 64, 128 and 256, values of as many channels; grouped heads; no mask or a
    band, for heads of 64 and 128 segments too. What :func:`opkit.attn.gpu.hopper.forward_cuda.forward` says of what is hidden,
    of infinities and of strides holds here too. Tensor cores keep 14 bits of a sum of products of float8, so that logits may be
    off by some 1e-3 of their size. Descales may be any numbers.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the portable kernel is called.
    """
    call = Float8Call(*args)
    if not fits_float8(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention_float8: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}: it takes heads of {(*calls.HEADS,)}, under a band, segments "
            "or no mask. Leave the choice to opkit, or force kernel='triton'."
        )
    plain = call.plain
    kind = kind_of(plain)
    kernels = library.kernels_or_none(_SOURCE, call.q.dtype, kind.definitions)
    if kernels is None:
        return portable.forward_float8.prepare(*call)
    inner = launching(kernels, kind, plain, torch.empty_like(call.q, dtype=torch.bfloat16))

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        call = Float8Call(*args)
        return inner(*call.plain, by=[each.contiguous() for each in call.descales])

    return run
