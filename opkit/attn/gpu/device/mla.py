"""Latent attention for few queries on sm_90, in Gluon: keys of 576 channels, the first 512 of which are the values.

A program has 64 heads of one query, whose results of 64 x 512 take two warpgroups' registers: each has 256 columns of them.
Keys come in pairs of blocks of 64, each loaded once by TMA, as keys and as values. The first warpgroup reckons the logits and
weights of a pair's first block, the second those of the other, and hands them to the other through shared memory with the
rows' maxima; each multiplies both with its half of the values. One reckons exponentials while the other's products run (the
method is that of FlashMLA, "A deep-dive into the new Flash MLA kernel", 2025). A buffer is filled anew as soon as its last
product is done, a half at a time. The last 64 channels of the queries stay in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from opkit.attn.gpu.device.hopper_softmax import (
    added,
    capped,
    exp2,
    normal,
    raised,
    rescaled,
    row_max,
    row_sums,
    weights,
)
from opkit.attn.gpu.device.hopper_work import ROWS

KEYS = gl.constexpr(64)  #: of a block
HALF = gl.constexpr(256)  #: columns of results of a warpgroup
VALUES = gl.constexpr(512)
_REST = gl.constexpr(64)  #: channels of queries and keys after the values'
_LN2 = gl.constexpr(0.6931471805599453)
_EMPTY = gl.constexpr(6)  # barriers of emptied buffers follow those of full ones
_QUERIES, _FULL_P, _EMPTY_P = gl.constexpr(12), gl.constexpr(13), gl.constexpr(15)


@gluon.jit
def _zero():
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
    keys: gl.tensor  # of the tensor
    halves: gl.shared_memory_descriptor
    rests: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor  # a left and a right half
    weights: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor
    CAPPED: gl.constexpr
    SINKS: gl.constexpr
    SPLIT: gl.constexpr
    AHEAD: gl.constexpr  # pairs of blocks
    DTYPE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, begin, stop, keys, halves, rests, queries, weights, tops, barriers, CAPPED, SINKS, SPLIT, AHEAD, DTYPE
    ):  # fmt: skip
        self.begin = begin
        self.stop = stop
        self.keys = keys
        self.halves = halves
        self.rests = rests
        self.queries = queries
        self.weights = weights
        self.tops = tops
        self.barriers = barriers
        self.CAPPED = gl.constexpr(CAPPED)
        self.SINKS = gl.constexpr(SINKS)
        self.SPLIT = gl.constexpr(SPLIT)
        self.AHEAD = gl.constexpr(AHEAD)
        self.DTYPE = gl.constexpr(DTYPE)

    @gluon.jit
    def pairs(self):
        return (self.stop - self.begin + 2 * KEYS - 1) // (2 * KEYS)

    @gluon.jit
    def half(self, BLOCK: gl.constexpr, PART: gl.constexpr):
        """Half of a block: rows of keys."""
        return self.halves.index(2 * BLOCK + PART + _zero()).reshape([KEYS, HALF])

    @gluon.jit
    def rest(self, BLOCK: gl.constexpr):
        return self.rests.index(BLOCK + _zero()).reshape([KEYS, _REST])

    @gluon.jit
    def wait(self, I: gl.constexpr, phase):
        mbarrier.wait(self.barriers.index(I), phase)

    @gluon.jit
    def arrive(self, I: gl.constexpr):
        mbarrier.arrive(self.barriers.index(I), count=1)


@gluon.jit
def _load(work, q_desc, half_desc, rest_desc, query_at, key_at, ahead, SHARES: gl.constexpr):
    """Queries once, then pairs of blocks, parts in the order in which they are freed; a pair is in the L2 cache before."""
    b, head, row = query_at
    mbarrier.expect(work.barriers.index(_QUERIES), 2 * q_desc.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(
            q_desc, [b, head, row, part * HALF], work.barriers.index(_QUERIES), work.queries.index(part)
        )
    phase = gl.to_tensor(1)
    for n in range(work.pairs()):
        first = work.begin + 2 * n * KEYS
        if work.AHEAD > 0:
            _fetch(work, first + 2 * work.AHEAD * KEYS, ahead, SHARES)
        _load_part(work, rest_desc, key_at, first, 0, 2, phase)
        _load_part(work, half_desc, key_at, first, 0, 0, phase)
        _load_part(work, half_desc, key_at, first, 0, 1, phase)
        second = first + KEYS
        second = gl.where(second < work.stop, second, work.keys)  # past the end nothing is read
        _load_part(work, rest_desc, key_at, second, 1, 2, phase)
        _load_part(work, half_desc, key_at, second, 1, 1, phase)
        _load_part(work, half_desc, key_at, second, 1, 0, phase)
        phase ^= 1


@gluon.jit
def _fetch(work, at, ahead, SHARES: gl.constexpr):
    """Ask for a pair of blocks, or for one where another program asks for the other, to be brought to the L2 cache."""
    k, stride, size, share = ahead
    ROWS_EACH: gl.constexpr = 2 * KEYS // SHARES
    rows = at + share * ROWS_EACH + gl.arange(0, ROWS_EACH, layout=gl.BlockedLayout([1], [32], [1], [0]))
    if at < work.stop:
        offsets = gl.minimum(rows, work.stop - 1).to(gl.int64) * stride
        text: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
        sizes = gl.full([ROWS_EACH], 0, gl.int32, layout=rows.type.layout) + size
        gl.inline_asm_elementwise(text, "=r,l,r", [k + offsets, sizes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_part(work, desc, key_at, at, BLOCK: gl.constexpr, PART: gl.constexpr, phase):
    b, head = key_at
    full = work.barriers.index(3 * BLOCK + PART)
    work.wait(_EMPTY + 3 * BLOCK + PART, phase)
    mbarrier.expect(full, desc.block_type.nbytes)
    if PART == 2:
        to = work.rests.index(BLOCK)
    else:
        to = work.halves.index(2 * BLOCK + PART)
    tma.async_copy_global_to_shared(desc, [b, head, at, PART * HALF], full, to)


@gluon.jit
def _logits_of_rest(ME: gl.constexpr, work, rest, none, phase, more):
    """Begin the logits of a block, with the last channels; where there is no ``more``, of whatever lies there."""
    mbarrier.wait(work.barriers.index(3 * ME + 2), phase, pred=more)
    return warpgroup_mma(rest, work.rest(ME).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _logits_of_half(ME: gl.constexpr, PART: gl.constexpr, work, s, phase, more):
    mbarrier.wait(work.barriers.index(3 * ME + PART), phase, pred=more)
    q = work.queries.index(PART + _zero()).reshape([ROWS, HALF])
    return warpgroup_mma(q, work.half(ME, PART).permute((1, 0)), s, is_async=True)


@gluon.jit
def _seen(ME: gl.constexpr, work, s, at, inner):
    """The logits of a block, -inf for keys past the end, whose values become zeros."""
    s = capped(s, inner, work.CAPPED)
    if at + KEYS > work.stop:
        columns = at + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))[None, :]
        s = gl.where(columns < work.stop, s, float("-inf"))
        _clear(work.half(ME, 0), work.stop - at)
        _clear(work.half(ME, 1), work.stop - at)
        fence_async_shared()
    return s


@gluon.jit
def _clear(half, first):
    """Write zeros to the rows from ``first`` on: what lies there may be NaN, which times zero is not zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))[:, None]
    for c in gl.static_range(0, HALF, 64):
        piece = half.slice(c, 64, dim=1)
        found = piece.load(layout)
        piece.store(gl.where(rows < first, found, gl.zeros_like(found)))


