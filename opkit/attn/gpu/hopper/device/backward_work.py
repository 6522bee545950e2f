"""What the warps of the Hopper backward share: the problem, the order of its programs, and who sees what."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language.core import _aggregate as aggregate

from opkit.attn.gpu.hopper.device.masks import end_of, seen_by_program

HALF = gl.constexpr(64)  #: keys of one warpgroup, and rows and columns of its part of the gradient of queries
STAGES = gl.constexpr(2)  #: blocks of queries that are there at once
AHEAD = gl.constexpr(2)  #: tiles of a program that are published at once
STEPS, FIRST, PLACE, BATCH, HEAD, NOUGHT, TILE_NUMBERS = (gl.constexpr(i) for i in range(7))
"""The numbers that are published of a tile: how many blocks of queries a head has, -1 after the last tile; the first of them; the
first key; the batch; the head of keys; 0. And how many numbers these are."""
WIDE = gl.constexpr(32)  #: floats in a row of the memory that sums up the gradient of queries
_FOUR_A_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [64]
    )
)  # fmt: skip
_LATE = gl.constexpr(2 * STAGES)  #: steps that are published at once to the warp that accumulates
_HEADS = gl.constexpr(STAGES)  #: where in the table the heads begin, the places of sums, and turns
_SUMS = gl.constexpr(2 * STAGES)
_TURNS = gl.constexpr(4 * STAGES)
BLOCK_NUMBERS = gl.constexpr(6 * STAGES)  #: how many numbers are published of blocks
_LANES = gl.constexpr(32)


@aggregate
class Slopes:
    """The sizes of a call and its mask: query ``i`` sees key ``j`` if ``lower <= j - i <= upper``, where it is BANDED.

    Where it is LISTED, a list has the blocks of queries to visit, and MASK and lengths, if there are any, say more of what is
    seen.
    """

    queries: gl.tensor
    keys: gl.tensor
    heads: gl.tensor  # of queries
    key_heads: gl.tensor
    lower: gl.tensor
    upper: gl.tensor
    section: gl.tensor  # heads of keys, of all batches, whose tiles are interleaved
    tiles: gl.tensor  # blocks of keys, of all heads
    D: gl.constexpr  # channels, padded
    ROWS: gl.constexpr  # queries of a step
    BANDED: gl.constexpr
    CAPPED: gl.constexpr
    ORDERED: gl.constexpr  # whether programs add to the gradient of queries in turn
    GROUPED: gl.constexpr  # whether the numbers of rows lie in memory so that a thread reads four at once
    APART: gl.constexpr  # whether each thread counts buffers in a register of its own
    DTYPE: gl.constexpr
    LISTED: gl.constexpr
    MASKED: gl.constexpr
    MASK: gl.constexpr
    LENGTHS: gl.constexpr
    KEYS: gl.constexpr  # of a program
    HELD: gl.constexpr  # whether keys and values are in registers, where there is room, while a tile is worked on

    @gluon.constexpr_function
    def __init__(
        self, queries, keys, heads, key_heads, lower, upper, section, tiles, D, ROWS, BANDED, CAPPED, ORDERED, GROUPED, APART,
        DTYPE, LISTED=False, MASK=(), LENGTHS=False, KEYS=128,
    ):  # fmt: skip
        self.queries = queries
        self.keys = keys
        self.heads = heads
        self.key_heads = key_heads
        self.lower = lower
        self.upper = upper
        self.section = section
        self.tiles = tiles
        self.D = gl.constexpr(D)
        self.ROWS = gl.constexpr(ROWS)
        self.BANDED = gl.constexpr(BANDED)
        self.CAPPED = gl.constexpr(CAPPED)
        self.ORDERED = gl.constexpr(ORDERED)
        self.GROUPED = gl.constexpr(GROUPED)
        self.APART = gl.constexpr(APART)
        self.DTYPE = gl.constexpr(DTYPE)
        self.LISTED = gl.constexpr(LISTED)
        self.MASKED = gl.constexpr(BANDED or LISTED)
        self.MASK = gl.constexpr(MASK)
        self.LENGTHS = gl.constexpr(LENGTHS)
        self.KEYS = gl.constexpr(KEYS)
        self.HELD = gl.constexpr(ROWS > HALF and not CAPPED and not (LISTED and BANDED))

    @gluon.jit
    def blocks(self):
        """Return how many steps there are at most for a head: blocks of queries."""
        return (self.queries + self.ROWS - 1) // self.ROWS

    @gluon.jit
    def place(self, tile):
        """Return the batch, the head of keys and the first key of a tile.

        The queries of a section fit into the L2 cache, with what is summed up for them. The first keys come first, since of a
        causal mask they have the most to do. Where tiles add in turn, the last keys come first: of a causal mask they begin
        with blocks of queries that no other keys have seen, so that nothing waits, and no tile waits for one that begins later.
        """
        of_head = (self.keys + self.KEYS - 1) // self.KEYS
        size = self.section * of_head
        first = tile // size * self.section
        rest = tile % size
        width = gl.minimum(self.section, self.tiles // of_head - first)
        head = first + rest % width
        block = rest // width
        if self.ORDERED:
            block = of_head - 1 - block
        return head // self.key_heads, head % self.key_heads, block * self.KEYS

    @gluon.jit
    def span(self, at):
        """Return the first block of queries that sees some of the keys from ``at``, and how many blocks do, perhaps none."""
        if self.BANDED:
            last = gl.minimum(gl.minimum(at + self.KEYS, self.keys) - 1 - self.lower, self.queries - 1)
            first = gl.maximum(at - self.upper, 0) // self.ROWS
            return first, gl.maximum((gl.maximum(last, -1) + self.ROWS) // self.ROWS - first, 0)
        return at * 0, self.blocks()

    @gluon.jit
    def turn(self, block, at):
        """Return how many tiles add to a block of queries before that of the keys from ``at``: those of later visible keys."""
        last = (self.keys - 1) // self.KEYS
        if self.BANDED:
            last = gl.minimum(last, ((block + 1) * self.ROWS - 1 + self.upper) // self.KEYS)
        return last - at // self.KEYS

    @gluon.jit
    def partial(self, row, at):
        """Return whether some of a block of queries from ``row`` do not see some of 64 keys from ``at``, or are not there."""
        past = (row + self.ROWS > self.queries) | (at + HALF > self.keys)
        if self.BANDED:
            past |= (at + (HALF - 1) - row > self.upper) | (at - row - (self.ROWS - 1) < self.lower)
        return past

    @gluon.jit
    def last_whole(self, at):
        """Without a band, the last row from which on a block of queries is not partial, or -1."""
        return gl.where(at + HALF > self.keys, -1, self.queries - self.ROWS)

    @gluon.jit
    def described(self, row, at):
        """Return the first of a block of queries, and in bits 0 and 1 for which half of the keys from ``at`` it is partial."""
        return row + self.partial(row, at).to(gl.int32) + 2 * self.partial(row, at + HALF).to(gl.int32)

    @gluon.jit
    def shown(self, x, row, at):
        """``x``, (keys from ``at``, queries from ``row``), with zeros where a query does not see a key, whatever was there."""
        layout: gl.constexpr = x.type.layout
        here = nothing()  # without it all of this is computed before the steps, and held in registers
        keys = here + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))[:, None]
        rows = here + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        if self.BANDED:
            past = gl.minimum(self.queries - row, keys + (at - row - self.lower + 1))
            seen = rows < gl.where(keys < self.keys - at, past, 0)
            seen &= rows >= keys + (at - row - self.upper)
        else:
            seen = (keys < self.keys - at) & (rows < self.queries - row)
        return gl.where(seen, x, 0.0)

    @gluon.jit
    def shown_by_mask(self, x, row, at, table, batch, head):
        """As :meth:`shown`, where the mask is more than a band; ``table`` has what it reads."""
        layout: gl.constexpr = x.type.layout
        here = nothing()
        keys = at + here + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))[:, None]
        rows = row + here + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        seen = keys < end_of(self, table, batch)
        if self.BANDED:
            x = self.shown(x, row, at)
        else:
            seen = seen & (rows < self.queries)
        if len(self.MASK) > 0:
            seen = seen & seen_by_program(self, table, batch, head, rows, keys, row)
        return gl.where(seen, x, 0.0)


@gluon.jit
def nothing():
    """Return a zero of which the compiler does not know."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@builtin
