"""Memory of kernels in C: results that are written past the caches, rows that are asked for before they are read."""

import numpy as np
import pytest

from opkit.compiler.emit.c import function
from opkit.compiler.ir.expr import cast, const, load, op, var
from opkit.compiler.ir.index import Axis, axis, index
from opkit.compiler.ir.kernel import Accumulator, Kernel, KernelArgument, Loop, Store, Update
from tests.compiler.interpreter_kernel import STORED

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
