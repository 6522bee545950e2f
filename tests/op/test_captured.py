"""References that use tensors which are not their arguments: differentiated by torch, or refused; never left out."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import RuleError


def test_a_captured_parameter_gets_its_gradient_where_there_is_no_kernel() -> None:
    scale = torch.full((3,), 2.0, requires_grad=True)

    def scaled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * scale

    op = opkit.custom_op("captured::parameter", scaled, mutates_args=())
    x = torch.randn(3, requires_grad=True)
    for tensor in (x, x.detach()):
        torch.testing.assert_close(torch.autograd.grad(op(tensor).sum(), scale)[0], x.detach())
    op.register_kernel("cpu", lambda x: x * 2)
    for _ in range(3):
        with pytest.raises(RuleError, match="is not an argument"):
            op(x.detach())
    for call in (op, torch.ops.captured.parameter):
        with pytest.raises(RuleError, match="is not an argument"):
            call(x)
    with torch.no_grad():
        torch.testing.assert_close(op(x), x * 2)
    with pytest.raises(RuleError, match="is not an argument"):
        op(x.detach())


def test_a_captured_constant_is_part_of_the_derived_backward() -> None:
    constant = torch.tensor([1.0, 2.0, 3.0])

    def weighted(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.sin() * constant

    op = opkit.custom_op("captured::constant", weighted, mutates_args=())
    op.register_kernel("cpu", weighted)
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], x.cos() * constant)


def test_outputs_that_the_reference_cuts_off_are_marked_where_the_whole_reference_runs_again() -> None:
    def mixed(x: Float[Tensor, "n m"]) -> tuple[Tensor, Tensor, Tensor, int]:
        return x * x.detach(), x.argmax(-1), (x > 0).to(x.dtype), x.shape[0]

    op = opkit.custom_op("captured::mixed", mixed, mutates_args=())
    op.register_kernel("cpu", mixed)
    x = torch.randn(3, 4, requires_grad=True)
    for call in (op, torch.ops.captured.mixed):
        differentiable, index, mask, rows = call(x)
        assert (differentiable.requires_grad, index.requires_grad, mask.requires_grad, rows) == (True, False, False, 3)
        (first,) = torch.autograd.grad(differentiable.sum(), x, create_graph=True)
        torch.testing.assert_close(first, x.detach())
        with pytest.raises(RuntimeError, match="does not require grad"):
            mask.sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: op(x)[0].sum())(x.detach()), x.detach())
    compiled = torch.compile(lambda x: op(x)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], x.detach())
