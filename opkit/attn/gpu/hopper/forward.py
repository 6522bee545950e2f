"""The forward kernel for sm_90 (:mod:`opkit.attn.gpu.hopper.device.forward`): which calls it takes, and a call of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit import config
from opkit.attn.allocation import overwritten, rows
from opkit.attn.calls import AnyCall, AttentionCall, dtypes_and_shapes
from opkit.attn.gpu import arguments, plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.plans import MaskShape, Words
from opkit.attn.masks.program import mask_fits, shapes_fit, sinks_fit
from opkit.errors import KernelError
from opkit.kernels.triton.named import Layout, Named
from opkit.op import torch_private as private
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel, tensor_descriptor
from opkit.op.triton.launch import PreparedLaunch, PreparedSeries

DTYPES = (torch.bfloat16, torch.float16)
_FAR = 2**30  #: further than any two positions are apart
LOG2E = 1.4426950408889634
MAX_FACTOR = 1024.0  #: of logits: a cap, or a scale where there is none
_INTERLEAVED = {64: 32 << 20, 128: 32 << 20, 256: 16 << 20}
"""Bytes of keys and values of the heads that are interleaved, by the size of the larger head, as measured: what the L2 cache
holds, which has 50 MB, or less. benchmarks/README.md explains the choice ("The forward for Hopper")."""
_SHORT, _INTERLEAVED_SHORT = 1024, 16 << 20
"""Up to so many keys it is fewer bytes: queries and results take as much of the cache, and tiles of all lengths are to be
under way at once, since those that come first read from memory."""
_ALIGNED = 8  #: elements: TMA's strides are multiples of 16 bytes
_MOST = 256  #: channels
_ROWS = 64  #: queries of a warpgroup
_FORWARD = Named("opkit.attn.gpu.hopper.device.forward", "hopper_forward")
_OF_MASKS = ("tiles", "counts", *plans.TENSORS)
_INPUTS = ("q", "k", "v", "counter")
_TENSORS = (*_INPUTS, "out", "lse", "sinks", *_OF_MASKS)
Run = Callable[..., tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """How the work of a program is laid out.

    Attributes:
        warpgroups: that multiply, 64 queries of a tile each.
        keys: of a step.
        stages: buffers for the keys of a step, and for the values: as many, or one more, with which values are loaded with their
            keys and not a step later.
        row_stages: buffers for the queries of a tile; with 2, the first product of the next one overlaps the end of a tile.
        own_results: whether results have other buffers than queries.
        registers: of a thread that multiplies, of the warp that loads, and of all before they are shared out.
        turns: whether the warpgroups take turns at the tensor cores.
        held: of wider heads, channels of queries that are in registers while a tile is worked on, so that products read less of
            shared memory; with one buffer for queries.
    """

    warpgroups: int
    keys: int
    stages: tuple[int, int]
    row_stages: int
    own_results: bool
    registers: tuple[int, int, int]
    turns: bool = True
    held: int = 0


TILES = {
    64: ForwardTile(2, 128, (4, 4), 2, True, (240, 24, 168)),
    128: ForwardTile(2, 128, (2, 2), 2, True, (240, 24, 168)),
    256: ForwardTile(2, 64, (2, 3), 1, False, (240, 24, 168), held=128),
}
"""By the size of the larger head, rounded up."""

LONG = ForwardTile(3, 128, (3, 3), 2, True, (160, 24, 128), turns=False)
"""For heads of 64 and many queries that see many keys: three warpgroups, since exponentials take most of the time there."""

_LONG_FROM = {False: 2048, True: 8192}
"""From how many queries and keys that each sees LONG is faster, without and with a band.

