"""Operators under torch.compile: autocast."""

from __future__ import annotations

import pytest
import torch

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LOW = torch.bfloat16
POLICIES = {
    None: {(torch.float32, torch.float32): torch.float32, (LOW, torch.float32): LOW, (LOW, LOW): LOW},
    "low": {(torch.float32, torch.float32): LOW, (LOW, torch.float32): LOW, (LOW, LOW): LOW},
    "full": {
        (torch.float32, torch.float32): torch.float32,
        (LOW, torch.float32): torch.float32,
        (LOW, LOW): torch.float32,
    },
    "promote": {(torch.float32, torch.float32): torch.float32, (LOW, torch.float32): torch.float32, (LOW, LOW): LOW},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_gives_the_same_dtypes_everywhere(name, policy, kernel, train):
    op = opkit.custom_op(
        name, lambda x, y: (x @ y.T.to(x.dtype)) * y.sum(), schema="(Tensor x, Tensor y) -> Tensor", autocast=policy
    )
    namespace, opname = name.split("::")
    seen = []
    if kernel:
        op.register_kernel("cpu", lambda x, y: seen.append((x.dtype, y.dtype)) or op.reference(x, y))
    compiled = torch.compile(lambda x, y: op(x, y), backend="aot_eager", fullgraph=True)
    for dtypes, expected in POLICIES[policy].items():
        x, y = (torch.randn(3, 3, dtype=dtype, requires_grad=train) for dtype in dtypes)
        with torch.autocast("cpu", LOW):
            results = [op(x, y), getattr(getattr(torch.ops, namespace), opname)(x, y), compiled(x, y)]
        assert [r.dtype for r in results] == [expected] * 3
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2)
        if train:
            grads = [torch.autograd.grad(r.sum(), (x, y)) for r in results]
            for grad in grads:
                assert [g.dtype for g in grad] == list(dtypes)
                torch.testing.assert_close(grad, grads[0], rtol=3e-2, atol=3e-2)


def test_float64_is_left_alone(name):
    op = opkit.custom_op(name, lambda x: x * 2, schema="(Tensor x) -> Tensor", autocast="low")
    compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", LOW):
        assert (
            op(torch.ones(2, dtype=torch.float64)).dtype
            is compiled(torch.ones(2, dtype=torch.float64)).dtype
            is torch.float64
        )
