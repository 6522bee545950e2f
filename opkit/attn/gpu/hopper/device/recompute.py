"""Rows that are computed again: those with results that are not numbers, and those with huge logits.

In the product of a step, a value that is not a number reaches rows that do not see it, as 0 * NaN. It shows in the results, so
these are looked at: 64 rows with such a result are marked, and at its end a warpgroup goes once more over those that it has
marked, row by row, reading of the values those alone that a row sees. That is slow; usually there are none.

The main loop takes the rounded product of a row's greatest logit and the factor from all exponents, and what was rounded away is
another number for each greatest logit so far. Up to LARGE that is less than 2^-8. Rows with greater exponents are marked, and so
are those whose weights overflowed before a greater logit came: their results or log-sum-exps are NaN. Their differences from the
greatest logit are taken before they are multiplied.

Marks are numbers of owners in memory, one for 64 rows, and one for each warpgroup that says whether it made any. They are put
back to 0, as the counter of tiles is, next to which they lie.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from opkit.attn.gpu.hopper.device.masks import (
    OUT,
    SIZES,
    K,
    Q,
    V,
    load_number,
    load_size,
    sees,
    store_number,
    store_tensor,
)
from opkit.attn.gpu.hopper.device.softmax import capped, exp2
from opkit.attn.gpu.hopper.device.work import ROWS

OWNERS = gl.constexpr(4)  #: numbers of a program's warpgroups
_FIRST = gl.constexpr(2)  #: place of the first mark
_BARRIER = gl.constexpr(12)  #: the first of the named barriers that the threads of one warpgroup use
_KEYS = gl.constexpr(32)
_CHANNELS = gl.constexpr(64)
_LARGE = gl.constexpr(65536.0)  #: of exponents of 2


@gluon.jit
def _owner(ME: gl.constexpr):
    return gl.program_id(0).to(gl.int32) * OWNERS + ME


@gluon.jit
def _marks(counter):
    """Return where the marks of 64 rows each begin, after those of the warpgroups."""
    return counter + _FIRST + gl.num_programs(0).to(gl.int32) * OWNERS


@gluon.jit
def mark_rows(ME: gl.constexpr, problem, counter, acc, exponents, powers, place):
    """Mark 64 rows of which some results are not numbers, or are of huge logits; ``place`` is their number among all.

    ``exponents`` are the greatest ones of rows, ``powers`` the logarithms of their sums.
    """
    if problem.MASKED:
        sums = gl.convert_layout(gl.sum(acc, 1), exponents.type.layout, assert_trivial=True)
        bad = sums != sums
    else:
        layout: gl.constexpr = exponents.type.layout
        bad = _first_of_rows_is_nan(acc, layout)
    if not problem.CAPPED:
        bad = bad | (powers != powers) | ((gl.abs(exponents) > _LARGE) & (gl.abs(exponents) < float("inf")))
    zeros = gl.zeros_like(exponents).to(gl.int32)
    gl.store(_marks(counter) + place + zeros, _owner(ME) + 1 + zeros, mask=bad)
    gl.store(counter + _FIRST + _owner(ME) + zeros, 1 + zeros, mask=bad)


@gluon.jit
def _first_of_rows_is_nan(acc, layout: gl.constexpr):
    """Return whether the first number of a row that a thread holds is NaN: without a mask all are where a weight overflowed."""
    ROWS_OF_ACC: gl.constexpr = acc.shape[0]
    x, _ = gl.split(gl.reshape(acc, [ROWS_OF_ACC, acc.shape[1] // 2, 2]))
    x = gl.permute(gl.reshape(x, [ROWS_OF_ACC, acc.shape[1] // 8, 4]), (0, 2, 1))
    x = _first_of_last(x)
    bad = gl.max((x != x).to(gl.int32), 1) != 0
    return gl.convert_layout(bad, layout)


@gluon.jit
def _first_of_last(x):
    """Return the first element of the last dimension, which is a power of two and within a thread."""
    if x.shape[2] == 1:
        return gl.reshape(x, [x.shape[0], x.shape[1]])
    else:  # noqa: RET505 - of a return behind an `if` alone Triton takes both
        half, _ = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
        return _first_of_last(half)


@gluon.constexpr_function
def _together(number):
    return f"cp.async.bulk.wait_group 0; bar.sync {number}, 128; mov.b32 $0, 0;"


@gluon.jit
def _meet(ME: gl.constexpr):
    """Wait for the other threads of this warpgroup, and for what they have stored."""
    text: gl.constexpr = _together(_BARRIER + ME)
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def recompute_rows(ME: gl.constexpr, problem, others):
    """Compute again what this warpgroup has marked."""
    counter = others[7]
    _meet(ME)
    mine = counter + _FIRST + _owner(ME)
    if gl.load(mine, volatile=True) != 0:
        blocks = load_size(others[2], 0) * problem.WARPGROUPS
        for place in range(load_size(others[2], 1) * problem.WARPGROUPS):
            mark = _marks(counter) + place
            if gl.load(mark, volatile=True) == _owner(ME) + 1:
                row = place % blocks * ROWS
                for i in range(row, gl.minimum(row + ROWS, problem.queries)):
                    _recompute_row(problem, others, place // blocks, i)
                _meet(ME)  # all have seen the mark
                gl.store(mark, 0)
        _meet(ME)
        gl.store(mine, 0)


@gluon.jit
def _recompute_row(problem, others, head, i):
    """The results of one row, ``head`` counted among those of all batches."""
    table, lse, sinks, inner, factor = others[2], others[3], others[4], others[5], others[6]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_row = lse + head.to(gl.int64) * problem.queries + i
    batch = head // load_size(table, 2)
    head = head % load_size(table, 2)
    key_head = head // load_size(table, 3)
    begin, end = gl.to_tensor(0), problem.keys
    if problem.BANDED:
        begin, end = gl.maximum(i + problem.lower, 0), gl.minimum(i + problem.upper, problem.keys - 1) + 1
    reach = (begin, end)
    most = gl.full([_KEYS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    for at in range(begin, end, _KEYS):
        seen, s = _seen_logits(problem, table, batch, head, key_head, i, at, reach, inner, layout)
        most = gl.maximum(most, s)
    top = gl.max(most, 0)
    if problem.SINKS:
        sink = gl.load(sinks + head) * 1.4426950408889634 / factor  # in the units of logits
        top = gl.maximum(top, sink)
    top = gl.where(top == float("-inf"), 0.0, top)
    weights = gl.zeros([_KEYS], gl.float32, layout=gl.SliceLayout(1, layout))
    for at in range(begin, end, _KEYS):
        seen, s = _seen_logits(problem, table, batch, head, key_head, i, at, reach, inner, layout)
        weights += exp2((s - top) * factor)
    total = gl.sum(weights, 0)
    if problem.SINKS:
        total += exp2((sink - top) * factor)
    gl.store(of_row, (top * factor + gl.log2(total)) * 0.6931471805599453)
    by = gl.where(total == 0.0, 0.0, 1.0 / total)
    for c in range(0, problem.DV, _CHANNELS):
        sums = gl.zeros([_KEYS, _CHANNELS], gl.float32, layout=layout)
        for at in range(begin, end, _KEYS):
            keys = at + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, layout))
            seen, s = _seen_logits(problem, table, batch, head, key_head, i, at, reach, inner, layout)
            p = exp2((s - top) * factor) * by
            sums += p[:, None] * _rows(problem, table, V, batch, key_head, keys, seen, c, layout)
        to, there = _channels(problem, table, OUT, batch, head, c, layout)
        gl.store(to + i.to(gl.int64) * load_number(table, OUT + 3), gl.sum(sums, 0).to(problem.DTYPE), mask=there)


@gluon.jit
def _seen_logits(problem, table, batch, head, key_head, i, at, reach, inner, layout: gl.constexpr):
    """Return which keys from ``at`` query ``i`` sees of those within its ``reach``, and its logits with them, else -inf."""
    keys = at + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, layout))
    seen = keys < reach[1]
    if problem.LISTED:
        seen = seen & sees(problem, table, batch, head, i, keys)
    s = capped(_logits(problem, table, batch, head, key_head, i, keys, seen, layout), inner, problem.CAPPED)
    return seen, gl.where(seen, s, float("-inf"))


@gluon.jit
def _logits(problem, table, batch, head, key_head, i, keys, seen, layout: gl.constexpr):
    """Return the products of query ``i`` with some keys."""
    found = gl.zeros([_KEYS], gl.float32, layout=gl.SliceLayout(1, layout))
    for c in range(0, problem.D, _CHANNELS):
        at, there = _channels(problem, table, Q, batch, head, c, layout)
        query = gl.load(at + i.to(gl.int64) * load_number(table, Q + 3), mask=there, other=0.0).to(gl.float32)
        key = _rows(problem, table, K, batch, key_head, keys, seen, c, layout)
        found += gl.sum(query[None, :] * key, 1)
    return found


@gluon.jit
def _rows(problem, table, TENSOR: gl.constexpr, batch, head, keys, seen, c, layout: gl.constexpr):
    """Channels from ``c`` of the keys or values that are seen; the others are zeros."""
    at, there = _channels(problem, table, TENSOR, batch, head, c, layout)
    offsets = keys.to(gl.int64) * load_number(table, TENSOR + 3)
    inside = seen[:, None] & there[None, :]
    return gl.load(at[None, :] + offsets[:, None], mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _channels(problem, table, TENSOR: gl.constexpr, batch, head, c, layout: gl.constexpr):
    """Return where channels from ``c`` of the first row of a head lie in one of q, k, v, out, and which of them there are."""
    base = load_number(table, TENSOR) + 2 * (
        batch * load_number(table, TENSOR + 1) + head * load_number(table, TENSOR + 2)
    )
    columns = c + gl.arange(0, _CHANNELS, layout=gl.SliceLayout(0, layout))
    return base.to(gl.pointer_type(problem.DTYPE), bitcast=True) + columns, columns < load_number(table, TENSOR + 4)


@gluon.jit
def store_call(table, q, k, v, out, strides, head_size, value_size, problem):
    """Store in the table what :func:`recompute_rows` reads."""
    store_tensor(table, Q, q, strides[0], head_size)
    store_tensor(table, K, k, strides[1], head_size)
    store_tensor(table, V, v, strides[2], value_size)
    store_tensor(table, OUT, out, strides[3], value_size)
    store_number(table, SIZES, problem.blocks)
    store_number(table, SIZES + 1, problem.tiles)
    store_number(table, SIZES + 2, problem.heads)
    store_number(table, SIZES + 3, problem.group)