On an H200, TFLOP/s of ``TILES[64]`` and LONG: 8 x 16 heads of 2048 403 and 441, 2 x 16 of 8192 419 and 472; causal, 2 x 16 of
8192 438 and 451, 16 of 16384 444 and 474; but 16 x 16 of 1024 385 and 378, causal 306 and 232.
"""


def takes(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`forward`: what it says there, on a GPU of compute capability 9.0.

    Not where batch invariance is set.
    """
    return fits(call) and applies(call)


def applies(call: AnyCall) -> bool:
    """Return whether calls get kernels for Hopper where these fit."""
    return not config.get().batch_invariant and on_hopper(call.q)


def on_hopper(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU of compute capability 9.0."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) == (9, 0)


def fits(call: AttentionCall) -> bool:
    """Return whether :func:`forward` can compute a call."""
    return call.q.dtype in DTYPES and sizes_fit(call)


def sizes_fit(call: AttentionCall) -> bool:
    """Return the same of one in DTYPES."""
    q, k, v = call[:3]
    if not shapes_fit(q, k, v) or 0 in q.shape or 0 in v.shape:
        return False
    heads = all(size % _ALIGNED == 0 and size <= _MOST for size in (q.shape[3], v.shape[3]))
    lengths = max(q.shape[2], k.shape[2]) < _FAR and q.shape[0] * q.shape[1] * q.shape[2] < 2**31
    plain = not call.bias and call.dropout_p == 0 and has_moderate_factor(call)
    return heads and lengths and plain and sinks_fit(call.sinks, q) and mask_fits(call)


def has_moderate_factor(call: AnyCall) -> bool:
    """Return whether the logits of usual queries and keys are of a size to which float32 resolves their differences.

    Rows with greater logits are computed apart here, slowly. The portable kernels take those of great factors.
    """
    return call.scale > 0 and (call.softcap or call.scale) <= MAX_FACTOR


@PreparedKernel
def forward(*args: Any) -> Run:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    It takes bfloat16 and float16; heads of up to 256 channels that 8 divides, those of queries and of values of any two such
    sizes; grouped heads; any numbers of queries and keys but none; every mask; a positive scale; a soft cap; sinks. The factor of
    logits, which is the cap or else the scale, is at most 1024. It takes no biases and no dropout.

    Probabilities are rounded to q's dtype before they are multiplied with the values. Keys and values that are hidden do not
    reach a result, whatever they hold: 64 rows with a result that is not a number are computed once more, slowly, of what they
    see alone. So are 64 rows if the greatest logit of one of them is beyond 45,000 or below -45,000: then differences of logits
    are taken before these are scaled. Where a visible logit is infinite, or a value, results and log-sum-exp may be NaN where the
    reference has an infinity. A call's results do not depend on other calls, nor on the GPU's multiprocessors.

    Tensors are read as they lie where TMA can follow their strides, and copied where it cannot.

    Raises:
        KernelError: it does not take the call.
    """
    call = AttentionCall(*args)
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention: kernel 'hopper' does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, dropout_p={call.dropout_p}. Leave the choice to opkit, or force kernel='reference'."
        )
    return _prepared(call, tile_of(call))


def tile_of(call: AttentionCall) -> ForwardTile:
    """Return the layout that a call gets."""
    size = padded(max(call.q.shape[3], call.v.shape[3]))
    shape = plans.shape_of(tuple(call.mask), ())
    seen = min(call.k.shape[2], shape.upper - shape.lower)
    long = size == 64 and not listed(shape) and min(call.q.shape[2], seen) >= _LONG_FROM[shape.banded]
    return LONG if long else TILES[size]


def listed(shape: MaskShape) -> bool:
    """Return whether a mask says more than a band: then the tiles to visit come from a list."""
    return bool(shape.mask or shape.lengths)


def _prepared(call: AttentionCall, tile: ForwardTile) -> Run:
    roomy = arguments.fit_to_slots(call)
    shape = arguments.shape_of(roomy)
    as_they_lie, copied = (_series(call, shape, tile) for _ in range(2))  # copies have strides of their own
    described = all(describable(each) for each in call[:3])
    counter = counters(call.q.device, _marks(call, tile))
    mask_tensors = _mask_reader(shape, tile, roomy is call) if listed(shape) else None

    def run(*args: Any) -> tuple[Tensor, ...]:
        sinks = args[5]
        more = {} if sinks is None else {"sinks": sinks.to(torch.float32).contiguous()}
        if mask_tensors is not None:
            more |= mask_tensors(AttentionCall(*args))
        read = [*args[:3], counter(), *more.values()]
        at = [each.data_ptr() for each in read]
        if described and not (at[0] | at[1] | at[2]) % 16:
            return as_they_lie(*more).at(read, at)
        read[:3] = [each.clone(memory_format=torch.contiguous_format) for each in read[:3]]
        return copied(*more)(*read)

    return run


def _mask_reader(shape: MaskShape, tile: ForwardTile, fits: bool) -> Callable[[AttentionCall], dict[str, Tensor]]:
    """Return a function that returns a call's list of tiles and the tensors that its mask reads.

    ``fits``: the mask's program fits a kernel's slots.
    """
    blocks = BlockSizes(tile.warpgroups * _ROWS, tile.keys, 0, 0)

    def mask_tensors(call: AttentionCall) -> dict[str, Tensor]:
        call = call if fits else arguments.fit_to_slots(call)
        lists = tile_lists.lists_of(call, shape, blocks, by_keys=False)
        found = zip(_OF_MASKS, (*lists, *arguments.tensors_of(call, shape)), strict=True)
        return {name: tensor for name, tensor in found if tensor is not None}

    return mask_tensors


def _series(call: AttentionCall, shape: MaskShape, tile: ForwardTile) -> Callable[..., PreparedSeries]:
    """Return a function that returns the launch, for the names of the tensors that a call has in addition to ``_INPUTS``.

    TMA can follow q, k and v. The results are the operator's.
    """
    launch = PreparedLaunch(_kernel(tile, shape.mask), _TENSORS, _numbers(call, shape))
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    made = {"out": overwritten(rows(call.q, call.v.shape[3], call.out_is_bshd)), "lse": overwritten(lse)}

    @functools.cache
    def series(*more: str) -> PreparedSeries:
        return PreparedSeries([launch], _INPUTS + more, made, {})

    return series


def _numbers(call: AttentionCall, shape: MaskShape) -> dict[str, Any]:
    """Return the numbers that the kernel takes. The exponents' base is 2."""
    capped = call.softcap > 0
    return {
        **plans.numbers_of(shape),
        "BANDED": shape.banded,
        "CAPPED": capped,
        "factor": (call.softcap if capped else call.scale) * LOG2E,
        "inner": call.scale / call.softcap if capped else 1.0,
        "processors": processors(call.q.device),
    }


def _marks(call: AttentionCall, tile: ForwardTile) -> int:
    """Return how many numbers a launch counts and marks with, as :mod:`opkit.attn.gpu.hopper.device.recompute` lays them out."""
    batch, heads, queries, _ = call.q.shape
    tiles = batch * heads * -(-queries // (tile.warpgroups * _ROWS)) if call.mask or not call.softcap else 0
    return 2 + tiles * tile.warpgroups


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


# ---- the counter of tiles --------------------------------------------------------------------------------------------

_known_counters: dict[tuple[int, int], Tensor] = {}


def counters(device: torch.device, size: int) -> Callable[[], Tensor]:
    """Return a function that returns ``size`` zeros or more, with which a launch counts tiles and marks rows to recompute.

    A kernel leaves them as zeros, so that launches on one stream can share them. A graph that is captured may run at the same
    time as others, and gets its own.
    """
    new = functools.partial(torch.zeros, size, dtype=torch.int32, device=device)
    if device.type != "cuda":
        return new

    def counter() -> Tensor:
        if private.capturing():
            return new()
        key = device.index, private.current_stream(device.index)
        found = _known_counters.get(key)
        if found is None or found.shape[0] < size:
            found = _known_counters[key] = new()
        return found

    return counter


# ---- tensors for TMA -------------------------------------------------------------------------------------------------


def describable(x: Tensor) -> bool:
    """Return whether TMA can follow the strides."""
    aligned = 16 // x.element_size()
    return x.stride(3) == 1 and all(0 < stride < 2**37 and stride % aligned == 0 for stride in x.stride()[:3])


# ---- the kernel ------------------------------------------------------------------------------------------------------


def padded(channels: int) -> int:
    """Return the size of a head in registers and shared memory."""
    return next(size for size in TILES if channels <= size)


@functools.cache
def _kernel(tile: ForwardTile, mask: Words) -> TritonKernel:
    layout = Layout("NVMMASharedLayout", swizzle_byte_width=128, element_bitwidth=16, rank=4)
    of_queries, of_keys = (functools.partial(_block, rows) for rows in (_ROWS, tile.keys))
    block = tile.warpgroups * _ROWS
    loops, loads, all_threads = tile.registers
    return triton_kernel(
        _FORWARD,
        grid=lambda work, processors: min(work, processors),
        q_desc=tensor_descriptor("q", block=lambda q: of_queries(q), layout=layout),
        k_desc=tensor_descriptor("k", block=lambda k: of_keys(k), layout=layout),
        v_desc=tensor_descriptor("v", block=lambda v: of_keys(v), layout=layout),
        out_desc=tensor_descriptor("out", block=lambda out: of_queries(out), layout=layout),
        **_SIZES,
        blocks=lambda q: -(-q.shape[2] // block),
        work=lambda q: q.shape[0] * q.shape[1] * -(-q.shape[2] // block),
        MASK=mask,
        SINKS=lambda sinks: sinks is not None,
        WARPGROUPS=tile.warpgroups,
        STAGES=tile.stages[0],
        VALUE_STAGES=tile.stages[1],
        ROW_STAGES=tile.row_stages,
        TURNS=tile.turns,
        HELD=lambda q: tile.held if padded(q.shape[3]) > tile.held else 0,
        OWN_RESULTS=lambda q, v: tile.own_results or padded(q.shape[3]) != padded(v.shape[3]),
        REGISTERS=loops,
        LOADER_REGISTERS=loads,
        num_warps=4,
        maxnreg=all_threads,
        targets=("sm_90",),
    )


def _block(rows: int, x: Any) -> tuple[int, int, int, int]:
    return 1, 1, rows, padded(x.shape[3])


def section(q: Any, k: Any, v: Any) -> int:
    """Return how many heads of queries to interleave."""
    size = padded(max(q.shape[3], v.shape[3]))
    return heads_within(_INTERLEAVED_SHORT if k.shape[2] <= _SHORT else _INTERLEAVED[size], q, k, v)


def heads_within(limit: int, q: Any, k: Any, v: Any) -> int:
    """Return how many heads of queries have at most ``limit`` bytes of keys and values; those of one head of keys at least."""
    of_head = k.shape[2] * (padded(k.shape[3]) + padded(v.shape[3])) * 2
    return q.shape[1] // k.shape[1] * evenly(k.shape[0] * k.shape[1], limit // of_head)


def evenly(heads: int, most: int) -> int:
    """At most so many of ``heads``, so that sections are about as large: at the end of a small last one many would have no tile.

    >>> evenly(40, 16)
    14
    """
    return -(-heads // -(-heads // max(most, 1)))


_SIZES: dict[str, Any] = {
    "queries": lambda q: q.shape[2],
    "keys": lambda k: k.shape[2],
    "heads": lambda q: q.shape[1],
    "group": lambda q, k: q.shape[1] // k.shape[1],
    "head_size": lambda q: q.shape[3],
    "value_size": lambda v: v.shape[3],
    "section": section,
}
