"""Bodies that are opaque or random or use tensors which are not their arguments: what is derived all the same; autocast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import opkit
from opkit.errors import RuleError


def test_a_random_reference_beside_a_kernel_refuses_derivation() -> None:
    def drop(x: Float[Tensor, "n"], p: float = 0.5) -> Float[Tensor, "n"]:
        return x * (torch.rand_like(x) > p)

    op = opkit.custom_op("derived_opaque::drop", drop)
    x = torch.ones(8, requires_grad=True)
    torch.manual_seed(0)
    y = op(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], (y != 0).float())
    op.register_kernel("cpu", op.reference)
    for call in (op, torch.ops.derived_opaque.drop):
        with pytest.raises(RuleError, match=r"derived_opaque::drop: no backward can be derived.*register_autograd"):
            call(x)


def test_an_opaque_body_names_the_line_and_the_method() -> None:
    def leaves(x: Tensor) -> Tensor:
        doubled = x * 2
        return torch.from_numpy(np.sin(doubled.numpy(force=True)))

    op = opkit.custom_op("derived_opaque::leaves", leaves, mutates_args=())
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuleError, match="no autograd formula") as caught:
        op(x).sum().backward()
    note = caught.value.__notes__[0]
    assert "np.sin(doubled.numpy(force=True))" in note
    assert "register_autograd" in note
    with FakeTensorMode(), pytest.raises(RuleError, match="no fake impl") as caught:
        op(torch.ones(2))
    assert "register_fake" in caught.value.__notes__[0]
    with pytest.raises(RuleError, match="forward-mode"):
        torch.func.jvp(op, (torch.ones(2),), (torch.ones(2),))
    assert {r.rule: r.origin for r in op.describe().rules}["backward"] == "not derivable"


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * 2 if x.sum() > 0 else x * 3,
        lambda x: torch.tensor(x.tolist()) * 2,
    ],
    ids=["item", "branch", "tolist"],
)
def test_values_read_by_the_body_make_it_opaque(body: Any) -> None:
    def opaque(x: Tensor) -> Tensor:
        return body(x)

    name = f"derived_opaque::opaque_{abs(hash(body))}"
    op = opkit.custom_op(name, opaque, mutates_args=())
    torch.testing.assert_close(op(torch.ones(2)), body(torch.ones(2)))
    with pytest.raises(RuleError, match="no autograd formula"):
        op(torch.ones(2, requires_grad=True)).sum().backward()


def test_a_reference_given_beside_an_opaque_body() -> None:
    def with_numpy(x: Tensor) -> Tensor:
        return torch.from_numpy(np.cos(x.numpy(force=True)))

    op = opkit.custom_op("derived_opaque::numpy_cos", with_numpy, mutates_args=(), reference=lambda x: x.cos())
    x = torch.randn(3, requires_grad=True)
    assert op.select(x).kernel == "with_numpy"
    torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], -x.sin())
    compiled = torch.compile(lambda x: op(x) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), 2 * x.cos())


def test_a_call_that_no_kernel_takes_is_differentiated_by_torch_itself() -> None:
    def noisy(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * (torch.rand_like(x) > 0.5)

    op = opkit.custom_op("derived_opaque::noisy", noisy)
    op.register_kernel("cpu", lambda x: x * 0, dtypes=[torch.float64])
    x = torch.ones(16, requires_grad=True)
    y = op(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], (y != 0).float())


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


POLICIES = {
    None: (torch.float32, torch.float16),
    "low": (torch.bfloat16, torch.bfloat16),
    "full": (torch.float32, torch.float32),
    "promote": (torch.float32, torch.float32),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_policies(policy: str | None, kernel: bool) -> None:
    def seen(x: Float[Tensor, "n n"], y: Float[Tensor, "n n"]) -> tuple[Tensor, Tensor]:
        return x @ x, y @ y

    op = opkit.custom_op(f"derived_autocast::autocast_{policy}_{kernel}", seen, autocast=policy)
    if kernel:
        op.register_kernel("cpu", op.reference)
    x, y = torch.randn(2, 2), torch.randn(2, 2, dtype=torch.float16)
    compiled = torch.compile(lambda x, y: op(x, y), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (op, getattr(torch.ops.derived_autocast, f"autocast_{policy}_{kernel}"), compiled):
            assert tuple(t.dtype for t in call(x, y)) == POLICIES[policy]
            assert call(x.double(), y.double())[0].dtype is torch.float64
    assert op(x, y)[0].dtype is torch.float32


def test_autocast_gradients_keep_the_inputs_dtype() -> None:
    def softmax(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return torch.softmax(x, -1)

    op = opkit.custom_op("derived_autocast::autocast_grad", softmax, autocast="low")
    op.register_kernel("cpu", op.reference)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = op(x)
    (grad,) = torch.autograd.grad(out.float().pow(2).sum(), x)
    assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
