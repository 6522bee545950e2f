"""Attention for sm_90 in Gluon: one warp that loads by TMA, and warpgroups that multiply, 64 rows of queries each.

A program takes tiles, a block of queries of one head each, from a counter until there are no more. The keys of a tile are
visited from the last to the first. The product of queries with the next keys is begun before the softmax of these keys, and
the warpgroups take turns at it, so that the tensor cores have work from one while others compute exponentials (the method is
that of FlashAttention-3, Shah et al., 2024, section 3).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from opkit.attn.gpu.hopper.device.masks import LENGTH, list_of, store_mask, table_of, visit
from opkit.attn.gpu.hopper.device.recompute import checked, mark_rows, no_flags, recompute_rows, store_call
from opkit.attn.gpu.hopper.device.softmax import (
    added,
    capped,
    masked,
    normal,
    partial,
    raised,
    rescaled,
    row_max,
    row_sums,
    weights,
)
from opkit.attn.gpu.hopper.device.work import (
    ROWS,
    TILE_NUMBERS,
    TURN,
    Problem,
    pass_turn,
    publish_step,
    publish_tile,
    put_back,
    read_step,
    read_tile,
    ring,
    take_turn,
)

_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _load(problem, q_desc, k_desc, v_desc, rings, marks, lists, counter):
    """Hand out tiles: their numbers, their queries, and keys and values from the last to the first.

    A step multiplies with the keys it is given and with the values of the step before, and frees both at once: each arrival at a
    barrier costs two meetings of a warpgroup's threads. So values are loaded a step late, unless they have a buffer more than
    keys. When the first step of a tile is done, all are done with the numbers of the tile before it, and with its queries if it
    has a buffer of its own for them.

    A tile is claimed while loads of the one at hand are on their way: the first ones or, where tiles differ much, the last, since
    what a program has claimed, no other can take, even if that has nothing else to do.
    """
    rows, keys, values, turns = rings
    rows, keys, values, turns = rows.begin(1), keys.begin(1), values.begin(1), turns.begin(1)
    tile = gl.program_id(0).to(gl.int32)
    programs = gl.num_programs(0).to(gl.int32)
    begun, owed = tile < 0, (tile * 0, tile * 0, tile * 0)  # where the values of the last step's keys are
    while tile < problem.tiles:
        following = tile  # not known yet
        batch, head, row = problem.place(tile)
        if problem.LISTED:
            listed = list_of(problem, lists, batch, head, row)
            following_mark = visit(*listed, tile * 0)
            steps, last = gl.maximum(listed[2], 1), tile * 0
        else:
            first, steps = problem.reach(row)
            last = first + steps - 1
        claim = tile * 0
        if problem.LISTED or problem.DV > 128:
            claim = gl.maximum(steps - 2, 0)
        of_all = batch * problem.heads + head
        place = of_all * (problem.blocks * problem.WARPGROUPS) + row // ROWS
        publish_tile(turns, (steps, last, row, head, batch, of_all, place))
        turns = turns.next()
        for i in range(steps):
            at = (last - i) * problem.KEYS
            if problem.LISTED:
                mark = following_mark
                following_mark = visit(*listed, i + 1)
                at = mark // 2 * problem.KEYS
            keys.wait_empty()
            if values.COUNT == keys.COUNT and begun:
                values.load(v_desc, owed[0], owed[1], owed[2])
                values = values.next()
            if problem.LISTED:
                publish_step(keys, marks, mark)
            keys.load(k_desc, batch, head // problem.group, at)
            if i == 0:
                rows = _load_rows(problem, rows, keys, q_desc, batch, head, row)
            if values.COUNT > keys.COUNT:
                values.load(v_desc, batch, head // problem.group, at)
                values = values.next()
            keys = keys.next()
            begun, owed = tile >= 0, (batch, head // problem.group, at)
            if i == claim:
                following = gl.atomic_add(counter, 1, sem="relaxed") + programs
        tile = following
    if values.COUNT == keys.COUNT:
        keys.wait_empty()
        values.load(v_desc, owed[0], owed[1], owed[2])
    publish_tile(turns, (tile * 0, tile, tile, tile, tile, tile, tile))
    put_back(counter, programs)


@gluon.jit
def _load_rows(problem, rows, keys, q_desc, batch, head, row):
    """Load a tile's queries; the ring after that."""
    for ME in gl.static_range(problem.WARPGROUPS):
        _wait_for_rows(ME, problem, rows, keys)
        rows.load(q_desc, batch, head, row + ME * ROWS)
        rows = rows.next()
    return rows


