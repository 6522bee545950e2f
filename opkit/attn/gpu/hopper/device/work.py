"""What the warps of the Hopper kernels share: the problem, rings of buffers in shared memory, and who is to do what."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)  #: queries of one warpgroup
TILE_NUMBERS = gl.constexpr(7)  #: numbers that are published of a tile
TURN = gl.constexpr(8)  #: the first of the named barriers by which warpgroups take turns; Triton uses those below


@aggregate
class Problem:
    """The sizes of a call and its mask: query ``i`` sees key ``j`` if ``lower <= j - i <= upper``, where it is BANDED.

    Where it is LISTED, a list has the tiles to visit, and MASK and lengths, if there are any, say more of what is seen.
    """

    queries: gl.tensor
    keys: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # heads that share one head of keys
    lower: gl.tensor
    upper: gl.tensor
    blocks: gl.tensor  # tiles of one head
    section: gl.tensor  # heads, of all batches, whose tiles are interleaved
    tiles: gl.tensor
    D: gl.constexpr  # channels of queries and keys, padded
    DV: gl.constexpr
    KEYS: gl.constexpr  # keys of a step
    WARPGROUPS: gl.constexpr  # that multiply; each has 64 queries of a tile
    BANDED: gl.constexpr
    LISTED: gl.constexpr
    MASKED: gl.constexpr
    RECOMPUTED: gl.constexpr  # whether some rows may have to be computed again
    MASK: gl.constexpr
    LENGTHS: gl.constexpr
    CAPPED: gl.constexpr
    SINKS: gl.constexpr
    OWN_RESULTS: gl.constexpr
    OVERLAPPED: gl.constexpr  # a tile's first product with the results of the one before
    TURNS: gl.constexpr  # whether warpgroups take turns at the tensor cores
    HELD: gl.constexpr  # channels of queries that are in registers while a tile is worked on
    DTYPE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, queries, keys, heads, group, lower, upper, blocks, section, tiles, D, DV, KEYS, WARPGROUPS, BANDED, LISTED,
        MASK, LENGTHS, CAPPED, SINKS, OWN_RESULTS, OVERLAPPED, TURNS, HELD, DTYPE,
    ):  # fmt: skip
        self.queries = queries
        self.keys = keys
        self.heads = heads
        self.group = group
        self.lower = lower
        self.upper = upper
        self.blocks = blocks
        self.section = section
        self.tiles = tiles
        self.D = gl.constexpr(D)
        self.DV = gl.constexpr(DV)
        self.KEYS = gl.constexpr(KEYS)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.BANDED = gl.constexpr(BANDED)
        self.LISTED = gl.constexpr(LISTED)
        self.MASKED = gl.constexpr(BANDED or LISTED)
        self.RECOMPUTED = gl.constexpr(BANDED or LISTED or not CAPPED)
        self.MASK = gl.constexpr(MASK)
        self.LENGTHS = gl.constexpr(LENGTHS)
        self.CAPPED = gl.constexpr(CAPPED)
        self.SINKS = gl.constexpr(SINKS)
        self.OWN_RESULTS = gl.constexpr(OWN_RESULTS)
        self.OVERLAPPED = gl.constexpr(OVERLAPPED)
        self.TURNS = gl.constexpr(TURNS)
        self.HELD = gl.constexpr(HELD)
        self.DTYPE = gl.constexpr(DTYPE)

    @gluon.jit
    def place(self, tile):
        """Return the batch and the head of a tile, and its first query.

        A section's keys and values about fit into the L2 cache. With a mask the last blocks of queries come first: of a causal
        one they have the most to do.
        """
        size = self.section * self.blocks
        first = tile // size * self.section
        rest = tile % size
        if self.BANDED or self.LISTED:
            width = gl.minimum(self.section, self.tiles // self.blocks - first)
            head = first + rest % width
            block = self.blocks - 1 - rest // width
        else:
            head = first + rest // self.blocks
            block = rest % self.blocks
        return head // self.heads, head % self.heads, block * (self.WARPGROUPS * ROWS)

    @gluon.jit
    def reach(self, row):
        """Return the first step of keys that a block of queries needs, and how many; at least one, if only to see nothing."""
        if self.BANDED:
            end = gl.minimum(row + self.WARPGROUPS * ROWS, self.queries) - 1
            last = gl.maximum(gl.minimum(end + self.upper, self.keys - 1), 0) // self.KEYS
            first = gl.minimum(gl.maximum(row + self.lower, 0) // self.KEYS, last)
            return first, last - first + 1
        return self.tiles * 0, (self.keys + self.KEYS - 1) // self.KEYS


@aggregate
class Ring:
    """Buffers in shared memory that one side fills and the other empties, in turn; each side has one of its own.

    ``index`` is the next buffer, ``phase`` the parity of the barriers that this side waits for.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    index: gl.tensor
    phase: gl.tensor
    COUNT: gl.constexpr
    STRIDE: gl.constexpr  # from one buffer of a side to its next

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, index, phase, COUNT, STRIDE):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.index = index
        self.phase = phase
        self.COUNT = gl.constexpr(COUNT)
        self.STRIDE = gl.constexpr(STRIDE)

    @gluon.jit
    def begin(self, phase):
        """Return the ring as the side that fills (phase 1) or empties (0) finds it."""
        zero = gl.to_tensor(0)
        return Ring(self.buffers, self.full, self.empty, zero, zero + phase, self.COUNT, 1)

    @gluon.jit
    def at(self, ME: gl.constexpr, of: gl.constexpr):
        """Return the buffers of one of several warpgroups, each of which empties some."""
        zero = gl.to_tensor(0)
        return Ring(self.buffers, self.full, self.empty, zero + ME, zero, self.COUNT, of)

    @gluon.jit
    def next(self):
        index = self.index + self.STRIDE
        wraps = index >= self.COUNT
        index = gl.where(wraps, index - self.COUNT, index)
        phase = gl.where(wraps, self.phase ^ 1, self.phase)
        return Ring(self.buffers, self.full, self.empty, index, phase, self.COUNT, self.STRIDE)

    @gluon.jit
    def freed(self):
        """Return the ring after this side is done with a buffer."""
        mbarrier.arrive(self.empty.index(self.index), count=1)
        return self.next()

    @gluon.jit
    def matrix(self):
        """Return the next buffer as a matrix of rows."""
        shape: gl.constexpr = self.buffers.shape
        return self.buffers.index(self.index).reshape([shape[3], shape[4]])

    @gluon.jit
    def transposed(self):
        return self.matrix().permute((1, 0))

    @gluon.jit
    def wait_full(self, pred=True):
        mbarrier.wait(self.full.index(self.index), self.phase, pred=pred)

    @gluon.jit
    def wait_empty(self):
        mbarrier.wait(self.empty.index(self.index), self.phase)

    @gluon.jit
    def wait_emptied(self, BACK: gl.constexpr):
        """Wait until what was loaded so many times before is no longer needed; fewer times than there are buffers."""
        wraps = self.index < BACK
        index = gl.where(wraps, self.index + (self.COUNT - BACK), self.index - BACK)
        mbarrier.wait(self.empty.index(index), gl.where(wraps, self.phase, self.phase ^ 1))

    @gluon.jit
    def load(self, descriptor, batch, head, row):
        """Fill the next buffer with rows of a head; rows that there are not become zeros."""
        barrier = self.full.index(self.index)
        mbarrier.expect(barrier, descriptor.block_type.nbytes)
        tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], barrier, self.buffers.index(self.index))