def reduce_add(descriptor, place, source, _semantic=None):
    """Begin to add a block in shared memory to one in memory, by TMA."""
    at = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, source.handle)


@gluon.jit
def meet():
    """Wait for the other warpgroup that multiplies."""
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cleaned(buffer):
    """Put zeros in place of what is not finite in 16-bit rows in shared memory: times the zero of what is hidden it is NaN."""
    ROWS: gl.constexpr = buffer.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for c in gl.static_range(buffer.shape[1] // 64):
        part = buffer.slice(c * 64, 64, dim=1)
        x = part.load(layout)
        part.store(gl.where(gl.abs(x.to(gl.float32)) < float("inf"), x, gl.zeros([ROWS, 64], x.dtype, layout=layout)))


@gluon.jit
def in_order(x):
    """Return a part of the gradient of queries, (64, 64), in the order in which threads hold it: rows of 32.

    Each thread's numbers are then stored four at a time, and those of a warp to different banks.
    :func:`opkit.attn.gpu.hopper.device.backward_rows.in_rows` puts them in rows again.
    """
    there = x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return there.reshape([HALF * HALF // WIDE, WIDE])


@gluon.jit
def back_in_order(buffer):
    """Return what was put into shared memory by :func:`in_order`, as the threads held it: (64, 64)."""
    held: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0], [64, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [],
        [HALF * HALF // WIDE, WIDE],
    )  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    x = buffer.load(held).reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([HALF, HALF])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def numbers_of(buffer, GROUPED: gl.constexpr):
    """Numbers of 64 queries, for logits (keys, queries).

    :func:`opkit.attn.gpu.hopper.device.backward_rows.grouped` says how they lie if they are GROUPED.
    """
    layout: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16]))
    if GROUPED:
        x = buffer.load(_FOUR_A_THREAD).reshape([4, 4, 2, 2]).permute([0, 2, 1, 3]).reshape([HALF])
        return gl.convert_layout(x, layout, assert_trivial=True)
    return buffer.load(layout)


