"""Strips of loops in C: calls of library functions, results that are written past the caches, and rows that are prefetched."""

import ctypes
import math

import numpy as np
import pytest

from opkit.compiler.emit.c.kernel import function
from opkit.compiler.emit.c.source import source
from opkit.compiler.ir.expr import Callee, bound, call, cast, const, load, op, var
from opkit.compiler.ir.index import Axis, axis, index, size, value
from opkit.compiler.ir.kernel import (
    Accumulator,
    How,
    Kernel,
    KernelArgument,
    KernelLaunch,
    Let,
    Loop,
    Scratch,
    Store,
    Update,
    called_functions,
)
from opkit.compiler.ir.printer import kernel_text
from opkit.compiler.ir.verifier import verify_kernel
from opkit.compiler.run.library import function_table
from opkit.errors import CompileError, CompilerError
from tests.compiler.interpreter_kernel import STORED, run_kernel

LIBM = "libm.so.6"
GAMMA = Callee("tgamma", LIBM, ("f64",), "f64")
HYPOT = Callee("hypotf", LIBM, ("f32", "f32"), "f32")
SCALED = Callee("ldexp", LIBM, ("f64", "i32"), "f64")
ROUNDED = Callee("lround", LIBM, ("f64",), "i64")


def rounded(x):
    return math.floor(abs(x) + 0.5) * (1 if x >= 0 else -1)


PYTHON = {
    "tgamma": lambda x: math.gamma(x),
    "hypotf": lambda x, y: np.float32(math.hypot(x, y)),
    "ldexp": lambda x, n: math.ldexp(x, int(n)),
    "lround": rounded,
}
N = size("n")
AT = axis(0, N)
X = load("x", "f64", AT)
F = load("f", "f32", AT)


def kernel(*statements, how: How = "parallel", before=(), after=()):
    loop = (*before, Loop(Axis(0, N), statements, how), *after)
    given = (KernelArgument("x", "f64", False), KernelArgument("f", "f32", False), KernelArgument("y", "f64", True))
    return Kernel("called", (*given, KernelArgument("z", "f32", True)), ("n",), loop)


def y(expression):
    return Store("y", AT, expression)


KERNELS = {
    "alone": kernel(y(call(GAMMA, X))),
    "a vector": kernel(y(call(GAMMA, X)), how="vector"),
    "what is before and after": kernel(
        y(op("add", call(GAMMA, op("mul", op("sin", X), const(2.0, "f64"))), const(1.0, "f64")))
    ),
    "a call of a call": kernel(y(call(GAMMA, op("add", op("abs", call(GAMMA, X)), const(1.5, "f64"))))),
    "twice the same": kernel(y(op("mul", call(GAMMA, X), call(GAMMA, X))), Store("z", AT, cast(call(GAMMA, X), "f32"))),
    "two functions": kernel(y(op("add", call(GAMMA, X), cast(call(HYPOT, F, const(2.0, "f32")), "f64")))),
    "an integer": kernel(y(call(SCALED, X, const(3, "i32")))),
    "of nothing but numbers": kernel(y(op("add", X, call(SCALED, const(1.0, "f64"), const(3, "i32"))))),
    "in place": kernel(Let("old", load("y", "f64", AT)), y(op("add", call(GAMMA, var("old", "f64")), X))),
    "in place, without a variable": kernel(y(call(GAMMA, load("y", "f64", AT)))),
    "a variable that a call is in": kernel(
        Let("v", op("add", call(GAMMA, X), const(0.5, "f64"))), y(call(GAMMA, op("abs", var("v", "f64"))))
    ),
    "after a store": kernel(
        y(X), Let("v", load("y", "f64", AT)), Store("z", AT, cast(call(GAMMA, var("v", "f64")), "f32"))
    ),
    "an index": kernel(y(load("x", "f64", value(bound(op("min", call(ROUNDED, X), const(0, "i64")), N))))),
    "a sum": kernel(
        Update("s", "sum", call(GAMMA, X)),
        how="vector",
        before=(Accumulator("s", "f64", "sum"),),
        after=(Store("y", size("n") - size("n"), var("s", "f64")),),
    ),
    "of a sum": kernel(
        y(call(GAMMA, op("add", X, var("s", "f64")))),
        how="vector",
        before=(Accumulator("s", "f64", "sum"), Loop(Axis(1, N), (Update("s", "sum", const(0.125, "f64")),), "vector")),
    ),
    "from scratch memory": kernel(
        Store("m", AT, X), y(call(GAMMA, load("m", "f64", AT))), how="plain", before=(Scratch("m", "f64", N),)
    ),
}


