"""Kernels with sin, cos or tan: written for arguments near zero, and once more for those that are far."""

import re
import shutil
import subprocess

import numpy as np
import pytest

from opkit.compiler.emit import near
from opkit.compiler.emit.source import source
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
    return source([[KernelLaunch(made, buffers, ())]], ("x", "y"), ())[0]


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
    assert near.types(made, True) == {"f32"}
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
    assert near.types(AGAIN[case], True) == NEVER
    assert "_near" not in text(AGAIN[case])


def test_arguments_that_may_be_the_same_memory():
    made = kernel(stored(op("sin", X)))
    assert near.types(made, True) == {"f32"}
    assert near.types(made, False) == NEVER
    assert "_near" not in text(made, ("x", "x"))


def test_both_types_and_a_value_with_a_name(same):
    wide = op("cos", cast(X, "f64"))
    both = op("max", op("sin", var("v", "f32")), cast(wide, "f32"))
    made = kernel(Let("v", op("mul", X, const(4.0, "f32"))), stored(where(op("lt", X, const(0.0, "f32")), both, X)))
    assert near.types(made, True) == {"f32", "f64"}
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
