"""The warps of the Hopper backward for wide heads that move data: one loads, two add up the gradient of queries in memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from opkit.attn.gpu.hopper.device.backward_moves import publish_tile
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
def load(problem, descriptors, buffers, barriers, counter, lists):
    """Hand out tiles: their keys and values, and the queries that see them with their gradients, block by block.

    Where the problem is LISTED, ``lists`` are those of :mod:`opkit.attn.gpu.hopper.device.backward_work`.
    """
    tiles, blocks = buffers[8], buffers[9]
    keys_full, values_full, keys_empty, tile_full, tile_empty = barriers[0]
    queries_empty = barriers[1][1]
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
                    mbarrier.wait(queries_empty.index(slot), phase)
                    publish_block(problem, blocks, slot, phase ^ 1, mark, head, of_head + block, turn)
                    mark, turn = visit(problem, mine, i + 1)
                    place = (batch, head, key_head, at, block * problem.ROWS, of_head + block)
                    _load_block(descriptors, buffers, barriers, place, slot, n, done == 0)
                    done += 1
                    slot, phase = following(slot, phase)
            else:
                for i in range(steps):
                    row = (first + i) * problem.ROWS
                    mbarrier.wait(queries_empty.index(slot), phase)
                    if problem.BANDED:
                        publish(blocks, slot, row + problem.partial(row, at).to(gl.int32))
                    place = (batch, head, key_head, at, row, of_head + first + i)
                    _load_block(descriptors, buffers, barriers, place, slot, n, (g == 0) & (i == 0))
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
def _load_block(descriptors, buffers, barriers, place, slot, n, begins):
    """Load a block of queries with what belongs to it, into buffers that are free; where it ``begins`` a tile, its keys too."""
    q_desc, k_desc, v_desc, gradient_desc, sums_desc = descriptors
    keys, values, queries, gradients, sums, deltas = buffers[:6]
    keys_full, values_full, keys_empty = barriers[0][:3]
    queries_full, _, gradients_full, gradients_empty = barriers[1]
    batch, head, key_head, at, row, of_all = place
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    numbers = of_all * (2 * ROWS)
    at_rows, full = (batch, head, row, numbers), queries_full.index(slot)
    _load(q_desc, sums_desc, at_rows, full, queries.index(slot), sums.index(slot))
    if begins:
        mbarrier.wait(keys_empty.index(0), n % 2 ^ 1)
        _load_keys(k_desc, batch, key_head, at, keys_full.index(0), keys.index(0))
    mbarrier.wait(gradients_empty.index(0), slot ^ 1)
    at_rows, full = (batch, head, row, numbers + ROWS), gradients_full.index(0)
    _load(gradient_desc, sums_desc, at_rows, full, gradients.index(0), deltas.index(0))
    if begins:
        _load_keys(v_desc, batch, key_head, at, values_full.index(0), values.index(0))


@gluon.jit
def _load(descriptor, of_numbers, at, full, buffer, numbers):
    """Load a block of queries or of gradients, and the numbers of its rows."""
    batch, head, row, place = at
    mbarrier.expect(full, descriptor.block_type.nbytes + of_numbers.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], full, buffer)
    tma.async_copy_global_to_shared(of_numbers, [place], full, numbers)


@gluon.jit
def _load_keys(descriptor, batch, head, at, full, buffer):
    """Load the 64 keys, or values, of a tile."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [batch, head, at, 0], full, buffer)


@gluon.jit
def add(KEYS: gl.constexpr, problem, sum_desc, turns, buffers, barriers):
    """Add the parts of the gradient of queries that one warpgroup makes to memory as they come.

    The one that has values puts its two into two buffers, the one that has KEYS into one. In turn, each of the two warps counts
    for a half.
    """
    tiles, blocks = buffers[8], buffers[9]
    tile_full, tile_empty = barriers[0][3], barriers[0][4]
    full = barriers[2][0]
    group = problem.heads // problem.key_heads
    n, phase = problem.tiles * 0, problem.tiles * 0
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
                if KEYS:  # a block's numbers are published before its gradient is there
                    mbarrier.wait(full.index(2), 0)
                else:
                    mbarrier.wait(full.index(0), phase)
                block, turn = read_sum(problem, blocks, count)
                _add_block(KEYS, problem, sum_desc, turns, buffers, barriers, block, turn, phase)
                phase ^= 1
                count += 1
        else:
            for g in range(group):
                of_head = (batch * problem.heads + key_head * group + g) * problem.blocks()
                for i in range(steps):
                    block = of_head + first + i
                    turn = block
                    if problem.ORDERED:
                        turn = problem.turn(first + i, at)
                    _add_block(KEYS, problem, sum_desc, turns, buffers, barriers, block, turn, phase)
                    phase ^= 1
        n += 1
        mbarrier.wait(tile_full.index(n % AHEAD), n // AHEAD % 2)
        steps = read_number(tiles, n % AHEAD * TILE_NUMBERS + STEPS, 1)
    added()


@gluon.jit
def _add_block(KEYS: gl.constexpr, problem, sum_desc, turns, buffers, barriers, block, turn, phase):
    """Add one half of the gradient of a block of queries, counted among all, when ``turn`` others have been added to it."""
    parts = buffers[7]
    full, empty = barriers[2]
    if problem.ORDERED:
        while gl.atomic_add(turns + block, 0, sem="acquire") < 2 * turn:
            pass
    if KEYS:
        for c in gl.static_range(2):
            _add_part(sum_desc, block, 2 + c, parts.index(2), full.index(2), c)
            tma.store_wait(0)
            mbarrier.arrive(empty.index(2), count=1)
    else:
        for c in gl.static_range(2):
            _add_part(sum_desc, block, c, parts.index(c), full.index(c), phase)
        for c in gl.static_range(2):
            tma.store_wait(1 - c)
            mbarrier.arrive(empty.index(c), count=1)
    if problem.ORDERED:
        added()
        gl.atomic_add(turns + block, 1, sem="release")


@gluon.jit
def _add_part(descriptor, block, I: gl.constexpr, part, full, phase):
    """Begin to add one of the four parts of a block of queries."""
    mbarrier.wait(full, phase)
    reduce_add(descriptor, [(block * 4 + I) * (HALF * HALF // WIDE), 0], part)
