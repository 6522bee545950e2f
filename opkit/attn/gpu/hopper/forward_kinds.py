"""What the forward for sm_90a is compiled for: the layout of a call's work, and what the call asks for.

Each kind of call has a kernel of its own, which is compiled at the first such call: what a call does not ask for, its kernel does
not have. A mask that bands, segments and lengths do not describe becomes an expression over bits of keys in CUDA C++
(``cuda/forward_masks.cuh``), which is evaluated in the tiles that some of their queries see in part; the lists of
:mod:`opkit.attn.gpu.tile_lists` say which these are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from opkit.attn.calls import AttentionCall
from opkit.attn.gpu import plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.hopper import calls, functions
from opkit.attn.gpu.hopper.library import Lists, lists_of, of_segments
from opkit.attn.gpu.plans import MaskShape, Words
from opkit.attn.masks import program

ROWS = 64  #: queries of a warpgroup
_VALUES = (64, 96, 128, 192, 256)  # channels of products with values
_STEP = 16  # channels of a product with keys
_PROCESSORS = 132  # of an H200; the same for all GPUs, so that results do not depend on them
_FEW_KEYS = 384  # up to so many steps of 64 keys leave fewer places empty than those of 80
_BOX = 64  # channels that the copy engine loads at once
_DEEP = 192  # channels of heads for which there is shared memory with values of 128
_FEW = (1024, 2048)
"""Up to how many keys that a query sees these are few; and where there is a band, and there are no more queries than that."""


class Layout(NamedTuple):
    """How the work of a block is laid out, as ``cuda/forward_tiles.cuh`` says.

    Attributes:
        text: the type there.
        groups: warpgroups.
        keys: of a step.
    """

    text: str
    groups: int
    keys: int


class Kind(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        layout: of its work.
        listed: whether steps are listed, or those of spans.
        banded: whether there is a band.
        asked: of ``Asked`` in ``cuda/forward_call.cuh``.
        mask: the program; empty where bands, segments and lengths say all.
        functions: those of users.
    """

    layout: Layout
    listed: bool
    banded: bool
    asked: tuple[bool, ...]
    mask: Words
    functions: functions.Texts = functions.Texts("", "")

    @property
    def definitions(self) -> str:
        """The definitions with which ``forward.cu`` is compiled."""
        layout = f"Listed<{self.layout.text}>" if self.listed else self.layout.text
        found = {
            "LAYOUT": layout,
            "OF_BAND": str(self.banded).lower(),
            "ASKED": ", ".join(str(each).lower() for each in self.asked),
        }
        if self.mask:
            found["MASK_PROGRAM"] = expression_of(self.mask)
        found |= {name: text for name, text in zip(("USER_FUNCTIONS", "SCORE"), self.functions, strict=True) if text}
        return "".join(f"#define {name} {text}\n" for name, text in found.items())


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
    program.BAND_AT: "in_band_at",
    program.SEGMENTS: "of_segment<COUNT>",
    program.LENGTH: "before_length",
    program.DENSE: "where_true<COUNT>",
}


def shape_of(call: AttentionCall) -> MaskShape:
    """Return the shape of a call's mask; of bools, if its program does not fit the kernel's slots."""
    found = plans.shape_of(tuple(call.mask), ())
    return found if found.fits else plans.shape_of((program.DENSE, 0), ())


def kind_of(call: AttentionCall) -> Kind:
    """Return the kind of a call."""
    shape, head, values = shape_of(call), call.q.shape[3], call.v.shape[3]
    spans = of_segments(shape)
    odd = tuple(size > _BOX and size % _BOX != 0 for size in (head, values))
    asked = (call.softcap > 0, call.sinks is not None, bool(shape.lengths), *odd)
    listed = bool(shape.mask)
    texts = functions.texts_of(call)
    return Kind(layout_of(call), listed, shape.banded or spans, asked, () if spans else shape.mask, texts)


