"""Functions that generated kernels call. Nothing but their text imports this module, for it imports Triton."""

# ruff: noqa: ANN001, ANN201
# pyright: reportOperatorIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from triton.language.extra import libdevice

# ---- what reductions combine values with -------------------------------------------------------------------------------


@triton.jit
def opk_add(a, b):
    return a + b


@triton.jit
def opk_mul(a, b):
    return a * b


@triton.jit
def opk_or(a, b):
    return a | b


@triton.jit
def opk_and(a, b):
    return a & b


@triton.jit
def opk_max(a, b):
    return tl.maximum(a, b)


@triton.jit
def opk_min(a, b):
    return tl.minimum(a, b)


@triton.jit
def opk_max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def opk_min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


# ---- arithmetic of integers: by zero, 0 --------------------------------------------------------------------------------


@triton.jit
def opk_div(a, b):
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b)).to(a.dtype)


@triton.jit
def opk_fmod(a, b):
    return tl.where(b == 0, 0, a % tl.where(b == 0, 1, b)).to(a.dtype)


@triton.jit
def opk_floordiv(a, b):
    quotient = opk_div(a, b)
    rest = a - quotient * b
    below = (b != 0) & (rest != 0) & ((rest < 0) != (b < 0))
    return quotient - below.to(a.dtype)


@triton.jit
def opk_rem(a, b):
    rest = opk_fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def opk_pow(a, b):
    odd = tl.where((b & 1) != 0, a, 1).to(a.dtype)
    inverse = tl.where(a == 1, 1, tl.where(a == -1, odd, 0)).to(a.dtype)
    negative = b < 0
    left = tl.where(negative, 0, b).to(b.dtype)
    power = left * 0 + 1 + a * 0
    factor = a + left * 0
    for _ in range(64):
        power = tl.where((left & 1) != 0, power * factor, power).to(a.dtype)
        factor = factor * factor
        left = left >> 1
    return tl.where(negative, inverse, power)


@triton.jit
def opk_shl(a, b, BITS: tl.constexpr):
    outside = (b < 0) | (b >= BITS)
    return tl.where(outside, 0, a << tl.where(outside, 0, b).to(b.dtype)).to(a.dtype)


@triton.jit
def opk_shr(a, b, BITS: tl.constexpr):
    shift = tl.where((b < 0) | (b >= BITS), BITS - 1, b).to(b.dtype)
    return a >> shift


@triton.jit
def opk_shr_unsigned(a, b, BITS: tl.constexpr):
    outside = b >= BITS
    return tl.where(outside, 0, a >> tl.where(outside, 0, b).to(b.dtype)).to(a.dtype)


# ---- arithmetic of floats ------------------------------------------------------------------------------------------------


@triton.jit
def opk_rem_float(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def opk_one_plus_erf(x):
    """Return 1 + erf(x), for results of bfloat16 or float16.

    It is erfc(-x), whose logarithm is a polynomial: the absolute error is below 2.5e-7, and the relative one of small results
    below 1.2e-4 down to x = -3.8. Below, where 1 + erf(x) in float32 is 0 or almost 0, it falls faster than erfc.
    """
    z = tl.abs(x)
    power = -1.39351204778814e-05 * z + 1.711760414764285e-04
    power = power * z - 5.575013346970081e-04
    power = power * z - 2.3418068885803223e-03
    power = power * z + 2.9631713405251503e-02
    power = power * z - 1.4909635484218597e-01
    power = power * z - 9.182934165000916e-01
    power = power * z - 1.6279164552688599
    rest = tl.exp2(power * z)
    return tl.where(x > 0, 2.0 - rest, rest)


@triton.jit
def opk_one_plus_tanh(x):
    rest = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x > 0, 2.0, 2.0 * rest) * (1.0 / (1.0 + rest))


@triton.jit
def opk_one_minus_tanh_squared(x):
    rest = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + rest)
    return 4.0 * rest * inverse * inverse


@triton.jit
def opk_online_sum(total, greatest, x):
    """Return the sum of exp(x - greatest) with one more x, where ``greatest`` becomes x if that is greater.

    The method is Milakov and Gimelshein's (2018). One of the two exponentials is always 1. ``greatest`` is never -inf.
    """
    factor = tl.exp(-tl.abs(x - greatest))
    return tl.where(x > greatest, total * factor + 1.0, total + factor)


# ---- random numbers: those of the C emitter for the same seed and count ---------------------------------------------------


@triton.jit
def opk_philox(seed, count):
    seed, count = seed.to(tl.uint64), count.to(tl.uint64)
    zero = (count * 0).to(tl.uint32)
    low, high = count.to(tl.uint32), (count >> 32).to(tl.uint32)
    return tl.philox_impl(low, high, zero, zero, zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32), 10)


@triton.jit
def opk_random_f32(seed, count):
    a, b, c, d = opk_philox(seed, count // 64 * 16 + count % 16)
    number = count // 16 % 4
    word = tl.where(number == 0, a, tl.where(number == 1, b, tl.where(number == 2, c, d)))
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def opk_random_f64(seed, count):
    a, b, _, _ = opk_philox(seed, count)
    low = ((a & 0x3F) << 21) | (b >> 11)
    high = (a >> 6).to(tl.int32).to(tl.float64)
    return (high * 134217728.0 + low.to(tl.int32).to(tl.float64)) * 1.1102230246251565e-16
