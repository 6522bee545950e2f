"""What masks are in kernels for sm_90a in CUDA C++: bits, or expressions, and tensors that these read.

A mask that bands, segments and lengths do not describe is read as bits, in the tiles that some of their queries see in part
(``cuda/masks.cuh``); :mod:`opkit.attn.gpu.tile_lists` evaluates it into these and into lists of tiles. So one kernel serves all
such masks. Where there is no room for the bits of all tiles, a kernel is compiled with the mask as an expression too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu import arguments, plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.hopper import functions
from opkit.attn.gpu.hopper.library import Lists, lists_of, of_segments
from opkit.attn.gpu.plans import MaskShape, Words
from opkit.attn.masks import program
from opkit.attn.tensor_cache import TensorCache
from opkit.op import torch_private as private

_MAX_CACHED = 16  # calls' masks, of which each may have bits of functions
_BOX = 64  # channels that the copy engine loads at once


def shape_of(call: AttentionCall | GradientCall) -> MaskShape:
    """Return the shape of a call's mask; of bools, if its program does not fit the kernels' slots."""
    found = plans.shape_of(tuple(call.mask), ())
    return found if found.fits else plans.shape_of((program.DENSE, 0), ())


class Asked(NamedTuple):
    """What a call asks for, with which kernels are compiled.

    Attributes:
        banded: whether there is a band, or segments, whose keys see spans of queries.
        listed: whether steps are listed: a mask is more than a band and lengths.
        flags: of ``Asked`` in ``cuda/asked.cuh``.
        tile: queries and keys of which a mask has bits; empty where bands, segments and lengths say all.
        mask: the program, for tiles without bits; empty if there are none.
        functions: those of users, of masks only if there is such a program.
    """

    banded: bool
    listed: bool
    flags: tuple[bool, ...]
    tile: tuple[int, ...]
    mask: Words
    functions: functions.Texts

    def definitions(self, **more: str) -> str:
        """Return the definitions with which a source is compiled, ``more`` of them first."""
        found = {**more, "ASKED": ", ".join(str(each).lower() for each in self.flags)}
        found |= {name: str(size) for name, size in zip(("TILE_QUERIES", "TILE_KEYS"), self.tile, strict=False)}
        if self.mask:
            found["MASK_PROGRAM"] = expression_of(self.mask)
        found |= {
            name: text
            for name, text in zip(("USER_FUNCTIONS", "SCORE", "KEYS_READ"), self.functions, strict=True)
            if text
        }
        return "".join(f"#define {name} {text}\n" for name, text in found.items())


def asked_of(call: AttentionCall | GradientCall, tile: tuple[int, int], *, sinks: bool, sloped: bool = False) -> Asked:
    """Return what a call asks for, in tiles of queries and keys; ``sloped``: with the derivatives of functions of logits."""
    shape = shape_of(call)
    spans = of_segments(shape)
    bits = bool(shape.mask) and not spans
    every = bits and _bits_fit(call, tile)  # and then the band and lengths are in the bits
    odd = tuple(size > _BOX and size % _BOX != 0 for size in (call.q.shape[3], call.v.shape[3]))
    flags = (call.softcap > 0, sinks, bool(shape.lengths) and not every, *odd)
    mask = shape.mask if bits and not every else ()
    texts = functions.texts_of(call, sloped, bool(mask))
    return Asked(spans or (shape.banded and not every), bool(shape.mask), flags, tile if bits else (), mask, texts)


def _bits_fit(call: AttentionCall | GradientCall, tile: tuple[int, int]) -> bool:
    """Return whether there are bits of all tiles. A mask that fits no slots becomes bools, which take more room."""
    shape = plans.shape_of(tuple(call.mask), ())
    return not shape.fits or tile_lists.bits_fit(call, shape, BlockSizes(*tile, 0, 0))


def expression_of(mask: Words) -> str:
    """Return what a mask's program is in CUDA C++.

    >>> expression_of(((program.SEGMENTS, 0, 1), (program.NOT,), (program.BAND, 0), (program.OR,)))
    '(~of_segment<COUNT>(problem, at, 0, 1) | in_band(problem, at, 0))'
    """
    stack: list[str] = []
    for opcode, *operands in mask:
        if opcode in (program.AND, program.OR):
            right, left = stack.pop(), stack.pop()
            stack.append(f"({left} {'&' if opcode == program.AND else '|'} {right})")
        elif opcode == program.NOT:
            stack.append(f"~{stack.pop()}")
        elif opcode == program.FUNCTION:
            called = f"{functions.name_of(operands[0])}(problem, at.batch, at.head, i, j, 0.f)"
            stack.append(f"where_holds<COUNT>(problem, at, [&](int i, int j) {{ return {called}; }})")
        else:
            stack.append(f"{_LEAVES[opcode]}(problem, at, {', '.join(map(str, operands))})")
    return stack[0]


_LEAVES = {
    program.BAND: "in_band",
    program.BAND_AT: "in_band_at<COUNT>",
    program.SEGMENTS: "of_segment<COUNT>",
    program.LENGTH: "before_length",
    program.DENSE: "where_true<COUNT>",
}


class Slot(ctypes.Structure):
    """A tensor that a mask's program reads, with its strides."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "query", "key")))


