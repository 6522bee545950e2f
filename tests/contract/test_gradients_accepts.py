"""gradients.accepts: mistakes that raise where gradients are required, and refusals that are meant."""

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
