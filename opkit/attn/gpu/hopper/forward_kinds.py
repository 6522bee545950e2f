"""What the forward for sm_90a is compiled for: the layout of a call's work, and what the call asks for.

Each kind of call has a kernel of its own, which is compiled at the first such call: what a call does not ask for, its kernel does
not have, and a mask's program is an expression there (:mod:`opkit.attn.gpu.hopper.masks`).
"""

from __future__ import annotations

from typing import NamedTuple

from opkit.attn.calls import AttentionCall
from opkit.attn.gpu import plans
from opkit.attn.gpu.hopper import calls, functions
from opkit.attn.gpu.hopper.library import of_segments
from opkit.attn.gpu.hopper.masks import Asked, asked_of, shape_of
from opkit.attn.gpu.plans import MaskShape

ROWS = 64  #: queries of a warpgroup
_VALUES = (64, 96, 128, 192, 256)  # channels of products with values
_STEP = 16  # channels of a product with keys
_PROCESSORS = 132  # of an H200; the same for all GPUs, so that results do not depend on them
_FEW_KEYS = 384  # up to so many steps of 64 keys leave fewer places empty than those of 80
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

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a block's step."""
        return self.groups * ROWS, self.keys


class Kind(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        layout: of its work.
        asked: what else a call asks for.
    """

    layout: Layout
    asked: Asked

    @property
    def definitions(self) -> str:
        """The definitions with which ``forward.cu`` is compiled."""
        layout = f"Listed<{self.layout.text}>" if self.asked.listed else self.layout.text
        return self.asked.definitions(LAYOUT=layout, OF_BAND=str(self.asked.banded).lower())


def kind_of(call: AttentionCall) -> Kind:
    """Return the kind of a call."""
    layout = layout_of(call)
    return Kind(layout, asked_of(call, layout.tile, sinks=call.sinks is not None))


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
    loads = functions.key_loads(plans.shape_of(tuple(call.mask), tuple(call.bias)))
    if (shape.mask and not of_segments(shape)) or is_low(call, shape) or False in loads:  # many are under way at once
        return Layout(f"Low<{sizes}>", 2, 128)
    if shape.mask or loads or seen <= _FEW[shape.banded and call.q.shape[2] <= _FEW[1]]:
        return Layout(f"Brief<{sizes}>", 4, 64)
    return Layout(f"Narrow<{str(not shape.banded).lower()}, {sizes}>", 3, 128)


def is_low(call: AttentionCall, shape: MaskShape) -> bool:
    """Return whether there are few queries, or so few in all that an H200 is not filled with blocks of more."""
    batch, heads, queries, _ = call.q.shape
    filled = batch * heads * -(-queries // (4 * ROWS)) > _PROCESSORS
    return queries <= 2 * ROWS or not (filled or shape.mask)
