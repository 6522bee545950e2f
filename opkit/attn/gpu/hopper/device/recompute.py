"""Rows that are computed again: those with results that are not numbers, and those with huge logits.

In the product of a step, a value that is not a number reaches rows that do not see it, as 0 * NaN. It shows in the results, so
these are looked at: 64 rows with such a result are marked, and at its end a program goes once more over those that it has
marked, row by row, reading of the values those alone that a row sees. That is slow; usually there are none.

The main loop takes the rounded product of a row's greatest logit and the factor from all exponents, and what was rounded away is
another number for each greatest logit so far. Up to LARGE that is less than 2^-8. Rows with greater exponents are marked, and so
are those whose weights overflowed before a greater logit came: their results or log-sum-exps are NaN. Their differences from the
greatest logit are taken before they are multiplied.

Marks are numbers of programs in memory, one for 64 rows. They are put back to 0, as the counter of tiles is, next to which they
lie. Flags in shared memory say whether a program made any.
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
from opkit.attn.gpu.hopper.device.softmax import capped, exp2, row_sums
from opkit.attn.gpu.hopper.device.work import ROWS

_FIRST = gl.constexpr(2)  #: place of the first mark
_ONE, _ALL = gl.constexpr(12), gl.constexpr(13)  #: named barriers: of the first warpgroup, and of all that multiply
_KEYS = gl.constexpr(32)
_CHANNELS = gl.constexpr(64)
_LARGE = gl.constexpr(65536.0)  #: of exponents of 2


@gluon.jit
def _mine():
    """Return the mark of this program."""
    return gl.program_id(0).to(gl.int32) + 1


@gluon.jit
def no_flags(WARPGROUPS: gl.constexpr):
    """Return a flag for each row of each warpgroup, to be set where a mark was made; all are 0."""
    flags = gl.allocate_shared_memory(gl.int32, [WARPGROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    for i in gl.static_range(WARPGROUPS):
        flags.index(i).store(gl.zeros([ROWS], gl.int32, layout=gl.BlockedLayout([2], [32], [4], [0])))
    return flags


@gluon.jit
def checked(problem, total, acc):
    """Return the sums of weights, NaN in rows with results that are not numbers.

    Without a mask these are all results of a row in which a weight overflowed before a greater logit came.
    """
    if problem.MASKED:
        sums = row_sums(acc)
    else:
        first, _ = gl.split(gl.reshape(acc, [ROWS, acc.shape[1] // 8, 4, 2]))
        sums = _first_of_last(gl.permute(first, (0, 2, 1)))
    sums = gl.convert_layout(sums, total.type.layout, assert_trivial=True)
    return gl.where(sums == sums, total, float("nan"))


@gluon.jit
def _first_of_last(x):
    """Return the first element of the last dimension, which is a power of two and within a thread."""
    if x.shape[2] == 1:
        return gl.reshape(x, [x.shape[0], x.shape[1]])
    else:  # noqa: RET505 - of a return behind an `if` alone Triton takes both
        half, _ = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
        return _first_of_last(half)


@gluon.jit
def mark_rows(problem, others, powers, flags, before, place):
    """Mark 64 rows if some logarithm of a row's weights is not a number, or huge; ``place`` is their number among all.

    ``before`` is what their ``flags`` have been.
    """
    bad = ~(gl.abs(powers) <= _LARGE)
    if problem.MASKED:
        bad = bad & (powers != float("-inf"))
    zeros = gl.zeros_like(before)
    gl.store(others[7] + _FIRST + place + zeros, _mine() + zeros, mask=bad)
    flags.store(before | bad.to(gl.int32))


@gluon.constexpr_function
def _barrier(number, threads):
    return f"cp.async.bulk.wait_group 0; bar.sync {number}, {threads}; mov.b32 $0, 0;"


@gluon.jit
def _meet(NUMBER: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Wait for the other threads of some warpgroups, and for what they have stored."""
    text: gl.constexpr = _barrier(NUMBER, 128 * WARPGROUPS)
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def recompute_rows(ME: gl.constexpr, problem, others):
    """Compute again what this program has marked, by its first warpgroup.

    Each copy of this code takes registers and room in the instruction cache from the main loops.
    """
    _meet(_ALL, problem.WARPGROUPS)
    if ME == 0:
        flags = gl.to_tensor(0)
        for i in gl.static_range(problem.WARPGROUPS):
            flags |= gl.max(others[8].index(i).load(gl.BlockedLayout([2], [32], [4], [0])), 0)
        if flags != 0:
            _recompute_marked(problem, others)


@gluon.jit
def _recompute_marked(problem, others):
    blocks = load_size(others[2], 0) * problem.WARPGROUPS
    for place in range(load_size(others[2], 1) * problem.WARPGROUPS):
        mark = others[7] + _FIRST + place
        if gl.load(mark, volatile=True) == _mine():
            row = place % blocks * ROWS
            for i in range(row, gl.minimum(row + ROWS, problem.queries)):
                _recompute_row(problem, others, place // blocks, i)
            _meet(_ONE, 1)  # all have seen the mark
            gl.store(mark, 0)


@gluon.jit
def _recompute_row(problem, others, head, i):
    """The results of one row, ``head`` counted among those of all batches."""
    table, lse, sinks, inner, factor = others[2], others[3], others[4], others[5], others[6]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
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
