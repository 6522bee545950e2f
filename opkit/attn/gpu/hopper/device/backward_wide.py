"""The gradients of attention for sm_90 with heads of 129 to 256 channels: a program has 64 keys of a head.

Sums for 64 keys and 256 channels are 128 registers of each thread of a warpgroup, so that one has room for one of the two.
Here two warpgroups divide the products and not the keys: one makes probabilities and the gradient of values, and hands the
probabilities, in float32, to the other, which makes the gradients of logits and of keys and hands the former back. Each then
multiplies 128 channels of the gradient of queries, which a warp of its own adds to memory.

A step of 64 queries is 2560 cycles of the tensor cores. Its products read 240 KiB of shared memory, 1920 cycles; what TMA loads,
64 KiB, and the gradient of queries, 64 KiB written and read, 1536 more; what is handed over, about 300. FlashAttention-3 has 80
keys (``run_mha_bwd_hdim256`` of ``hopper/flash_bwd_launch_template.h``) and divides each product, of which both operands are
then read by each warpgroup: by the same count 4100 cycles for 64 keys. Of the gradient of the result there is one buffer: it is
free when the gradient of values is done, well before the next step begins.

Where a mask is more than a band the queries come from lists (:mod:`opkit.attn.gpu.hopper.device.backward_work`). The warpgroup
of values asks the mask; the zeros among the probabilities that it hands over tell the other one what is hidden. Of a block that
is partly seen each makes what its own product reads finite (:func:`opkit.attn.gpu.hopper.device.backward_work.cleaned`), so that
neither waits for the other: that of values gradients, that of keys queries, when it has probabilities and thus nobody reads
queries but itself. The other one may read gradients meanwhile, for those of probabilities. Of a row that is not finite it may
then find numbers or zeros; but nothing of such a row is used where it is hidden, and where it is seen its probabilities are NaN.
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

from opkit.attn.gpu.hopper.device.backward import INTS, OF_MASKS, barriers_of, product
from opkit.attn.gpu.hopper.device.backward_wide_moves import add, load
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
    back_in_order,
    cleaned,
    following,
    in_order,
    nothing,
    numbers_of,
    read_head,
    read_number,
)
from opkit.attn.gpu.hopper.device.masks import LENGTH, store_mask, table_of
from opkit.attn.gpu.hopper.device.softmax import capped, exp2


@gluon.jit
def _multiply(KEYS: gl.constexpr, problem, buffers, barriers, result, numbers, table):
    """The gradient of 64 values of each tile, or of its KEYS, and 128 channels of that of the queries that see any of them."""
    keys, values, tiles = buffers[0], buffers[1], buffers[8]
    keys_full, values_full, keys_empty, tile_full, tile_empty = barriers[0]
    keys_read = barriers[3][1]
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.D, 16])
    n = problem.tiles * 0
    mbarrier.wait(tile_full.index(0), 0)
    slot, phase = n, n
    if problem.APART:
        slot = read_number(tiles, NOUGHT, 4)
    steps = read_number(tiles, STEPS, 4)
    while steps >= 0:
        total = gl.zeros([HALF, problem.D], gl.float32, layout=of_sums)
        mbarrier.wait(keys_full.index(0), n % 2)
        if problem.MASKED and (not KEYS and steps > 0):
            cleaned(keys.index(0).reshape([HALF, problem.D]))  # the other warpgroup reads them after probabilities
            fence_async_shared()
        mbarrier.wait(values_full.index(0), n % 2)
        # Where there is a mask, the warp that loads publishes rows.
        row, last = slot * 0, problem.last_whole(read_number(tiles, n % AHEAD * TILE_NUMBERS + PLACE, 4))
        if not problem.LISTED:
            steps *= problem.heads // problem.key_heads
        for _ in range(steps):
            of_step = (slot, phase, n, row, row > last)
            if KEYS:
                total = _keys_step(problem, buffers, barriers, of_step, total)
            else:
                total = _values_step(problem, buffers, barriers, numbers, table, of_step, total)
            slot, phase = following(slot, phase)
            row += problem.ROWS
            row = gl.where(row < problem.queries, row, 0)
        if KEYS:
            mbarrier.wait(keys_read.index(0), n % 2)
            _finish(problem, keys, tiles, n, result, total * numbers[2])
        else:
            mbarrier.arrive(keys_read.index(0), count=1)
            _finish(problem, values, tiles, n, result, total)
        mbarrier.arrive(tile_empty.index(n % AHEAD), count=1)
        mbarrier.arrive(keys_empty.index(0), count=1)
        n += 1
        mbarrier.wait(tile_full.index(n % AHEAD), n // AHEAD % 2)
        steps = read_number(tiles, n % AHEAD * TILE_NUMBERS + STEPS, 4)


@gluon.jit
def _finish(problem, buffer, tiles, n, descriptor, total):
    """Store the gradients of 64 keys or values, by way of where these were."""
    tile = n % AHEAD * TILE_NUMBERS
    at = read_number(tiles, tile + PLACE, 4)
    batch, head = read_number(tiles, tile + BATCH, 4), read_number(tiles, tile + HEAD, 4)
    buffer.index(0).reshape([HALF, problem.D]).store(total.to(problem.DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [batch, head, at, 0], buffer.index(0))
    tma.store_wait(0)


@gluon.jit
def _described(problem, blocks, slot, row, part):
    """Return the first query of a block, and whether some of it do not see some of the keys."""
    if problem.MASKED:
        described = read_number(blocks, slot, 4)
        return described // HALF * HALF, described % HALF != 0
    return row, part


@gluon.jit
def _values_step(problem, buffers, barriers, numbers, table, of_step, dv):
    """Return the gradient of values so far, after that of one block of queries."""
    keys, _, queries, gradients, sums, _, meeting, parts, tiles, blocks = buffers
    queries_full, queries_empty, gradients_full, gradients_empty = barriers[1]
    part_full, part_empty = barriers[2]
    slopes_full, _, weights_full = barriers[3]
    slot, phase, n, row, part = of_step
    inner, factor, _ = numbers
    here = (
        nothing()
    )  # else the descriptors of all buffers that stay are computed before the steps, and stay in registers
    k = keys.index(here).reshape([HALF, problem.D])
    gradient = gradients.index(here).reshape([HALF, problem.D])
    mbarrier.wait(queries_full.index(slot), phase)
    row, part = _described(problem, blocks, slot, row, part)
    s = product(k, queries.index(slot).reshape([HALF, problem.D]))
    power = numbers_of(sums.index(slot), problem.GROUPED)
    mbarrier.wait(part_empty.index(0), slot ^ 1)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(queries_empty.index(slot), count=1)
    s = capped(s, inner, problem.CAPPED)
    p = exp2(s * factor - power[None, :])
    if problem.LISTED:
        p = _shown_by_mask(problem, tiles, blocks, slot, n, part, table, p)
    else:
        p = _shown(problem, tiles, n, row, part, p)
    handed = p
    if problem.CAPPED:
        handed = p * (1.0 - s * s)
        if problem.LISTED and part:  # the other warpgroup knows by the zeros what is hidden
            handed = gl.where(p == nothing().to(gl.float32), 0.0, handed)
    parts.index(0).store(in_order(handed))
    mbarrier.arrive(weights_full.index(0), count=1)
    narrow = _narrow(problem, p)
    mbarrier.wait(gradients_full.index(0), slot)
    if problem.LISTED and part:
        cleaned(gradient)
        fence_async_shared()
    dv = warpgroup_mma(narrow, gradient, dv, is_async=True)
    mbarrier.wait(slopes_full.index(0), slot)
    dq = _part(0, problem, k, meeting)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    mbarrier.arrive(gradients_empty.index(0), count=1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    first, second = _halves(dq)
    parts.index(0).store(in_order(first))  # the other warpgroup has read the probabilities
    fence_async_shared()
    mbarrier.arrive(part_full.index(0), count=1)
    mbarrier.wait(part_empty.index(1), slot ^ 1)
    parts.index(1).store(in_order(second))
    fence_async_shared()
    mbarrier.arrive(part_full.index(1), count=1)
    return dv


@gluon.jit
def _keys_step(problem, buffers, barriers, of_step, dk):
    """Return the gradient of keys so far, after that of one block of queries."""
    keys, values, queries, gradients, _, deltas, meeting, parts, tiles, blocks = buffers
    queries_full, queries_empty, gradients_full, gradients_empty = barriers[1]
    part_full, part_empty = barriers[2]
    slopes_full, _, weights_full = barriers[3]
    slot, phase, n, row, part = of_step
    q = queries.index(slot).reshape([HALF, problem.D])
    mbarrier.wait(gradients_full.index(0), slot)
    here = nothing()
    gradient = gradients.index(here).reshape([HALF, problem.D])
    dp = product(values.index(here).reshape([HALF, problem.D]), gradient)
    delta = numbers_of(deltas.index(0), problem.GROUPED)
    mbarrier.wait(queries_full.index(slot), phase)
    row, part = _described(problem, blocks, slot, row, part)
    mbarrier.wait(weights_full.index(0), slot)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(gradients_empty.index(0), count=1)
    weights = back_in_order(parts.index(0))
    ds = weights * (dp - delta[None, :])
    if not problem.LISTED:
        ds = _shown(problem, tiles, n, row, part, ds)
    elif part:  # what is hidden has probability 0, and a mask is not asked twice
        ds = gl.where(weights == nothing().to(gl.float32), 0.0, ds)  # without it all steps would ask
    ds = ds.to(problem.DTYPE)
    meeting.index(0).store(ds)  # before probabilities, the other warpgroup has read those of the step before
    fence_async_shared()
    mbarrier.arrive(slopes_full.index(0), count=1)
    if problem.MASKED and part:
        cleaned(q)
        fence_async_shared()
    dq = _part(1, problem, keys.index(here).reshape([HALF, problem.D]), meeting)
    dk = warpgroup_mma(_narrow(problem, ds), q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    first, second = _halves(dq)
    mbarrier.wait(part_empty.index(2), 1)
    parts.index(2).store(in_order(first))
    fence_async_shared()
    mbarrier.arrive(part_full.index(2), count=1)
    mbarrier.wait(part_empty.index(2), 0)
    parts.index(2).store(in_order(second))
    fence_async_shared()
    mbarrier.arrive(part_full.index(2), count=1)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(queries_empty.index(slot), count=1)
    return dk


@gluon.jit
def _shown(problem, tiles, n, row, part, x):
    """``x`` of a block of queries, with zeros where they do not see keys."""
    if part:
        x = problem.shown(x, row, read_number(tiles, n % AHEAD * TILE_NUMBERS + PLACE, 4))
    return x


@gluon.jit
def _shown_by_mask(problem, tiles, blocks, slot, n, part, table, x):
    """As :func:`_shown`, where the mask is more than a band."""
    if part:
        batch, at = (
            read_number(tiles, n % AHEAD * TILE_NUMBERS + BATCH, 4),
            read_number(tiles, n % AHEAD * TILE_NUMBERS + PLACE, 4),
        )
        row = read_number(blocks, slot, 4) // HALF * HALF
        x = problem.shown_by_mask(x, row, at, table, batch, read_head(blocks, slot))
    return x


@gluon.jit
def _narrow(problem, x):
    """``x`` as the left side of a product into the sums of keys or values."""
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.D, 16])
    return gl.convert_layout(x.to(problem.DTYPE), gl.DotOperandLayout(0, of_sums, k_width=2))


@gluon.jit
def _part(I: gl.constexpr, problem, k, meeting):
    """Begin the product for a half of the channels of the gradient of queries."""
    WIDTH: gl.constexpr = problem.D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    none = gl.zeros([HALF, WIDTH], gl.float32, layout=layout)
    k = k.slice(I * WIDTH, WIDTH, dim=1)
    return warpgroup_mma(meeting.index(0).permute((1, 0)), k, none, use_acc=False, is_async=True)


@gluon.jit
def _halves(x):
    """Return the left and the right half of (64, 128), each as products of 64 columns are held."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    first, second = gl.split(x.reshape([HALF, 2, HALF]).permute([0, 2, 1]))
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
    )


