"""What the warps of :mod:`opkit.attn.gpu.hopper.device.mla` share: what a program goes over, its buffers and their filling."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from opkit.attn.gpu.hopper.device.work import ROWS

KEYS = gl.constexpr(64)  #: of a block
HALF = gl.constexpr(256)  #: columns of results of a warpgroup
VALUES = gl.constexpr(512)
REST = gl.constexpr(64)  #: channels of queries and keys after the values'
EMPTY = gl.constexpr(6)  #: barriers of emptied buffers follow those of full ones
QUERIES, FULL_P, EMPTY_P, BARRIERS = gl.constexpr(12), gl.constexpr(13), gl.constexpr(15), gl.constexpr(17)


@gluon.jit
def zero():
    """0, which the compiler does not know: the addresses of products would not fit the registers if it kept them all."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@aggregate
class Work:
    """What of the keys a program goes over, and its buffers.

    Of each pair of blocks there are two halves of 256 channels and the rest of 64: ``halves`` are the first block's left and
    right half, and the second's. Barrier ``3 * block + part`` is of a part (left, right, rest) of a block.
    """

    begin: gl.tensor  # the first key
    stop: gl.tensor  # the key after the last one
    end: gl.tensor  # a key, or a page, that there is not
    halves: gl.shared_memory_descriptor
    rests: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor  # a left and a right half
    weights: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor
    CAPPED: gl.constexpr
    SINKS: gl.constexpr
    SPLIT: gl.constexpr
    PAGE: gl.constexpr  # 0 where keys are contiguous
    DTYPE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, begin, stop, end, halves, rests, queries, weights, tops, barriers, CAPPED, SINKS, SPLIT, PAGE, DTYPE
    ):  # fmt: skip
        self.begin = begin
        self.stop = stop
        self.end = end
        self.halves = halves
        self.rests = rests
        self.queries = queries
        self.weights = weights
        self.tops = tops
        self.barriers = barriers
        self.CAPPED = gl.constexpr(CAPPED)
        self.SINKS = gl.constexpr(SINKS)
        self.SPLIT = gl.constexpr(SPLIT)
        self.PAGE = gl.constexpr(PAGE)
        self.DTYPE = gl.constexpr(DTYPE)

    @gluon.jit
    def pairs(self):
        return (self.stop - self.begin + 2 * KEYS - 1) // (2 * KEYS)

    @gluon.jit
    def half(self, BLOCK: gl.constexpr, PART: gl.constexpr):
        """Half of a block: rows of keys."""
        return self.halves.index(2 * BLOCK + PART + zero()).reshape([KEYS, HALF])

    @gluon.jit
    def rest(self, BLOCK: gl.constexpr):
        return self.rests.index(BLOCK + zero()).reshape([KEYS, REST])

    @gluon.jit
    def wait(self, I: gl.constexpr, phase):
        mbarrier.wait(self.barriers.index(I), phase)

    @gluon.jit
    def arrive(self, I: gl.constexpr):
        mbarrier.arrive(self.barriers.index(I), count=1)


@gluon.jit
def load(work, q_desc, half_desc, rest_desc, query_at, key_at):
    """Queries once, then pairs of blocks, parts in the order in which they are freed."""
    b, head, row = query_at
    mbarrier.expect(work.barriers.index(QUERIES), 2 * q_desc.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(
            q_desc, [b, head, row, part * HALF], work.barriers.index(QUERIES), work.queries.index(part)
        )
    phase = gl.to_tensor(1)
    first, second = _pages(work, key_at, work.begin)
    for n in range(work.pairs()):
        at = work.begin + 2 * n * KEYS
        next_first, next_second = _pages(work, key_at, at + 2 * KEYS)
        place = _place(work, key_at, at, first)
        _load_part(work, rest_desc, place, 0, 2, phase)
        _load_part(work, half_desc, place, 0, 0, phase)
        _load_part(work, half_desc, place, 0, 1, phase)
        place = _place(work, key_at, at + KEYS, second)
        _load_part(work, rest_desc, place, 1, 2, phase)
        _load_part(work, half_desc, place, 1, 1, phase)
        _load_part(work, half_desc, place, 1, 0, phase)
        first, second = next_first, next_second
        phase ^= 1


@gluon.jit
def _pages(work, key_at, at):
    """Of a pair of blocks from ``at`` the pages; past the last page where there is none, of which nothing is read."""
    _, _, table = key_at
    first, second = work.end, work.end
    if work.PAGE > 0:
        if at < work.stop:
            first = gl.minimum(gl.maximum(gl.load(table + at // work.PAGE).to(gl.int32), 0), work.end - 1)
        at += KEYS
        if at < work.stop:
            second = gl.minimum(gl.maximum(gl.load(table + at // work.PAGE).to(gl.int32), 0), work.end - 1)
    return first, second


@gluon.jit
def _place(work, key_at, at, page):
    """Return where a block lies in the tensor of keys, in its first three dimensions."""
    b, head, _ = key_at
    if work.PAGE > 0:
        return page, at % work.PAGE, head
    return b, head, gl.where(at < work.stop, at, work.end)


@gluon.jit
def _load_part(work, desc, place, BLOCK: gl.constexpr, PART: gl.constexpr, phase):
    full = work.barriers.index(3 * BLOCK + PART)
    work.wait(EMPTY + 3 * BLOCK + PART, phase)
    mbarrier.expect(full, desc.block_type.nbytes)
    if PART == 2:
        to = work.rests.index(BLOCK)
    else:
        to = work.halves.index(2 * BLOCK + PART)
    x, y, z = place
    tma.async_copy_global_to_shared(desc, [x, y, z, PART * HALF], full, to)


@gluon.jit
def sequence(starts, lengths, slot, batch, tokens, keys, GROUP: gl.constexpr, BATCH: gl.constexpr):
    """Return what :func:`opkit.attn.gpu.decode.device.decode.place_of` says of a slot of pages: the same slots are merged."""
    each = gl.arange(0, BATCH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    there = each < batch
    first = _within(gl.load(starts + each, mask=there, other=0), tokens)
    after = _within(gl.load(starts + each + 1, mask=there, other=0), tokens)
    length = _within(gl.load(lengths + each, mask=there, other=0), keys)
    base = first * GROUP // ROWS + each
    b = gl.maximum(gl.sum((there & (base <= slot)).to(gl.int32), 0) - 1, 0)
    mine = each == b
    begin, end = gl.sum(gl.where(mine, first, 0), 0), gl.sum(gl.where(mine, after, 0), 0)
    row = (slot - gl.sum(gl.where(mine, base, 0), 0)) * ROWS
    return b, begin, gl.maximum(end - begin, 0), gl.sum(gl.where(mine, length, 0), 0), row


@gluon.jit
def _within(x, most):
    return gl.minimum(gl.maximum(x, 0), most).to(gl.int32)
