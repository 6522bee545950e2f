"""Operators called with tensors of subclasses: they see the operator by torch's own protocol, whatever kernel it has."""

import itertools

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

import opkit

C_KERNEL = """
void scaled(const T* x, const T* weight, T* out, int64_t batch, int64_t n) {
    for (int64_t i = 0; i < batch; i++)
        for (int64_t j = 0; j < n; j++) out[i * n + j] = x[i * n + j] * weight[j];
}
"""
_count = itertools.count()


def defined(kind):
    @opkit.custom_op(f"testsubclasses::scaled{next(_count)}")
    def scaled(x: Float[Tensor, "*batch n"], weight: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
        return x * weight

    if kind == "python":
        scaled.register_kernel("cpu", lambda x, weight: x * weight, name="python")
    elif kind == "c":
        scaled.register_kernel("cpu", opkit.c_kernel(C_KERNEL, dtypes=[torch.float32]))
    return scaled


class Function(Tensor):
    """Twice what its memory holds, which it says to functions of torch."""

    @staticmethod
    def of(x):
        return (x / 2).as_subclass(Function)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def read(x):
            return x.as_subclass(Tensor) * 2 if isinstance(x, Function) else x

        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


class Wrapper(Tensor):
    """Twice the elements of another tensor, without memory, which it says to the dispatcher and to compilers."""

    @staticmethod
    def __new__(cls, half):
        return Tensor._make_wrapper_subclass(
            cls, half.shape, strides=half.stride(), dtype=half.dtype, device=half.device
        )

    def __init__(self, half):
        self.half = half

    @staticmethod
    def of(x):
        return Wrapper(x / 2)

    def __tensor_flatten__(self):
        return ["half"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapper(inner["half"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def read(x):
            return x.half * 2 if isinstance(x, Wrapper) else x

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


@pytest.mark.parametrize("make", [Function.of, Wrapper.of], ids=["function", "dispatch"])
@pytest.mark.parametrize("kind", ["reference", "python", "c"])
def test_elements_are_those_that_the_subclass_says(kind, make):
    op, x, weight = defined(kind), torch.randn(3, 4), torch.randn(4)
    for _ in range(8):  # until calls of this kind go straight to the kernel
        op(x, weight)
        op._opoverload(x, weight)
    for call in (op, op._opoverload):
        torch.testing.assert_close(call(make(x), weight), x * weight)
    learned = weight.clone().requires_grad_()
    op(make(x), learned).sum().backward()
    torch.testing.assert_close(learned.grad, x.sum(0))
    with opkit.use_kernel(op, "reference"):
        torch.testing.assert_close(op(make(x), weight), x * weight)


class Scale(torch.nn.Module):
    def __init__(self, op, x):
        super().__init__()
        self.op, self.x = op, x

    def forward(self, weight):
        return self.op(self.x, weight)


def test_compiled():
    op, x, weight = defined("c"), torch.randn(3, 4), torch.randn(4)
    compiled = torch.compile(lambda x, weight: op(x, weight), backend="opkit")
    torch.testing.assert_close(compiled(x, weight), x * weight)
    torch.testing.assert_close(compiled(Wrapper.of(x), weight), x * weight)
    state = torch.compile(Scale(op, Wrapper.of(x)), backend="opkit")
    torch.testing.assert_close(state(weight), x * weight)
