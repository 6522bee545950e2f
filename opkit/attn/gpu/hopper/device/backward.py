"""The gradients of attention for sm_90 in Gluon: a program has 128 keys of a head, and goes through the queries that see them.

Two warpgroups multiply, 64 keys each: logits and probabilities are (keys, queries), so that probabilities and their gradients
feed the products for values and keys from registers, where the sums of these stay. The gradients of logits of both
warpgroups meet in shared memory, for the gradient of queries: a warpgroup multiplies half of it, and a warp of its own
adds that to memory by TMA, in float32. Another warp loads (the method is that of FlashAttention-3, Shah et al., 2024,
section 3, and its files ``hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp`` and ``flash_attn/cute/flash_bwd_sm90.py``). Where a mask
is more than a band the queries come from lists (:mod:`opkit.attn.gpu.hopper.device.backward_work`).
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

from opkit.attn.gpu.hopper.device.backward_moves import add, load
from opkit.attn.gpu.hopper.device.backward_work import (
    AHEAD,
    BATCH,
    BLOCK_NUMBERS,
    HALF,
    HEAD,
    NOUGHT,
    PLACE,
    STAGES,
    STEPS,
    TILE_NUMBERS,
    WIDE,
    Slopes,
    cleaned,
    following,
    in_order,
    meet,
    nothing,
    numbers_of,
    read_head,
    read_number,
)
from opkit.attn.gpu.hopper.device.masks import LENGTH, store_mask, table_of
from opkit.attn.gpu.hopper.device.softmax import capped, exp2

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name in Triton 3.7, and before


@gluon.jit
def _multiply(ME: gl.constexpr, problem, buffers, barriers, results, numbers, table):
    """The gradients of 64 keys and values of each tile, and half of those of the queries that see any of the 128."""
    keys, tiles = buffers[0], buffers[8]
    keys_full, values_full, keys_empty, tile_full, tile_empty = barriers[0]
    part_empty = barriers[2]
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.D, 16])
    n = problem.tiles * 0
    mbarrier.wait(tile_full.index(0), 0)
    slot, phase = n, n
    if problem.APART:
        slot = read_number(tiles, NOUGHT, 4)
    steps = read_number(tiles, STEPS, 4)
    while steps >= 0:
        dk = gl.zeros([HALF, problem.D], gl.float32, layout=of_sums)
        dv = gl.zeros([HALF, problem.D], gl.float32, layout=of_sums)
        mbarrier.wait(keys_full.index(0), n % 2)
        if problem.MASKED and steps > 0:
            cleaned(keys.index(ME).reshape([HALF, problem.D]))
            fence_async_shared()
            meet()
            barrier()  # Triton does not know of the other, and would have one in each step
        mbarrier.wait(values_full.index(0), n % 2)
        # Where there is a mask, the warp that loads publishes rows.
        row, last = slot * 0, problem.last_whole(read_number(tiles, n % AHEAD * TILE_NUMBERS + PLACE, 4) + ME * HALF)
        if not problem.LISTED:
            steps *= problem.heads // problem.key_heads
        power = _power_ahead(problem, buffers, barriers, slot, phase, steps > 0)
        held = _left_sides(ME, problem, keys, buffers[1])
        for i in range(steps):
            of_step = (slot, phase, n, row, row > last, i + 1 < steps)
            power, dk, dv = _step(ME, problem, buffers, barriers, numbers, table, held, of_step, power, dk, dv)
            slot, phase = following(slot, phase)
            row += problem.ROWS
            row = gl.where(row < problem.queries, row, 0)
        meet()  # the other warpgroup reads these keys for its half of the gradient of queries
        mbarrier.arrive(keys_empty.index(0), count=1)
        mbarrier.wait(part_empty.index(ME), slot ^ 1)
        _finish(ME, problem, buffers, n, results, dk * numbers[2], dv)
        mbarrier.arrive(tile_empty.index(n % AHEAD), count=1)
        n += 1
        mbarrier.wait(tile_full.index(n % AHEAD), n // AHEAD % 2)
        steps = read_number(tiles, n % AHEAD * TILE_NUMBERS + STEPS, 4)


@gluon.jit
def _finish(ME: gl.constexpr, problem, buffers, n, results, dk, dv):
    """Store the gradients of 64 keys and values, by way of buffers that no product reads then."""
    dk_desc, dv_desc = results
    keys, meeting, parts, tiles = buffers[0], buffers[6], buffers[7], buffers[8]
    tile = n % AHEAD * TILE_NUMBERS
    at = read_number(tiles, tile + PLACE, 4) + ME * HALF
    batch, head = read_number(tiles, tile + BATCH, 4), read_number(tiles, tile + HEAD, 4)
    of_values = _own(ME, 4 * HALF // problem.D, parts, keys)
    of_keys = _own(ME, 2 * STAGES * problem.ROWS // problem.D, meeting, keys)
    of_values.reshape([HALF, problem.D]).store(dv.to(problem.DTYPE))
    of_keys.reshape([HALF, problem.D]).store(dk.to(problem.DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_desc, [batch, head, at, 0], of_values)
    tma.async_copy_shared_to_global(dk_desc, [batch, head, at, 0], of_keys)
    tma.store_wait(0)


@gluon.jit
def _own(ME: gl.constexpr, COUNT: gl.constexpr, buffer, keys):
    """Return what only this warpgroup writes of a buffer into which ``COUNT`` times 64 keys go, as that of 64 keys."""
    alike = buffer._reinterpret(keys.dtype, [COUNT, 1, 1, HALF, keys.shape[4]], keys.layout)
    return alike.index(ME * (COUNT // 2))


@gluon.jit
def _left_sides(ME: gl.constexpr, problem, keys, values):
    """Keys and values: this warpgroup's in registers if these are HELD, so that products read half as much shared memory."""
    if problem.HELD:
        of_logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        held: gl.constexpr = gl.DotOperandLayout(0, of_logits, k_width=2)
        k, v = keys.index(ME).reshape([HALF, problem.D]), values.index(ME).reshape([HALF, problem.D])
        return k.load(held), v.load(held)
    else:  # noqa: RET505 - of a return behind an `if` alone Triton takes both
        return keys, values