@gluon.jit
def ring(buffers, COUNT: gl.constexpr, readers: gl.constexpr):
    """Return a ring of buffers that ``readers`` warpgroups empty; with none, another ring's barriers say when they are empty."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = full
    if readers > 0:
        empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        if readers > 0:
            mbarrier.init(empty.index(i), count=readers)
    zero = gl.to_tensor(0)
    return Ring(buffers, full, empty, zero, zero, COUNT, 1)


# ---- tiles, which the warp that loads publishes to the others --------------------------------------------------------


@gluon.jit
def publish_tile(turns, numbers):
    """Publish a tile to the other warpgroups: how many steps, 0 after the last tile, and where."""
    for i in gl.static_range(TILE_NUMBERS):
        number = gl.full([1], numbers[i], gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        turns.buffers.index(turns.index * TILE_NUMBERS + i).store(number)
    mbarrier.arrive(turns.full.index(turns.index), count=1)


@gluon.jit
def read_tile(turns, ME: gl.constexpr):
    """Return the numbers of a tile, with the first of this warpgroup's rows."""
    steps, last, row = _read_number(turns, 0), _read_number(turns, 1), _read_number(turns, 2)
    head, batch, of_all, place = (
        _read_number(turns, 3),
        _read_number(turns, 4),
        _read_number(turns, 5),
        _read_number(turns, 6),
    )
    return steps, last, row + ME * ROWS, head, batch, of_all, place


@gluon.jit
def _read_number(turns, I: gl.constexpr):
    return gl.max(turns.buffers.index(turns.index * TILE_NUMBERS + I).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def publish_step(keys, marks, mark):
    """Publish to the other warpgroups, before the keys of a step are loaded, which they are."""
    marks.index(keys.index).store(gl.full([1], mark, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_step(keys, marks):
    return gl.max(marks.index(keys.index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


# ---- the counter of tiles --------------------------------------------------------------------------------------------


@gluon.jit
def put_back(counter, programs):
    """The last program to end leaves the counter as it found it: zeros."""
    if gl.atomic_add(counter + 1, 1, sem="acq_rel") == programs - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


# ---- turns at the tensor cores ---------------------------------------------------------------------------------------


@gluon.constexpr_function
def _barrier(what, number):
    return f"bar.{what} {number}, 256; mov.b32 $0, 0;"


@gluon.jit
def take_turn(NUMBER: gl.constexpr, TURNS: gl.constexpr):
    """Wait until another warpgroup passes the turn on."""
    text: gl.constexpr = _barrier("sync", NUMBER)
    if TURNS:
        gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(NUMBER: gl.constexpr, TURNS: gl.constexpr):
    text: gl.constexpr = _barrier("arrive", NUMBER)
    if TURNS:
        gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
