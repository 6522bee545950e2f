"""Integer expressions over loop axes and sizes: where an element is, and how often a loop runs.

An :class:`Index` is a polynomial with integer coefficients in a normal form: two are equal in Python exactly if their values are
always equal. Its atoms are loop axes, symbolic sizes, floor divisions and remainders that could not be resolved, and integers
that are read from memory (``x[i]`` as an index of ``y``).

>>> i, j = axis(0, 8), axis(1, 4)
>>> flat = i * 4 + j
>>> flat // 4 == i, flat % 4 == j
(True, True)
>>> n = size("s0")
>>> print((axis(0, n) * n + axis(1, n)) // n)
a0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, Union


class Axis(NamedTuple):
    """The variable of a loop: 0 <= value < extent."""

    number: int
    extent: Index

    def __str__(self) -> str:
        return f"a{self.number}"


class Symbol(NamedTuple):
    """A size that is known when the program runs: at least ``least``."""

    name: str
    least: int = 1

    def __str__(self) -> str:
        return self.name


class Div(NamedTuple):
    """The quotient rounded down; the divisor is positive."""

    dividend: Index
    divisor: Index
    operator: str = "//"  # tuples of other classes are equal to this one if their fields are

    def __str__(self) -> str:
        return f"({self.dividend})//({self.divisor})"


class Mod(NamedTuple):
    """The remainder of :class:`Div`: 0 <= value < divisor."""

    dividend: Index
    divisor: Index
    operator: str = "%"

    def __str__(self) -> str:
        return f"({self.dividend})%({self.divisor})"


class Value(NamedTuple):
    """An integer that is computed: an expression of the IR (``opkit.compiler.ir.expr.Expr``)."""

    expr: Any

    def __str__(self) -> str:
        return f"[{self.expr}]"


Atom: TypeAlias = Axis | Symbol | Div | Mod | Value
Monomial: TypeAlias = tuple[Atom, ...]
IndexLike: TypeAlias = Union["Index", int]


class Index:
    """A polynomial, made with :func:`index`, ``axis``, ``size`` and arithmetic.

    Attributes:
        terms: the coefficient of each monomial; () is the constant one. No coefficient is 0.
    """

    __slots__ = ("_hash", "terms")
    terms: dict[Monomial, int]

    def __init__(self, terms: dict[Monomial, int]) -> None:
        self.terms = terms
        self._hash = hash(frozenset(terms.items()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.constant == other
        return isinstance(other, Index) and self._hash == other._hash and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    @property
    def constant(self) -> int | None:
        """Its value if it has no atoms, else None."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    def __str__(self) -> str:
        texts = ["*".join([*map(str, m), *([] if c == 1 and m else [str(c)])]) for m, c in self.terms.items()]
        return " + ".join(texts) or "0"

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise TypeError(f"The index {self} is neither true nor false: compare it with ==.")

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def __add__(self, other: IndexLike) -> Index:
        other = index(other)
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            total = terms.pop(monomial, 0) + coefficient
            if total:
                terms[monomial] = total
        return Index(terms)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: IndexLike) -> Index:
        return self + index(other) * -1

    def __rsub__(self, other: IndexLike) -> Index:
        return index(other) - self

    def __mul__(self, other: IndexLike) -> Index:
        many, one = (self, index(other)) if self.constant is None else (index(other), self)
        if (constant := one.constant) is not None:
            return many if constant == 1 else Index({m: c * constant for m, c in many.terms.items() if constant})
        terms: dict[Monomial, int] = {}
        for a, x in self.terms.items():
            for b, y in index(other).terms.items():
                monomial = tuple(sorted((*a, *b), key=_sort_key)) if a and b else a or b
                terms[monomial] = terms.get(monomial, 0) + x * y
        return Index({m: c for m, c in terms.items() if c})

    __rmul__ = __mul__

    def __floordiv__(self, other: IndexLike) -> Index:
        return _divided(self, index(other))[0]

    def __mod__(self, other: IndexLike) -> Index:
        return _divided(self, index(other))[1]

    # ---- its parts ---------------------------------------------------------------------------------------------------

    def atoms(self) -> set[Atom]:
        """Return the atoms of its monomials; not those inside quotients and remainders."""
        return {atom for monomial in self.terms for atom in monomial}

    def axes(self) -> set[Axis]:
        """Return the axes among its leaves."""
        return {atom for atom in self.leaves() if isinstance(atom, Axis)}

    def leaves(self) -> set[Atom]:
        """Return every axis, size and value it depends on, also within quotients and remainders; not through values."""
        inner = [a.dividend.leaves() | a.divisor.leaves() if isinstance(a, Div | Mod) else {a} for a in self.atoms()]
        return set().union(*inner)

    def coefficient(self, of: Axis) -> Index | None:
        """Return what ``of`` is multiplied by, if the index is linear in it; else None."""
        terms: dict[Monomial, int] = {}
        for monomial, c in self.terms.items():
            if any(of in atom.dividend.axes() for atom in monomial if isinstance(atom, Div | Mod)):
                return None
            if of in monomial:
                rest = list(monomial)
                rest.remove(of)
                if of in rest:
                    return None
                terms[tuple(rest)] = c
        return Index(terms)

    def substitute(self, axes: Mapping[Any, IndexLike]) -> Index:
        """Return the index with the axes, sizes and values that the mapping names replaced."""
        parts = ((index(c), *(_replaced(atom, axes) for atom in m)) for m, c in self.terms.items())
        return _recombined(sum((functools.reduce(lambda a, b: a * b, part) for part in parts), ZERO))