class Runtime(ctypes.Structure):
    _fields_ = (("openmp", ctypes.c_void_p * 2), ("threads", ctypes.c_int64), ("error", ctypes.c_int64 * 3),
                ("functions", ctypes.c_void_p))  # fmt: skip


@pytest.fixture(scope="module")
def compiled(segments):
    """All kernels, each as a segment, and the functions that they call."""
    library, _ = segments
    launches = [KernelLaunch(made, ("x", "f", "y", "z"), ("n",)) for made in KERNELS.values()]
    made = library([[launch] for launch in launches], ["x", "f", "y", "z"], ["n"])
    return made, function_table(called_functions(launches))


@pytest.mark.parametrize("lengths", [(1, 512, 1100), pytest.param((3, 511, 513), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", KERNELS)
def test_the_numbers_are_those_of_the_interpreter(subtests, compiled, segments, name, lengths):
    made, (library, functions), (_, call_segment) = KERNELS[name], compiled, segments
    verify_kernel(made)
    segment = getattr(library, f"opkit_segment_{list(KERNELS).index(name)}")

    def same(length):
        rng = np.random.default_rng(length)
        arrays = {"x": rng.uniform(0.6, 4, length), "f": rng.uniform(0.1, 2, length).astype(np.float32)}
        arrays |= {"y": rng.uniform(0.6, 4, length), "z": np.zeros(length, np.float32)}
        expected = {key: array.copy() for key, array in arrays.items()}
        run_kernel(made, expected, {"n": length}, PYTHON)
        runtime = Runtime(threads=1, functions=ctypes.addressof(functions))
        assert call_segment(segment, list(arrays.values()), [length], runtime) == (0, [0, 0, 0])
        for key, array in arrays.items():
            np.testing.assert_allclose(array, expected[key], rtol=1e-13 if array.dtype == np.float64 else 1e-6)

    for case in lengths:
        with subtests.test(str(case)):
            same(case)


@pytest.mark.parametrize(
    ("name", "parted"), [("what is before and after", True), ("in place", True), ("after a store", False)]
)
def test_calls_are_loops_of_their_own_where_they_can_go_first(name, parted):
    made = KERNELS[name]
    (text,) = source([[KernelLaunch(made, ("x", "f", "y", "z"), ("n",))]], ["x", "f", "y", "z"], ["n"])
    assert ("+= 512" in text) == parted


def test_it_is_printed_by_its_name():
    assert "y[a0] = tgamma(x[a0])" in kernel_text(KERNELS["alone"])


@pytest.mark.parametrize("wrong", [call(GAMMA, F), call(GAMMA, X, X), cast(call(HYPOT, F, F), "i32")])
def test_the_verifier_knows_what_a_function_takes(wrong):
    with pytest.raises(CompilerError):
        verify_kernel(kernel(y(wrong)))


def test_a_library_that_is_gone_is_an_error():
    for name, path in (("tgamma", "/nowhere/libnothing.so"), ("no_such_function", LIBM)):
        with pytest.raises(CompileError, match=f"the function {name} of {path} cannot be called"):
            function_table([Callee(name, path, (), "f64")])


SECOND = {"square": lambda x: op("mul", x, x), "exp": lambda x: op("exp", x), "neg": lambda x: op("neg", x)}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "i64"])
@pytest.mark.parametrize("how", ["parallel", "vector"])
@pytest.mark.parametrize("n", [128, 513, 1300])
def test_results_that_are_written_past_the_caches(same, dtype, how, n):
    """Wherever a row begins: to no multiple of a line, by no whole lines."""
    x = np.random.default_rng(n).integers(0, 100, n + 3).astype(STORED[dtype])
    streamed = (KernelArgument("x", dtype, False), KernelArgument("y", dtype, True, streamed=True))
    store = Store("y", axis(0, n) + 3, op("neg", load("x", dtype, axis(0, n))))
    kernel = Kernel("streams", streamed, (), (Loop(Axis(0, index(n)), (store,), how),))
    assert "opk_stream(" in function(kernel, "streams")
    same(kernel, {"x": x, "y": np.ones(n + 3, STORED[dtype])})


def test_what_is_read_or_dear_is_written_as_always():
    at, both = axis(0, 1000), (KernelArgument("x", "f32", False), KernelArgument("y", "f32", True, streamed=True))
    for body in (op("exp", load("x", "f32", at)), op("add", load("y", "f32", at), load("x", "f32", at))):
        kernel = Kernel("k", both, (), (Loop(Axis(0, index(1000)), (Store("y", at, body),), "vector"),))
        assert "opk_stream(" not in function(kernel, "k")


def normed(rows, columns, second, dtype="f32"):
    """y = x - the mean of its row; ``second`` makes what the second pass adds up."""
    row, at = axis(0, rows), axis(0, rows) * columns + axis(1, columns)
    x, inner = cast(load("x", dtype, at), "f32"), Axis(1, index(columns))
    mean = op("div", var("s", "f32"), const(float(columns), "f32"))
    body = (
        Accumulator("s", "f32", "sum"),
        Loop(inner, (Update("s", "sum", x),), "vector"),
        Accumulator("q", "f32", "sum"),
        Loop(inner, (Update("q", "sum", second(op("sub", x, mean))),), "vector"),
        Store("y", row, op("add", mean, var("q", "f32"))),
    )
    return Kernel(
        "normed",
        (KernelArgument("x", dtype, False), KernelArgument("y", "f32", True)),
        (),
        (Loop(Axis(0, index(rows)), body, "parallel"),),
    )


def sums(run, kernel, rows, columns, second, dtype="f32"):
    """The kernel's results beside numpy's in float64."""
    x = np.random.default_rng(rows).integers(-3, 4, (rows, columns)).astype(np.float32)
    stored = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else x
    arrays = {"x": stored, "y": np.zeros(rows, np.float32)}
    assert run(kernel, arrays, {}) == (0, [0, 0, 0])
    mean = x.mean(1, dtype=np.float64)
    np.testing.assert_allclose(arrays["y"], mean + second(x - mean[:, None]).sum(1), rtol=1e-5)


def test_the_next_row_is_asked_for_where_memory_would_wait(run):
    kernel = normed(1500, 700, SECOND["square"])
    assert "__builtin_prefetch(p_x + (700 + a0*700) + ahead" in function(kernel, "k")
    sums(run, kernel, 1500, 700, np.square)


@pytest.mark.parametrize(
    ("rows", "columns", "second", "dtype"),
    [(200, 9000, "square", "f32"), (300, 9001, "square", "bf16"), (1500, 1100, "exp", "f32")],
    ids=["long", "long and narrow", "functions"],
)
def test_rows_are_asked_for_stretch_by_stretch(run, rows, columns, second, dtype):
    kernel = normed(rows, columns, SECOND[second], dtype)
    text = function(kernel, "k")
    assert f"ahead < u1; ahead += {16 if dtype == 'f32' else 32}) __builtin_prefetch(p_x + ({columns}" in text
    assert text.index("c1 += 512") < text.index("__builtin_prefetch")
    sums(run, kernel, rows, columns, getattr(np, second), dtype)


def test_no_row_is_asked_for_where_that_does_not_pay():
    cases = {
        "in the cache": (20, 700, "neg", "f32"),
        "short": (1500, 100, "neg", "f32"),
        "too long": (200, 40000, "neg", "f32"),
        "narrow functions": (3000, 1100, "exp", "bf16"),
    }
    for name, (rows, columns, second, dtype) in cases.items():
        assert "__builtin_prefetch" not in function(normed(rows, columns, SECOND[second], dtype), "k"), name


def added(rows, columns, block):
    """A kernel that adds up the columns of a matrix, a block of columns at a time."""
    blocks, along, lane = Axis(0, index(columns // block)), Axis(1, index(rows)), Axis(2, index(block))
    at = axis(2, index(block))
    column = axis(0, blocks.extent) * block + at
    element = load("x", "f32", axis(1, along.extent) * columns + column)
    body = (
        Scratch("s", "f64", index(block)),
        Loop(lane, (Store("s", at, const(0.0, "f64")),), "vector"),
        Loop(along, (Loop(lane, (Store("s", at, cast(element, "f64"), "add"),), "vector"),), "plain"),
        Loop(lane, (Store("y", column, cast(load("s", "f64", at), "f32")),), "vector"),
    )
    arguments = (KernelArgument("x", "f32", False), KernelArgument("y", "f32", True))
    return Kernel("added", arguments, (), (Loop(blocks, body, "parallel"),))


def test_parts_of_later_rows_are_prefetched(run):
    made = added(4000, 320, 32)
    assert "ahead < 32; ahead += 16) __builtin_prefetch(p_x + (5120 + a0*32 + a1*320) + ahead" in function(made, "k")
    x = np.random.default_rng(0).integers(-3, 4, (4000, 320)).astype(np.float32)
    arrays = {"x": x, "y": np.zeros(320, np.float32)}
    assert run(made, arrays, {}) == (0, [0, 0, 0])
    np.testing.assert_array_equal(arrays["y"], x.sum(0))


@pytest.mark.parametrize("sizes", [(4000, 32, 32), (100, 320, 32), (4000, 3200, 1600)], ids=["all", "small", "wide"])
def test_no_part_is_prefetched_where_that_does_not_pay(sizes):
    assert "__builtin_prefetch" not in function(added(*sizes), "k")