def layout_of(call: AttentionCall) -> Layout:
    """Return how the work of a call is laid out."""
    head, values = call.q.shape[3], call.v.shape[3]
    sizes = f"{-(-head // _STEP) * _STEP}, {next(size for size in _VALUES if values <= size)}"
    shape = shape_of(call)
    size = calls.padded(max(head, values))
    if size == calls.HEADS[0]:
        return _narrow(call, shape, sizes)
    if size == calls.HEADS[1]:
        turns = (
            values > calls.HEADS[0] or call.k.shape[2] <= _FEW[0]
        )  # products take less of the time with fewer values
        return Layout(f"Middle<{str(turns).lower()}, {sizes}>", 2, 128)
    if head <= _DEEP and values <= calls.HEADS[1]:
        return Layout(f"Deep<{sizes}>", 2, 128)
    keys = 64 if shape.mask or call.k.shape[2] <= _FEW_KEYS else 80
    return Layout(f"Wide<{keys}, {sizes}>", 2, keys)


def _narrow(call: AttentionCall, shape: MaskShape, sizes: str) -> Layout:
    """Return the layout of heads of up to 64 channels."""
    seen = min(call.k.shape[2], shape.upper - shape.lower)
    if (shape.mask and not of_segments(shape)) or is_low(call, shape):
        return Layout(f"Low<{sizes}>", 2, 128)
    if shape.mask or seen <= _FEW[shape.banded and call.q.shape[2] <= _FEW[1]]:
        return Layout(f"Brief<{sizes}>", 4, 64)
    return Layout(f"Narrow<{str(not shape.banded).lower()}, {sizes}>", 3, 128)


def is_low(call: AttentionCall, shape: MaskShape) -> bool:
    """Return whether there are few queries, or so few in all that an H200 is not filled with blocks of more."""
    batch, heads, queries, _ = call.q.shape
    filled = batch * heads * -(-queries // (4 * ROWS)) > _PROCESSORS
    return queries <= 2 * ROWS or not (filled or shape.mask)


# ---- what masks read -------------------------------------------------------------------------------------------------


class Slot(ctypes.Structure):
    """A tensor that a mask's program reads, with its strides."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "query", "key")))


class Mask(ctypes.Structure):
    """What a mask says besides a band and segments, as ``cuda/forward_call.cuh`` says."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("lengths_batch", "blocks_head", "counts_head")),
        ("slots", Slot * plans.SLOTS),
        ("numbers", ctypes.c_int * plans.NUMBERS),
    )


def mask_of(call: AttentionCall, shape: MaskShape, layout: Layout) -> tuple[Mask, Lists, Sequence[Tensor]]:
    """Return what a call's mask reads, and the lists of its tiles; and tensors that must live until the kernel is launched."""
    mask, lists, sizes = Mask(), Lists(), (*call.q.shape[:3], call.k.shape[2])
    read: list[Tensor] = []
    rows = layout.groups * ROWS
    for number in shape.lengths:
        lengths = call.mask_tensors[number]
        mask.lengths, mask.lengths_batch = lengths.data_ptr(), lengths.stride(0) if lengths.shape[0] > 1 else 0
    if of_segments(shape):
        lists, read = lists_of(call, rows, layout.keys, by_keys=False)
    elif shape.mask:
        mask.numbers[: len(shape.numbers)] = shape.numbers
        for place, x in enumerate(plans.slots_of(shape, call.mask_tensors, [], sizes, of_biases=False)):
            mask.slots[place] = Slot(x.data_ptr(), *x.stride())
        found = tile_lists.lists_of(call, shape, BlockSizes(rows, layout.keys, 0, 0), by_keys=False)
        read += found
        (lists.blocks, lists.counts), strides = (x.data_ptr() for x in found), [x.stride() for x in found]
        lists.blocks_batch, lists.counts_batch = (each[0] for each in strides)
        mask.blocks_head, mask.counts_head = (each[1] for each in strides)
    return mask, lists, read