class Bits(ctypes.Structure):
    """Bits of a mask, as ``cuda/asked.cuh`` says."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )


class Mask(ctypes.Structure):
    """What a mask says besides a band and segments, as ``cuda/asked.cuh`` says."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("lengths_batch", "blocks_head", "counts_head")),
        ("slots", Slot * plans.SLOTS),
        ("numbers", ctypes.c_int * plans.NUMBERS),
        ("bits", Bits),
    )


class MaskRead(NamedTuple):
    """What a call's mask reads, and the lists of its tiles; and tensors of these that must live until the kernel is launched."""

    mask: Mask
    lists: Lists
    tensors: Sequence[Tensor]


_cache: TensorCache[MaskRead] = TensorCache(_MAX_CACHED)


@functools.lru_cache(maxsize=1024)
def _name_of(*what: Hashable) -> object:
    """Return what stands for these in keys: it is compared in less time."""
    return object()


def reader_of(
    call: AttentionCall | GradientCall, shape: MaskShape, asked: Asked, tile: tuple[int, int], by_keys: bool,
    in_order: bool = False,
) -> Callable[[AttentionCall | GradientCall], MaskRead]:  # fmt: skip
    """Return a function that returns what the mask of a call like ``call`` reads.

    That is cached with the mask's tensors, and must live until the kernel is launched.

    Args:
        call: a call, whose mask fits the kernels' slots.
        shape: of its mask.
        asked: what the kernels are compiled for.
        tile: queries and keys.
        by_keys: whether tiles of keys have lists of those of queries.
        in_order: whether such lists have turns, by which sums are made in order.
    """
    sizes, strides = (*call.q.shape[:3], call.k.shape[2]), tuple([x.stride() for x in call.mask_tensors])
    every = not asked.mask
    name = _name_of(shape, every, tile, by_keys, in_order, sizes, strides, call.q.device)

    def read(call: AttentionCall | GradientCall) -> MaskRead:
        build = functools.partial(_mask_of, call, shape, every, tile, by_keys, in_order, sizes)
        return tile_lists.get_or_build(_cache, name, call, build)

    return read


def _mask_of(
    call: AttentionCall | GradientCall, shape: MaskShape, every: bool, tile: tuple[int, int], by_keys: bool, in_order: bool,
    sizes: tuple[int, ...],
) -> MaskRead:  # fmt: skip
    mask, lists = Mask(), Lists()
    read: list[Tensor] = []
    for number in shape.lengths:
        lengths = call.mask_tensors[number]
        mask.lengths, mask.lengths_batch = lengths.data_ptr(), lengths.stride(0) if lengths.shape[0] > 1 else 0
    if of_segments(shape):
        lists, found = lists_of(call, *tile, by_keys=by_keys, in_order=in_order)
        read += found[2:]  # the first are the mask's own
    elif shape.mask:
        mask.numbers[: len(shape.numbers)] = shape.numbers
        for place, x in enumerate(plans.slots_of(shape, call.mask_tensors, [], sizes, of_biases=False)):
            mask.slots[place] = Slot(x.data_ptr(), *x.stride())
        blocks = BlockSizes(*tile, 0, 0)
        bits = tile_lists.bits_of(call, shape, blocks, by_keys, every)
        assert bits.places is not None
        assert bits.words is not None
        mask.bits = Bits(bits.words.data_ptr(), bits.places.data_ptr(), *bits.places.stride()[:2])
        read += (bits.places, bits.words)
        found = tile_lists.lists_of(call, shape, blocks, by_keys, bits)
        read += found
        (lists.blocks, lists.counts), strides = (x.data_ptr() for x in found), [x.stride() for x in found]
        lists.blocks_batch, lists.counts_batch = (each[0] for each in strides)
        mask.blocks_head, mask.counts_head = (each[1] for each in strides)
        if in_order:
            read.append(tile_lists.visits_of_call(found, call, shape, blocks, bits))
            lists.visits = read[-1].data_ptr()
    return MaskRead(mask, lists, read)


def list_building(
    call: AttentionCall | GradientCall, asked: Asked, tile: tuple[int, int], by_keys: bool, in_order: bool = False
) -> Callable[[], Any] | None:
    """Return what builds the lists of a call's tiles, which are cached, while kernels are compiled; None without lists."""
    shape = shape_of(call)
    if not shape.mask or not call.q.is_cuda or private.capturing():
        return None
    fitted = arguments.fit_to_slots(call)
    return functools.partial(reader_of(fitted, shape, asked, tile, by_keys, in_order), fitted)
