"""Decoding for sm_90, in Gluon: one query to a head, whose time goes to reading keys and values.

A program has up to 64 heads of one query, which share keys, and a part of these. One warp loads by TMA, as far ahead as there
is shared memory, from the program's first moment; a warpgroup multiplies. Rows that there are not cost nothing that counts:
what is waited for is memory. Splits are merged as those of :mod:`opkit.attn.gpu.device.decode` are.
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

from opkit.attn.gpu.device.hopper_softmax import added, capped, normal, raised, rescaled, row_max, row_sums, weights
from opkit.attn.gpu.device.hopper_work import ROWS, ring

_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _load(q_desc, k_desc, v_desc, q_rows, q_full, keys, values, query_at, key_at, begin, stop):
    """Queries once, and keys and values in turn; past the end nothing is read."""
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    b, row, i = query_at
    batch, head = key_at
    keys, values = keys.begin(1), values.begin(1)
    mbarrier.expect(q_full.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [b, row, i, 0], q_full.index(0), q_rows)
    for at in range(begin, stop, KEYS):
        keys.wait_empty()
        keys.load(k_desc, batch, head, at)
        keys = keys.next()
        values.wait_empty()
        values.load(v_desc, batch, head, at)
        values = values.next()


@gluon.jit
def _attend(q_rows, q_full, keys, values, begin, stop, results, factor, inner, CAPPED: gl.constexpr, SINKS: gl.constexpr,
            SPLIT: gl.constexpr):  # fmt: skip
    D: gl.constexpr = keys.buffers.shape[4]
    DV: gl.constexpr = values.buffers.shape[4]
    KEYS: gl.constexpr = keys.buffers.shape[3]
    DTYPE: gl.constexpr = keys.buffers.dtype
    of_logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_out, k_width=2)
    keys, values = keys.begin(0), values.begin(0)
    none = gl.zeros([ROWS, KEYS], gl.float32, layout=of_logits)
    acc = gl.zeros([ROWS, DV], gl.float32, layout=of_out)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, of_logits))
    total = row_sums(none)
    mbarrier.wait(q_full.index(0), 0)
    q = q_rows.reshape([ROWS, D])
    for at in range(begin, stop, KEYS):
        keys.wait_full()
        s = warpgroup_mma(q, keys.transposed(), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        keys = keys.freed()
        s = capped(s, inner, CAPPED)
        values.wait_full()
        if at + KEYS > stop:
            columns = at + gl.arange(0, KEYS, layout=gl.SliceLayout(0, of_logits))[None, :]
            s = gl.where(columns < stop, s, float("-inf"))
            _clear(values.matrix(), stop - at)
        top, by = raised(top, row_max(s), factor)
        pf = weights(s, top, factor)
        total = added(total, by, pf)
        acc = rescaled(acc, by)
        acc = warpgroup_mma(gl.convert_layout(pf.to(DTYPE), of_p), values.matrix(), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        values = values.freed()
    _finish(acc, top, total, results, factor, SINKS, SPLIT)


@gluon.jit
def _clear(values, first):
    """Write zeros to the rows from ``first`` on: what lies there may be NaN, which times zero is not zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    found = values.load(layout)
    values.store(gl.where(rows < first, found, gl.zeros_like(found)))
    fence_async_shared()


