"""What the backward for sm_90a is compiled for: sizes of heads, and what calls ask for.

Each kind of call has kernels of its own, which are compiled at the first such call, as those of the forward are
(:mod:`opkit.attn.gpu.hopper.forward_kinds`).
"""

from __future__ import annotations

from typing import NamedTuple

from opkit.attn.calls import GradientCall
from opkit.attn.gpu.hopper import calls
from opkit.attn.gpu.hopper.masks import Asked, asked_of, shape_of
from opkit.attn.gpu.plans import MaskShape

PART = 64 * 64  #: floats of a part of the gradient of a block of queries


class Kind(NamedTuple):
    """What kernels are compiled for.

    Attributes:
        size: of a head in shared memory.
        head: channels of queries and keys.
        values: channels of values.
        ordered: whether the gradient of queries is summed up in one order.
        alone: of :func:`is_alone`: no gradient of queries is a sum, and there is nothing to order.
        asked: what else a call asks for.
    """

    size: int
    head: int
    values: int
    ordered: bool
    alone: bool
    asked: Asked

    @property
    def tile(self) -> tuple[int, int]:
        """Queries of a step, and keys of a tile."""
        return tile_of(self.size)

    @property
    def rows(self) -> int:
        """Queries of a step."""
        return self.tile[0]

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return self.tile[1]

    @property
    def parts(self) -> int:
        """Parts of the gradient of a block of queries."""
        return self.rows * self.size // PART

    @property
    def definitions(self) -> str:
        """The definitions with which ``backward.cu`` is compiled."""
        sizes = f"{self.size}, {self.head}, {self.values}"
        ways = ", ".join(str(each).lower() for each in (self.asked.banded, self.asked.listed, self.ordered, self.alone))
        return self.asked.definitions(LAYOUT=f"Shape<{sizes}, {ways}>")


_STEP = 16  # channels of a product


def tile_of(size: int) -> tuple[int, int]:
    """Return how many queries a step has, and keys a tile, of heads of that size in shared memory."""
    return max(2 * PART // size, 64), 128 if size <= calls.HEADS[1] else 64


def is_alone(call: GradientCall, shape: MaskShape) -> bool:
    """Return whether each head has one tile of keys, and this visits all queries."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    size = calls.padded(max(call.q.shape[3], call.v.shape[3]))
    whole = not shape.mask and not shape.lengths and shape.upper >= 0 and keys - shape.lower >= queries
    return whole and keys <= tile_of(size)[1]


def kind_of(call: GradientCall, ordered: bool) -> Kind:
    """Return the kind of a call."""
    shape, head, values = shape_of(call), *(-(-size // _STEP) * _STEP for size in (call.q.shape[3], call.v.shape[3]))
    alone, size = is_alone(call, shape), calls.padded(max(head, values))
    asked = asked_of(call, tile_of(size), sinks=False, sloped=True)
    return Kind(size, head, values, ordered and not alone, alone, asked)
