"""This module writes indices as C: sums of products of 64-bit integers."""

from __future__ import annotations

from collections.abc import Callable

from opkit.compiler.ir.index import Atom, Axis, Div, Index, Mod, Size, is_nonnegative, lower, upper

Spell = Callable[[Atom], str]


def text(index: Index, spell: Spell) -> str:
    """Return the value; ``spell`` writes the atoms. Terms with the fewest axes come first, so that a loop's own stands last.

    >>> from opkit.compiler.ir.index import axis, size
    >>> text(axis(1, 8) + axis(0, 4) * 8 * size("n") - 3, plain)
    '-3 + a0*n_n*8 + a1'
    """
    terms = [_term([spell(atom) for atom in monomial], c) for monomial, c in sorted(index.terms.items(), key=_depth)]
    return " + ".join(terms) or "0"


def _term(factors: list[str], coefficient: int) -> str:
    number = (
        [] if coefficient == 1 and factors else [f"{coefficient}" if abs(coefficient) < 2**31 else f"{coefficient}L"]
    )
    return "*".join([*factors, *number])


def _depth(term: tuple[tuple[Atom, ...], int]) -> int:
    numbers = [atom.number for atom in term[0] if isinstance(atom, Axis)]
    return max(numbers, default=-1)


def plain(atom: Atom) -> str:
    """Return an axis or a size by the name of its variable."""
    assert isinstance(atom, Axis | Size), atom
    return f"a{atom.number}" if isinstance(atom, Axis) else f"n_{atom.name}"


def nested(atom: Atom) -> str:
    """Return an axis or a size by its name, quotients and remainders in full."""
    return divided(atom, nested) if isinstance(atom, Div | Mod) else plain(atom)


def divided(atom: Div | Mod, spell: Spell) -> str:
    """Return a quotient or remainder: unsigned where nothing is negative, in 32 bits where all fits, for these are fast.

    >>> from opkit.compiler.ir.index import axis, size
    >>> divided(Div(axis(0, 8), axis(1, 4)), plain), divided(Mod(axis(0, size("n")), size("m")), plain)
    ('(int64_t)((uint32_t)(a0)/(uint32_t)(a1))', '(int64_t)((uint64_t)(a0)%(uint64_t)(n_m))')
    """
    a, b = text(atom.dividend, spell), text(atom.divisor, spell)
    low, high = lower(atom.dividend), upper(atom.dividend)
    if low is None or not is_nonnegative(low):
        return f"opk_{'floordiv' if isinstance(atom, Div) else 'rem'}_i64({a}, {b})"
    most = high.constant if high is not None else None
    size = 32 if most is not None and most < 2**31 and _fits(atom.divisor) else 64
    sign = "/" if isinstance(atom, Div) else "%"
    return f"(int64_t)((uint{size}_t)({a}){sign}(uint{size}_t)({b}))"


def _fits(divisor: Index) -> bool:
    high = upper(divisor)
    return high is not None and high.constant is not None and high.constant < 2**31