@gluon.jit
def _power_ahead(problem, buffers, barriers, slot, phase, more):
    """Wait for a block of 64 queries, and read their log-sum-exps; where there is no more to come, what is left of others.

    They are read before products that are begun meanwhile read shared memory, behind which they would be late. Blocks of 128
    queries have no registers for that: their steps begin with it.
    """
    if problem.ROWS > HALF:
        return gl.to_tensor(0.0)
    else:  # noqa: RET505 - of a return behind an `if` alone Triton takes both
        mbarrier.wait(barriers[1][0].index(slot), phase, pred=more)
        return numbers_of(buffers[4].index(slot), problem.GROUPED)


@gluon.jit
def _step(ME: gl.constexpr, problem, buffers, barriers, numbers, table, held, of_step, power, dk, dv):
    """Return the gradients of keys and values so far, after those of one block of queries, and what is read ahead of the next."""
    keys, values, queries, gradients, sums, deltas, meeting, parts, tiles, blocks = buffers
    slot, phase, n, row, part, more = of_step
    queries_full, gradients_full, ended = barriers[1]
    part_empty = barriers[2]
    q = queries.index(slot).reshape([problem.ROWS, problem.D])
    gradient = gradients.index(slot).reshape([problem.ROWS, problem.D])
    HALVES: gl.constexpr = problem.ROWS // HALF
    if problem.HELD:
        k, v = held
    else:
        mine = ME + nothing()  # else their descriptors are computed before the steps, and stored in memory
        k = keys.index(mine).reshape([HALF, problem.D])
        v = values.index(mine).reshape([HALF, problem.D])
    if HALVES == 2:
        mbarrier.wait(queries_full.index(slot), phase)
        first_power = numbers_of(sums.index(slot * 2), problem.GROUPED)
        if not problem.HELD:
            second_power = numbers_of(sums.index(slot * 2 + 1), problem.GROUPED)
    if problem.MASKED:
        described = read_number(blocks, slot, 4)
        row = described // HALF * HALF
        part = described // (ME + 1) % 2 != 0
        mixed = described % HALF != 0  # for either warpgroup's keys
    if problem.LISTED and part:
        mbarrier.wait(gradients_full.index(slot), phase)
        _cleaned_halves(ME, problem, q, gradient)
    of_block = (meeting.index(ME * STAGES + slot), tiles, n, row, part, blocks, slot, table)
    first = _rows(q, 0)
    s = product(k, first)
    mbarrier.wait(gradients_full.index(slot), phase)
    dp = product(v, _rows(gradient, 0))
    if HALVES == 2:
        next_s = product(k, _rows(q, 1))
        s = warpgroup_mma_wait(2, deps=(s,))
        s, p, narrow = _weights(ME, 0, problem, numbers, of_block, s, first_power)
        dv = warpgroup_mma(narrow, _rows(gradient, 0), dv, is_async=True)
        delta = numbers_of(deltas.index(slot * 2), problem.GROUPED)
        dp = warpgroup_mma_wait(2, deps=(dp,))
        first_ds = _slopes(ME, 0, problem, of_block, s, p, dp, delta)
        if problem.HELD:  # there are no registers for it before
            second_power = numbers_of(sums.index(slot * 2 + 1), problem.GROUPED)
        dp = product(v, _rows(gradient, 1))
        s = warpgroup_mma_wait(2, deps=(next_s,))
        s, p, narrow = _weights(ME, 1, problem, numbers, of_block, s, second_power)
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
        s, p, narrow = _weights(ME, 0, problem, numbers, of_block, s, power)
    delta = numbers_of(deltas.index(slot * HALVES + HALVES - 1), problem.GROUPED)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = _slopes(ME, HALVES - 1, problem, of_block, s, p, dp, delta)
    dv = warpgroup_mma(narrow, _rows(gradient, HALVES - 1), dv, is_async=True)  # begun earlier it is slower
    if problem.BANDED and not problem.LISTED and mixed:
        cleaned(q.slice(ME * (problem.ROWS // 2), problem.ROWS // 2, dim=0))
    fence_async_shared()
    meet()
    dq = _part(ME, problem, keys, meeting, slot)
    if HALVES == 2:
        dk = warpgroup_mma(first_ds, first, dk, is_async=True)
    dk = warpgroup_mma(ds, _rows(q, HALVES - 1), dk, is_async=True)
    if HALVES == 1:
        power = _power_ahead(problem, buffers, barriers, slot ^ 1, phase ^ slot, more)
    dq, dv = warpgroup_mma_wait(HALVES, deps=(dq, dv))
    mbarrier.wait(part_empty.index(ME), slot ^ 1)
    parts.index(ME).store(in_order(dq))
    dk = warpgroup_mma_wait(0, deps=(dk,))  # ptxas of Triton 3.6 fails where the fence comes before it
    fence_async_shared()
    mbarrier.arrive(ended.index(slot), count=1)
    return power, dk, dv


@gluon.jit
def _cleaned_halves(ME: gl.constexpr, problem, q, gradient):
    """Clean a block of queries and gradients of which some see some of the keys: each warpgroup does half of it."""
    SIZE: gl.constexpr = problem.ROWS // 2
    cleaned(q.slice(ME * SIZE, SIZE, dim=0))
    cleaned(gradient.slice(ME * SIZE, SIZE, dim=0))
    fence_async_shared()
    meet()


@gluon.jit
def _rows(buffer, I: gl.constexpr):
    """64 rows of a buffer."""
    if buffer.shape[0] == HALF:
        return buffer
    return buffer.slice(I * HALF, HALF, dim=0)


@gluon.jit
def product(a, b):
    """Begin the product of two buffers of 64 rows each, row by row."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    none = gl.zeros([HALF, HALF], gl.float32, layout=layout)
    return warpgroup_mma(a, b.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _shown(ME: gl.constexpr, I: gl.constexpr, problem, of_block, x):
    """``x`` of 64 of the queries of a block, with zeros where they do not see keys."""
    _, tiles, n, row, part, blocks, slot, table = of_block
    if part:
        at = read_number(tiles, n % AHEAD * TILE_NUMBERS + PLACE, 4) + ME * HALF
        if problem.LISTED:
            batch, head = read_number(tiles, n % AHEAD * TILE_NUMBERS + BATCH, 4), read_head(blocks, slot)
            row = read_number(blocks, slot, 4) // HALF * HALF
            x = problem.shown_by_mask(x, row + I * HALF, at, table, batch, head)
        else:
            x = problem.shown(x, row + I * HALF, at)
    return x


@gluon.jit
def _weights(ME: gl.constexpr, I: gl.constexpr, problem, numbers, of_block, s, power):
    """Capped logits of 64 keys and 64 of the queries of a block, their probabilities, and these as a product takes them."""
    inner, factor, _ = numbers
    s = capped(s, inner, problem.CAPPED)
    p = _shown(ME, I, problem, of_block, exp2(s * factor - power[None, :]))
    return s, p, _narrow(problem, p)


@gluon.jit
def _narrow(problem, x):
    """``x`` as the left side of a product into the sums of a warpgroup's keys or values."""
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.D, 16])
    return gl.convert_layout(x.to(problem.DTYPE), gl.DotOperandLayout(0, of_sums, k_width=2))


@gluon.jit
def _slopes(ME: gl.constexpr, I: gl.constexpr, problem, of_block, s, p, dp, delta):
    """Put the gradients of logits where the other warpgroup finds them too; give them as a product takes them."""
    meeting, part = of_block[0], of_block[4]
    ds = p * (dp - delta[None, :])
    if problem.CAPPED:
        ds *= 1.0 - s * s
    if not problem.MASKED:
        ds = _shown(ME, I, problem, of_block, ds)
    elif part:  # what is hidden has probability 0, and a mask is not asked twice
        ds = gl.where(p == nothing().to(gl.float32), 0.0, ds)  # without it all steps would ask
    ds = ds.to(problem.DTYPE)
    if problem.ROWS > HALF:
        meeting = meeting.slice(I * HALF, HALF, dim=1)
    meeting.store(ds)
    return _narrow(problem, ds)


@gluon.jit
def _part(ME: gl.constexpr, problem, keys, meeting, slot):
    """Begin the product for this warpgroup's part of the gradient of queries: half of the queries, or of the channels."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dq = gl.zeros([HALF, HALF], gl.float32, layout=layout)
    for c in gl.static_range(2):
        ds = meeting.index(c * STAGES + slot)
        k = keys.index(c).reshape([HALF, problem.D])
        if problem.ROWS > HALF:
            ds = ds.slice(ME * HALF, HALF, dim=1)
        else:
            k = k.slice(ME * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def barriers_of(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """Barriers, each of which waits for so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=arrivals)
    return found


