"""The softmax of a warpgroup's 64 rows on Hopper, in registers: four threads share a row.

Logits are in units in which ``factor`` times them are powers of two; ``-inf`` stands for what a row does not see.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LOG2E = gl.constexpr(1.4426950408889634)
_FEW = gl.constexpr(32)  #: registers of a thread


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def capped(logits, inner, CAPPED: gl.constexpr):
    """tanh of the logits times ``inner``, or the logits themselves."""
    if CAPPED:
        grown = exp2(logits * (inner * (2 * _LOG2E)))
        return 1.0 - 2.0 / (grown + 1.0)
    return logits


@gluon.jit
def row_max(logits):
    """Return the largest logit of each row; most of it within a thread."""
    M: gl.constexpr = logits.shape[0]
    N: gl.constexpr = logits.shape[1]
    found = gl.max(gl.max(gl.max(gl.reshape(logits, [M, N // 8, 4, 2]), 3), 1), 1)
    return gl.convert_layout(found, gl.SliceLayout(1, logits.type.layout), assert_trivial=True)


@gluon.jit
def row_sums(p):
    """Four sums for each row, one of each thread that has a part of it."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def base_of(top, factor):
    """Return what is taken from exponents: 0 of rows that saw nothing, so that no difference of infinities arises."""
    return gl.where(top == float("-inf"), 0.0, top * factor)


@gluon.jit
def weights(logits, top, factor):
    """Return the exponentials of logits, each row's divided by that of its maximum."""
    return exp2(logits * factor - base_of(top, factor)[:, None])


@gluon.jit
def exact_weights(logits, top, factor):
    """Return the same for logits so large that the power of the rounding error of ``top * factor`` may overflow."""
    return exp2((logits - base_of(top, 1.0)[:, None]) * factor)


@gluon.jit
def added(total, by, p):
    """Return the sums of each row, once they are multiplied by what belongs to the row, with those of further exponentials."""
    factors = gl.convert_layout(by, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return total * factors[:, None] + row_sums(p)


@gluon.constexpr_function
def _rescaling(n):
    """Multiply ``n`` registers by as many others, unless all of these are 1 in the whole warp: there are two rows a thread."""
    multiply = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni L${{:uid}}; {multiply} L${{:uid}}: }}"
    )


@gluon.constexpr_function
def _rescaling_registers(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescaled(acc, by):
    """``acc`` with each row times its factor; few columns are multiplied without asking whether it is 1."""
    N: gl.constexpr = acc.shape[1] // 2
    if N <= _FEW:
        return acc * gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout))[:, None]
    text: gl.constexpr = _rescaling(N)
    registers: gl.constexpr = _rescaling_registers(N)
    factors = gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout))[:, None]
    factors, acc = gl.broadcast(factors, acc)
    return gl.inline_asm_elementwise(text, registers, [acc, factors], dtype=gl.float32, is_pure=False, pack=N)


@gluon.jit
def raised(top, now, factor, SLACK: gl.constexpr):
    """Return the rows' maxima, raised where they grow by more than SLACK powers of two, and what earlier sums are multiplied by.

    Slack spares most of these products. But the greatest weight of a row is then not always 1, and rounded: in bfloat16 errors
    compared with float64 were 4 % greater with a slack of 8 than with none (mean squares), the greatest up to 1.6 times as great.
    """
    now = gl.maximum(top, now)
    if SLACK > 0:
        grows = (now - top) * factor > SLACK
        now = gl.where(grows, now, top)
        return now, gl.where(grows, exp2((top - now) * factor), 1.0)
    base = gl.where(now == float("-inf"), 0.0, now)
    return now, exp2((top - base) * factor)


@gluon.jit
def normal(top, total, sinks, head, SINKS: gl.constexpr):
    """By what a row's sums are multiplied, and the logarithm, base 2, of its sum of exponentials.

    ``top`` is the exponent that was taken from those of ``total``, or -inf.
    """
    if SINKS:
        sink = gl.load(sinks + head) * _LOG2E
        most = gl.maximum(top, sink)
        base = gl.where(most == float("-inf"), 0.0, most)
        shift = exp2(top - base)
        total = total * shift + exp2(sink - base)
        return gl.where(total == 0.0, 0.0, shift / total), base + gl.log2(total)
    return gl.where(total == 0.0, 0.0, 1.0 / total), top + gl.log2(total)
