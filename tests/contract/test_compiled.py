"""compile: planted defects that only compiled programs show, right operators that all must pass."""

import itertools
import types

import pytest
import torch
from torch import Tensor

from opkit.contract.properties import compiled
from opkit.contract.traced import graphs
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


@pytest.mark.parametrize(("message", "fault"), [("boom", True), ("Guard failed: x.size()[0] == 3", False)])
def test_an_exported_program_that_fails_at_other_sizes(fails, holds, monkeypatch, message, fault):
    whole = graphs.exported

    def exported(*given):
        made, known = whole(*given), []
        module = made.module()

        def program(args, kwargs):
            known.append(args[0].shape)
            if args[0].shape != known[0]:
                raise RuntimeError(message)
            return module(args, kwargs)

        return types.SimpleNamespace(module=lambda: program)

    monkeypatch.setattr(graphs, "exported", exported)
    monkeypatch.setattr(compiled, "_round_trip", lambda *given: None)
    if fault:
        assert message in fails("compile.export", operator(double), max_examples=1, **VECTOR).message
    else:
        holds("compile.export", operator(double), max_examples=1, **VECTOR)


def twice(x):
    result = x * 2
    return result, result


@pytest.mark.parametrize(
    ("kernel", "results"),
    [(lambda x: x, 1), (lambda x: x if x.shape[0] % 2 else x.clone(), 1), (twice, 2)],
)
def test_memory_that_is_shared_in_secret(fails, kernel, results):
    library = torch.library.Library(f"compile_tests_shared{next(NUMBERS)}", "FRAGMENT")
    library.define(f"op(Tensor x) -> {'Tensor' if results == 1 else '(Tensor, Tensor)'}")
    library.impl("op", kernel, "CPU")
    library.impl(
        "op", torch.empty_like if results == 1 else lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta"
    )
    assert "functionalised" in fails("compile.functionalize", getattr(torch.ops, library.ns).op, **VECTOR).message


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kernel", [lambda x: x, lambda x: (x.expand(3, -1), x + 1), torch.relu_, lambda x: x[:2]])
def test_views_and_writes_that_torch_knows_of(asked, kernel):
    assert not asked("compile.functionalize", kernel, **VECTOR).failures


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


def test_a_fake_that_asks_for_an_unknown_size(fails, holds):
    how = {"args": (tensor("b n"),), "reference": double, "max_examples": 1}
    op = operator(double, lambda x: torch.empty_like(x) if x.shape[0] > 1 else x.new_empty(x.shape))
    assert "branch on whether a size is 0, 1 or larger" in fails("compile.unbacked", op, **how).message
    holds("compile.unbacked", operator(double), **how)


_scale = 2.0


def set_scale(value: float) -> None:
    global _scale
    _scale = value


def scaled(x: Tensor) -> Tensor:
    return x * _scale


def test_a_global_that_a_compiled_backward_does_not_read_again(fails):
    op = operator(scaled)
    op.register_autograd(lambda ctx, grad: grad * _scale)
    message = fails("compile.aot_eager", op, max_examples=1, **VECTOR).message
    assert "after _scale was changed" in message
    assert "gradient of argument 0 differs" in message
