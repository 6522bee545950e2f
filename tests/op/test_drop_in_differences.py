"""Where opkit answers differently from ``torch.library.custom_op``, on purpose: the tables of ``docs/drop_in.md``."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode

import opkit

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def sine(name: str) -> opkit.CustomOp:
    @opkit.custom_op(name, mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return x.sin()

    return sine


def add_one(name: str) -> opkit.CustomOp:
    def op(x: Tensor) -> Tensor:
        x.add_(1)
        return x

    return opkit.custom_op(name, op, mutates_args={"x"}, tags=torch.Tag.inplace)


def test_a_backward_is_derived(sine: opkit.CustomOp) -> None:
    x = torch.randn(3, requires_grad=True)
    sine(x).sum().backward()
    assert torch.equal(x.grad, x.cos())


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="torch.Tag.inplace came with torch 2.13")
def test_in_place_gradients_are_torchs_own(name: str) -> None:
    add_ = add_one(name)
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        add_(leaf)
    y = leaf * 2
    assert add_(y) is y
    (y * y).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 12.0))


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="torch.Tag.inplace came with torch 2.13")
def test_in_place_outside_torch_has_no_gradient(name: str) -> None:
    def op(x: Tensor) -> Tensor:
        np.sin(x.detach().numpy(), out=x.detach().numpy())
        return x

    sin_ = opkit.custom_op(name, op, mutates_args={"x"}, tags=torch.Tag.inplace)
    x = torch.ones(3, requires_grad=True)
    found = sin_(x)
    assert found.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula"):
        found.sum().backward()


def test_a_fake_is_derived(sine: opkit.CustomOp) -> None:
    with FakeTensorMode():
        assert sine(torch.randn(3)).shape == (3,)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch's own forward-mode rules
def test_forward_mode_is_derived(sine: opkit.CustomOp) -> None:
    x = torch.randn(3)
    assert torch.allclose(torch.func.jvp(sine, (x,), (torch.ones(3),))[1], x.cos())


@pytest.mark.parametrize("kernel", [False, True])
def test_compiled_graphs_hold_the_reference_or_the_unit(sine: opkit.CustomOp, kernel: bool) -> None:
    if kernel:
        sine.register_kernel("cpu")(lambda x: torch.from_numpy(np.sin(x.numpy())))
    backend = AotEagerAndRecordGraphs()
    torch.compile(lambda x: sine(x) + 1, backend=backend, fullgraph=True)(torch.ones(3))
    targets = [node.target for node in backend.fw_graphs[0].graph.nodes]
    assert (sine._opoverload in targets) is kernel
    assert (torch.ops.aten.sin.default in targets) is not kernel


def test_autocast_is_off_inside(name: str) -> None:
    @opkit.custom_op(name, mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x @ x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert square(torch.ones(2, 2)).dtype is torch.float32


def test_undeclared_writes_are_errors(name: str) -> None:
    def op(x: Tensor) -> Tensor:
        x.add_(1)
        return x.clone()

    with pytest.raises(opkit.errors.MutationError, match="mutates_args"):
        opkit.custom_op(name, op, mutates_args=())(torch.ones(3))


def test_nothing_returned_is_an_error(name: str) -> None:
    def op(x: Tensor) -> Tensor:
        x.sin()

    with pytest.raises(opkit.errors.OutputError, match="returned nothing"):
        opkit.custom_op(name, op, mutates_args=())(torch.ones(3))


def test_kernels_of_another_dtype_are_errors(sine: opkit.CustomOp) -> None:
    sine.register_kernel("cpu")(lambda x: x.sin().double())
    with pytest.raises(opkit.errors.OutputError, match="float64"):
        sine(torch.ones(3))


def test_definitions_by_the_same_module_warn(name: str) -> None:
    def op(x: Tensor) -> Tensor:
        return x.clone()

    opkit.custom_op(name, op, mutates_args=())
    with pytest.warns(opkit.errors.RedefinitionWarning):
        opkit.custom_op(name, op, mutates_args=())