INTS = ("queries", "keys", "heads", "key_heads", "lower", "upper", "section", "tiles")
OF_MASKS = (
    *(f"{x}_stride_{i}" for x in ("listed", "counts") for i in range(3)),
    "lengths_stride_0",
    *(f"n{i}" for i in range(8)),
    *(f"t{i}_stride_{k}" for i in range(6) for k in range(4)),
)


@gluon.jit(do_not_specialize=(*INTS, *OF_MASKS))
def hopper_backward(
    q_desc, k_desc, v_desc, gradient_desc, sums_desc, sum_desc, of_k_desc, of_v_desc, turns, counter,
    queries, keys, heads, key_heads, lower, upper, section, tiles, factor, inner, scale,
    listed, listed_turns, counts, lengths, lengths_stride_0, listed_stride_0, listed_stride_1, listed_stride_2,
    counts_stride_0, counts_stride_1, counts_stride_2,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7,
    ROWS: gl.constexpr, BANDED: gl.constexpr, MASK: gl.constexpr, CAPPED: gl.constexpr, ORDERED: gl.constexpr,
    GROUPED: gl.constexpr, APART: gl.constexpr, REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[3]
    problem = Slopes(
        queries.to(gl.int32), keys.to(gl.int32), heads.to(gl.int32), key_heads.to(gl.int32), lower.to(gl.int32),
        upper.to(gl.int32), section.to(gl.int32), tiles.to(gl.int32), D, ROWS, BANDED, CAPPED, ORDERED, GROUPED, APART,
        q_desc.dtype, listed is not None, MASK, lengths is not None,
    )  # fmt: skip
    meeting: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    buffers = (
        gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, HALF, D], k_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, HALF, D], v_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, D], gradient_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * ROWS // HALF, HALF], sums_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * ROWS // HALF, HALF], sums_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [2 * STAGES, HALF, ROWS], meeting),
        gl.allocate_shared_memory(gl.float32, [2, HALF * HALF // WIDE, WIDE], sum_desc.layout),
        gl.allocate_shared_memory(gl.int32, [AHEAD * TILE_NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        gl.allocate_shared_memory(
            gl.int32, [BLOCK_NUMBERS if problem.LISTED else STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ),
    )
    table = ()
    if problem.LISTED:
        table = table_of(LENGTH)
        slots = (
            (t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3), (t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3),
            (t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3), (t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3),
            (t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3), (t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3),
        )  # fmt: skip
        store_mask(table, problem, lengths, lengths_stride_0, slots, (n0, n1, n2, n3, n4, n5, n6, n7))
    lists = (
        listed, listed_turns, (listed_stride_0, listed_stride_1, listed_stride_2),
        counts, (counts_stride_0, counts_stride_1, counts_stride_2),
    )  # fmt: skip
    barriers = (
        (barriers_of(1, 1), barriers_of(1, 1), barriers_of(1, 2), barriers_of(AHEAD, 1), barriers_of(AHEAD, 3)),
        (barriers_of(STAGES, 1), barriers_of(STAGES, 1), barriers_of(STAGES, 2)),
        barriers_of(2, 1),
    )
    fence_async_shared()
    results = (of_k_desc, of_v_desc)
    numbers = (inner, factor, scale)
    gl.warp_specialize(
        [
            (_multiply, (0, problem, buffers, barriers, results, numbers, table)),
            (_multiply, (1, problem, buffers, barriers, results, numbers, table)),
            (load, (problem, (q_desc, k_desc, v_desc, gradient_desc, sums_desc), buffers, barriers, counter, lists)),
            (add, (problem, sum_desc, turns, buffers, barriers)),
        ],
        [4, 1, 1],
        [REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )
