"""What is well formed passes; each mistake is named with its place."""

import numpy as np
import pytest

from opkit.compiler.ir.expr import bound, cast, const, load, make, op, position, var, where
from opkit.compiler.ir.index import Axis, axis, index, size, value
from opkit.compiler.ir.kernel import Accumulator, Kernel, KernelArgument, Let, Loop, Scratch, Store, Update
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, Strided
from opkit.compiler.ir.verifier import verify_kernel, verify_program
from opkit.errors import CompilerError
from tests.compiler import interpreter

AT = axis(0, 8)
X = load("x", "f32", AT)
ONE = const(1.0, "f32")
SUM = Accumulator("s", "f32", "sum")


def kernel(*body, how="plain", stop=None, extent=8):
    given = (KernelArgument("x", "f32", False), KernelArgument("i", "i64", False), KernelArgument("y", "f32", True))
    return Kernel("k", given, ("n",), (Loop(Axis(0, index(extent)), body, how, stop),))


def store(body, at=AT, **more):
    return Store("y", at, body, **more)


GOOD = [
    kernel(store(op("add", X, ONE)), how="vector"),
    kernel(Let("a", X), store(var("a", "f32")), how="parallel"),
    kernel(SUM, Loop(Axis(1, size("n")), (Update("s", "sum", X),)), store(var("s", "f32"))),
    kernel(Scratch("t", "f32", size("n")), Store("t", AT, X), store(load("t", "f32", AT))),
    kernel(store(X, value(bound(load("i", "i64", AT), size("n"))), update="add", atomic=True)),
    kernel(store(load("x", "f32", AT, mask=op("lt", position(AT), const(3, "i64")))), stop=(AT, size("n"))),
]

BAD = {
    "holds f32, not f64": kernel(store(cast(load("x", "f64", AT), "f32"))),
    "arguments of add are of types f32, i64": kernel(store(make("add", "f32", (X, load("i", "i64", AT))))),
    "add of f32 is f32, not i32": kernel(store(cast(make("add", "i32", (X, X)), "f32"))),
    "lt of f32 is b1, not f32": kernel(store(make("lt", "f32", (X, X)))),
    "and does not take f32": kernel(store(op("and", X, X))),
    "exp takes 1 arguments, and has 2": kernel(store(make("exp", "f32", (X, X)))),
    "'walk' is not an op": kernel(store(make("walk", "f32", (X,)))),
    "1 is no constant of f32": kernel(store(make("const", "f32", (), 1))),
    r"where of \['f32', 'f32', 'f32'\]": kernel(store(where(X, X, ONE))),
    "i64 and f32 have different sizes": kernel(store(make("bitcast", "f32", (load("i", "i64", AT),)))),
    "no buffer z here": kernel(store(load("z", "f32", AT))),
    "has 1 dimensions, and the load 2 coordinates": kernel(store(load("x", "f32", AT, AT))),
    "the mask of": kernel(store(load("x", "f32", AT, mask=X))),
    "no variable a here": kernel(Loop(Axis(1, index(2)), (Let("a", X),)), store(var("a", "f32"))),
    "a is of type f32, not f64": kernel(Let("a", X), store(cast(var("a", "f64"), "f32"))),
    "the name a is used already": kernel(Let("a", X), Let("a", X)),
    "a1 is used outside of its loop": kernel(store(X, axis(1, 2))),
    "a0 runs to 8 here, and is used as one to 9": kernel(store(X, axis(0, 9))),
    "m is not one of the sizes": kernel(store(X, size("m"))),
    "is of type f32": kernel(store(X, value(X))),
    "f64 is stored to a buffer of f32": kernel(store(cast(X, "f64"))),
    "not an argument that is written": kernel(Store("x", AT, X)),
    "'lt' is not an op that combines two values": kernel(store(X, update="lt")),
    "only a store with an update": kernel(store(X, atomic=True)),
    "no accumulator s here": kernel(Update("s", "sum", X)),
    "the accumulator is f32 sum": kernel(SUM, Update("s", "max", X)),
    "argmax and argmin alone have a position": kernel(SUM, Update("s", "sum", X, AT)),
    "'mean' is not a reduction": kernel(Accumulator("s", "f32", "mean")),
    "a loop around it has the same number": kernel(Loop(Axis(0, index(2)), ())),
    "must be the innermost": kernel(Loop(Axis(1, index(2)), ()), how="vector"),
    "a parallel loop stands inside": kernel(Loop(Axis(1, index(2)), (store(X),), "parallel")),
    "a vector loop cannot stop early": kernel(store(X), how="vector", stop=(AT, size("n"))),
    "its length depends on a loop": kernel(Scratch("t", "f32", AT)),
}


