"""The interpreter, on programs written by hand."""

import numpy as np
import pytest

from opkit.compiler.ir.expr import bound, cast, const, load, op, position, where
from opkit.compiler.ir.index import axis, index, size, value
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, ScalarItem, Strided
from tests.compiler.interpreter import as_dtype, bfloat16, run


def program(steps, buffers, inputs=("x",), sizes=None, result="y"):
    known = {b.name: b for b in buffers}
    y = known[result]
    output = Strided(y.name, y.shape, y.strides, index(0))
    return Program("test", inputs, known, tuple(steps), (output,), sizes or {})


def vector(name, length, dtype="f32", role="made"):
    return Buffer(name, dtype, (index(length),), (index(1),), role)


N = size("n")
A, B = axis(0, 3), axis(1, 4)
MATRIX = Buffer("x", "f32", (index(3), index(4)), (index(4), index(1)), "input")
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_elements_and_sizes():
    at = axis(0, N)
    step = Compute("y", (N,), (at,), op("add", load("x", "f32", at), cast(position(at), "f32")))
    (y,) = run(
        program([step], [vector("x", N, role="input"), vector("y", N)], sizes={"n": 5}), [np.ones(5, np.float32)]
    )
    assert y.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sum", X.sum(0)),
        ("prod", X.prod(0)),
        ("max", X.max(0)),
        ("min", X.min(0)),
        ("argmax", [2] * 4),
        ("argmin", [0] * 4),
    ],
)
def test_reductions(name, expected):
    dtype = "i64" if name.startswith("arg") else "f32"
    body = load("x", "f32", A, B)
    step = Compute("y", (index(3), index(4)), (B,), body, reduction=name, reduced=frozenset({0}))
    (y,) = run(program([step], [MATRIX, vector("y", 4, dtype)]), [X])
    assert y.tolist() == list(expected)


def test_a_reduction_of_nothing_is_neutral():
    at = axis(0, N)
    for name, expected in (("sum", 0), ("prod", 1), ("max", -np.inf), ("min", np.inf)):
        y = Buffer("y", "f32", (), ())
        step = Compute("y", (N,), (), load("x", "f32", at), reduction=name, reduced=frozenset({0}))
        (found,) = run(program([step], [vector("x", N, role="input"), y], sizes={"n": 0}), [np.zeros(0, np.float32)])
        assert found == expected


def test_scans():
    y = Buffer("y", "f32", (index(3), index(4)), (index(4), index(1)))
    step = Compute(
        "y", (index(3), index(4)), (A, B), load("x", "f32", A, B), reduction="scan:sum", reduced=frozenset({1})
    )
    (found,) = run(program([step], [MATRIX, y]), [X])
    np.testing.assert_array_equal(found, X.cumsum(1))


def test_gathering_and_scattering():
    at = axis(0, 4)
    where_to = value(bound(load("i", "i64", at), 3))
    gathered = Compute("y", (index(4),), (at,), load("x", "f32", where_to))
    buffers = [vector("x", 3, role="input"), vector("i", 4, "i64", "input"), vector("y", 4)]
    given = [np.array([1.0, 2.0, 3.0], np.float32), np.array([0, -1, 1, 0])]
    (y,) = run(program([gathered], buffers, ("x", "i")), given)
    assert y.tolist() == [1, 3, 2, 1]
    added = Compute("x", (index(4),), (where_to,), const(1, "f32"), update="add")
    run(program([added], buffers, ("x", "i"), result="x"), given)
    assert given[0].tolist() == [3, 3, 4]


def test_a_position_outside_stops():
    at = axis(0, 1)
    step = Compute("y", (index(1),), (index(0),), load("x", "f32", value(bound(position(index(7)), 3))))
    with pytest.raises(IndexError, match="outside a dimension of 3"):
        run(program([step], [vector("x", 3, role="input"), vector("y", 1)]), [np.zeros(3, np.float32)])
    assert at == 0


def test_what_a_mask_hides_is_not_read():
    at = axis(0, 5)
    inside = op("lt", position(at), const(3, "i64"))
    step = Compute("y", (index(5),), (at,), where(inside, load("x", "f32", at, mask=inside), const(9, "f32")))
    (y,) = run(program([step], [vector("x", 3, role="input"), vector("y", 5)]), [np.ones(3, np.float32)])
    assert y.tolist() == [1, 1, 1, 9, 9]


def test_extern_calls():
    call = Extern("sum", (Strided("x", (index(2),), (index(2),), index(1)), ScalarItem("k")), {}, ("y",))
    buffers = [vector("x", 4, role="input"), Buffer("k", "i64", (), (), "input"), vector("y", 1)]
    (y,) = run(
        program([call], buffers, ("x", "k")),
        [np.arange(4, dtype=np.float32), np.array(10)],
        call=lambda step, args, kwargs: np.asarray([args[0].sum() * args[1]]),
    )
    assert y.tolist() == [40]


def test_strides_of_buffers():
    y = Buffer("y", "f32", (index(3), index(4)), (index(1), index(3)))
    step = Compute("y", (index(3), index(4)), (A, B), load("x", "f32", A, B))
    (found,) = run(program([step], [MATRIX, y]), [X])
    np.testing.assert_array_equal(found, X)


def test_narrow_types_are_rounded():
    assert bfloat16(np.float32(1 + 2**-8)) == 1
    assert bfloat16(np.float32(1 + 3 * 2**-8)) == np.float32(1 + 4 * 2**-8)
    assert np.isnan(bfloat16(np.float32("nan")))
    assert as_dtype(np.asarray(300), "u8") == 44