@gluon.jit
def _finish(acc, top, total, results, factor, SINKS: gl.constexpr, SPLIT: gl.constexpr):
    """Store the rows that there are: normalised, or as the split's that they are."""
    out, out_stride, columns, lse, lse_stride, partial, sinks, there = results
    of_out: gl.constexpr = acc.type.layout
    of_rows: gl.constexpr = top.type.layout
    DV: gl.constexpr = acc.shape[1]
    total = gl.convert_layout(gl.sum(total, 1), of_rows)
    rows = gl.arange(0, ROWS, layout=of_rows)
    at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_out))[:, None]
    column = gl.arange(0, DV, layout=gl.SliceLayout(0, of_out))[None, :]
    if SPLIT:
        gl.store(partial + ROWS * DV + rows, top * factor, mask=rows < there)
        gl.store(partial + ROWS * (DV + 1) + rows, total, mask=rows < there)
        gl.store(partial + at * DV + column, acc, mask=at < there)
    else:
        by, powers = normal(top * factor, total, sinks, gl.maximum(gl.minimum(rows, there - 1), 0), SINKS)
        acc = acc * gl.convert_layout(by, gl.SliceLayout(1, of_out))[:, None]
        gl.store(out + at * out_stride + column, acc.to(out.dtype.element_ty), mask=(at < there) & (column < columns))
        gl.store(lse + rows * lse_stride, powers * _LN2, mask=rows < there)


@gluon.jit
def _depend(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


RUN_TIME = (
    *("batch", "slots", "splits", "kv_heads", "queries", "keys", "lower", "upper", "columns"),
    *("out_b", "out_h", "out_t", "lse_b", "lse_h", "lse_t"),
)


@gluon.jit(do_not_specialize=RUN_TIME)
def hopper_decode(
    q_desc, k_desc, v_desc, out, lse, sinks, partial, table, lengths, starts, out_b, out_h, out_t, lse_b, lse_h, lse_t,
    batch, slots, splits, kv_heads, queries, keys, lower, upper, columns, factor, inner,
    GROUP: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr, LENGTHS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One split of up to 64 heads of one query: query ``i`` sees key ``j`` if ``lower <= j - i <= upper``, within the length.

    ``LENGTHS`` is 0, 1 or 2: there are none, one for all, or one of each sequence.
    """
    if PDL:
        _depend("griddepcontrol.wait; mov.b32 $0, 0;")
        _depend("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    DV: gl.constexpr = v_desc.block_type.shape[3]
    TILES: gl.constexpr = (GROUP + ROWS - 1) // ROWS
    tile = gl.program_id(0) % (slots * kv_heads)
    split = gl.program_id(0) // (slots * kv_heads)
    head, slot = tile % kv_heads, tile // kv_heads
    b, i, first = slot // (TILES * queries), slot // TILES % queries, slot % TILES * ROWS
    there = gl.minimum(GROUP - first, ROWS)
    first += head * GROUP
    length = keys
    if LENGTHS > 0:
        length = gl.minimum(gl.maximum(gl.load(lengths + b * (LENGTHS - 1)), 0), keys).to(gl.int32)
    begin = gl.maximum(i + lower, 0)
    stop = gl.maximum(gl.minimum(i + upper + 1, length), begin)
    share = ((stop - begin + KEYS - 1) // KEYS + splits - 1) // splits * KEYS
    begin = gl.minimum(begin + split * share, stop)
    stop = gl.minimum(begin + share, stop)
    wide, head_at = b.to(gl.int64), first.to(gl.int64)
    out += wide * out_b + i.to(gl.int64) * out_t + head_at * out_h
    lse += wide * lse_b + i.to(gl.int64) * lse_t + head_at * lse_h
    partial += (tile * splits + split).to(gl.int64) * (ROWS * (DV + 2))

    q_rows = gl.allocate_shared_memory(q_desc.dtype, [1, ROWS, 1, D], q_desc.layout)
    keys_ring = ring(gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout), STAGES, 1)
    values = ring(gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, KEYS, DV], v_desc.layout), STAGES, 1)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    fence_async_shared()
    results = (out, out_h, columns, lse, lse_h, partial, sinks + first, there)
    gl.warp_specialize(
        [
            (
                _attend,
                (q_rows, q_full, keys_ring, values, begin, stop, results, factor, inner, CAPPED, SINKS, SPLIT),
            ),
            (
                _load,
                (q_desc, k_desc, v_desc, q_rows, q_full, keys_ring, values, (b, first, i), (b, head), begin, stop),
            ),
        ],
        [1],
        [REGISTERS],
    )
