"""transforms: functionalization, autocast with a declared policy, maps within maps, and gradients of each sample."""

import ctypes

import pytest
import torch

import opkit
from opkit.testing import tensor

X = (tensor("n"),)
MATRICES = (tensor("b n"), tensor("n m"))


def product(name, kernel):
    @torch.library.custom_op(f"transforms_modes_test::{name}", mutates_args=())
    def op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return kernel(x, y)

    op.register_autocast("cpu", torch.bfloat16)
    return op


def nesting():
    """How many autocast contexts are entered: whoever asks this takes a disabled one for an enabled one."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def enabled():
    return nesting() == 1


KERNELS = {
    "returns_another_dtype": lambda x, y: (x @ y).float() if enabled() else x @ y,
    "computes_something_else": lambda x, y: 2 * (x @ y) if enabled() else x @ y,
    "refuses_what_it_declares": lambda x, y: torch.from_numpy(x.numpy() @ y.numpy()),
}


@pytest.mark.parametrize("name", [*KERNELS][:2])
def test_a_kernel_that_breaks_its_declared_autocast_is_found(name, fails):
    failure = fails("transforms.autocast", product(name, KERNELS[name]), args=MATRICES, max_examples=10)
    assert "cast as declared" in failure.message
    assert max(failure.args[0].shape) <= 2


def test_a_kernel_that_raises_under_its_declared_autocast_is_found(fails):
    op = product("refuses_what_it_declares", KERNELS["refuses_what_it_declares"])
    failure = fails("transforms.autocast", op, args=MATRICES, reference=torch.matmul, max_examples=10)
    assert "under torch.autocast it raises" in failure.message


def test_a_result_that_changes_under_a_disabled_autocast_is_found(fails):
    failure = fails("transforms.autocast", lambda x: x * (3 if nesting() else 2), args=X, max_examples=10)
    assert "enabled=False" in failure.message
    assert failure.args[0].numel() <= 1


def test_a_declared_autocast_holds(holds):
    holds("transforms.autocast", product("right", torch.matmul), args=MATRICES, max_examples=10)

    @opkit.custom_op("transforms_modes_test::scaled", autocast="low")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    holds("transforms.autocast", scaled, args=X, max_examples=10)


def unmapped(x):
    """Whether the tensor is no wrapper, as functionalization's are."""
    return not torch._is_functional_tensor(x)


FUNCTIONALIZED = {
    "another result": lambda x: x * (2 if unmapped(x) else 3),
    "another dtype": lambda x: x * 2 if unmapped(x) else (x * 2).double(),
    "a write that is lost": lambda x: x.add_(1) if unmapped(x) else x + 1,
}


@pytest.mark.parametrize("name", FUNCTIONALIZED)
def test_what_functionalization_changes_is_found(name, fails):
    failure = fails("transforms.functionalize", FUNCTIONALIZED[name], args=X, max_examples=10)
    assert failure.args[0].numel() <= 1
    assert "functionalize" in failure.message


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", [lambda x: x.add_(1), lambda x: x.view(-1), torch.sin])
def test_functionalization_holds(op, holds):
    holds("transforms.functionalize", op, args=X, max_examples=10)


def batched(x):
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def vmapped(name, rule):
    @torch.library.custom_op(f"transforms_modes_test::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op.register_vmap(rule)
    return op


def once(info, in_dims, x):
    return x * (3 if batched(x) else 2), in_dims[0]


def test_a_batching_rule_that_is_wrong_within_another_is_found(fails):
    failure = fails("transforms.vmap", vmapped("once", once), args=X, max_examples=10)
    assert "torch.vmap of torch.vmap" in failure.message
    assert failure.args[0].numel() <= 1


def test_gradients_of_each_sample_that_are_wrong_are_found(fails):
    def op(x):
        with torch.no_grad():
            value = x.sin()
        return value + (x.sin() - value) * (2 if batched(x) else 1)

    failure = fails("transforms.vmap", op, args=X, max_examples=10)
    assert "torch.func.grad" in failure.message


def test_maps_print_no_warnings(capfd, asked):
    @torch.library.custom_op("transforms_modes_test::fallback", mutates_args=())
    def fallback(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert asked("transforms", fallback, args=X, max_examples=6).ok
    assert "performance drop" not in capfd.readouterr().err


def from_memory(x):
    """What a C function that is given an address reads there."""
    if not x.numel():
        return torch.empty_like(x)
    x = x.contiguous()
    memory = (ctypes.c_char * (x.numel() * x.itemsize)).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).clone()


@pytest.mark.parametrize("read", [from_memory, lambda x: torch.Tensor._make_subclass(torch.Tensor, x)])
def test_a_subclass_of_which_the_memory_is_read(read, fails):
    assert "tensor subclass" in fails("transforms.subclasses", lambda x: read(x) * 2, args=X).message


def test_subclasses_that_count_as_what_they_stand_for_or_are_refused(holds):
    @opkit.custom_op("transforms_modes_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def refuses(x):
        if type(x) is not torch.Tensor:
            raise TypeError("plain tensors only")
        return from_memory(x) * 2

    for op in (doubled, refuses, lambda x: x):
        holds("transforms.subclasses", op, args=X)
    doubled.register_kernel("cpu", lambda x: from_memory(x) * 2)
    holds("transforms.subclasses", doubled, args=X)
    opkit.remove(doubled.name)
