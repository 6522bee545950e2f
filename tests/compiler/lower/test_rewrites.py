"""Identities of expressions, and the passes over programs."""

import math

import torch

from opkit.compiler.ir.expr import cast, const, load, make, op, where
from opkit.compiler.ir.index import axis
from opkit.compiler.ir.program import Extern
from opkit.compiler.lower.rewrites import simplify
from tests.compiler.graphs import check, computes, program_of

X = load("x", "f32", axis(0, 8))
I = load("i", "i32", axis(0, 8))  # noqa: E741
T = load("t", "b1", axis(0, 8))
NARROW = load("h", "bf16", axis(0, 8))


def f(number):
    return const(number, "f32")


IDENTITIES = [
    (op("mul", X, f(1)), X),
    (op("mul", f(1), X), X),
    (op("div", X, f(1)), X),
    (op("sub", X, f(0.0)), X),
    (op("add", X, f(-0.0)), X),
    (op("neg", op("neg", X)), X),
    (op("sub", X, op("neg", X)), op("add", X, X)),
    (op("max", X, X), X),
    (op("add", I, const(0, "i32")), I),
    (op("mul", I, const(0, "i32")), const(0, "i32")),
    (op("not", op("not", T)), T),
    (op("and", T, const(False, "b1")), const(False, "b1")),
    (make("where", "f32", (const(True, "b1"), X, f(2))), X),
    (where(op("not", T), X, f(2)), where(T, f(2), X)),
    (cast(cast(NARROW, "f32"), "bf16"), NARROW),
    (cast(cast(I, "i64"), "i32"), I),
    (op("add", f(2), f(3)), f(5)),
    (op("lt", f(2), f(3)), const(True, "b1")),
    (op("add", op("mul", X, op("add", f(2), f(-1))), f(-0.0)), X),
]


def test_identities():
    for before, after in IDENTITIES:
        assert simplify(before) is after, str(before)


UNCHANGED = [
    op("add", X, f(0.0)),  # -0.0 + 0.0 is 0.0
    op("sub", X, f(-0.0)),
    op("mul", X, f(0)),  # NaN and infinities
    op("sub", X, X),
    cast(cast(X, "bf16"), "f32"),  # rounds
    cast(cast(cast(I, "f32"), "i32"), "i32"),  # float32 does not hold every i32
    op("exp", f(math.pi)),  # a library's last bit
]


def test_what_is_no_identity_stays():
    for expression in UNCHANGED:
        assert simplify(expression) is expression, str(expression)


def test_equal_computes_are_one():
    program = program_of(lambda x: (x.sin() * 2).exp() + (x.sin() * 2).cos(), torch.randn(3))
    assert sum("sin(" in str(c.body) for c in computes(program)) == 1


def test_equal_searches_are_one_and_random_numbers_are_not():
    def numbers(bounds, x):
        found = [torch.searchsorted(bounds[1:], torch.arange(5), right=True).float() for _ in range(2)]
        return found[0] + 1, found[1] * 2, torch.bernoulli(x) + 1, torch.bernoulli(x) + 1

    program = program_of(numbers, torch.tensor([0, 2, 5]), torch.rand(5))
    called = [step.target for step in program.steps if isinstance(step, Extern)]
    assert sum("searchsorted" in target for target in called) == 1
    check(lambda bounds, x: numbers(bounds, x)[:2], torch.tensor([0, 2, 5]), torch.ones(5), lowered=False)
    bodies = [str(c.body) for c in computes(program)]
    assert sum("bernoulli" in target for target in called) + sum("random" in body for body in bodies) == 2


def test_results_stay_apart():
    check(lambda x: (x.sin(), x.sin()), torch.randn(3))
    program = program_of(lambda x: (x.sin(), x.sin()), torch.randn(3))
    assert len({output.buffer for output in program.outputs}) == 2


def test_what_is_read_before_and_after_a_write_is_not_the_same():
    def written(x):
        before = x.sin() + 1
        x.copy_(x * 2)
        return before, x.sin() + 1

    check(written, torch.randn(3))


def test_what_nobody_needs_is_not_computed():
    program = program_of(lambda x: torch.var_mean(x, 0)[1] + 1, torch.randn(3, 4))
    assert all("sub" not in str(c.body) for c in computes(program))
    assert {c.buffer for c in computes(program)} | {"x_1", "arg0_1"} >= set(program.buffers)
