"""The blocks of queries that a tile of keys visits in the Hopper backward, where a list has them, and what is told of each.

:mod:`opkit.attn.gpu.device.tile_lists` makes the lists, of the keys of each tile the blocks of queries; heads of queries that
share keys may have different ones. :mod:`opkit.attn.gpu.device.tile_lists` says, of each block in a list, how many tiles of keys
add to the gradient of those queries before this one. The warp that loads reads both, and tells of a block in a table. The
warpgroups that multiply find there, by the buffers that the block is in, its first row, in bits 0 and 1 whether it is partly
seen, and the head. What adds up, a warp or for wide heads two, finds the sum's place and the turn, by the step: of four steps,
since it may be a block behind the warpgroups, and the warp that loads two ahead of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from opkit.attn.gpu.hopper.device.backward_work import STAGES, tell, told

_LATE = gl.constexpr(2 * STAGES)  #: steps of which the warp that adds up is told at once
_HEADS = gl.constexpr(STAGES)  #: where in the table the heads begin, the places of sums, and turns
_SUMS = gl.constexpr(2 * STAGES)
_TURNS = gl.constexpr(4 * STAGES)
BLOCKS_TOLD = gl.constexpr(6 * STAGES)  #: how many numbers these are
_LANES = gl.constexpr(32)


@gluon.jit
def listed_steps(problem, lists, batch, key_head, at):
    """How many blocks of queries, of all heads that share them, see some of the keys from ``at``."""
    _, _, _, counts, strides = lists
    group = problem.heads // problem.key_heads
    counts += batch * strides[0].to(gl.int64) + at // problem.KEYS * strides[2] + 1
    found = at * 0
    for first in range(0, group, _LANES):
        g = first + gl.arange(0, _LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
        found += gl.sum(gl.load(counts + (key_head * group + g) * strides[1], mask=g < group, other=0), 0)
    return found


@gluon.jit
def list_of(problem, lists, batch, head, at):
    """The list of a head for the keys from ``at``: where blocks and turns begin, how many are whole, and how many there are."""
    blocks, turns, block_strides, counts, strides = lists
    own = at // problem.KEYS
    place = batch * block_strides[0].to(gl.int64) + head * block_strides[1].to(gl.int64) + own * block_strides[2]
    counts += batch * strides[0].to(gl.int64) + head * strides[1].to(gl.int64) + own * strides[2]
    blocks += place
    mine = blocks
    if problem.ORDERED:
        mine = turns + place
    return blocks, mine, gl.load(counts), gl.load(counts + 1)


@gluon.jit
def visit(problem, mine, step):
    """The block of a step, twice, and one more if it is partly seen, which are the first; and its turn."""
    blocks, turns, whole, total = mine
    partly = step < total - whole
    index = gl.where(partly, problem.blocks() - 1 - step, step - (total - whole))
    mark = 2 * gl.load(blocks + index, mask=step < total, other=0) + partly.to(gl.int32)
    turn = mark
    if problem.ORDERED:
        turn = gl.load(turns + index, mask=step < total, other=0)
    return mark, turn


@gluon.jit
def tell_listed(problem, table, slot, phase, mark, head, of_all, turn):
    """Tell of the block for the buffers of ``slot``; ``phase`` is the parity of those that read them."""
    tell(table, slot, mark // 2 * problem.ROWS + mark % 2 * 3)
    tell(table, _HEADS + slot, head)
    tell(table, _SUMS + slot + STAGES * phase, of_all)
    if problem.ORDERED:
        tell(table, _TURNS + slot + STAGES * phase, turn)


@gluon.jit
def told_head(table, slot):
    """The head of the queries in the buffers of ``slot``."""
    return told(table, _HEADS + slot, 4)


@gluon.jit
def told_of_sum(problem, table, step):
    """Which block of all the sum of a step belongs to, and its turn."""
    place = step % _LATE
    found = told(table, _SUMS + place, 1)
    turn = found
    if problem.ORDERED:
        turn = told(table, _TURNS + place, 1)
    return found, turn
