"""Latent attention for few queries on sm_90, in Gluon: keys of 576 channels, the first 512 of which are the values.

A program has 64 heads of one query, whose results of 64 x 512 take two warpgroups' registers: each has 256 columns of them.
Keys come in pairs of blocks of 64, each loaded once by TMA, as keys and as values. The first warpgroup computes the logits and
weights of a pair's first block, the second those of the other, and hands them to the other through shared memory with the
rows' maxima; each multiplies both with its half of the values. One computes exponentials while the other's products run (the
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

from opkit.attn.gpu.hopper.device.mla_work import (
    BARRIERS,
    EMPTY,
    EMPTY_P,
    FULL_P,
    HALF,
    KEYS,
    QUERIES,
    REST,
    VALUES,
    Work,
    load,
    sequence,
    zero,
)
from opkit.attn.gpu.hopper.device.softmax import (
    added,
    capped,
    exact_weights,
    exp2,
    normal,
    raised,
    rescaled,
    row_max,
    row_sums,
)
from opkit.attn.gpu.hopper.device.work import ROWS

_LN2 = gl.constexpr(0.6931471805599453)
_SLACK = gl.constexpr(8.0)  #: powers of two by which maxima may grow before sums are rescaled


@gluon.jit
def _logits_of_rest(ME: gl.constexpr, work, rest, none, phase, more):
    """Begin the logits of a block, with the last channels; where there is no ``more``, of whatever lies there."""
    mbarrier.wait(work.barriers.index(3 * ME + 2), phase, pred=more)
    return warpgroup_mma(rest, work.rest(ME).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _logits_of_half(ME: gl.constexpr, PART: gl.constexpr, work, s, phase, more):
    mbarrier.wait(work.barriers.index(3 * ME + PART), phase, pred=more)
    q = work.queries.index(PART + zero()).reshape([ROWS, HALF])
    return warpgroup_mma(q, work.half(ME, PART).permute((1, 0)), s, is_async=True)


@gluon.jit
def _seen(ME: gl.constexpr, work, s, at, inner):
    """Return the logits of a block, -inf for keys past the end, whose values become zeros."""
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
    work.wait(EMPTY_P + ME, phase ^ 1)
    work.weights.index(ME).store(p)
    work.tops.index(ME).store(top)
    fence_async_shared()
    work.arrive(FULL_P + ME)


@gluon.jit
def _handed(OTHER: gl.constexpr, work, top, factor, phase):
    """Return the other warpgroup's maxima, and what sums are multiplied by."""
    work.wait(FULL_P + OTHER, phase)
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
    work.wait(QUERIES, 0)
    s = _logits_of_rest(0, work, q, none, phase, pairs > 0)
    s = _logits_of_half(0, 0, work, s, phase, pairs > 0)
    s = _logits_of_half(0, 1, work, s, phase, pairs > 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    for n in range(pairs):
        more = n + 1 < pairs
        work.arrive(EMPTY + 2)
        s = _seen(0, work, s, at, inner)
        top, by = raised(top, row_max(s), factor, _SLACK)
        pf = exact_weights(s, top, factor)
        total = added(total, by, pf)
        p = pf.to(work.DTYPE)
        _hand(0, work, p, top, phase)
        acc = rescaled(acc, by)
        acc = warpgroup_mma(gl.convert_layout(p, of_p), work.half(0, 0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        work.arrive(EMPTY + 0)
        top, by = _handed(1, work, top, factor, phase)
        total = _times(total, by)
        acc = rescaled(acc, by)
        acc = warpgroup_mma(work.weights.index(1 + zero()), work.half(1, 0), acc, is_async=True)
        phase ^= 1
        s = _logits_of_rest(0, work, q, none, phase, more)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        work.arrive(EMPTY + 3)
        work.arrive(EMPTY_P + 1)
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
    work.wait(QUERIES, 0)
    s = _logits_of_rest(1, work, q, none, phase, pairs > 0)
    s = _logits_of_half(1, 1, work, s, phase, pairs > 0)
    s = _logits_of_half(1, 0, work, s, phase, pairs > 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    for n in range(pairs):
        more = n + 1 < pairs
        work.arrive(EMPTY + 5)
        s = _seen(1, work, s, at, inner)
        top, before = _handed(0, work, top, factor, phase)
        acc = rescaled(acc, before)
        work.wait(1, phase)
        acc = warpgroup_mma(work.weights.index(0 + zero()), work.half(0, 1), acc, is_async=True)
        top, by = raised(top, row_max(s), factor, _SLACK)
        pf = exact_weights(s, top, factor)
        total = added(total, before * by, pf)
        p = pf.to(work.DTYPE)
        _hand(1, work, p, top, phase)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        work.arrive(EMPTY + 1)
        work.arrive(EMPTY_P + 0)
        acc = rescaled(acc, by)
        acc = warpgroup_mma(gl.convert_layout(p, of_p), work.half(1, 1), acc, is_async=True)
        phase ^= 1
        s = _logits_of_rest(1, work, q, none, phase, more)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        work.arrive(EMPTY + 4)
        s = _logits_of_half(1, 1, work, s, phase, more)
        s = _logits_of_half(1, 0, work, s, phase, more)
        s = warpgroup_mma_wait(0, deps=(s,))
        at += 2 * KEYS
    _finish(1, work, results, acc, top, total, factor, phase)


@gluon.jit
def _rest_of_queries(rest, work, of_logits: gl.constexpr):
    """Return the last channels of the queries; zeros where there are none."""
    q, stride, there, channels = rest
    layout: gl.constexpr = gl.DotOperandLayout(0, of_logits, k_width=2)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    columns = VALUES + gl.arange(0, REST, layout=gl.SliceLayout(0, layout))[None, :]
    return gl.load(q + rows * stride + columns, mask=(rows < there) & (columns < channels), other=0.0)


@gluon.jit
def _finish(ME: gl.constexpr, work, results, acc, top, total, factor, phase):
    """Store half of the columns of the results: normalised, or as the split's that they are."""
    out_desc, out_at, lse, lse_stride, partial, sinks, there = results
    of_rows: gl.constexpr = top.type.layout
    mine = gl.convert_layout(gl.sum(total, 1), of_rows)
    work.wait(EMPTY_P + ME, phase ^ 1)
    work.tops.index(ME).store(mine)
    work.arrive(FULL_P + ME)
    work.wait(FULL_P + (1 - ME), phase)
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
        by, powers = normal(top * factor, total, sinks, gl.maximum(gl.minimum(rows, there - 1), 0), work.SINKS)
        acc = acc * gl.convert_layout(by, gl.SliceLayout(1, of_out))[:, None]
        b, head, row = out_at
        mine = work.queries.index(ME)  # no product reads it any more
        mine.reshape([ROWS, HALF]).store(acc.to(work.DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [b, head, row, ME * HALF], mine)
        if ME == 0:
            gl.store(lse + rows * lse_stride, powers * _LN2, mask=rows < there)
        tma.store_wait(0)


RUN_TIME = (
    *("batch", "slots", "splits", "kv_heads", "queries", "keys", "pages", "lower", "upper", "channels", "table_b"),
    *("q_b", "q_h", "q_t", "lse_b", "lse_h", "lse_t"),
)


@gluon.jit(do_not_specialize=RUN_TIME)
def mla(
    q_desc, half_desc, rest_desc, out_desc, q, lse, sinks, partial, table, lengths, starts,
    q_b, q_h, q_t, lse_b, lse_h, lse_t, table_b,
    batch, slots, splits, kv_heads, queries, keys, pages, lower, upper, channels, factor, inner,
    GROUP: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr, LENGTHS: gl.constexpr,
    PAGE: gl.constexpr, BATCH: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One split of 64 heads of one query.

    Query ``i`` sees key ``j`` if ``lower <= j - i <= upper``, or with pages ``j - i - length + count``, and ``j`` is within the
    length. Queries, results and log-sum-exps are (batch, heads, queries, channels); with pages those of all sequences are one
    batch. ``LENGTHS`` is 0, 1 or 2: there are none, one for all, or one of each sequence.
    """
    tile = gl.program_id(0) % (slots * kv_heads)
    split = gl.program_id(0) // (slots * kv_heads)
    head, slot = tile % kv_heads, tile // kv_heads
    if PAGE > 0:
        b, token, count, length, row = sequence(starts, lengths, slot, batch, queries, keys, GROUP, BATCH)
    else:
        TILES: gl.constexpr = (GROUP + ROWS - 1) // ROWS
        b, token, count = slot // (TILES * queries), slot * 0, queries
        row = slot // TILES % queries * GROUP + slot % TILES * ROWS
        length = keys
        if LENGTHS > 0:
            length = gl.minimum(gl.maximum(gl.load(lengths + b * (LENGTHS - 1)), 0), keys).to(gl.int32)
    valid = row < count * GROUP  # a slot may have no rows
    i, first = row // GROUP, row % GROUP
    there = gl.where(valid, gl.minimum(GROUP - first, ROWS), 0)
    first += head * GROUP
    position = i
    if PAGE > 0:
        position += length - count
    begin = gl.maximum(position + lower, 0)
    stop = gl.where(valid, gl.maximum(gl.minimum(position + upper + 1, length), begin), begin)
    share = ((stop - begin + KEYS - 1) // KEYS + splits - 1) // splits * KEYS
    begin = gl.minimum(begin + split * share, stop)
    stop = gl.minimum(begin + share, stop)
    if PAGE > 0:
        key_at = (b, head, table + b.to(gl.int64) * table_b)
        end = pages
        q_batch = b * 0
    else:
        key_at = (b, head, table)
        end = keys
        q_batch = b
    i = gl.where(valid, token + i, queries)
    wide = i.to(gl.int64)
    q_at = q_batch.to(gl.int64) * q_b + wide * q_t + first.to(gl.int64) * q_h
    lse_at = q_batch.to(gl.int64) * lse_b + wide * lse_t + first.to(gl.int64) * lse_h
    partial += (tile * splits + split).to(gl.int64) * (ROWS * (VALUES + 2))

    halves = gl.allocate_shared_memory(half_desc.dtype, _several(4, half_desc.block_type.shape), half_desc.layout)
    rests = gl.allocate_shared_memory(half_desc.dtype, _several(2, rest_desc.block_type.shape), rest_desc.layout)
    heads = gl.allocate_shared_memory(q_desc.dtype, [2, 1, ROWS, 1, HALF], q_desc.layout)
    of_p: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    handed = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, KEYS], of_p)
    tops = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(BARRIERS):
        mbarrier.init(barriers.index(n), count=1)
    fence_async_shared()
    work = Work(
        begin, stop, end, halves, rests, heads, handed, tops, barriers, CAPPED, SINKS, SPLIT, PAGE, q_desc.dtype
    )  # fmt: skip
    results = (out_desc, (q_batch, first, i), lse + lse_at, lse_h, partial, sinks + first, there)
    rest = (q + q_at, q_h, there, channels)
    gl.warp_specialize(
        [
            (_first, (work, rest, results, inner, factor)),
            (_second, (work, rest, results, inner, factor)),
            (load, (work, q_desc, half_desc, rest_desc, (q_batch, first, i), key_at)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.constexpr_function
def _several(count, shape):
    return [count, *shape]
