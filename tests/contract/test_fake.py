"""fake: planted defects that each property must catch, right operators that all must pass."""

import itertools

import pytest
import torch
from torch import Tensor

from opkit.testing import tensor

NUMBERS = itertools.count()
MATRIX = {"args": (tensor("b n"),)}


def operator(kernel, fake, mutates_args=()):
    """A new operator of torch's."""
    made = torch.library.custom_op(f"fake_tests::op{next(NUMBERS)}", kernel, mutates_args=mutates_args)
    if fake is not None:
        made.register_fake(fake)
    return made


def double(x: Tensor) -> Tensor:
    return x.contiguous() * 2


def like(x):
    return x.new_empty(x.shape)


def total(x: Tensor) -> Tensor:
    return x.sum(-1)


def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


def reads_elements(x):
    return x.new_empty(x.shape) if x.sum() > 0 else torch.empty_like(x)


def refuses_empty(x):
    if not x.numel():
        raise ValueError("nothing to do")
    return x.new_empty(x.shape)


@pytest.mark.parametrize("fake", [reads_elements, refuses_empty, lambda x: x.clone().numpy()])
def test_a_fake_that_refuses(fails, fake):
    fails("fake.accepts", operator(double, fake), **MATRIX)


def test_a_refusal_of_empty_tensors_is_shown_on_one(fails):
    failure = fails("fake.accepts", operator(double, refuses_empty), **MATRIX)
    assert failure.args[0].shape in [(0, 1), (1, 0)]
    assert "nothing to do" in failure.message