@gluon.jit(do_not_specialize=(*INTS, *OF_MASKS))
def hopper_backward_wide(
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
        q_desc.dtype, listed is not None, MASK, lengths is not None, HALF,
    )  # fmt: skip
    meeting: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    buffers = (
        gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, HALF, D], k_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, HALF, D], v_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, ROWS, D], gradient_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, HALF], sums_desc.layout),
        gl.allocate_shared_memory(gl.float32, [1, HALF], sums_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [1, HALF, ROWS], meeting),
        gl.allocate_shared_memory(gl.float32, [3, HALF * HALF // WIDE, WIDE], sum_desc.layout),
        gl.allocate_shared_memory(gl.int32, [AHEAD * TILE_NUMBERS, 1], numbers),
        gl.allocate_shared_memory(gl.int32, [BLOCK_NUMBERS if problem.LISTED else STAGES, 1], numbers),
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
        (barriers_of(1, 1), barriers_of(1, 1), barriers_of(1, 2), barriers_of(AHEAD, 1), barriers_of(AHEAD, 4)),
        (barriers_of(STAGES, 1), barriers_of(STAGES, 2), barriers_of(1, 1), barriers_of(1, 2)),
        (barriers_of(3, 1), barriers_of(3, 1)),
        (barriers_of(1, 1), barriers_of(1, 1), barriers_of(1, 1)),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, problem, buffers, barriers, of_v_desc, (inner, factor, scale), table)),
            (_multiply, (1, problem, buffers, barriers, of_k_desc, (inner, factor, scale), table)),
            (load, (problem, (q_desc, k_desc, v_desc, gradient_desc, sums_desc), buffers, barriers, counter, lists)),
            (add, (0, problem, sum_desc, turns, buffers, barriers)),
            (add, (1, problem, sum_desc, turns, buffers, barriers)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )
