"""Indices in their normal form."""

from opkit.compiler.ir.index import axis, size


def test_a_quotient_and_a_remainder_are_told_apart():
    """As tuples of the same fields they would be equal, and a sum would mix them up."""
    at, n = axis(0, 6 * size("n")), size("n")
    assert at // n != at % n
    assert len((at // n + at % n).terms) == 2
