"""Complex numbers as pairs of elements: arithmetic and functions, written with those of real numbers.

A product is four real products, also by a real number, as in ATen, so that infinities and NaN are the same.
Quotients, absolute values and square roots are scaled, so that they overflow only where the result does.

>>> from opkit.compiler.lower.scalar import number
>>> z = Complex(number(3.0, "f64"), number(-4.0, "f64")) * 2
>>> z.re.expr, z.im.expr
(6.0, -8.0)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from opkit.compiler.ir.index import Index
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.rules.pointwise import copysign, hypotenuse
from opkit.compiler.lower.scalar import Scalar

Number = complex | float | int | bool | Index


@dataclasses.dataclass(frozen=True, eq=False)
class Complex:
    """One element; a number on the other side of an operator takes its type."""

    re: Scalar
    im: Scalar

    @property
    def part(self) -> str:
        """The type of the two parts."""
        return self.re.dtype

    def __add__(self, other: Operand) -> Complex:
        y = number(other, self.part)
        return Complex(self.re + y.re, self.im + y.im)

    def __sub__(self, other: Operand) -> Complex:
        y = number(other, self.part)
        return Complex(self.re - y.re, self.im - y.im)

    def __rsub__(self, other: Operand) -> Complex:
        return number(other, self.part) - self

    def __mul__(self, other: Operand) -> Complex:
        y = number(other, self.part)
        return Complex(self.re * y.re - self.im * y.im, self.re * y.im + self.im * y.re)

    def __truediv__(self, other: Operand) -> Complex:
        return quotient(self, number(other, self.part))

    def __rtruediv__(self, other: Operand) -> Complex:
        return quotient(number(other, self.part), self)

    def __neg__(self) -> Complex:
        return Complex(-self.re, -self.im)

    __radd__, __rmul__ = __add__, __mul__


Operand = Complex | Number
Formula = Callable[..., Complex]


def number(value: Operand, part: str) -> Complex:
    """Return a number as a constant whose parts are of a type; an element as it is."""
    if isinstance(value, Complex):
        return value
    if isinstance(value, complex):
        return Complex(f.number(value.real, part), f.number(value.imag, part))
    return Complex(f.number(value, part), f.number(0, part))


# ---- choices and truth -----------------------------------------------------------------------------------------------


def where(condition: Scalar, yes: Complex, no: Complex) -> Complex:
    return Complex(f.where(condition, yes.re, no.re), f.where(condition, yes.im, no.im))


def equal(x: Complex, y: Complex) -> Scalar:
    return f.equal(x.re, y.re) & f.equal(x.im, y.im)


def unequal(x: Complex, y: Complex) -> Scalar:
    return ~equal(x, y)


def truth(x: Complex) -> Scalar:
    """Return whether it is not 0."""
    return f.truth(x.re) | f.truth(x.im)


def _is_infinite(x: Scalar) -> Scalar:
    return f.equal(f.absolute(x), math.inf)


def is_nan(x: Complex) -> Scalar:
    return f.is_nan(x.re) | f.is_nan(x.im)


def is_infinite(x: Complex) -> Scalar:
    return _is_infinite(x.re) | _is_infinite(x.im)


def is_finite(x: Complex) -> Scalar:
    return (f.absolute(x.re) < math.inf) & (f.absolute(x.im) < math.inf)


# ---- absolute value and angle -------------------------------------------------------------------------------------------


def conjugate(x: Complex) -> Complex:
    return Complex(x.re, -x.im)


def absolute(x: Complex) -> Scalar:
    return hypotenuse(x.re, x.im)


def angle(x: Complex) -> Scalar:
    return f.apply("atan2", x.im, x.re)


def polar(size: Scalar, angle: Scalar) -> Complex:
    return Complex(size * f.cos(angle), size * f.sin(angle))


def sign(x: Complex) -> Complex:
    """Return the number of absolute value 1 with the same angle; 0 for 0."""
    size = absolute(x)
    zero = f.equal(size, 0)
    return Complex(f.where(zero, 0, x.re / size), f.where(zero, 0, x.im / size))


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def quotient(x: Complex, y: Complex) -> Complex:
    """Return the quotient by Smith's method: divide by the larger part of the divisor first."""
    wide = f.absolute(y.re) >= f.absolute(y.im)
    large, small = f.where(wide, y.re, y.im), f.where(wide, y.im, y.re)
    ratio = small / large
    scale = 1 / (large + small * ratio)
    re = f.where(wide, x.re + x.im * ratio, x.re * ratio + x.im) * scale
    im = f.where(wide, x.im - x.re * ratio, x.im * ratio - x.re) * scale
    zero = f.equal(y.re, 0) & f.equal(y.im, 0)
    return Complex(f.where(zero, x.re / f.absolute(y.re), re), f.where(zero, x.im / f.absolute(y.im), im))


