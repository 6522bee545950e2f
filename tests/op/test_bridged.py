"""Which calls of an operator with a native kernel run in C without Python, and when Python has them back."""

import contextlib

import pytest
import torch
from jaxtyping import Float, Float32
from torch import Tensor

import opkit

pytestmark = pytest.mark.usefixtures("bridge")

TWICE = "void twice(const T* x, T* out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = 2 * x[i]; }"
THRICE = TWICE.replace("twice", "thrice").replace("2 *", "3 *")


@pytest.fixture
def doubled():
    """An operator whose kernel serves its calls in C."""

    @opkit.custom_op("bridged::doubled")  # one name: the kernel is built once, as the name is part of what is built
    def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    doubled.register_kernel("cpu", opkit.c_kernel(TWICE, dtypes=["float32"]))
    doubled(torch.ones(2))
    assert serving(doubled)
    yield doubled
    opkit.remove("bridged::doubled")


def serving(op):
    return op._operator.bridged.serving


def both(op, x):
    """A call as ``op(x)`` and one through ``torch.ops``, which must agree."""
    namespace, name = op.name.split("::")
    direct, dispatched = op(x), getattr(getattr(torch.ops, namespace), name)(x)
    assert torch.equal(direct, dispatched)
    return direct


def test_calls_run_in_c_after_the_first(doubled):
    x = torch.ones(5)
    for _ in range(3):
        assert both(doubled, x).tolist() == [2.0] * 5
    with torch.inference_mode():
        assert both(doubled, x).is_inference()


def test_gradients_go_to_python(doubled):
    x = torch.ones(5, requires_grad=True)
    both(doubled, x)
    doubled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 5
    with torch.no_grad():
        assert not both(doubled, x).requires_grad


def test_what_the_kernel_does_not_take_goes_to_python(doubled):
    assert both(doubled, torch.ones(3, dtype=torch.float64)).dtype is torch.float64
    assert both(doubled, torch.ones(6)[::2]).tolist() == [2.0] * 3
    assert both(doubled, torch.ones(0)).shape == (0,)
    assert serving(doubled)
    for wrong in (torch.ones(2, 2), torch.ones(2, dtype=torch.int64)):
        with pytest.raises((opkit.errors.ShapeError, opkit.errors.DtypeError)):
            doubled(wrong)


def test_annotations_are_checked_at_every_new_kind_of_call(name):
    @opkit.custom_op(name)
    def doubled(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    doubled.register_kernel("cpu", opkit.c_kernel(TWICE, dtypes=["float32", "float64"]))
    for _ in range(3):
        doubled(torch.ones(2))
        with pytest.raises(opkit.errors.DtypeError):
            doubled(torch.ones(2, dtype=torch.float64))


def test_another_kernel_takes_over(doubled):
    doubled.register_kernel("cpu", opkit.c_kernel(THRICE, dtypes=["float32"]), priority=1)
    assert not serving(doubled)
    for _ in range(3):
        assert both(doubled, torch.ones(2)).tolist() == [3.0, 3.0]
    assert serving(doubled)


def test_a_condition_is_asked_in_python(doubled):
    kernel = opkit.c_kernel(THRICE, dtypes=["float32"])
    doubled.register_kernel("cpu", kernel, when=lambda x: x.shape[0] > 3)
    for _ in range(4):
        assert both(doubled, torch.ones(2)).tolist() == [2.0] * 2
        assert both(doubled, torch.ones(4)).tolist() == [3.0] * 4
    assert not serving(doubled)


def test_a_python_kernel_takes_over(doubled):
    doubled.register_kernel("cpu", lambda x: x * 4, priority=1)
    for _ in range(3):
        assert both(doubled, torch.ones(2)).tolist() == [4.0] * 2


def test_forced_and_disabled_kernels(doubled):
    doubled.register_kernel("cpu", lambda x: x * 4, when=lambda x: False, name="four")
    for _ in range(2):
        assert both(doubled, torch.ones(2)).tolist() == [2.0] * 2
        with opkit.use_kernel(doubled, "four"):
            assert both(doubled, torch.ones(2)).tolist() == [4.0] * 2
        with doubled.set_kernel_enabled("cpu", False):
            assert doubled.select(torch.ones(2)).kernel == "reference"
            assert both(doubled, torch.ones(2)).tolist() == [2.0] * 2


def test_a_rule_given_later_holds(doubled):
    doubled.register_autograd(lambda ctx, grad: grad * 100)
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        both(doubled, torch.ones(2))
        x.grad = None
        doubled(x).sum().backward()
        assert x.grad.tolist() == [100.0, 100.0]


def test_a_redefined_kernel_and_operator(name):
    for source, factor in ((TWICE, 2.0), (THRICE, 3.0), (TWICE, 2.0)):
        again = source == THRICE
        with pytest.warns(opkit.errors.RedefinitionWarning) if again else contextlib.nullcontext():

            @opkit.custom_op(name)
            def op(x: Float[Tensor, "n"], factor: float = factor) -> Float[Tensor, "n"]:
                return x * factor

        op.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float32"]))
        for _ in range(3):
            assert op(torch.ones(2)).tolist() == [factor] * 2
        if again:
            opkit.remove(name)


def test_a_kernel_registered_again_is_the_new_one(doubled):
    doubled.register_kernel("cpu", opkit.c_kernel(TWICE.replace("2 *", "5 *"), dtypes=["float32"]))
    for _ in range(3):
        assert both(doubled, torch.ones(2)).tolist() == [5.0, 5.0]
    assert [kernel.name for kernel in doubled.describe().kernels] == ["twice"]
