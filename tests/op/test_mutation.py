"""Mutation: inferred at definition, verified at run time, composed with torch.compile."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import MutationError, MutationUnknownError, RuleError


def helper(t: Tensor) -> None:
    t.mul_(2)


def pure_helper(t: Tensor) -> Tensor:
    return t.sin() + 1


def write_through_pointer(t: Tensor) -> None:
    ctypes.memset(t.data_ptr(), 0, t.numel() * t.element_size())


Matrix = Float[Tensor, "n m"]


def through_helper(x: Matrix) -> None:
    helper(x)


def through_view(x: Matrix) -> None:
    x.view(-1)[:2].add_(1)


def through_out(x: Matrix, result: Matrix) -> None:
    torch.add(x, 1, out=result)


def under_flag(x: Matrix, flag: bool = False) -> Matrix:
    if flag:
        x.add_(1)
    return x * 2


def in_list(xs: list[Float[Tensor, "n"]]) -> None:
    for x in xs:
        x.zero_()


def optional(x: Matrix, y: Matrix | None = None) -> Matrix:
    if y is not None:
        y.zero_()
    return x + 1


def nothing(x: Matrix, y: Matrix) -> Matrix:
    t = x * 2
    t.add_(y)
    return t


def test_inferred_by_tracing() -> None:
    for function, mutates in (
        (through_helper, ("x",)),
        (through_view, ("x",)),
        (through_out, ("result",)),
        (under_flag, ("x",)),
        (in_list, ("xs",)),
        (optional, ("y",)),
        (nothing, ()),
    ):
        described = opkit.custom_op(f"mutation::traced_{function.__name__}", function).describe()
        assert (described.mutates, described.mutation_origin) == (mutates, "a trace of the reference"), described.name


def plain_pure(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) + y.cos().sum() * torch.nn.functional.relu(x)


def plain_method(x: Tensor, y: Tensor) -> Tensor:
    y.add_(x)
    return x * 2


def plain_subscript(x: Tensor) -> None:
    x[0] = 1


def plain_augmented(x: Tensor, y: Tensor) -> None:
    y += x


def plain_out(x: Tensor, y: Tensor) -> None:
    torch.mul(x, 2, out=y)


def plain_helper(x: Tensor, y: Tensor) -> Tensor:
    helper(y)
    return pure_helper(x)


def plain_fresh(x: Tensor) -> Tensor:
    t = torch.empty_like(x)
    t.copy_(x)
    return t


def plain_raise(x: Tensor) -> Tensor:
    if x.dim() != 1:
        raise ValueError(f"one dimension, not {x.dim()}")
    return x + 1


def test_inferred_from_the_source() -> None:
    for function, mutates in (
        (plain_pure, ()),
        (plain_method, ("y",)),
        (plain_subscript, ("x",)),
        (plain_augmented, ("y",)),
        (plain_out, ("y",)),
        (plain_helper, ("y",)),
        (plain_fresh, ()),
        (plain_raise, ()),
    ):
        described = opkit.custom_op(f"mutation::read_{function.__name__}", function).describe()
        assert (described.mutates, described.mutation_origin) == (mutates, "its source"), described.name


def unproved_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


def unproved_pointer(x: Matrix) -> None:
    write_through_pointer(x)


def unproved_view(x: Tensor) -> None:
    y = x.view(-1)
    y.add_(1)


def unproved_call(x: Tensor, y: Tensor) -> Tensor:
    for f in (torch.sin, torch.cos):
        x = f(x)
    return x


def unproved_running_statistics(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return torch.nn.functional.batch_norm(x, mean, var, training=True)


def unproved_rebinding(x: Tensor, y: Tensor) -> Tensor:
    x = y
    x.add_(1)
    return x * 2


def test_what_is_not_proved_must_be_declared() -> None:
    for function in (
        unproved_numpy,
        unproved_pointer,
        unproved_view,
        unproved_call,
        unproved_running_statistics,
        unproved_rebinding,
    ):
        with pytest.raises(MutationUnknownError, match=r"Pass mutates_args=\(\)"):
            pytest.fail(f"of {function} was found: {opkit.custom_op('mutation::unproved', function).describe()}")
        assert not hasattr(torch.ops.mutation, "unproved"), function
        op = opkit.custom_op("mutation::unproved", function, mutates_args="unknown")
        assert op.describe().mutation_origin == "unknown: every tensor", function
        opkit.remove("mutation::unproved")


def test_opaque_operators_are_not_traced() -> None:
    with pytest.raises(MutationUnknownError, match="opaque"):
        opkit.custom_op("mutation::opaque", unproved_numpy, opaque=True)


def test_a_branch_on_a_value_is_not_taken_for_proof() -> None:
    def branches(x: Matrix, n: int) -> Matrix:
        if n > 100:
            view = x.view(-1)
            view.add_(1)
        return x * 2

    with pytest.raises(MutationUnknownError, match="branches on n"):
        opkit.custom_op("mutation::branches", branches)


def undeclared_method(x: Tensor) -> Tensor:
    y = x * 2
    x.add_(1)
    return y


def undeclared_helper(x: Tensor) -> Tensor:
    helper(x)
    return x * 2


def undeclared_view(x: Tensor) -> Tensor:
    x.view(-1)[0] = 5
    return x * 2


def undeclared_out(x: Tensor) -> Tensor:
    torch.sin(x, out=x)
    return x * 2


def undeclared_numpy(x: Tensor) -> Tensor:
    np.sin(x.numpy(), out=x.numpy())
    return x * 2


def undeclared_pointer(x: Tensor) -> Tensor:
    write_through_pointer(x)
    return x * 2


@pytest.mark.sweep
@pytest.mark.parametrize("through_ops", [False, True])
@pytest.mark.parametrize(
    "function",
    [undeclared_method, undeclared_helper, undeclared_view, undeclared_out, undeclared_numpy, undeclared_pointer],
)
def test_an_undeclared_write_is_an_error(function: Any, through_ops: bool) -> None:
    name = f"undeclared_{function.__name__}_{through_ops}"
    op = opkit.custom_op(f"mutation::{name}", function, mutates_args=())
    call = getattr(torch.ops.mutation, name) if through_ops else op
    for _ in range(3):
        with pytest.raises(
            MutationError, match=r"wrote to the argument 'x' of shape \(2, 2\), which is not in mutates_args"
        ):
            call(torch.ones(2, 2))


def test_an_undeclared_write_by_a_kernel() -> None:
    op = opkit.custom_op("mutation::kernel_writes", plain_fresh)
    op.register_kernel("cpu", undeclared_pointer)
    with pytest.raises(MutationError, match="the kernel undeclared_pointer wrote"):
        op(torch.ones(2))


def test_a_flag_is_its_own_guard_set() -> None:
    op = opkit.custom_op("mutation::flagged", under_flag, mutates_args=())
    for _ in range(3):
        op(torch.ones(2, 2), False)
    with pytest.raises(MutationError):
        op(torch.ones(2, 2), True)


def test_small_and_integer_writes_are_seen() -> None:
    def smallest(x: Tensor) -> Tensor:
        write = x.numpy()
        write[0] = np.nextafter(write[0], np.float32(2))
        return torch.ones(1)

    op = opkit.custom_op("mutation::smallest", smallest, mutates_args=())
    with pytest.raises(MutationError):
        op(torch.ones(1000))


def test_nan_is_not_taken_for_a_write() -> None:
    op = opkit.custom_op("mutation::nan", plain_fresh, mutates_args=())
    assert op(torch.tensor([float("nan"), 1.0]))[1].item() == 1


def test_version_counters_advance_and_a_stale_backward_raises() -> None:
    op = opkit.custom_op("mutation::bumps", unproved_numpy_write, mutates_args=("x",))
    x = torch.ones(3)
    before = x._version
    op(x)
    assert x._version > before
    w = torch.ones(3, requires_grad=True)
    h = w * 2
    y = h.sin()
    with torch.no_grad():
        op(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def unproved_numpy_write(x: Tensor) -> None:
    np.multiply(x.detach().numpy(), 2, out=x.detach().numpy())


def test_gradients_flow_through_an_in_place_reference() -> None:
    op = opkit.custom_op("mutation::doubles", through_helper)
    op.register_kernel("cpu", through_helper)
    w = torch.randn(2, 3, requires_grad=True)
    x = w.sin()
    op(x)
    (grad,) = torch.autograd.grad(x.sum(), w)
    torch.testing.assert_close(grad, 2 * w.cos())


def test_no_gradient_is_lost_through_an_opaque_write() -> None:
    op = opkit.custom_op("mutation::opaque_write", opaque_write_and_return, mutates_args=("x",))
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(RuleError, match="the gradient through x would be silently wrong"):
        op(w * 1)
    with torch.no_grad():
        op(w * 1)


def opaque_write_and_return(x: Tensor) -> Tensor:
    np.multiply(x.detach().numpy(), 2, out=x.detach().numpy())
    return x.detach() * 2


@pytest.mark.sweep
@pytest.mark.parametrize("function", [through_helper, through_view])
@pytest.mark.parametrize("kernel", [False, True])
def test_in_place_under_compile(function: Any, kernel: bool) -> None:
    op = opkit.custom_op(f"mutation::compiled_{function.__name__}_{kernel}", function)
    if kernel:
        op.register_kernel("cpu", function)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        z = x.sin()
        before = z + 1
        op(z)
        return before, z * 3

    x = torch.randn(2, 3)
    for a, b in zip(torch.compile(program, fullgraph=True, backend="aot_eager")(x), program(x), strict=True):
        torch.testing.assert_close(a, b)


def test_writes_to_an_input_of_the_program_under_compile() -> None:
    op = opkit.custom_op("mutation::compiled_out", through_out)

    def program(x: Tensor, y: Tensor) -> Tensor:
        op(x, y)
        return y * 2

    x, y = torch.randn(2, 3), torch.zeros(2, 3)
    result = torch.compile(program, fullgraph=True, backend="aot_eager")(x, y)
    torch.testing.assert_close(y, x + 1)
    torch.testing.assert_close(result, 2 * x + 2)
