"""Calls through the bridge: in C where nothing needs Python, with what they write and how they fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opkit.errors import ArgumentTypeError, KernelError


def test_plain_calls_run_in_c(native, plus_one):
    for x in (
        torch.randn(4),
        torch.randn(2, 3).t(),
        torch.randn(0),
        torch.randn(()),
        torch.nn.Parameter(torch.ones(2), False),
    ):
        y, calls = native.calls(lambda x=x: plus_one.call(x))
        torch.testing.assert_close(y, x.detach() + 1)
        assert calls == 1
        assert not y.requires_grad
        _, calls = native.calls(lambda x=x: torch.ops.bridge_test.plus_one(x))
        assert calls == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_wanted(native, plus_one, mode):
    x = torch.randn(4, requires_grad=True)
    with mode():
        y, calls = native.calls(lambda: plus_one.call(x))
        again, more = native.calls(lambda: plus_one.call(y))
    assert (calls, more) == (1, 1)
    assert not y.requires_grad
    assert again.is_inference() == (mode is torch.inference_mode)


def test_gradients_go_through_python(native, plus_one):
    x = torch.randn(4, requires_grad=True)
    y = plus_one.call(x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach() + 1))


@pytest.mark.parametrize("needs", ["optional", "list"])
def test_any_tensor_can_need_a_gradient(native, define, needs):
    def plus_optional(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x + 1 if y is None else x + 1 + 0 * y

    def plus_all(x: Tensor, others: list[Tensor]) -> Tensor:
        return torch.stack([x + 1, *others]).sum(0)

    function, kernel = (plus_optional, "plus_one_optional") if needs == "optional" else (plus_all, "plus_all")
    op = define(f"any_{needs}", function)
    native.install(op, kernel)
    x, y = torch.randn(4), torch.randn(4)
    wrapped = (lambda t: t) if needs == "optional" else (lambda t: [t] * 70)
    result, calls = native.calls(lambda: op._opoverload(x, wrapped(y)))
    assert calls == 1
    torch.testing.assert_close(result, function(x, wrapped(y)))
    y.requires_grad_()
    result, calls = native.calls(lambda: op._opoverload(x, wrapped(y)))
    assert result.requires_grad
    result.sum().backward()
    assert y.grad is not None
    if needs == "optional":
        assert native.calls(lambda: op._opoverload(x, None))[1] == 1
        assert native.calls(lambda: op._opoverload(x))[1] == 1


def test_every_kind_of_argument(native, library):
    schema = (
        "every(Tensor x, SymInt i, float f, bool b, str s, ScalarType dtype, SymInt[] ints, float[] floats, bool[] bools, "
        "SymInt? oi=None, float? of=None, str? os=None, Device? device=None) -> Tensor"
    )
    ops = library("bridge_every")
    ops.define(schema)
    ops.impl("every", lambda x, *_, **__: x.new_zeros(x.shape), "CompositeExplicitAutograd")
    installed = native.install("bridge_every::every", "every")
    x, ints = torch.zeros(12), list(range(300))
    given = (x, 7, 0.5, True, "ab", torch.bfloat16, ints, [0.25, 0.5], [True, False, True])
    result, calls = native.calls(lambda: torch.ops.bridge_every.every(*given))
    first = [7, 0.5, 1, ord("a") + 2 * ord("b"), 15, sum(ints), 0.75, 2]
    assert calls == 1
    assert result.tolist() == [*first, -1, -1, -1, 0]
    result = torch.ops.bridge_every.every(*given, -3, 1, "", torch.device("cpu"))
    assert result.tolist() == [*first, -3, 1, 0, 1]
    assert torch.ops.bridge_every.every(x, 1, 1.0, False, "", torch.int8, [], [], [])[:8].tolist() == [
        1,
        1,
        0,
        0,
        1,
        0,
        0,
        0,
    ]
    installed.remove()
    assert not torch.ops.bridge_every.every(*given).any()


def test_several_outputs(native, define):
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    op = define("both", both)
    native.install(op, "two")
    x = torch.randn(3)
    (y, z), calls = native.calls(lambda: op._opoverload(x))
    assert calls == 1
    torch.testing.assert_close((y, z), (x + 1, x + 2))


def test_many_arguments(native, library):
    ops = library("bridge_many")
    ops.define(f"op(Tensor x{''.join(f', Tensor? y{i}=None' for i in range(18))}) -> Tensor")
    ops.impl("op", lambda x, *_, **__: x + 1, "CompositeExplicitAutograd")
    native.install("bridge_many::op", "nineteen")
    x = torch.ones(2)
    y, calls = native.calls(lambda: torch.ops.bridge_many.op(x, None, x, y17=x))
    assert (y.tolist(), calls) == ([2.0] * 2, 1)


def test_a_list_with_a_gap_goes_to_python(native, library):
    ops = library("bridge_gap")
    ops.define("op(Tensor x, Tensor?[] others) -> Tensor")
    ops.impl("op", lambda x, others: x - 1, "CompositeExplicitAutograd")
    native.install("bridge_gap::op", "plus_all")
    x = torch.ones(2)
    assert torch.ops.bridge_gap.op(x, [x, x]).tolist() == [4.0] * 2
    assert torch.ops.bridge_gap.op(x, [x, None]).tolist() == [0.0] * 2


# ---- operators that write -------------------------------------------------------------------------------------------


def test_a_stale_backward_raises(native, add_one_):
    weight, buffer = torch.randn(4, requires_grad=True), torch.randn(4)
    product = (weight * buffer).sum()
    expected, version = buffer + 1, buffer._version
    _, calls = native.calls(lambda: add_one_(buffer))
    assert (calls, buffer._version) == (1, version + 1)
    torch.testing.assert_close(buffer, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_versions_without_gradients(native, add_one_):
    leaf = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        assert native.calls(lambda: add_one_(leaf))[1] == 1
    with torch.inference_mode():
        assert native.calls(lambda: add_one_(leaf))[1] == 1  # below Python's version counter
        inference = torch.zeros(2)
        assert native.calls(lambda: add_one_(inference))[1] == 1
    assert (leaf.tolist(), leaf._version) == ([2.0, 2.0], 2)
    add_one_(inference)
    assert inference.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError):
        add_one_(leaf)


def test_every_written_tensor_gets_a_new_version(native, define):
    def add_one_to_all(xs: list[Tensor]) -> None:
        for x in xs:
            x.add_(1)

    op = define("add_one_to_all", add_one_to_all, mutates_args=("xs",))
    native.install(op, "void_all")
    xs = [torch.zeros(2), torch.zeros(3)]
    assert native.in_c(lambda: op._opoverload(xs))
    assert [(x[0].item(), x._version) for x in xs] == [(1.0, 1)] * 2
    with torch.inference_mode():
        mixed = [torch.zeros(2), xs[0].clone()]
    add_to = [torch.zeros(2), mixed[0]]
    op._opoverload(add_to)
    assert [x.tolist() for x in add_to] == [[1.0] * 2] * 2


def test_a_written_argument_is_returned(native, library):
    ops = library("bridge_written")
    ops.define("add_one_(Tensor(a!) x) -> Tensor(a!)")
    ops.impl("add_one_", lambda x: x.add_(1), "CompositeExplicitAutograd")
    installed = native.install("bridge_written::add_one_", "in_place")
    x = torch.zeros(3)
    y, calls = native.calls(lambda: torch.ops.bridge_written.add_one_(x))
    assert calls == 1
    assert y is x
    assert (x.tolist(), x._version) == ([1.0] * 3, 1)
    installed.remove()


# ---- refusals and errors --------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("x", [torch.ones(1, 1, 2), torch.ones(2, dtype=torch.float64)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_c_refuses_runs_in_python(native, plus_one, x, mode):
    plus_one.call(x)  # a first call in inference mode would be one too many for the check of kernels
    with mode():
        y, calls = native.calls(lambda: plus_one.call(x))
    assert calls == 0
    torch.testing.assert_close(y, x + 1)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_error_in_c_is_its_message(native, plus_one, mode):
    with mode(), pytest.raises(RuntimeError) as caught:
        plus_one.call(torch.ones(1, 1, 1, 1))
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == "bridge_test::plus_one: 100% too many dimensions"


@pytest.mark.sweep
@pytest.mark.parametrize("error", [KeyError("k"), StopIteration("s"), KeyboardInterrupt(), KernelError("mine")])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_python_errors_keep_their_type(native, plus_one, error, mode):
    def failing(x: Tensor) -> Tensor:
        raise error

    plus_one.op.register_kernel("cpu", failing, priority=1)
    x = torch.ones(1, 1, 2)
    with mode(), pytest.raises(type(error)) as caught:
        plus_one.call(x)
    assert caught.value.args == error.args


def test_none_for_a_tensor_is_explained(native, plus_one, define):
    def plus(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x + 1

    op = define("plus_optional", plus)
    native.install(op, "plus_one_optional")
    with pytest.raises(ArgumentTypeError, match="the argument x must be a tensor"):
        op._opoverload(None, torch.ones(2))
    with pytest.raises(ArgumentTypeError, match="the argument x must be a tensor"):
        plus_one.call(None)