@gluon.jit
def following(slot, phase):
    """Return the buffers of the next block of queries, and the parity of their barriers.

    The compiler holds what is linear in steps in registers for each buffer.
    """
    return slot ^ 1, phase ^ slot


@gluon.jit
def publish(table, I, number):
    """Store a number in a table in shared memory; one warp does."""
    table.index(I).store(gl.full([1], number, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_number(table, I, WARPS: gl.constexpr):
    """Return a number of a table."""
    return gl.max(table.index(I).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def added():
    """Wait until all that was begun by :func:`reduce_add` is in memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def listed_steps(problem, lists, batch, key_head, at):
    """Return how many blocks of queries, of all heads that share them, see some of the keys from ``at``."""
    _, _, _, counts, strides = lists
    group = problem.heads // problem.key_heads
    counts += batch * strides[0].to(gl.int64) + at // problem.KEYS * strides[2] + 1
    found = at * 0
    for first in range(0, group, _LANES):
        g = first + gl.arange(0, _LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
        found += gl.sum(gl.load(counts + (key_head * group + g) * strides[1], mask=g < group, other=0), 0)
    return found


@gluon.jit
def list_of(problem, lists, batch, head, at):
    """Return a head's list for the keys from ``at``: where blocks and turns begin, how many are whole, and how many there are."""
    blocks, turns, block_strides, counts, strides = lists
    own = at // problem.KEYS
    place = batch * block_strides[0].to(gl.int64) + head * block_strides[1].to(gl.int64) + own * block_strides[2]
    counts += batch * strides[0].to(gl.int64) + head * strides[1].to(gl.int64) + own * strides[2]
    blocks += place
    mine = blocks
    if problem.ORDERED:
        mine = turns + place
    return blocks, mine, gl.load(counts), gl.load(counts + 1)


@gluon.jit
def visit(problem, mine, step):
    """Return the block of a step, twice, and one more if it is partly seen, which are the first; and its turn."""
    blocks, turns, whole, total = mine
    partly = step < total - whole
    index = gl.where(partly, problem.blocks() - 1 - step, step - (total - whole))
    mark = 2 * gl.load(blocks + index, mask=step < total, other=0) + partly.to(gl.int32)
    turn = mark
    if problem.ORDERED:
        turn = gl.load(turns + index, mask=step < total, other=0)
    return mark, turn


@gluon.jit
def publish_block(problem, table, slot, phase, mark, head, of_all, turn):
    """Publish the block in the buffers of ``slot``; ``phase`` is the parity of those that read them."""
    publish(table, slot, mark // 2 * problem.ROWS + mark % 2 * 3)
    publish(table, _HEADS + slot, head)
    publish(table, _SUMS + slot + STAGES * phase, of_all)
    if problem.ORDERED:
        publish(table, _TURNS + slot + STAGES * phase, turn)


@gluon.jit
def read_head(table, slot):
    """Return the head of the queries in the buffers of ``slot``."""
    return read_number(table, _HEADS + slot, 4)


@gluon.jit
def read_sum(problem, table, step):
    """Return which block of all the sum of a step belongs to, and its turn."""
    place = step % _LATE
    found = read_number(table, _SUMS + place, 1)
    turn = found
    if problem.ORDERED:
        turn = read_number(table, _TURNS + place, 1)
    return found, turn
