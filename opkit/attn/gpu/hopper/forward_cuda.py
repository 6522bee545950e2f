"""The forward for sm_90a in CUDA C++ (``cuda/forward.cu``): which calls are for it, and a call of it.

As in the kernel in Gluon, warpgroups have 64 queries each. What Gluon cannot express: a warp frees a buffer by itself, where
Triton has all of a warpgroup meet before and after; keys of a tile are loaded before the last values of the tile before, and not
at once with them; a warpgroup passes over steps of keys of which it sees none; and a step has 80 keys, which fill shared memory
together with queries of 256 channels; and how much of the softmax comes before a product is waited for is said, not left to the
compiler. Calls that are not short get it, and those that ask for ``kernel="hopper_cuda"``; the kernel in Gluon is as fast or
faster for others.

Under segments the source is compiled a second time. If numbers of keys are in order, as those of packed sequences are, a tile's
steps begin where its first sequence does, and a row's span of keys is computed before: to hide other keys takes as little as a
band. Else the blocks of keys that a tile visits are listed. Both are in :mod:`opkit.attn.gpu.tile_lists`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import overwritten, rows
from opkit.attn.calls import AttentionCall, Float8Call, dtypes_and_shapes, predicate
from opkit.attn.gpu import plans
from opkit.attn.gpu.hopper import forward as gluon
from opkit.attn.gpu.hopper import library
from opkit.attn.gpu.hopper.library import Lists, Rows, lists_of, of_segments
from opkit.attn.gpu.portable import forward as portable
from opkit.errors import KernelError
from opkit.op import torch_private as private
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME = "hopper_cuda"
GROUPS = {64: 3, 128: 2, 256: 2}  #: warpgroups of a block, by the channels of a head
_BRIEF_GROUPS = 4  #: of heads of 64 with few keys, or whose steps are listed
_LISTED_KEYS = {64: 64, 128: 128}  #: of a listed step, by the channels of a head
_BRIEF = (1024, 2048)
"""Up to how many keys that a query sees these are few; and where there is a band, and there are no more queries than that."""
_PRIORITY = 2  # above the kernel in Gluon
_FROM = {
    64: ((512, 512), (512, 128)),
    128: ((1024, 1024), (384, 128)),
    256: ((1024, 1024), (512, 512)),
}
"""From how many queries, and keys that each sees, it is the faster one, by the channels of a head: without and with a band."""
_INTERLEAVED = 64 << 20  #: bytes of keys and values of the heads of 64 channels that are interleaved, as measured
_INTERLEAVED_SHORT = 8 << 20  #: of heads of 128, up to so many keys; else as many as in Gluon
_SHORT = 512
_OWNERS = 4  #: marks of a program in addition to those of its tiles
_ROWS = 64  #: queries of a warpgroup
_INTS = (
    "batch", "heads", "group", "queries", "keys", "head_size", "value_size", "lower", "upper", "banded", "brief", "section",
    "blocks", "tiles", "processors", "device",
)  # fmt: skip
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
    )


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel."""
    op.register_kernel(
        "cuda", forward, when=predicate(AttentionCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


def takes(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`forward`: long, on sm_90 with a CUDA compiler."""
    return fits(call) and long(call) and gluon.applies(call) and library.there(library_of(call), call.q.dtype)


def fits(call: AttentionCall) -> bool:
    """Return whether :func:`forward` can compute a call."""
    return call.q.dtype in gluon.DTYPES and plain(call)


def plain(call: AttentionCall) -> bool:
    """Return whether the source has what a call asks for, but for its dtype."""
    shape = plans.shape_of(tuple(call.mask), ())
    heads = _LISTED_KEYS if of_segments(shape) else () if shape.mask else GROUPS
    asked = call.sinks is not None or call.softcap != 0 or shape.lengths
    return not asked and gluon.sizes_fit(call) and call.q.shape[3] == call.v.shape[3] in heads


def long(call: AttentionCall) -> bool:
    """Return whether there are so many queries and keys that it is the faster one."""
    banded, seen = _seen(call)
    queries, enough = _FROM[call.q.shape[3]][banded]
    return call.q.shape[2] >= queries and seen >= enough


def _seen(call: AttentionCall) -> tuple[bool, int]:
    """Return whether there is a band, and how many keys a query sees at most."""
    shape = plans.shape_of(tuple(call.mask), ())
    return shape.banded, min(call.k.shape[2], shape.upper - shape.lower)


def _listed(call: AttentionCall) -> bool:
    """Return whether there are segments: then the steps of a tile come from spans or a list."""
    return bool(plans.shape_of(tuple(call.mask), ()).mask)


def library_of(call: AttentionCall) -> str:
    """Return the name of the library that a call needs."""
    return "forward_of_lists" if _listed(call) else "forward"


def _brief(call: AttentionCall) -> bool:
    """Return whether heads are of 64 channels, and keys few or steps listed."""
    banded, seen = _seen(call)
    return call.q.shape[3] == 64 and (_listed(call) or seen <= _BRIEF[banded and call.q.shape[2] <= _BRIEF[1]])


def _groups(call: AttentionCall) -> int:
    return _BRIEF_GROUPS if _brief(call) else GROUPS[call.q.shape[3]]


@PreparedKernel
def forward(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    It takes bfloat16 and float16; heads of 64, 128 and 256; grouped heads; any numbers of queries and keys but none; no mask or a
    band, for heads of 64 and 128 segments too; a positive scale. What :func:`opkit.attn.gpu.hopper.forward.forward` says of
    rounding, of what is hidden, of infinities and of strides holds here too.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the kernel in Gluon is called.
    """
    call = AttentionCall(*args)
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}, dropout_p={call.dropout_p}: it takes heads of {(*GROUPS,)}, under a "
            f"band or no mask, and of {(*_LISTED_KEYS,)} under segments. Leave the choice to opkit, or force kernel='hopper'."
        )
    return _prepared(call)


def _prepared(call: AttentionCall) -> Callable[..., tuple[Tensor, Tensor]]:
    kernels = library.kernels_or_none(library_of(call), call.q.dtype)
    return gluon.forward.prepare(*call) if kernels is None else launching(kernels, call, call.q)


def launching(kernels: library.Kernels, call: AttentionCall, like: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that launches for calls like ``call``; results are of the dtype of ``like``, which is as q is.

    Where queries and keys are float8 it takes ``by``: three of float32, (batch, key heads) and dense, that their numbers and
    those of the values are multiplied by.
    """
    listed = _listed(call)
    described = all(gluon.describable(each) for each in call[:3])
    counter = gluon.counters(call.q.device, _marks(call))
    made = rows(like, call.v.shape[3], call.out_is_bshd)
    new_out, new_lse = overwritten(made), overwritten(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    common, gpu = _problem(call, made), call.q.get_device()
    launch = kernels.launching(*_steps(kernels, call, common), ForwardProblem, gpu)
    tile = _groups(call) * _ROWS, _LISTED_KEYS.get(call.q.shape[3], 0)

    def run(*args: Any, by: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        inputs, problem = args[:3], ForwardProblem.from_buffer_copy(common)
        if not described or any(each.data_ptr() % 16 for each in inputs):
            inputs = [each.clone(memory_format=torch.contiguous_format) for each in inputs]
            problem.q, problem.k, problem.v = map(library.rows_of, inputs)
        out, lse, marks = new_out(), new_lse(), counter()
        for of, tensor in zip((problem.q, problem.k, problem.v, problem.out), (*inputs, out), strict=True):
            of.data = tensor.data_ptr()
        problem.lse, problem.counter = lse.data_ptr(), marks.data_ptr()
        _wide = _set_float8(problem, inputs[2], by) if by else None  # held until the launch
        if listed:
            problem.lists, _read = lists_of(AttentionCall(*args), *tile, by_keys=False)  # held until the launch
        launch(problem, private.current_stream(gpu))
        return out, lse

    return run


def _problem(call: AttentionCall, out: Tensor) -> ForwardProblem:
    """Return what is the same for all calls like this one."""
    q, k, v = call[:3]
    shape = plans.shape_of(tuple(call.mask), ())
    numbers = {
        "batch": q.shape[0], "heads": q.shape[1], "group": q.shape[1] // k.shape[1], "queries": q.shape[2],
        "keys": k.shape[2], "head_size": q.shape[3], "value_size": v.shape[3], "lower": shape.lower, "upper": shape.upper,
        "banded": shape.banded, "brief": _brief(call), "section": _section(q, k, v), "processors": gluon.processors(q.device),
        "device": q.get_device(), "factor": call.scale * gluon.LOG2E,
    }  # fmt: skip
    return ForwardProblem(*map(library.rows_of, (q, k, v, out)), **numbers)


def _kernel_of(call: AttentionCall) -> str:
    """Return the name of the kernel in ``cuda/forward.cu``."""
    banded = plans.shape_of(tuple(call.mask), ()).banded or _listed(call)
    return f"attention_{call.q.shape[3]}{'_brief' if _brief(call) else ''}{'_banded' if banded else ''}"


def _steps(
    kernels: library.Kernels, call: AttentionCall, problem: ForwardProblem
) -> tuple[list[library.Step], list[library.Map]]:
    """Return the launches of a call, and the maps of q, k and v; set how many tiles the problem has."""
    q, k, v = call[:3]
    name, size, float8 = _kernel_of(call), q.shape[3], q.dtype not in gluon.DTYPES
    _, _, rows, keys, key_boxes, value_boxes = kernels.numbers[name]
    problem.blocks = -(-q.shape[2] // rows)
    problem.tiles = q.shape[0] * q.shape[1] * problem.blocks
    places = (getattr(ForwardProblem, each).offset for each in ("q", "k", "v"))
    of_v = torch.float16 if float8 else v.dtype
    shapes = ((q, q.dtype, rows, key_boxes), (k, k.dtype, keys, key_boxes), (v, of_v, keys, value_boxes))
    maps = [
        library.map_of(place, dtype, x.shape[:3], size, box, boxes)
        for place, (x, dtype, box, boxes) in zip(places, shapes, strict=True)
    ]
    steps = [library.Step(name, (min(problem.tiles, problem.processors), 1, 1), early=True)]
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
    if q.shape[3] == 64:
        return gluon.heads_within(_INTERLEAVED, q, k, v)
    if q.shape[3] == 128 and k.shape[2] <= _SHORT:
        return gluon.heads_within(_INTERLEAVED_SHORT, q, k, v)
    return gluon.section(q, k, v)


def _marks(call: AttentionCall) -> int:
    """Return how many numbers a launch counts and marks with, as ``cuda/forward.cu`` lays them out."""
    batch, heads, queries, _ = call.q.shape
    groups = _groups(call)
    tiles = batch * heads * -(-queries // (groups * _ROWS))
    return 2 + _OWNERS * gluon.processors(call.q.device) + tiles * groups


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
    if not fits_float8(call) or not long(call.plain) or not gluon.applies(call.plain):
        return False
    return library.there(library_of(call.plain), call.q.dtype)


def fits_float8(call: Float8Call) -> bool:
    """Return whether :func:`forward_float8` can compute a call."""
    blocks = max(call.k.shape[:2]) <= _MAX_BLOCKS
    return blocks and portable.takes_float8(call) and plain(call.plain)


@PreparedKernel
def forward_float8(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    It takes float8_e4m3fn and float8_e5m2, and else what :func:`opkit.attn.gpu.hopper.forward_cuda.forward` takes; what that
    says of what is hidden, of infinities and of strides holds here too. Tensor cores keep 14 bits of a sum of products of
    float8, so that logits may be off by some 1e-3 of their size. Descales may be any numbers.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no CUDA compiler. One that refuses the source is warned of, and the portable kernel is called.
    """
    call = Float8Call(*args)
    if not fits_float8(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention_float8: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}: it takes heads of {(*GROUPS,)}, under a band, segments "
            "or no mask. Leave the choice to opkit, or force kernel='triton'."
        )
    plain = call.plain
    kernels = library.kernels_or_none(library_of(plain), call.q.dtype)
    if kernels is None:
        return portable.forward_float8.prepare(*call)
    inner = launching(kernels, plain, torch.empty_like(call.q, dtype=torch.bfloat16))

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        call = Float8Call(*args)
        return inner(*call.plain, by=[each.contiguous() for each in call.descales])

    return run