def test_a_kernel_that_alone_refuses_is_a_remark(holds):
    def even(x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            raise ValueError("odd")
        return x.clone()

    passed = holds("fake.accepts", operator(even, like), args=(tensor("n"),))
    assert "the kernel refuses" in passed.remarks[0]


@pytest.mark.parametrize(
    ("kernel", "fake"),
    [
        (total, lambda x: x.new_empty((*x.shape[:-1], 1))),
        (total, lambda x: x.new_empty(x.shape[1:])),
        (lambda x: x[:, ::2].clone(), lambda x: x.new_empty(x.shape[0], x.shape[1] // 2)),
        (lambda x: x[:, :64].clone(), like),
    ],
)
def test_a_wrong_shape(fails, kernel, fake):
    def typed(x: Tensor) -> Tensor:
        return kernel(x)

    failure = fails("fake.shapes", operator(typed, fake), **MATRIX)
    assert failure.args[0].stride()[-1] == 1  # the layout is not what matters
    assert "by the fake implementation" in failure.message


def test_a_size_that_depends_on_data_and_is_fixed_by_the_fake(fails):
    fails("fake.shapes", operator(positive, like), args=(tensor("n"),))


def test_the_number_of_results_and_none(fails):
    def lists(x: Tensor, n: int) -> list[Tensor]:
        return [x.clone() for _ in range(n)]

    def wrong(x, n):
        return [torch.empty_like(x)] * 2

    failure = fails("fake.shapes", operator(lists, wrong), args=(tensor("n"), 3))
    assert "3 results, the fake 2" in failure.message


def test_a_number_that_depends_on_data(fails):
    def count(x: Tensor) -> int:
        return int((x > 0).sum())

    fails("fake.shapes", operator(count, lambda x: 0), args=(tensor("n"),))


@pytest.mark.parametrize(
    "fake", [lambda x, y: torch.empty_like(x), lambda x, y: torch.empty(x.shape), lambda x, y: x.new_empty(x.shape)]
)
def test_a_wrong_dtype(fails, fake):
    def promoted(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    both = (tensor("n", (torch.float32, torch.bfloat16)), tensor("n", (torch.float64, torch.float16)))
    failure = fails("fake.dtype", operator(promoted, fake), args=both)
    assert failure.args[0].numel() <= 1


@pytest.mark.parametrize(
    ("kernel", "fake"),
    [
        (double, torch.empty_like),  # keeps a transposed layout
        (torch.clone, like),  # loses it
        (lambda x: x.t().contiguous().t(), like),
    ],
)
def test_wrong_strides(fails, kernel, fake):
    def typed(x: Tensor) -> Tensor:
        return kernel(x)

    failure = fails("fake.strides", operator(typed, fake), **MATRIX)
    assert sorted(failure.args[0].shape) == [2, 2]


def test_strides_of_dimensions_of_size_1_are_a_remark(holds):
    def column(x: Tensor) -> Tensor:
        return torch.empty_strided((x.shape[0], 1), (1, 7)).fill_(1)

    passed = holds("fake.strides", operator(column, lambda x: x.new_empty(x.shape[0], 1)), args=(tensor("n"),))
    assert "size 1" in passed.remarks[0]


def test_part_of_a_larger_buffer(fails):
    def part(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x])[1:]

    assert fails("fake.offset", operator(part, like), args=(tensor("n"),)).args[0].shape == (1,)


@pytest.mark.parametrize("fake", [lambda x: torch.empty(x.shape), lambda x: torch.empty(x.shape, device="meta")])
def test_a_wrong_device(fails, fake):
    fails("fake.device", operator(double, fake), **MATRIX)


def test_a_kernel_for_the_cpu_alone_may_say_so(holds):
    library = torch.library.Library("fake_tests_cpu", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", double, "CPU")
    torch.library.register_fake("fake_tests_cpu::double", lambda x: torch.empty(x.shape), lib=library)
    holds("fake.device", torch.ops.fake_tests_cpu.double, args=(tensor("n"),))


def test_gradients_that_the_fake_loses(fails):
    library = torch.library.Library("fake_tests_grad", "FRAGMENT")
    library.define("double(Tensor x, Tensor y) -> Tensor")

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    def autograd(x, y):
        return Double.apply(x, y) if type(x) is Tensor else torch.empty_like(x)

    library.impl("double", autograd, "Autograd")
    failure = fails("fake.requires_grad", torch.ops.fake_tests_grad.double, args=(tensor("n"), tensor("n")))
    assert "requires_grad=True, and False" in failure.message


@pytest.mark.parametrize("fake", [lambda x: x, lambda x: x.view(x.shape)])
def test_a_fake_that_returns_its_argument(fails, fake):
    library = torch.library.Library(f"fake_tests_alias{next(NUMBERS)}", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", double, "CPU")
    library._register_fake("double", fake)
    packet = getattr(torch.ops, library.ns).double
    assert fails("fake.aliasing", packet, args=(tensor("n"),)).args[0].shape == (1,)


def test_two_results_in_one_storage(fails):
    library = torch.library.Library("fake_tests_halves", "FRAGMENT")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("halves", lambda x: tuple(torch.stack([x, x]).unbind()), "CPU")
    library._register_fake("halves", lambda x: (torch.empty_like(x), torch.empty_like(x)))
    failure = fails("fake.aliasing", torch.ops.fake_tests_halves.halves, args=(tensor("n"),))
    assert "result 0 and result 1" in failure.message


CALLS = itertools.count()


def seeds(x):
    torch.manual_seed(next(CALLS))
    return torch.empty_like(x)


@pytest.mark.parametrize("fake", [seeds, lambda x: x.new_empty(next(CALLS), *x.shape)])
def test_effects(fails, fake):
    fails("fake.effects", operator(double, fake), **MATRIX)


def test_a_plain_function_that_cannot_run_on_fakes_is_skipped(asked):
    report = asked("fake.shapes", lambda x: torch.from_numpy(x.numpy() * 2), args=(tensor("n"),))
    assert "does not run on fake tensors" in report.skipped[0].reason


def test_an_operator_without_fake_is_skipped(asked):
    report = asked("fake.shapes", operator(double, None), **MATRIX)
    assert "no fake implementation" in report.skipped[0].reason