def reciprocal(x: Complex) -> Complex:
    return 1 / x


def square(x: Complex) -> Complex:
    return x * x


def square_root(x: Complex) -> Complex:
    """Return the root in the right half of the plane, computed from a quarter of the argument."""
    a, b = f.absolute(x.re) * 0.25, f.absolute(x.im) * 0.25
    large = 2 * f.sqrt((a + hypotenuse(a, b)) * 0.5)
    small = f.where(f.equal(large, 0), 0, f.absolute(x.im) / (2 * large))
    right = ~(x.re < 0)
    re, im = f.where(right, large, small), copysign(f.where(right, small, large), x.im)
    return Complex(f.where(_is_infinite(x.im), math.inf, re), f.where(_is_infinite(x.im), x.im, im))


def power(x: Complex, exponent: float) -> Complex:
    """Return a power whose exponent is a multiple of a half, by products of squares and the square root."""
    if exponent < 0:
        return 1 / power(x, -exponent)
    whole = number(1, x.part) if exponent < 1 else _whole_power(x, int(exponent))
    half = exponent % 1 != 0
    return (square_root(x) if exponent < 1 else whole * square_root(x)) if half else whole


def _whole_power(x: Complex, exponent: int) -> Complex:
    if exponent == 1:
        return x
    rest = _whole_power(x * x, exponent // 2)
    return rest * x if exponent % 2 else rest


# ---- functions -------------------------------------------------------------------------------------------------------


def exp(x: Complex) -> Complex:
    """Return the exponential, by the square root of its absolute value, which does not overflow if the result does not."""
    half = f.exp(x.re * 0.5)
    im = f.where(f.equal(x.im, 0), x.im, (half * f.sin(x.im)) * half)
    return Complex((half * f.cos(x.im)) * half, im)


def log(x: Complex) -> Complex:
    return Complex(f.log(absolute(x)), angle(x))


def sin(x: Complex) -> Complex:
    return Complex(f.sin(x.re) * f.apply("cosh", x.im), f.cos(x.re) * f.apply("sinh", x.im))


def cos(x: Complex) -> Complex:
    return Complex(f.cos(x.re) * f.apply("cosh", x.im), -(f.sin(x.re) * f.apply("sinh", x.im)))


def sinh(x: Complex) -> Complex:
    return Complex(f.apply("sinh", x.re) * f.cos(x.im), f.apply("cosh", x.re) * f.sin(x.im))


def cosh(x: Complex) -> Complex:
    return Complex(f.apply("cosh", x.re) * f.cos(x.im), f.apply("sinh", x.re) * f.sin(x.im))


def tanh(x: Complex) -> Complex:
    """Return tanh by the sum of tanh(re) and tanh(i im), which does not overflow."""
    u, v = f.tanh(x.re), f.apply("tan", x.im)
    slope = 1 / f.apply("cosh", x.re)
    below = 1 + (u * v) * (u * v)
    return Complex(u * (1 + v * v) / below, v * (slope * slope) / below)


def tan(x: Complex) -> Complex:
    rotated = tanh(Complex(-x.im, x.re))
    return Complex(rotated.im, -rotated.re)


def sigmoid(x: Complex) -> Complex:
    return 1 / (1 + exp(-x))


def scaled(x: Complex, by: float) -> Complex:
    """Return each part times a real number."""
    return Complex(x.re * by, x.im * by)