ZERO = Index({})


def index(value: IndexLike) -> Index:
    """Return an integer as an index.

    >>> print(index(3) * 2)
    6
    """
    return value if isinstance(value, Index) else _constant(value)


@functools.cache
def _constant(value: int) -> Index:
    return Index({(): int(value)} if value else {})


@functools.lru_cache(4096)
def axis(number: int, extent: IndexLike) -> Index:
    """Return the loop variable ``a<number>``, which runs from 0 to below ``extent``; 0 itself where that is 1."""
    return ZERO if extent == 1 else Index({(Axis(number, index(extent)),): 1})


def size(name: str, least: int = 1) -> Index:
    """Return a symbolic size."""
    return Index({(Symbol(name, least),): 1})


def value(expr: Any) -> Index:
    """Return an integer expression as an index."""
    return Index({(Value(expr),): 1})


def product(of: Iterable[IndexLike]) -> Index:
    """Return the product of indices.

    >>> print(product([2, size("n"), 3]))
    n*6
    """
    return functools.reduce(lambda a, b: a * index(b), of, index(1))


def flat(coordinates: Iterable[Index], strides: Iterable[IndexLike]) -> Index:
    """Return the sum of each coordinate times its stride."""
    return _recombined(sum((c * s for c, s in zip(coordinates, strides, strict=True)), ZERO))


def contiguous(shape: Iterable[IndexLike]) -> tuple[Index, ...]:
    """Return the strides of a row-major tensor, in elements.

    >>> contiguous([2, 3, 4])
    (12, 4, 1)
    """
    return _contiguous(tuple(shape))


@functools.lru_cache(4096)
def _contiguous(shape: tuple[IndexLike, ...]) -> tuple[Index, ...]:
    return tuple(product(shape[k + 1 :]) for k in range(len(shape)))


# ---- normal form -----------------------------------------------------------------------------------------------------


def _sort_key(atom: Atom) -> tuple[str, str]:
    return type(atom).__name__, str(atom)


def _recombined(a: Index) -> Index:
    """Return the index with ``x`` for ``x // b * b + x % b``, which results from two reshapes that undo each other."""
    for monomial, c in a.terms.items():
        for atom in monomial:
            if type(atom) is Mod and len(atom.divisor.terms) == 1:
                at = monomial.index(atom)
                rest = Index({monomial[:at] + monomial[at + 1 :]: c})
                quotients = [d for d in a.atoms() if type(d) is Div and d.divisor == atom.divisor]
                for quotient in (d for d in quotients if _congruent(d.dividend, atom)):
                    whole = Index({(quotient,): 1}) * atom.divisor * rest
                    if all(a.terms.get(m) == x for m, x in whole.terms.items()):
                        return _recombined(a - whole - Index({monomial: c}) + quotient.dividend * rest)
    return a


def _congruent(x: Index, remainder: Mod) -> bool:
    """Return whether ``x`` is the dividend of a remainder, or the dividend's remainder by a multiple of the divisor."""
    if x == remainder.dividend:
        return True
    (inner, *_) = (*x.atoms(), None)
    if not isinstance(inner, Mod) or inner.dividend != remainder.dividend or x != Index({(inner,): 1}):
        return False
    return _exact_part(inner.divisor, remainder.divisor)[1] == 0


def _replaced(atom: Atom, axes: Mapping[Any, IndexLike]) -> Index:
    if atom in axes:
        return index(axes[atom])
    if isinstance(atom, Div):
        return atom.dividend.substitute(axes) // atom.divisor.substitute(axes)
    if isinstance(atom, Mod):
        return atom.dividend.substitute(axes) % atom.divisor.substitute(axes)
    if isinstance(atom, Value):
        return value(atom.expr.substitute(axes))
    return Index({(atom,): 1})


