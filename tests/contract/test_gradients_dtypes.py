"""gradients in narrow dtypes: a planted defect that the property must catch, right operators that it must pass."""

import pytest
import torch

from opkit.testing import tensor

NARROW = (torch.float32, torch.bfloat16, torch.float16)
ROWS = tensor("b n", NARROW)


class Sums(torch.autograd.Function):
    """Multiplies by a vector; the gradient of that is a sum over rows, here in the argument's dtype, one row at a time."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        total = torch.zeros_like(weight)
        for row in grad * x:
            total += row
        return grad * weight, total


class Casts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        rounded = x.half() if x.dtype == torch.float16 else x.to(torch.float8_e4m3fn)
        return grad * rounded.to(x.dtype).cos()


def test_a_sum_in_a_narrow_dtype_is_found(fails):
    args = (ROWS, tensor("n", NARROW))
    fails("gradients.dtypes", Sums.apply, args=args, reference=torch.mul)


def test_a_cast_to_something_narrower_is_found(fails):
    fails("gradients.dtypes", Casts.apply, args=(ROWS,), reference=torch.sin)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.mul, (ROWS, tensor("n", NARROW))),
        (torch.matmul, (tensor("m k", NARROW), tensor("k n", NARROW))),
        (lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), (ROWS,)),
        (lambda x: torch.softmax(x, -1), (ROWS,)),
        (torch.nn.functional.gelu, (ROWS,)),
        (lambda x: x.square().mean(-1), (ROWS,)),
        (lambda x: torch.logsumexp(x, -1), (ROWS,)),
    ],
)
def test_right_backwards_hold(holds, op, args):
    holds("gradients.dtypes", op, args=args, reference=op)


def test_a_right_backward_that_saves_its_result_holds(holds):
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.softmax(x.float(), -1).to(x.dtype)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            y = ctx.saved_tensors[0].float()
            products = grad.float() * y
            return (products - y * products.sum(-1, keepdim=True)).to(grad.dtype)

    wide = lambda x: torch.softmax(x.float(), -1).to(x.dtype)  # noqa: E731
    holds("gradients.dtypes", Softmax.apply, args=(ROWS,), reference=wide)


def test_it_is_not_asked_where_no_argument_is_narrow(asked):
    assert "narrow" in asked("gradients.dtypes", torch.sin, args=(tensor("n"),), reference=torch.sin).skipped[0].reason
