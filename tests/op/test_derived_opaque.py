"""Bodies that are opaque or random: which rules are derived all the same, and how the others are refused."""

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
