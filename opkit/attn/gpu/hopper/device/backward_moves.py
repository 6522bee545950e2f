"""The warps of the Hopper backward that move data by TMA: one loads, one adds up the gradient of queries in memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from opkit.attn.gpu.hopper.device.backward_work import (
    AHEAD,
    BATCH,
    FIRST,
    HALF,
    HEAD,
    PLACE,
    STEPS,
    TILE_NUMBERS,
    WIDE,
    added,
    following,
    list_of,
    listed_steps,
    publish,
    publish_block,
    read_number,
    read_sum,
    reduce_add,
    visit,
)
from opkit.attn.gpu.hopper.device.work import put_back


@gluon.jit
def load(problem, descriptors, buffers, barriers, counter, lists=None):
    """Hand out tiles: their keys and values, and the queries that see them with their gradients, block by block.

    Where the problem is LISTED, ``lists`` are those of :mod:`opkit.attn.gpu.hopper.device.backward_work`.
    """
    tiles, blocks = buffers[8], buffers[9]
    keys_full, values_full, keys_empty, tile_full, tile_empty = barriers[0]
    ended = barriers[1][2]
    group = problem.heads // problem.key_heads
    tile = gl.program_id(0).to(gl.int32)
    programs = gl.num_programs(0).to(gl.int32)
    n, slot, phase = tile * 0, tile * 0, tile * 0 + 1
    while tile < problem.tiles:
        batch, key_head, at = problem.place(tile)
        if problem.LISTED:
            first, steps = at * 0, listed_steps(problem, lists, batch, key_head, at)
        else:
            first, steps = problem.span(at)
        mbarrier.wait(tile_empty.index(n % AHEAD), n // AHEAD % 2 ^ 1)
        publish_tile(tiles, n, (steps, first, at, batch, key_head, 0))
        mbarrier.arrive(tile_full.index(n % AHEAD), count=1)
        done = at * 0
        for g in range(group):
            head = key_head * group + g
            of_head = (batch * problem.heads + head) * problem.blocks()
            if problem.LISTED:
                mine = list_of(problem, lists, batch, head, at)
                mark, turn = visit(problem, mine, at * 0)
                for i in range(mine[3]):
                    block = mark // 2
                    mbarrier.wait(ended.index(slot), phase)
                    publish_block(problem, blocks, slot, phase ^ 1, mark, head, of_head + block, turn)
                    mark, turn = visit(problem, mine, i + 1)
                    place = (batch, head, key_head, at, block, of_head + block)
                    _load_block(problem, descriptors, buffers, barriers, place, slot, phase, n, done == 0)
                    done += 1
                    slot, phase = following(slot, phase)
            else:
                for i in range(steps):
                    block = first + i
                    mbarrier.wait(ended.index(slot), phase)
                    if problem.BANDED:
                        publish(blocks, slot, problem.described(block * problem.ROWS, at))
                    place = (batch, head, key_head, at, block, of_head + block)
                    _load_block(problem, descriptors, buffers, barriers, place, slot, phase, n, (g == 0) & (i == 0))
                    slot, phase = following(slot, phase)
        if steps == 0:
            mbarrier.wait(keys_empty.index(0), n % 2 ^ 1)
            mbarrier.arrive(keys_full.index(0), count=1)
            mbarrier.arrive(values_full.index(0), count=1)
        n += 1
        # Not earlier: a tile that is taken while another one is far from its end would begin late.
        tile = gl.atomic_add(counter, 1, sem="relaxed") + programs
    mbarrier.wait(tile_empty.index(n % AHEAD), n // AHEAD % 2 ^ 1)
    publish_tile(tiles, n, (-1, tile, tile, tile, tile, 0))
    mbarrier.arrive(tile_full.index(n % AHEAD), count=1)
    put_back(counter, programs)


@gluon.jit
def _load_block(problem, descriptors, buffers, barriers, place, slot, phase, n, begins):
    """Load a block of queries with what belongs to it, into buffers that are free; where it ``begins`` a tile, its keys too."""
    q_desc, k_desc, v_desc, gradient_desc, sums_desc = descriptors
    keys, values, queries, gradients, sums, deltas = buffers[:6]
    keys_full, values_full, keys_empty = barriers[0][:3]
    queries_full, gradients_full, _ = barriers[1]
    batch, head, key_head, at, block, of_all = place
    HALVES: gl.constexpr = problem.ROWS // HALF
    row = block * problem.ROWS
    numbers = of_all * (2 * problem.ROWS)
    full = queries_full.index(slot)
    mbarrier.expect(full, q_desc.block_type.nbytes + HALVES * sums_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], full, queries.index(slot))
    _load_sums(HALVES, sums_desc, numbers, full, sums, slot)
    if begins:
        mbarrier.wait(keys_empty.index(0), n % 2 ^ 1)
        _load_half(k_desc, batch, key_head, at, keys_full, keys)
    full = gradients_full.index(slot)
    mbarrier.expect(full, gradient_desc.block_type.nbytes + HALVES * sums_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(gradient_desc, [batch, head, row, 0], full, gradients.index(slot))
    _load_sums(HALVES, sums_desc, numbers + problem.ROWS, full, deltas, slot)
    if begins:
        _load_half(v_desc, batch, key_head, at, values_full, values)


@gluon.jit
def publish_tile(tiles, n, numbers):
    """Publish tile ``n`` of this program to the other warps."""
    for i in gl.static_range(TILE_NUMBERS):
        publish(tiles, n % AHEAD * TILE_NUMBERS + i, numbers[i])


@gluon.jit
def _load_sums(HALVES: gl.constexpr, descriptor, place, full, buffers, slot):
    """Load numbers of a block of queries."""
    for i in gl.static_range(HALVES):
        at = place + i * HALF
        tma.async_copy_global_to_shared(descriptor, [at], full, buffers.index(slot * HALVES + i))


@gluon.jit
def _load_half(descriptor, batch, head, at, full, buffers):
    """Load the 128 keys, or values, of a tile."""
    mbarrier.expect(full.index(0), 2 * descriptor.block_type.nbytes)
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(descriptor, [batch, head, at + c * HALF, 0], full.index(0), buffers.index(c))


@gluon.jit
def add(problem, sum_desc, turns, buffers, barriers):
    """Add the parts of the gradient of queries to memory as they come."""
    tiles, blocks = buffers[8], buffers[9]
    tile_full, tile_empty = barriers[0][3], barriers[0][4]
    group = problem.heads // problem.key_heads
    n, slot, phase = problem.tiles * 0, problem.tiles * 0, problem.tiles * 0
    count = n
    mbarrier.wait(tile_full.index(0), 0)
    steps = read_number(tiles, n % AHEAD * TILE_NUMBERS + STEPS, 1)
    while steps >= 0:
        first, at = (
            read_number(tiles, n % AHEAD * TILE_NUMBERS + FIRST, 1),
            read_number(tiles, n % AHEAD * TILE_NUMBERS + PLACE, 1),
        )
        batch, key_head = (
            read_number(tiles, n % AHEAD * TILE_NUMBERS + BATCH, 1),
            read_number(tiles, n % AHEAD * TILE_NUMBERS + HEAD, 1),
        )
        mbarrier.arrive(tile_empty.index(n % AHEAD), count=1)
        if problem.LISTED:
            for _ in range(steps):
                mbarrier.wait(
                    barriers[1][2].index(slot), phase
                )  # a block's numbers are published before its gradient is there
                of_all, turn = read_sum(problem, blocks, count)
                _add_block(problem, sum_desc, turns, buffers, barriers, of_all, turn, slot, phase)
                slot, phase = following(slot, phase)
                count += 1
        else:
            for g in range(group):
                of_head = (batch * problem.heads + key_head * group + g) * problem.blocks()
                for i in range(steps):
                    block = first + i
                    turn = block
                    if problem.ORDERED:
                        turn = problem.turn(block, at)
                    _add_block(problem, sum_desc, turns, buffers, barriers, of_head + block, turn, slot, phase)
                    slot, phase = following(slot, phase)
        n += 1
        mbarrier.wait(tile_full.index(n % AHEAD), n // AHEAD % 2)
        steps = read_number(tiles, n % AHEAD * TILE_NUMBERS + STEPS, 1)
    added()


@gluon.jit
def _add_block(problem, sum_desc, turns, buffers, barriers, of_all, turn, slot, phase):
    """Add the gradient of a block of queries, counted among all, when ``turn`` others have been added to it."""
    parts = buffers[7]
    empty = barriers[2]
    SIZE: gl.constexpr = HALF * HALF // WIDE
    if problem.ORDERED:
        while gl.atomic_add(turns + of_all, 0, sem="acquire") < turn:
            pass
    mbarrier.wait(barriers[1][2].index(slot), phase)
    for c in gl.static_range(2):
        reduce_add(sum_desc, [(of_all * 2 + c) * SIZE, 0], parts.index(c))
    for c in gl.static_range(2):
        tma.store_wait(1 - c)
        mbarrier.arrive(empty.index(c), count=1)
    if problem.ORDERED:
        added()
        gl.atomic_add(turns + of_all, 1, sem="release")
