"""Translation units: how kernels are distributed and launched, and kernels with a form for arguments near zero."""

import itertools
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from opkit.compiler import backend
from opkit.compiler.emit.c import blocks, source
from opkit.compiler.ir.expr import bound, cast, const, load, op, var, where
from opkit.compiler.ir.index import Axis, axis, index, value
from opkit.compiler.ir.kernel import (
    Accumulator,
    Kernel,
    KernelArgument,
    KernelLaunch,
    Let,
    Loop,
    Scratch,
    Store,
    Update,
)
from opkit.compiler.run.library import flags
from opkit.kernels.cc import isa
from tests.compiler.interpreter_kernel import STORED


def test_a_large_graph_is_compiled_in_two_units(monkeypatch):
    monkeypatch.setattr(source, "_WORTH_A_UNIT", 300)

    def function(x, w):
        return torch.softmax((x @ w).sigmoid() @ w, -1).cumsum(0)

    seen = []
    token = backend.observer.set(seen.append)
    try:
        args = torch.randn(6, 8), torch.randn(8, 8)
        found = torch.compile(function, backend=backend.opkit_backend, options={"strict": True})(*args)
    finally:
        backend.observer.reset(token)
    torch.testing.assert_close(found, function(*args))
    first, second = seen[0].texts
    assert "opkit_segment_0" in first
    assert "opkit_segment_" not in second
    assert "_range(" in second


def test_a_small_graph_is_one_unit():
    (text,) = source.source([[]], [], [], units=4)
    assert "opkit_segment_0" in text


# ---- launches side by side -------------------------------------------------------------------------------------------


def tripled(count, name):
    """y += 2 * x, so that an iteration that runs twice is seen."""
    at = axis(0, count)
    arguments = (KernelArgument("x", "f32", False), KernelArgument("y", "f32", True))
    more = Store("y", at, op("mul", load("x", "f32", at), const(2.0, "f32")), update="add")
    return Kernel(name, arguments, (), (Loop(Axis(0, index(count)), (more,), "parallel"),), 4)


