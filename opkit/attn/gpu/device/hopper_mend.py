"""Results that are not numbers, computed again so that a value reaches only the rows that see it.

In the product of a step, a value that is not a number reaches rows that do not see it, as 0 * NaN. It shows in the results, so
these are looked at: 64 rows with such a result are marked, and at its end a warpgroup goes once more over those that it has
marked, row by row, reading of the values those alone that a row sees. That is slow; usually there are none.

Marks are numbers of owners in memory, one for 64 rows, and one for each warpgroup that says whether it made any. They are put
back to 0, as the counter of tiles is, beside which they lie.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from opkit.attn.gpu.device.hopper_softmax import capped, exp2
from opkit.attn.gpu.device.hopper_work import ROWS

OWNERS = gl.constexpr(4)  #: numbers of a program's warpgroups
_FIRST = gl.constexpr(2)  #: place of the first mark
_BARRIER = gl.constexpr(12)  #: the first of the named barriers that the threads of one warpgroup use
_NUMBERS = gl.constexpr(20)  #: place of the first number after those of the tensors
_KEYS = gl.constexpr(32)
_CHANNELS = gl.constexpr(64)


@gluon.jit
def _owner(ME: gl.constexpr):
    return gl.program_id(0).to(gl.int32) * OWNERS + ME


@gluon.jit
def _marks(counter):
    """Where the marks of 64 rows each begin, after those of the warpgroups."""
    return counter + _FIRST + gl.num_programs(0).to(gl.int32) * OWNERS


@gluon.jit
def mark(ME: gl.constexpr, counter, acc, place):
    """Mark 64 rows of which some results are not numbers; ``place`` is their number among all."""
    sums = gl.sum(acc, 1)
    bad = sums != sums
    zeros = gl.zeros_like(sums).to(gl.int32)
    gl.store(_marks(counter) + place + zeros, _owner(ME) + 1 + zeros, mask=bad)
    gl.store(counter + _FIRST + _owner(ME) + zeros, 1 + zeros, mask=bad)


@gluon.constexpr_function
def _together(number):
    return f"cp.async.bulk.wait_group 0; bar.sync {number}, 128; mov.b32 $0, 0;"


@gluon.jit
def _meet(ME: gl.constexpr):
    """Wait for the other threads of this warpgroup, and for what they have stored."""
    text: gl.constexpr = _together(_BARRIER + ME)
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mend(ME: gl.constexpr, problem, others):
    """Compute again what this warpgroup has marked."""
    counter = others[7]
    _meet(ME)
    mine = counter + _FIRST + _owner(ME)
    if gl.load(mine, volatile=True) != 0:
        blocks = _number(others[2], 0) * problem.WARPGROUPS
        for place in range(_number(others[2], 1) * problem.WARPGROUPS):
            mark = _marks(counter) + place
            if gl.load(mark, volatile=True) == _owner(ME) + 1:
                row = place % blocks * ROWS
                for i in range(row, gl.minimum(row + ROWS, problem.queries)):
                    _mend_row(problem, others, place // blocks, i)
                _meet(ME)  # all have seen the mark
                gl.store(mark, 0)
        _meet(ME)
        gl.store(mine, 0)


@gluon.jit
def _mend_row(problem, others, head, i):
    """The results of one row, ``head`` counted among those of all batches."""
    _, _, addresses, lse, _, inner, factor, _ = others
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    power = gl.load(lse + head.to(gl.int64) * problem.queries + i) * 1.4426950408889634
    base = gl.where(power == float("-inf"), 0.0, power)
    batch = head // _number(addresses, 2)
    head = head % _number(addresses, 2)
    key_head = head // _number(addresses, 3)
    begin = gl.maximum(i + problem.lower, 0)
    end = gl.minimum(i + problem.upper, problem.keys - 1) + 1
    for c in range(0, problem.DV, _CHANNELS):
        sums = gl.zeros([_KEYS, _CHANNELS], gl.float32, layout=layout)
        for at in range(begin, end, _KEYS):
            keys = at + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, layout))
            s = _logits(problem, addresses, batch, head, key_head, i, keys, end, layout)
            p = gl.where(keys < end, exp2(capped(s, inner, problem.CAPPED) * factor - base), 0.0)
            sums += p[:, None] * _rows(problem, addresses, 2, batch, key_head, keys, end, c, layout)
        at, there = _channels(problem, addresses, 3, batch, head, c, layout)
        gl.store(at + i.to(gl.int64) * _kept(addresses, 18), gl.sum(sums, 0).to(problem.DTYPE), mask=there)


@gluon.jit
def _logits(problem, addresses, batch, head, key_head, i, keys, end, layout: gl.constexpr):
    """The products of query ``i`` with some keys."""
    found = gl.zeros([_KEYS], gl.float32, layout=gl.SliceLayout(1, layout))
    for c in range(0, problem.D, _CHANNELS):
        at, there = _channels(problem, addresses, 0, batch, head, c, layout)
        query = gl.load(at + i.to(gl.int64) * _kept(addresses, 3), mask=there, other=0.0).to(gl.float32)
        key = _rows(problem, addresses, 1, batch, key_head, keys, end, c, layout)
        found += gl.sum(query[None, :] * key, 1)
    return found


@gluon.jit
def _rows(problem, addresses, TENSOR: gl.constexpr, batch, head, keys, end, c, layout: gl.constexpr):
    """Channels from ``c`` of keys or values before ``end``; the others are zeros."""
    at, there = _channels(problem, addresses, TENSOR, batch, head, c, layout)
    offsets = keys.to(gl.int64) * _kept(addresses, 5 * TENSOR + 3)
    seen = (keys < end)[:, None] & there[None, :]
    return gl.load(at[None, :] + offsets[:, None], mask=seen, other=0.0).to(gl.float32)


@gluon.jit
def _channels(problem, addresses, TENSOR: gl.constexpr, batch, head, c, layout: gl.constexpr):
    """Where channels from ``c`` of the first row of a head lie in one of q, k, v, out, and which of them there are."""
    FIRST: gl.constexpr = 5 * TENSOR
    of_head = batch * _kept(addresses, FIRST + 1) + head * _kept(addresses, FIRST + 2)
    base = _kept(addresses, FIRST) + 2 * of_head
    columns = c + gl.arange(0, _CHANNELS, layout=gl.SliceLayout(0, layout))
    return base.to(gl.pointer_type(problem.DTYPE), bitcast=True) + columns, columns < _kept(addresses, FIRST + 4)


@gluon.jit
def _kept(table, I: gl.constexpr):
    return gl.max(table.index(I).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _keep(table, FIRST: gl.constexpr, tensor, strides, size):
    """Of a tensor its address, three strides, and how many channels it has."""
    _keep_one(table, FIRST, tensor.to(gl.int64))
    for i in gl.static_range(3):
        _keep_one(table, FIRST + 1 + i, strides[i].to(gl.int64))
    _keep_one(table, FIRST + 4, size.to(gl.int64))


@gluon.jit
def _number(table, I: gl.constexpr):
    """The tiles of a head, all tiles, the heads, or how many of these share one of keys."""
    return _kept(table, _NUMBERS + I).to(gl.int32)


@gluon.jit
def keep_all(q, k, v, out, strides, head_size, value_size, problem):
    """A table of what is seldom needed, in shared memory, where it takes no registers."""
    table = gl.allocate_shared_memory(gl.int64, [_NUMBERS + 4, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    if problem.BANDED:
        _keep(table, 0, q, strides[0], head_size)
        _keep(table, 5, k, strides[1], head_size)
        _keep(table, 10, v, strides[2], value_size)
        _keep(table, 15, out, strides[3], value_size)
        _keep_one(table, _NUMBERS, problem.blocks.to(gl.int64))
        _keep_one(table, _NUMBERS + 1, problem.tiles.to(gl.int64))
        _keep_one(table, _NUMBERS + 2, problem.heads.to(gl.int64))
        _keep_one(table, _NUMBERS + 3, problem.group.to(gl.int64))
    return table


@gluon.jit
def _keep_one(table, I: gl.constexpr, number):
    table.index(I).store(gl.full([1], number, gl.int64, layout=gl.BlockedLayout([1], [32], [4], [0])))
