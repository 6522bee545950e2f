"""An index has the value of the arithmetic that made it, whatever form it is kept in."""

import functools
import operator

import hypothesis
from hypothesis import strategies as st

from opkit.compiler.ir.index import Axis, Index, axis, contiguous, flat, index, is_below, lower, size, upper

N = size("s0", least=2)
_KINDS = {"+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}


def evaluate(at, values):
    total = 0
    for monomial, coefficient in at.terms.items():
        for atom in monomial:
            coefficient *= _atom(atom, values)
        total += coefficient
    return total


def _atom(atom, values):
    if hasattr(atom, "dividend"):
        a, b = evaluate(atom.dividend, values), evaluate(atom.divisor, values)
        return a // b if type(atom).__name__ == "Div" else a % b
    return values[atom.number] if isinstance(atom, Axis) else values[atom.name]


@st.composite
def arithmetic(draw):
    """An index and the function that computes the same from plain numbers."""
    extents = [draw(st.integers(2, 9)), draw(st.integers(2, 9)), N]
    atoms = [(axis(k, e), lambda v, k=k: v[k]) for k, e in enumerate(extents)]
    atoms += [(N, lambda v: v["s0"]), (index(draw(st.integers(0, 40))), None)]
    made = [(a, f or (lambda v, c=a.constant: c)) for a, f in atoms]
    for _ in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from(list(_KINDS)))
        (a, f), (b, g) = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        if name in ("//", "%"):
            b = draw(st.sampled_from([index(draw(st.integers(1, 12))), N, N * 3]))
            g = functools.partial(evaluate, b)
        kind = _KINDS[name]
        made.append((kind(a, b), lambda v, f=f, g=g, kind=kind: kind(f(v), g(v))))
    return made[-1], extents


@hypothesis.given(arithmetic(), st.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_an_index_has_the_value_of_its_arithmetic(made, data):
    (at, function), extents = made
    values = {"s0": data.draw(st.integers(2, 9))}
    for k, extent in enumerate(extents):
        values[k] = data.draw(st.integers(0, (extent if isinstance(extent, int) else values["s0"]) - 1))
    assert evaluate(at, values) == function(values)
    high, low = upper(at), lower(at)
    assert high is None or evaluate(high, values) >= function(values)
    assert low is None or evaluate(low, values) <= function(values)


def test_a_view_and_its_inverse_are_nothing():
    i, j, k = axis(0, N), axis(1, 12), axis(2, 64)
    at = flat([i, j, k], contiguous([N, 12, 64]))
    assert (at // 768, at % 768 // 64, at % 64) == (i, j, k)
    whole = axis(0, N * 768)
    parts = (whole // 768, whole % 768 // 64, whole % 64)
    assert [str(p) for p in parts] == ["(a0)//(768)", "((a0)%(768))//(64)", "(a0)%(64)"]


def test_parts_of_rows_of_images_are_linear():
    part, row = axis(0, 64 * 4), axis(1, 784)
    at = part * 784 + row
    image = at // (56 * 56), at // 56 % 56, at % 56
    assert flat(image, [56 * 56 * 8, 56 * 8, 8]) == at * 8
    assert [str(at // 3136), str(at % 3136)] == ["(a0)//(4)", "(a0)%(4)*784 + a1"]


def test_rows_of_a_symbolic_length_are_told_apart():
    m = size("s1")
    at = axis(0, m) * N + axis(1, N)
    assert at // N == axis(0, m)
    assert at % N == axis(1, N)
    assert is_below(axis(1, N), N)
    assert not is_below(axis(1, N) + 1, N)


def test_the_order_of_terms_does_not_matter():
    i, j = axis(0, 4), axis(1, 5)
    assert i * 5 + j == j + i * 5
    assert hash(i * N * 2 + j) == hash(j + N * i * 2)
    assert isinstance(i * 0, Index)
    assert i * 0 == 0
    assert axis(3, 1) == 0


def test_a_quotient_and_its_remainder_are_the_whole_again():
    i, j = axis(0, 48), axis(1, 5)
    both = flat([i // 8, i % 8, j], [200, 25, 3])
    assert both == i * 25 + j * 3
    assert flat([i // 8, i % 8], [9, 1]) != i  # there is a gap
    whole = axis(0, N * 768)
    assert flat([whole // 768, whole % 768 // 64, whole % 64], contiguous([N, 12, 64])) == whole
    assert flat([whole % 768 // 64, whole % 64], [64, 1]) == whole % 768


def test_substitution_makes_a_whole_of_its_parts():
    n = size("s1")
    i, rows, columns = axis(0, n * N), axis(1, n), axis(2, N)
    assert (rows * N + columns).substitute({Axis(1, n): i // N, Axis(2, N): i % N}) == i


def test_a_quotient_and_a_remainder_are_told_apart():
    """As tuples of the same fields they would be equal, and a sum would mix them up."""
    at, n = axis(0, 6 * size("n")), size("n")
    assert at // n != at % n
    assert len((at // n + at % n).terms) == 2
