"""compile: planted defects that only compiled programs show, right operators that all must pass."""

import itertools

import pytest
import torch
from torch import Tensor

from opkit.testing import tensor

NUMBERS = itertools.count()
VECTOR = {"args": (tensor("n"),)}


def operator(kernel, fake=torch.empty_like, mutates_args=()):
    made = torch.library.custom_op(f"compile_tests::op{next(NUMBERS)}", kernel, mutates_args=mutates_args)
    made.register_fake(fake)
    return made


def double(x: Tensor) -> Tensor:
    return x * 2


def write(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def writes_in_secret(x: Tensor) -> Tensor:
    result = x * 2
    x.add_(1)
    return result


def branches_when_compiled(x):
    return x * 3 if torch.compiler.is_compiling() else x * 2


@pytest.mark.parametrize("op", [branches_when_compiled, operator(writes_in_secret)])
def test_another_result_when_compiled(fails, op):
    fails("compile.aot_eager", op, max_examples=1, **VECTOR)


def looks_up(x):
    sizes = {x.shape[0]: x.shape[0]}  # a symbol cannot be hashed
    return x.new_empty(sizes[x.shape[0]])


@pytest.mark.parametrize("op", [branches_when_compiled, operator(double, looks_up)])
def test_another_result_when_exported(fails, op):
    fails("compile.export", op, max_examples=1, **VECTOR)


def looks_where_it_begins(x: Tensor) -> None:
    x.mul_(3 if x.storage_offset() else 2)


def looks_at_the_memory(x: Tensor) -> None:
    x.add_(x.untyped_storage().nbytes() - x.numel() * 4)


@pytest.mark.parametrize("kernel", [looks_where_it_begins, looks_at_the_memory])
def test_a_kernel_that_a_copy_misleads(fails, kernel):
    failure = fails("compile.functionalize", operator(kernel, lambda x: None, ("x",)), **VECTOR)
    assert failure.case.tensors()[0].layout in ("offset", "strided")


def reads_elements(ctx, grad):
    return grad * (2 if grad.sum().item() > 0 else 1)


def test_a_backward_pass_that_cannot_be_traced(fails):
    op = operator(double)
    op.register_autograd(reads_elements)
    assert "raises" in fails("compile.aot_eager", op, max_examples=1, **VECTOR).message


def test_a_size_that_is_a_constant(fails):
    op = operator(double, lambda x: x.new_empty(int(x.shape[0])))
    assert "again for every size" in fails("compile.recompiles", op, max_examples=1, **VECTOR).message


def differentiable():
    op = operator(double)
    op.register_autograd(lambda ctx, grad: grad * 2)
    return op


def test_right_operators(holds):
    for name in ("functionalize", "recompiles", "aot_eager", "export"):
        holds(f"compile.{name}", differentiable(), max_examples=1, **VECTOR)


def test_one_in_place(holds):
    op = operator(write, lambda x, y: None, ("x",))
    for name in ("functionalize", "aot_eager", "export"):
        holds(f"compile.{name}", op, args=(tensor("n"), tensor("n")), max_examples=1)


def test_inductor_with_a_wrong_layout(fails):
    def rows(x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    failure = fails("compile.inductor", operator(rows), args=(tensor("b n"),), max_examples=1)
    assert "inductor" in failure.message


def test_inductor_with_a_right_operator(holds):
    holds("compile.inductor", differentiable(), max_examples=1, **VECTOR)


def test_the_backend_that_is_not_there_yet(asked):
    report = asked("compile.opkit", double, **VECTOR)
    assert "opkit" in torch._dynamo.list_backends() or "no backend" in report.skipped[0].reason


@pytest.mark.gpu
def test_cuda_graph(holds):
    holds("compile.cuda_graph", operator(double), device="cuda", **VECTOR)