def test_what_is_well_formed(subtests):
    for case in GOOD:
        with subtests.test(str(case)):
            verify_kernel(case)


def refused(message, verify, mistaken):
    with pytest.raises(CompilerError, match=message):
        verify(mistaken)


def test_mistakes_in_kernels(subtests):
    for message in BAD:
        with subtests.test(str(message)):
            refused(message, verify_kernel, BAD[message])


def program(*steps, outputs=("y",)):
    shape, strides = (index(8), size("n")), (size("n"), index(1))
    buffers = {n: Buffer(n, "f32", shape, strides, "input" if n == "x" else "made") for n in ("x", "y")}
    buffers["r"] = Buffer("r", "f32", shape[:1], (index(1),))
    results = tuple(Strided(n, buffers[n].shape, buffers[n].strides, index(0)) for n in outputs)
    return Program("p", ("x", size("n")), buffers, steps, results, {"n": 3})


BOTH = (index(8), size("n"))
A, B = axis(0, 8), axis(1, size("n"))
Y = Compute("y", BOTH, (A, B), op("exp", load("x", "f32", A, B)))
R = Compute("r", BOTH, (A,), load("x", "f32", A, B), "sum", frozenset({1}))
CALL = Extern("aten.mm.default", (Strided("x", BOTH, BOTH, index(0)),), {}, ("y",))

BAD_PROGRAMS = {
    "y is used before it is filled": program(R),
    "y is read before it is filled": program(Compute("r", BOTH, (A,), load("y", "f32", A, B), "sum", frozenset({1}))),
    "y has 2 dimensions, and the target 1 coordinates": program(Compute("y", BOTH, (A,), load("x", "f32", A, B))),
    "the target depends on an axis that is reduced": program(Compute("y", BOTH, (A, B), R.body, "sum", frozenset({1}))),
    "a reduction goes with axes": program(Compute("y", BOTH, (A, B), R.body, "sum")),
    "no buffer z": program(Extern("aten.mm.default", (), {}, ("z",))),
    "a2 is used outside": program(Compute("y", BOTH, (A, B), load("x", "f32", axis(2, 8), B))),
    "i64 is stored to a buffer of f32": program(Compute("y", BOTH, (A, B), position(A))),
}


def test_a_program():
    verify_program(program(Y, R, outputs=("y", "r")))
    verify_program(program(CALL))
    verify_program(program(Compute("y", BOTH, (A, B), R.body, "scan:sum", frozenset({1}))))


def test_mistakes_in_programs(subtests):
    for message in BAD_PROGRAMS:
        with subtests.test(str(message)):
            refused(message, verify_program, BAD_PROGRAMS[message])


# ---- parts -----------------------------------------------------------------------------------------------------------

Z = Buffer("z", "c64", (index(8),), (index(1),))
PARTS = [Buffer(f"z.{n}", "f32", Z.shape, (index(2),), whole=Z, offset=index(k)) for k, n in enumerate(("re", "im"))]


def complex_program(*steps):
    buffers = {each.name: each for each in (Buffer("x", "f32", Z.shape, Z.strides, "input"), Z, *PARTS)}
    return Program("p", ("x",), buffers, steps, (Strided("z", Z.shape, Z.strides, index(0)),), {})


FILLED = [Compute(part.name, Z.shape, (A,), load("x", "f32", A)) for part in PARTS]


def test_parts_fill_a_buffer():
    verify_program(complex_program(*FILLED))
    verify_program(complex_program(Extern("aten.view_as_complex.default", (), {}, ("z",)), FILLED[0]))
    assert complex_program().with_parts(["x", "z"]) == ["x", "z", "z.re", "z.im"]
    assert [str(part.place([A])) for part in PARTS] == ["a0*2", "a0*2 + 1"]


def test_mistakes_with_parts():
    with pytest.raises(CompilerError, match="z is used before it is filled"):
        verify_program(complex_program(FILLED[0]))
    with pytest.raises(CompilerError, match="is read and written by its parts"):
        verify_program(complex_program(*FILLED, Compute("z.re", Z.shape, (A,), cast(load("z", "c64", A), "f32"))))


def test_parts_share_the_memory_of_their_whole():
    x = np.arange(8, dtype=np.float32)
    (found,) = interpreter.run(complex_program(*FILLED), [x])
    np.testing.assert_array_equal(found, x * (1 + 1j))