def _divided(a: Index, b: Index) -> tuple[Index, Index]:
    """Return the quotient and the remainder, as simple as possible."""
    if b == 1:
        return a, ZERO
    quotient, rest = _exact_part(a, b)
    if not rest.terms or is_below(rest, b):
        return quotient, rest
    own = [math.gcd(c, *b.terms.values()) for c in rest.terms.values()]
    for factor in sorted({*own, math.gcd(*own)} - {1}, reverse=True):
        small = Index({m: c for m, c in rest.terms.items() if c % factor})
        if is_below(small, index(factor)):  # (x * p + y) // (p * q) is x // q if y is below p
            q, r = _divided(*(Index({m: c // factor for m, c in x.terms.items()}) for x in (rest - small, b)))
            return quotient + q, r * factor + small
    (inner,) = rest.atoms() if list(rest.terms.values()) == [1] and len(next(iter(rest.terms))) == 1 else (None,)
    if isinstance(inner, Div) and b.constant is not None:  # (x // p) // q is x // (p * q)
        whole = inner.dividend // (inner.divisor * b)
        return quotient + whole, rest - whole * b
    if isinstance(inner, Mod) and _exact_part(inner.divisor, b)[1] == 0:  # (x % (p * b)) % b is x % b
        remainder = inner.dividend % b
        return quotient + Index({(Div(rest, b),): 1}), remainder
    return quotient + Index({(Div(rest, b),): 1}), Index({(Mod(rest, b),): 1})


def _exact_part(a: Index, b: Index) -> tuple[Index, Index]:
    """Return ``quotient, rest`` with ``a == quotient * b + rest``; all terms that can be divided are in the quotient."""
    if a == b:
        return index(1), ZERO
    if len(b.terms) != 1:
        return ZERO, a
    ((monomial, c),) = b.terms.items()
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for m, x in a.terms.items():
        part = _without(m, monomial)
        if part is not None and (m == () or x % c == 0 or x < 0 or x > c):
            quotient[part] = quotient.get(part, 0) + x // c
            rest[m] = x % c
        else:
            rest[m] = x
    return Index({m: x for m, x in quotient.items() if x}), Index({m: x for m, x in rest.items() if x})


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """Return the monomial divided by another, or None if it has not all of its atoms."""
    rest = list(monomial)
    for atom in divisor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


# ---- bounds -----------------------------------------------------------------------------------------------------------


def lower(a: Index) -> Index | None:
    """Return a lower bound over sizes alone; None if none is known."""
    bound = upper(-a)
    return None if bound is None else -bound


def upper(a: Index) -> Index | None:
    """Return an upper bound over sizes alone; None if none is known."""
    total = ZERO
    for monomial, c in a.terms.items():
        limits = [_limits(atom) for atom in monomial]
        if any(limit is None for limit in limits):
            return None
        chosen = [limit[c > 0] for limit in limits if limit is not None]
        total = total + functools.reduce(lambda x, y: x * y, chosen, index(c))
    return total


def _limits(atom: Atom) -> tuple[Index, Index] | None:
    """Return the least and greatest value of an atom; atoms without a known sign have none."""
    if isinstance(atom, Axis | Mod):
        return ZERO, (atom.extent if isinstance(atom, Axis) else atom.divisor) - 1
    if isinstance(atom, Symbol):
        return Index({(atom,): 1}), Index({(atom,): 1})
    if isinstance(atom, Div):
        low, high = lower(atom.dividend), upper(atom.dividend)
        if low is None or high is None or not is_nonnegative(low):
            return None
        return ZERO, high // atom.divisor
    return None


def is_nonnegative(a: Index) -> bool:
    """Return whether it is known that the value, over sizes alone, is at least 0."""
    if all(c >= 0 for c in a.terms.values()):
        return not any(isinstance(atom, Value) for atom in a.atoms())
    if any(not isinstance(atom, Symbol) for atom in a.atoms()):
        return False
    shifted = a.substitute({atom: Index({(atom,): 1}) + atom.least for atom in a.atoms() if isinstance(atom, Symbol)})
    return all(c >= 0 for c in shifted.terms.values())


def is_below(a: Index, limit: Index) -> bool:
    """Return whether it is known that 0 <= a < limit."""
    low, high = lower(a), upper(a)
    return low is not None and high is not None and is_nonnegative(low) and is_nonnegative(limit - high - 1)