@pytest.mark.parametrize("counts", [(5,), (3, 3), (37, 0, 1, 100, 2), (0, 0)])
def test_a_batch_is_shared_among_threads(subtests, segments, team, counts):
    """Every iteration runs once, also where OpenMP gives fewer threads than it was asked for."""
    library, call = segments
    names = [f"{b}{k}" for k in range(len(counts)) for b in "xy"]
    launches = [KernelLaunch(tripled(n, f"k{k}"), (f"x{k}", f"y{k}"), joined=k > 0) for k, n in enumerate(counts)]
    segment = library([launches], names).opkit_segment_0

    def shared(case):
        threads, present = case
        arrays = [np.arange(n + 1, dtype=np.float32) + k for k, n in enumerate(counts) for _ in "xy"]
        workers = team(threads, present)
        assert call(segment, arrays, runtime=workers.runtime) == (0, [0, 0, 0])
        for k, n in enumerate(counts):
            x, y = arrays[2 * k], arrays[2 * k + 1]
            assert np.array_equal(y[:n], 3 * x[:n])
            assert y[n] == n + k
        assert workers.parts == ([min(threads, sum(counts) // 4, 256)] if min(threads, sum(counts) // 4) > 1 else [])

    for case in [*itertools.product((1, 2, 3, 7, 300), (0, 1, None))]:
        with subtests.test(str(case)):
            shared(case)


N = 64
AT = axis(1, N)
X = load("x", "f32", AT)
NEVER: frozenset[str] = frozenset()


def kernel(*body, before=(), after=(), y="f32"):
    arguments = (KernelArgument("x", X.dtype, False), KernelArgument("y", y, True))
    return Kernel("k", arguments, (), (*before, Loop(Axis(1, index(N)), body, "vector"), *after))


def stored(value, buffer="y", **options):
    return Store(buffer, AT, value, **options)


def text(made, buffers=("x", "y")):
    return source.source([[KernelLaunch(made, buffers, ())]], ("x", "y"), ())[0]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
@pytest.mark.parametrize("t", ["f32", "f64", "bf16", "f16"])
def test_both_forms_as_the_interpreter(subtests, same, t, name):
    at = axis(0, 100)
    made = Kernel(
        "k",
        (KernelArgument("x", t, False), KernelArgument("y", t, True)),
        (),
        (Loop(Axis(0, index(100)), (Store("y", at, op(name, load("x", t, at))),), "vector"),),
    )
    assert f"k_k_near(const {'float' if t == 'f32' else ''}" in text(made)

    def both(far):
        x = np.linspace(-9, 9, 100).astype(np.float32)
        x[[17, 99]] = x[[17, 99]] if far is None else far
        with np.errstate(over="ignore"):
            x = (x.view(np.uint32) >> 16).astype(np.uint16) if t == "bf16" else x.astype(STORED[t])
        same(made, {"x": x, "y": np.zeros(100, STORED[t])}, ulps=2)

    for case in (None, 3e7, 1e30, np.inf, np.nan):
        with subtests.test(str(case)):
            both(case)


@pytest.mark.parametrize("far", [False, True])
def test_a_reduction_begins_anew(same, far):
    update = Update("r", "sum", op("sin", X))
    made = kernel(
        update,
        before=(Accumulator("r", "f32", "sum"),),
        after=(Store("y", index(0), var("r", "f32")),),
    )
    x = np.linspace(0, 3, N).astype(np.float32)
    x[40] = 1e9 if far else 1
    same(made, {"x": x, "y": np.zeros(N, np.float32)}, ulps=40)


def test_threads_each_begin_anew(subtests, same, team):
    at = axis(0, N)
    loop = Loop(Axis(0, index(N)), (Store("y", at, op("cos", load("x", "f32", at))),), "parallel")
    made = Kernel("k", (KernelArgument("x", "f32", False), KernelArgument("y", "f32", True)), (), (loop,))

    def begun(far):
        x = np.linspace(-3, 3, N).astype(np.float32)
        x[list(far)] = 1e12
        same(made, {"x": x, "y": np.zeros(N, np.float32)}, ulps=2, runtime=team(4).runtime)

    for case in [(), (3,), (60,), (3, 60)]:
        with subtests.test(str(case)):
            begun(case)


def test_memory_of_the_function_is_no_obstacle(same):
    inner = (Loop(Axis(1, index(N)), (stored(op("sin", X), "s"),), "vector"),)
    outer = Loop(Axis(2, index(N)), (Store("y", axis(2, N), load("s", "f32", axis(2, N))),), "vector")
    made = Kernel("k", kernel(stored(X)).arguments, (), (Scratch("s", "f32", index(N)), *inner, outer))
    assert blocks.near_types(made, True) == {"f32"}
    same(made, {"x": np.linspace(0, 1e6, N).astype(np.float32), "y": np.zeros(N, np.float32)}, ulps=2)


AGAIN = {
    "in place": kernel(stored(op("sin", load("y", "f32", AT)))),
    "added to": kernel(stored(op("sin", X), update="add")),
    "an index by way of it": kernel(
        Store("y", value(bound(cast(op("abs", op("sin", X)), "i64"), index(N))), const(1.0, "f32"))
    ),
    "none": kernel(stored(op("exp", X))),
}


@pytest.mark.parametrize("case", AGAIN)
def test_what_cannot_be_run_twice_has_one_form(case):
    assert blocks.near_types(AGAIN[case], True) == NEVER
    assert "_near" not in text(AGAIN[case])


def test_arguments_that_may_be_the_same_memory():
    made = kernel(stored(op("sin", X)))
    assert blocks.near_types(made, True) == {"f32"}
    assert blocks.near_types(made, False) == NEVER
    assert "_near" not in text(made, ("x", "x"))


def test_both_types_and_a_value_with_a_name(same):
    wide = op("cos", cast(X, "f64"))
    both = op("max", op("sin", var("v", "f32")), cast(wide, "f32"))
    made = kernel(Let("v", op("mul", X, const(4.0, "f32"))), stored(where(op("lt", X, const(0.0, "f32")), both, X)))
    assert blocks.near_types(made, True) == {"f32", "f64"}
    for last in (1.0, 1e6, 1e12):
        x = np.linspace(-4, 4, N).astype(np.float32)
        x[-1] = -last
        same(made, {"x": x, "y": np.zeros(N, np.float32)}, ulps=4)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.skipif(isa.machine() != "x86_64", reason="what is vectorised is known for x86-64")
@pytest.mark.sweep
@pytest.mark.parametrize("t", ["f32", "f64"])
@pytest.mark.parametrize("how", ["vector", "parallel"])
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_vectors(tmp_path, name, how, t):
    at = axis(0, 4096)
    loop = Loop(Axis(0, index(4096)), (Store("y", at, op(name, load("x", t, at))),), how)
    written = text(Kernel("k", (KernelArgument("x", t, False), KernelArgument("y", t, True)), (), (loop,)))
    (tmp_path / "k.c").write_text(written)
    command = ["gcc", "-std=gnu11", "-march=x86-64-v3", *flags(), "-fopt-info-vec", "-c", "k.c", "-o", "k.o"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    lines = written.splitlines()
    begin = next(i for i, line in enumerate(lines, 1) if "int k_k_near(" in line)
    vectors = {int(line) for line in re.findall(r"k\.c:(\d+):\d+: optimized: loop vectorized", said)}
    assert vectors & set(range(begin, begin + 5))
