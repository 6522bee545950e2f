"""Masks on Hopper that are more than a band: lists of live tiles, and programs that are evaluated in these alone.

:mod:`opkit.attn.gpu.device.tile_lists` makes the lists, :mod:`opkit.attn.gpu.device.tile` says what a program means. What a
program reads lies in a table in shared memory: in most tiles every key is seen, and nothing of it is needed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from opkit.attn.gpu.device import tile
from opkit.attn.masks import program

LENGTH = gl.constexpr(2 + 6 * 5 + 8)  #: of the table
_LENGTHS = gl.constexpr(0)  #: place of the address of lengths, and of their stride
_SLOTS = gl.constexpr(2)
_NUMBERS = gl.constexpr(2 + 6 * 5)
_visible = gluon.jit(tile.visible.fn)
_of_queries, _of_keys = gluon.jit(tile.of_queries.fn), gluon.jit(tile.of_keys.fn)
_FIRST = gl.constexpr(5)  #: the entry of a slot after a pointer and four strides: the place of a tile's first column


@gluon.jit
def table_of(LENGTH: gl.constexpr):
    """Return a table without numbers."""
    return gl.allocate_shared_memory(gl.int64, [LENGTH, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def store_number(table, I: gl.constexpr, number):
    """Put a number, or a pointer, into the table."""
    number = number.to(gl.int64)
    table.index(I).store(gl.full([1], number, gl.int64, layout=gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def load_number(table, I: gl.constexpr):
    return gl.max(table.index(I).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.constexpr_function
def _slots_read(PROGRAM):
    """Of each slot that a program reads, from the first to the last, whether it holds bools."""
    bools = {word[1]: True for word in PROGRAM if word[0] == program.DENSE}
    numbers = {word[1]: False for word in PROGRAM if word[0] in (program.SEGMENTS, program.LENGTH, program.BAND_AT)}
    others = {word[2]: False for word in PROGRAM if word[0] == program.SEGMENTS}
    found = {**bools, **numbers, **others}
    return tuple(found[slot] for slot in sorted(found))


@gluon.constexpr_function
def _numbers_used(PROGRAM):
    places = [word[1] for word in PROGRAM if word[0] == program.BAND]
    return max([place + 2 for place in places + [word[2] for word in PROGRAM if word[0] == program.BAND_AT]], default=0)


@gluon.jit
def store_mask(table, problem, lengths, stride, slots, numbers):
    """Put into the table what a mask reads."""
    if problem.LENGTHS:
        store_number(table, _LENGTHS, lengths)
        store_number(table, _LENGTHS + 1, stride)
    for i in gl.static_range(len(_slots_read(problem.MASK))):
        for part in gl.static_range(5):
            store_number(table, _SLOTS + 5 * i + part, slots[i][part])
    for i in gl.static_range(_numbers_used(problem.MASK)):
        store_number(table, _NUMBERS + i, numbers[i])


@gluon.jit
def _slot(table, I: gl.constexpr, BOOLS: gl.constexpr):
    FIRST: gl.constexpr = _SLOTS + 5 * I
    TYPE: gl.constexpr = gl.int8 if BOOLS else gl.int32
    address = load_number(table, FIRST).to(gl.pointer_type(TYPE), bitcast=True)
    return (
        address,
        load_number(table, FIRST + 1),
        load_number(table, FIRST + 2),
        load_number(table, FIRST + 3),
        load_number(table, FIRST + 4),
    )


@gluon.jit
def end_of(problem, table, batch):
    """Return the number of keys that there are for a batch."""
    if problem.LENGTHS:
        at = load_number(table, _LENGTHS).to(gl.pointer_type(gl.int32), bitcast=True) + batch * load_number(
            table, _LENGTHS + 1
        )
        return gl.minimum(gl.maximum(gl.load(at), 0), problem.keys)
    return problem.keys


@gluon.jit
def seen_by_program(problem, table, batch, head, rows, keys, first):
    """Return what the mask's program says alone of a tile whose columns are the queries ``rows``, from ``first`` on."""
    return _evaluated(problem, table, batch, head, rows, keys, first, _line_of_queries, _of_keys)


@gluon.jit
def _evaluated(problem, table, batch, head, rows, columns, first, OF_QUERIES: gl.constexpr, OF_KEYS: gl.constexpr):
    """Evaluate the program for a tile; ``OF_QUERIES`` and ``OF_KEYS`` read its slots, from column ``first`` on if by lines."""
    slots = ()
    for i in gl.static_range(len(_slots_read(problem.MASK))):
        slots = slots + (_slot(table, i, _slots_read(problem.MASK)[i]) + (first,),)
    numbers = ()
    for i in gl.static_range(_numbers_used(problem.MASK)):
        numbers = numbers + (load_number(table, _NUMBERS + i).to(gl.int32),)
    queries, keys = problem.queries, problem.keys
    return _visible(problem.MASK, slots, numbers, batch, head, rows, columns, queries, keys, OF_QUERIES, OF_KEYS)


@gluon.jit
def _line_of_queries(slots, slot: gl.constexpr, b, h, i, queries):
    """Do what :func:`opkit.attn.gpu.device.tile.of_queries` does, for queries that are a tile's columns, (1, columns)."""
    return _line(slots[slot], b, h, slots[slot][3], i, queries)


@gluon.jit
def _line(slot, b, h, stride, places, end):
    """Return a slot's elements for the columns of a tile; each thread loads one, and shared memory distributes them."""
    at = slot[_FIRST] + gl.arange(0, places.shape[1], layout=gl.BlockedLayout([1], [32], [4], [0]))
    start = b.to(gl.int64) * slot[1] + h.to(gl.int64) * slot[2]
    found = gl.load(slot[0] + start + at * stride, mask=at < end, other=0)
    return gl.convert_layout(found, gl.SliceLayout(0, places.type.layout))[None, :]
