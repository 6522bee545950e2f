"""Numbers that a Hopper kernel seldom needs, in shared memory, where they take no registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

Q, K, V, OUT = (
    gl.constexpr(0),
    gl.constexpr(5),
    gl.constexpr(10),
    gl.constexpr(15),
)  #: places of five numbers of a tensor
SIZES = gl.constexpr(20)  #: place of the tiles of a head, all tiles, the heads, and how many of these share one of keys
MASK = gl.constexpr(24)  #: place of what a mask says, as hopper_masks has it
LENGTH = gl.constexpr(24 + 2 + 6 * 5 + 8)


@gluon.jit
def table_of(LENGTH: gl.constexpr):
    """A table without numbers."""
    return gl.allocate_shared_memory(gl.int64, [LENGTH, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def keep(table, I: gl.constexpr, number):
    """Put a number, or a pointer, into the table."""
    number = number.to(gl.int64)
    table.index(I).store(gl.full([1], number, gl.int64, layout=gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def keep_tensor(table, FIRST: gl.constexpr, tensor, strides, size):
    """Of a tensor its address, three strides, and how many channels it has."""
    keep(table, FIRST, tensor)
    for i in gl.static_range(3):
        keep(table, FIRST + 1 + i, strides[i])
    keep(table, FIRST + 4, size)


@gluon.jit
def kept(table, I: gl.constexpr):
    return gl.max(table.index(I).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def size_kept(table, I: gl.constexpr):
    """The tiles of a head, all tiles, the heads, or how many of these share one of keys."""
    return kept(table, SIZES + I).to(gl.int32)
