"""Gradients: calls that refuse or record none, narrow dtypes, equal numbers."""

import pytest
import torch
from hypothesis import strategies as st

from opkit.testing import tensor

TWO = (tensor("n"), tensor("n"))


def save(ctx, inputs, output):
    ctx.save_for_backward(*(each for each in inputs if isinstance(each, torch.Tensor)))


def library_op(name, backward, setup_context=save):
    @torch.library.custom_op(f"gradients_accepts_test::{name}", mutates_args=())
    def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    mul.register_autograd(backward, setup_context=setup_context)
    return mul


def right(ctx, g):
    x, y = ctx.saved_tensors
    return g * y, g * x


def other_parameters(ctx, given, returned):
    ctx.save_for_backward(*given)


def misspelt(ctx, g):
    x, y = ctx.saved
    return g * y, g * x


def one_too_few(ctx, g):
    return g * ctx.saved_tensors[1]


def wrong_shape(ctx, g):
    x, y = ctx.saved_tensors
    return (g * y).sum(), g * x


def not_for_one(ctx, g):
    x, y = ctx.saved_tensors
    return g * y, g * x / (1 if x.numel() != 1 else {}["scale"])


def only_both(ctx, g):
    x, y = ctx.saved_tensors
    wanted = [grad for grad, asked in zip((g * y, g * x), ctx.needs_input_grad, strict=True) if asked]
    first, second = wanted
    return first, second


WRONG = {
    "setup_context": (right, other_parameters),
    "attribute": (misspelt, save),
    "too_few": (one_too_few, save),
    "shape": (wrong_shape, save),
    "size_one": (not_for_one, save),
    "one_input": (only_both, save),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_where_gradients_are_required_is_found(name, fails):
    failure = fails("gradients.accepts", library_op(name, *WRONG[name]), args=TWO, max_examples=20)
    assert failure.args[0].numel() <= 2
    assert "Without gradients the call works" in failure.message


def test_an_optional_argument_that_is_forgotten_in_the_backward_is_found(fails):
    @torch.library.custom_op("gradients_accepts_test::optional", mutates_args=())
    def optional(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x * 2 if bias is None else x * 2 + bias

    def setup_context(ctx, inputs, output):
        ctx.sizes = inputs[1].shape

    optional.register_autograd(lambda ctx, g: (g * 2, g.sum_to_size(ctx.sizes)), setup_context=setup_context)
    args = (tensor("b n"), tensor("n", optional=True))
    failure = fails("gradients.accepts", optional, args=args, max_examples=20)
    assert "NoneType" in failure.message


def test_a_mistake_in_a_plain_function_is_found(fails):
    fails("gradients.accepts", lambda x: x * 2 if not x.requires_grad else x.scaled(2), args=(tensor("n"),))


def refuses(ctx, g):
    raise TypeError("mul has no backward")


def refuses_second(ctx, g):
    _, y = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        raise NotImplementedError("there is no gradient for y")
    return g * y, None


def test_what_is_raised_on_purpose_is_no_failure(asked, holds):
    assert asked("gradients.accepts", library_op("refuses", refuses), args=TWO, max_examples=10).ok
    holds("gradients.accepts", library_op("refuses_second", refuses_second), args=TWO, max_examples=10)


def test_an_operator_without_a_formula_is_not_asked(asked):
    @torch.library.custom_op("gradients_accepts_test::none", mutates_args=())
    def none(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def by_numpy(x):
        return torch.from_numpy(x.numpy() * 2)

    for op in (none, by_numpy):
        assert asked("gradients.accepts", op, args=(tensor("n"),), max_examples=10).skipped


RIGHT = {
    "op": (library_op("right", right), TWO),
    "power": (torch.pow, (tensor("b n", low=0.1, high=2), st.integers(0, 3))),
    "in place": (lambda x: x.add_(1), (tensor("n"),)),
    "argmax": (lambda x: x.argmax(), (tensor("n"),)),
    "max": (lambda x: torch.max(x, -1), (tensor("b n"),)),
    "cumulative product": (lambda x: torch.cumprod(x, -1), (tensor("*b n"),)),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", RIGHT)
def test_right_operators_are_accepted(name, asked):
    op, args = RIGHT[name]
    report = asked("gradients.accepts", op, args=args, max_examples=20)
    assert report.ok, str(report)


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