@gluon.jit
def _wait_for_rows(ME: gl.constexpr, problem, rows, keys):
    """Wait for a buffer for queries: of two, until the step before the last one is done, which may have been a tile's last."""
    if not problem.OVERLAPPED:
        rows.wait_empty()
    elif ME == 0 and keys.COUNT > 2:
        keys.wait_emptied(2)


@gluon.jit
def _multiply(ME: gl.constexpr, problem, rings, marks, others):
    """The results of 64 rows of each tile."""
    rows, keys, values, turns = rings
    of_logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.KEYS, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.DV, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_out, k_width=2)
    NEXT: gl.constexpr = TURN + (ME + 1) % problem.WARPGROUPS
    MINE: gl.constexpr = TURN + ME
    inner, factor = others[5], others[6]
    WIDE: gl.constexpr = problem.DV > 128  # so many sums are rescaled while the next logits are made
    none = gl.zeros([ROWS, problem.KEYS], gl.float32, layout=of_logits)
    rows, keys, values, turns = rows.at(ME, problem.WARPGROUPS), keys.begin(0), values.begin(0), turns.begin(0)
    if ME == problem.WARPGROUPS - 1:
        pass_turn(NEXT, problem.TURNS)  # the first warpgroup may begin
    turns.wait_full()
    tile = read_tile(turns, ME)
    s, held = _first_product(ME, problem, rows, keys, none, True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mark = _mark(problem, keys, marks)
    keys = keys.freed()
    while tile[0] > 0:
        steps, last, row, head, batch, _, _ = tile
        at = mark // 2 * problem.KEYS if problem.LISTED else last * problem.KEYS
        s = capped(s, inner, problem.CAPPED)
        if not problem.LISTED or partial(row, at, mark, problem):
            s = masked(s, row, at, problem, others[2], batch, head)
        top = row_max(s)
        pf = weights(s, top, factor)
        total = row_sums(pf)
        p = gl.convert_layout(pf.to(problem.DTYPE), of_p)
        acc, by = gl.zeros([ROWS, problem.DV], gl.float32, layout=of_out), gl.full_like(top, 1.0)
        keys.wait_full(pred=steps > 1)
        for i in range(1, steps):
            at -= problem.KEYS
            take_turn(MINE, problem.TURNS)
            s = _product(problem, held, rows, keys, none)
            if WIDE:
                acc = rescaled(acc, by)
            values.wait_full()
            acc = warpgroup_mma(p, values.matrix(), acc, is_async=True)
            pass_turn(NEXT, problem.TURNS)
            s = warpgroup_mma_wait(1, deps=(s,))
            if problem.LISTED:
                mark = read_step(keys, marks)
                at = mark // 2 * problem.KEYS
            s = capped(s, inner, problem.CAPPED)
            if problem.MASKED and partial(row, at, mark, problem):
                s = masked(s, row, at, problem, others[2], batch, head)
            top, by = raised(top, row_max(s), factor, 0)
            pf = weights(s, top, factor)
            total = added(total, by, pf)
            # Without a wait between them ptxas moves the one for the product above the softmax.
            following = keys.next()
            following.wait_full(pred=i + 1 < steps)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            keys, values = keys.freed(), values.next()
            p = gl.convert_layout(pf.to(problem.DTYPE), of_p)
            if not WIDE:
                acc = rescaled(acc, by)
        if WIDE:
            acc = rescaled(acc, by)
        done = turns
        turns = turns.next()
        turns.wait_full()
        tile = read_tile(turns, ME)
        values.wait_full()
        if problem.OVERLAPPED:
            rows = rows.next()
            s, acc = _last_products(ME, problem, rows, keys, values, none, p, acc, tile[0] > 0)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            _finish(ME, problem, others, done, acc, top, total)
        else:
            acc = warpgroup_mma(p, values.matrix(), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _finish(ME, problem, others, done, acc, top, total)
            if not problem.OWN_RESULTS:
                tma.store_wait(0)
            rows = rows.freed()
            s, held = _first_product(ME, problem, rows, keys, none, tile[0] > 0)
        s = warpgroup_mma_wait(0, deps=(s,))
        mark = _mark(problem, keys, marks)
        keys, values = keys.freed(), values.next()
    tma.store_wait(0)
    if ME == 0:
        take_turn(MINE, problem.TURNS)  # the last one that was passed on
    if problem.RECOMPUTED:
        recompute_rows(ME, problem, others)


@gluon.jit
def _mark(problem, keys, marks):
    """Return the published mark of the current keys; 0 where there is none."""
    if problem.LISTED:
        return read_step(keys, marks)
    return gl.to_tensor(0)


@gluon.jit
def _product(problem, held, rows, keys, none):
    """Begin the product of queries with the keys of a step: of the channels that are HELD, and then of the others."""
    HELD: gl.constexpr = problem.HELD
    LEFT: gl.constexpr = problem.D - HELD
    q, k = rows.matrix(), keys.matrix()
    if HELD == 0:
        s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(held, k.slice(0, HELD, dim=1).permute((1, 0)), none, use_acc=False, is_async=True)
        left = k.slice(HELD, LEFT, dim=1).permute((1, 0))
        s = warpgroup_mma(q.slice(HELD, LEFT, dim=1), left, s, is_async=True)
    return s


@gluon.jit
def _held(problem, rows, none):
    """Return the channels of a tile's queries that are HELD, so that products need not read them from shared memory."""
    if problem.HELD > 0:
        layout: gl.constexpr = gl.DotOperandLayout(0, none.type.layout, k_width=2)
        return rows.matrix().slice(0, problem.HELD, dim=1).load(layout)
    else:  # noqa: RET505 - of a return behind an `if` alone Triton takes both
        return gl.to_tensor(0)


@gluon.jit
def _first_product(ME: gl.constexpr, problem, rows, keys, none, more):
    """Begin a tile; where there are no ``more``, with what is left of another, which is not looked at."""
    rows.wait_full(pred=more)
    keys.wait_full(pred=more)
    held = _held(problem, rows, none)
    take_turn(TURN + ME, problem.TURNS)
    s = _product(problem, held, rows, keys, none)
    pass_turn(TURN + (ME + 1) % problem.WARPGROUPS, problem.TURNS)
    return s, held


@gluon.jit
def _last_products(ME: gl.constexpr, problem, rows, keys, values, none, p, acc, more):
    """Begin the last product with values of a tile, and after it the first one of the next tile, of which nothing is HELD."""
    rows.wait_full(pred=more)
    keys.wait_full(pred=more)
    take_turn(TURN + ME, problem.TURNS)
    acc = warpgroup_mma(p, values.matrix(), acc, is_async=True)
    s = _product(problem, None, rows, keys, none)
    pass_turn(TURN + (ME + 1) % problem.WARPGROUPS, problem.TURNS)
    return s, acc


@gluon.jit
def _finish(ME: gl.constexpr, problem, others, turns, acc, top, total):
    """Normalise and store 64 rows of results."""
    out_desc, results, _, lse, sinks, _, factor, _, _ = others
    _, _, row, head, batch, of_all, place = read_tile(turns, ME)
    of_rows: gl.constexpr = top.type.layout
    of_out: gl.constexpr = acc.type.layout
    if problem.RECOMPUTED:
        total = checked(problem, total, acc)
        flags = others[8].index(ME)
        before = flags.load(of_rows)
    by, powers = normal(top * factor, gl.convert_layout(gl.sum(total, 1), of_rows), sinks, head, problem.SINKS)
    if problem.OWN_RESULTS:
        tma.store_wait(0)
    out = acc * gl.convert_layout(by, gl.SliceLayout(1, of_out))[:, None]
    result = results.index(ME)
    result.reshape([ROWS, problem.DV]).store(out.to(problem.DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [batch, head, row, 0], result)
    rows = row + gl.arange(0, ROWS, layout=of_rows)
    of_head = of_all.to(gl.int64) * problem.queries
    gl.store(lse + of_head + rows, powers * _LN2, mask=rows < problem.queries)
    if problem.RECOMPUTED:
        mark_rows(problem, others, powers, flags, before, place + ME)


_INTS = ("queries", "keys", "heads", "group", "head_size", "value_size", "lower", "upper", "blocks", "section", "work")
_STRIDES = tuple(f"{x}_stride_{i}" for x in ("q", "k", "v", "out", "tiles", "counts") for i in range(3))
_OF_MASKS = (
    "lengths_stride_0",
    *(f"n{i}" for i in range(8)),
    *(f"t{i}_stride_{k}" for i in range(6) for k in range(4)),
)


@gluon.jit(do_not_specialize=(*_INTS, *_STRIDES, *_OF_MASKS))
def hopper_forward(
    q_desc, k_desc, v_desc, out_desc, q, k, v, out, lse, sinks, counter, tiles, counts, lengths, lengths_stride_0,
    queries, keys, heads, group, head_size, value_size, lower, upper, blocks, section, work,
    q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2, v_stride_0, v_stride_1, v_stride_2,
    out_stride_0, out_stride_1, out_stride_2, tiles_stride_0, tiles_stride_1, tiles_stride_2,
    counts_stride_0, counts_stride_1, counts_stride_2,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7, factor, inner,
    BANDED: gl.constexpr, MASK: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, TURNS: gl.constexpr,
    OWN_RESULTS: gl.constexpr, HELD: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[3]
    DV: gl.constexpr = v_desc.block_type.shape[3]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    problem = Problem(
        queries.to(gl.int32), keys.to(gl.int32), heads.to(gl.int32), group.to(gl.int32), lower.to(gl.int32),
        upper.to(gl.int32), blocks.to(gl.int32), section.to(gl.int32), work.to(gl.int32), D, DV, KEYS, WARPGROUPS,
        BANDED, tiles is not None, MASK, lengths is not None, CAPPED, SINKS, OWN_RESULTS, ROW_STAGES == 2, TURNS, HELD,
        q_desc.dtype,
    )  # fmt: skip
    row_buffers = gl.allocate_shared_memory(q_desc.dtype, [ROW_STAGES * WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    rows = ring(row_buffers, ROW_STAGES * WARPGROUPS, 2 - ROW_STAGES)
    keys_ring = ring(
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout), STAGES, WARPGROUPS
    )
    values = ring(
        gl.allocate_shared_memory(q_desc.dtype, [VALUE_STAGES, 1, 1, KEYS, DV], v_desc.layout), VALUE_STAGES, 0
    )
    TILES: gl.constexpr = STAGES + 2  # so many steps after a tile, the first step of the next one is known to be done
    numbers = gl.allocate_shared_memory(
        gl.int32, [TILES * TILE_NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    turns = ring(numbers, TILES, 0)
    if OWN_RESULTS:
        results = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS, 1, 1, ROWS, DV], out_desc.layout)
    else:
        results = row_buffers
    fence_async_shared()
    strides = (
        (q_stride_0, q_stride_1, q_stride_2), (k_stride_0, k_stride_1, k_stride_2), (v_stride_0, v_stride_1, v_stride_2),
        (out_stride_0, out_stride_1, out_stride_2),
    )  # fmt: skip
    table = table_of(LENGTH)
    if problem.RECOMPUTED:
        store_call(table, q, k, v, out, strides, head_size, value_size, problem)
    if problem.LISTED:
        slots = (
            (t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3), (t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3),
            (t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3), (t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3),
            (t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3), (t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3),
        )  # fmt: skip
        store_mask(table, problem, lengths, lengths_stride_0, slots, (n0, n1, n2, n3, n4, n5, n6, n7))
    marks = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    lists = (
        tiles, (tiles_stride_0, tiles_stride_1, tiles_stride_2), counts, (counts_stride_0, counts_stride_1, counts_stride_2),
    )  # fmt: skip
    rings = (rows, keys_ring, values, turns)
    flags = no_flags(WARPGROUPS)
    others = (out_desc, results, table, lse, sinks, inner, factor, counter, flags)
    loading = (problem, q_desc, k_desc, v_desc, rings, marks, lists, counter)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, problem, rings, marks, others)),
                (_multiply, (1, problem, rings, marks, others)),
                (_load, loading),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, problem, rings, marks, others)),
                (_multiply, (1, problem, rings, marks, others)),
                (_multiply, (2, problem, rings, marks, others)),
                (_load, loading),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