@gluon.jit
def _hand(ME: gl.constexpr, work, p, top, phase):
    """Give the other warpgroup this one's weights and maxima."""
    work.wait(_EMPTY_P + ME, phase ^ 1)
    work.weights.index(ME).store(p)
    work.tops.index(ME).store(top)
    fence_async_shared()
    work.arrive(_FULL_P + ME)


@gluon.jit
def _handed(OTHER: gl.constexpr, work, top, factor, phase):
    """The other warpgroup's maxima, and what sums are multiplied by."""
    work.wait(_FULL_P + OTHER, phase)
    higher = work.tops.index(OTHER).load(top.type.layout)
    return higher, gl.where(higher > top, exp2((top - higher) * factor), 1.0)


@gluon.jit
def _times(total, by):
    return total * gl.convert_layout(by, gl.SliceLayout(1, total.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _first(work, rest, results, inner, factor):
    """The warpgroup of the first block of each pair, and of the left half of the results."""
    of_logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_out, k_width=2)
    q = _rest_of_queries(rest, work, of_logits)
    none = gl.zeros([ROWS, KEYS], gl.float32, layout=of_logits)
    acc = gl.zeros([ROWS, HALF], gl.float32, layout=of_out)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, of_logits))
    total = row_sums(none)
    phase = gl.to_tensor(0)
    at = work.begin
    pairs = work.pairs()
    work.wait(_QUERIES, 0)
    s = _logits_of_rest(0, work, q, none, phase, pairs > 0)
    s = _logits_of_half(0, 0, work, s, phase, pairs > 0)
    s = _logits_of_half(0, 1, work, s, phase, pairs > 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    for n in range(pairs):
        more = n + 1 < pairs
        work.arrive(_EMPTY + 2)
        s = _seen(0, work, s, at, inner)
        top, by = raised(top, row_max(s), factor)
        pf = weights(s, top, factor)
        total = added(total, by, pf)
        p = pf.to(work.DTYPE)
        _hand(0, work, p, top, phase)
        acc = rescaled(acc, by)
        acc = warpgroup_mma(gl.convert_layout(p, of_p), work.half(0, 0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        work.arrive(_EMPTY + 0)
        top, by = _handed(1, work, top, factor, phase)
        total = _times(total, by)
        acc = rescaled(acc, by)
        acc = warpgroup_mma(work.weights.index(1 + _zero()), work.half(1, 0), acc, is_async=True)
        phase ^= 1
        s = _logits_of_rest(0, work, q, none, phase, more)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        work.arrive(_EMPTY + 3)
        work.arrive(_EMPTY_P + 1)
        s = _logits_of_half(0, 0, work, s, phase, more)
        s = _logits_of_half(0, 1, work, s, phase, more)
        s = warpgroup_mma_wait(0, deps=(s,))
        at += 2 * KEYS
    _finish(0, work, results, acc, top, total, factor, phase)


@gluon.jit
def _second(work, rest, results, inner, factor):
    """The warpgroup of the second block of each pair, and of the right half of the results."""
    of_logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_out, k_width=2)
    q = _rest_of_queries(rest, work, of_logits)
    none = gl.zeros([ROWS, KEYS], gl.float32, layout=of_logits)
    acc = gl.zeros([ROWS, HALF], gl.float32, layout=of_out)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, of_logits))
    total = row_sums(none)
    phase = gl.to_tensor(0)
    at = work.begin + KEYS
    pairs = work.pairs()
    work.wait(_QUERIES, 0)
    s = _logits_of_rest(1, work, q, none, phase, pairs > 0)
    s = _logits_of_half(1, 1, work, s, phase, pairs > 0)
    s = _logits_of_half(1, 0, work, s, phase, pairs > 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    for n in range(pairs):
        more = n + 1 < pairs
        work.arrive(_EMPTY + 5)
        s = _seen(1, work, s, at, inner)
        top, before = _handed(0, work, top, factor, phase)
        acc = rescaled(acc, before)
        work.wait(1, phase)
        acc = warpgroup_mma(work.weights.index(0 + _zero()), work.half(0, 1), acc, is_async=True)
        top, by = raised(top, row_max(s), factor)
        pf = weights(s, top, factor)
        total = added(total, before * by, pf)
        p = pf.to(work.DTYPE)
        _hand(1, work, p, top, phase)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        work.arrive(_EMPTY + 1)
        work.arrive(_EMPTY_P + 0)
        acc = rescaled(acc, by)
        acc = warpgroup_mma(gl.convert_layout(p, of_p), work.half(1, 1), acc, is_async=True)
        phase ^= 1
        s = _logits_of_rest(1, work, q, none, phase, more)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        work.arrive(_EMPTY + 4)
        s = _logits_of_half(1, 1, work, s, phase, more)
        s = _logits_of_half(1, 0, work, s, phase, more)
        s = warpgroup_mma_wait(0, deps=(s,))
        at += 2 * KEYS
    _finish(1, work, results, acc, top, total, factor, phase)


@gluon.jit
def _rest_of_queries(rest, work, of_logits: gl.constexpr):
    """The last channels of the queries; zeros where there are none."""
    q, stride, there, channels = rest
    layout: gl.constexpr = gl.DotOperandLayout(0, of_logits, k_width=2)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    columns = VALUES + gl.arange(0, _REST, layout=gl.SliceLayout(0, layout))[None, :]
    return gl.load(q + rows * stride + columns, mask=(rows < there) & (columns < channels), other=0.0)


@gluon.jit
def _finish(ME: gl.constexpr, work, results, acc, top, total, factor, phase):
    """Store half of the columns of the results: normalised, or as the split's that they are."""
    out_desc, out_at, lse, lse_stride, partial, sinks, there = results
    of_rows: gl.constexpr = top.type.layout
    mine = gl.convert_layout(gl.sum(total, 1), of_rows)
    work.wait(_EMPTY_P + ME, phase ^ 1)
    work.tops.index(ME).store(mine)
    work.arrive(_FULL_P + ME)
    work.wait(_FULL_P + (1 - ME), phase)
    total = mine + work.tops.index(1 - ME).load(of_rows)
    rows = gl.arange(0, ROWS, layout=of_rows)
    of_out: gl.constexpr = acc.type.layout
    at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_out))[:, None]
    columns = ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, of_out))[None, :]
    if work.SPLIT:
        gl.store(partial + at * VALUES + columns, acc)
        if ME == 0:
            gl.store(partial + ROWS * VALUES + rows, top * factor)
            gl.store(partial + ROWS * (VALUES + 1) + rows, total)
    else:
        by, powers = normal(top * factor, total, sinks, gl.minimum(rows, there - 1), work.SINKS)
        acc = acc * gl.convert_layout(by, gl.SliceLayout(1, of_out))[:, None]
        b, head, row = out_at
        mine = work.queries.index(ME)  # no product reads it any more
        mine.reshape([ROWS, HALF]).store(acc.to(work.DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [b, head, row, ME * HALF], mine)
        if ME == 0:
            gl.store(lse + rows * lse_stride, powers * _LN2, mask=rows < there)
        tma.store_wait(0)


RUN_TIME = ("batch", "slots", "splits", "kv_heads", "queries", "keys", "lower", "upper", "channels", "each_length")
_STRIDES = ("q_b", "q_h", "q_t", "k_b", "k_h", "k_t", "lse_b", "lse_h", "lse_t")


@gluon.jit(do_not_specialize=(*RUN_TIME, *_STRIDES))
def mla(
    q_desc, half_desc, rest_desc, out_desc, q, k, lse, sinks, partial, lengths,
    q_b, q_h, q_t, k_b, k_h, k_t, lse_b, lse_h, lse_t,
    batch, slots, splits, kv_heads, queries, keys, lower, upper, channels, each_length, factor, inner,
    GROUP: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr, LENGTHS: gl.constexpr,
    AHEAD: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One split of 64 heads of one query. Query ``i`` sees key ``j`` if ``lower <= j - i <= upper`` and ``j`` is within the length."""
    TILES: gl.constexpr = (GROUP + ROWS - 1) // ROWS
    tile = gl.program_id(0) % (slots * kv_heads)
    split = gl.program_id(0) // (slots * kv_heads)
    head, slot = tile % kv_heads, tile // kv_heads
    b = slot // (TILES * queries)
    i = slot // TILES % queries
    first = slot % TILES * ROWS
    there = gl.minimum(GROUP - first, ROWS)
    first += head * GROUP
    if LENGTHS:
        length = gl.minimum(gl.load(lengths + b * each_length), keys)
    else:
        length = keys
    begin = gl.maximum(i + lower, 0)
    blocks = (gl.maximum(gl.minimum(i + upper + 1, length) - begin, 0) + KEYS - 1) // KEYS
    stop = begin + gl.maximum(gl.minimum(i + upper + 1, length) - begin, 0)
    share = (blocks + splits - 1) // splits
    begin = gl.minimum(begin + split * share * KEYS, stop)
    stop = gl.minimum(begin + share * KEYS, stop)

    halves = gl.allocate_shared_memory(half_desc.dtype, [4, 1, 1, KEYS, HALF], half_desc.layout)
    rests = gl.allocate_shared_memory(half_desc.dtype, [2, 1, 1, KEYS, _REST], rest_desc.layout)
    heads = gl.allocate_shared_memory(q_desc.dtype, [2, 1, ROWS, 1, HALF], q_desc.layout)
    of_p: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    handed = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, KEYS], of_p)
    tops = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    barriers = gl.allocate_shared_memory(gl.int64, [17, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(17):
        mbarrier.init(barriers.index(n), count=1)
    fence_async_shared()
    work = Work(
        begin, stop, keys, halves, rests, heads, handed, tops, barriers, CAPPED, SINKS, SPLIT, AHEAD, q_desc.dtype
    )  # fmt: skip
    q_at = b.to(gl.int64) * q_b + i * q_t + first * q_h
    lse_at = b.to(gl.int64) * lse_b + i * lse_t + first * lse_h
    partial += (tile * splits + split).to(gl.int64) * (ROWS * (VALUES + 2))
    results = (out_desc, (b, first, i), lse + lse_at, lse_h, partial, sinks + first, there)
    rest = (q + q_at, q_h, there, channels)
    SHARES: gl.constexpr = 2 - TILES % 2
    k += b.to(gl.int64) * k_b + head.to(gl.int64) * k_h
    ahead = (k, k_t, (channels + 7) // 8 * 16, slot % SHARES)
    gl.warp_specialize(
        [
            (_first, (work, rest, results, inner, factor)),
            (_second, (work, rest, results, inner, factor)),
            (_load, (work, q_desc, half_desc, rest_desc, (b, first, i), (b, head), ahead, SHARES)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )
