"""The derived autocast rule: its policies, with and without a kernel."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

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
