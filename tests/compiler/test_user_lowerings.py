"""opkit operators under backend="opkit": seen through, called, or lowered by a rule of their author's."""

import logging
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

import opkit
from opkit import lowering as low
from opkit.compiler.backend import opkit_backend
from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.ir.program import Extern
from opkit.errors import RuleError

pytestmark = pytest.mark.usefixtures("fresh")
X = torch.linspace(-2, 2, 32).reshape(4, 8)


def softplus(x: Tensor, beta: float = 2.0) -> Tensor:
    return torch.log1p(torch.exp(x * beta)) / beta


def rule(b, x, beta):
    return low.pointwise(b, lambda x: low.log1p(low.exp(x * beta)) / beta, [x])


C = opkit.c_kernel(
    "void k(const T *x, double beta, T *out, int64_t x_numel)"
    "{ for (int64_t i = 0; i < x_numel; i++) out[i] = (T)(log1p(exp(x[i] * beta)) / beta); }"
)


def compiled(function, strict=True, **options):
    return torch.compile(function, backend=opkit_backend, options={"strict": strict, **options}, fullgraph=True)


def counts(graph):
    """Kernels, and calls of operators."""
    steps = graph.schedule.steps
    return sum(isinstance(s, KernelLaunch) for s in steps), [s.target for s in steps if isinstance(s, Extern)]


def among(op):
    return lambda x: torch.relu(op(x + 1)) * 2


# ---- without a rule --------------------------------------------------------------------------------------------------


def test_an_operator_without_a_kernel_fuses_with_its_neighbours(name, seen):
    op = opkit.custom_op(name, softplus)
    torch.testing.assert_close(compiled(among(op))(X), among(softplus)(X))
    assert counts(seen[0]) == (1, [])


@pytest.mark.exhaustive  # tests/op/test_compile_fusion.py does the same with other operators
def test_it_fuses_in_inductor_too(name):
    op = opkit.custom_op(name, softplus)
    metrics.reset()
    result, _ = run_and_get_code(torch.compile(among(op), fullgraph=True), X)
    torch.testing.assert_close(result, among(softplus)(X))
    assert metrics.generated_kernel_count == 1


def test_an_operator_with_a_c_kernel_is_called_between_two_kernels(name, seen):
    op = opkit.custom_op(name, softplus)
    op.register_kernel("cpu", C)
    torch.testing.assert_close(compiled(lambda x: torch.relu(op(x + 1) * 3) * 2)(X), (softplus(X + 1) * 3).relu() * 2)
    assert counts(seen[0]) == (2, [f"{name.replace('::', '.')}.default"])


@pytest.mark.sweep
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(("kernel", "lowered"), [(True, False), (True, True), (False, True), (False, False)])
def test_the_option_inline_decides(name, seen, inline, kernel, lowered):
    op = opkit.custom_op(name, softplus)
    if kernel:
        op.register_kernel("cpu", C)
    if lowered:
        op.register_lowering(lambda b, x, beta: pytest.fail("the rule was asked"))
    torch.testing.assert_close(compiled(among(op), inline=inline)(X), among(softplus)(X))
    assert counts(seen[0]) == ((1, []) if inline else (2, [f"{name.replace('::', '.')}.default"]))


# ---- with a rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [True, False])
def test_a_rule_is_used_in_place_of_reference_and_kernel(name, seen, kernel):
    op = opkit.custom_op(name, lambda x, beta=2.0: softplus(x, beta), schema="(Tensor x, float beta=2.0) -> Tensor")
    if kernel:
        op.register_kernel("cpu", C)
    assert op.register_lowering(rule) is rule
    torch.testing.assert_close(compiled(among(op))(X), among(softplus)(X))
    assert counts(seen[0]) == (1, [])
    assert name.replace("::", ".") in str(seen[0].captured.graph)


def test_the_backward_is_derived_from_the_reference_as_ever(name, seen):
    op = opkit.custom_op(name, softplus)
    op.register_lowering(rule)
    x = X.clone().requires_grad_()
    found = torch.autograd.grad(compiled(among(op))(x).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(among(softplus)(x).sum(), x))
    assert [counts(graph)[1] for graph in seen] == [[], []]


def test_registering_compiles_again(name):
    op = opkit.custom_op(name, softplus)
    fast = compiled(op)
    torch.testing.assert_close(fast(X), softplus(X))
    op.register_lowering(lambda b, x, beta: low.pointwise(b, lambda x: x * 7, [x]))
    torch.testing.assert_close(fast(X), X * 7)
    op.register_lowering(lambda b, x, beta: low.pointwise(b, lambda x: x * 8, [x]))
    torch.testing.assert_close(fast(X), X * 8)  # nor is a plan of the disk taken for the new rule's


def test_a_rule_is_part_of_the_contract_hash(name):
    op = opkit.custom_op(name, softplus)
    hashes = {op.describe().contract_hash}
    for number in (7, 8):
        op.register_lowering(lambda b, x, beta, number=number: low.pointwise(b, lambda x: x * number, [x]))
        hashes.add(op.describe().contract_hash)
    assert len(hashes) == 3


def test_the_hash_does_not_follow_the_state_of_the_compiler(name):
    op = opkit.custom_op(name, softplus)
    op.register_lowering(rule)
    before = op.describe().contract_hash
    compiled(op)(X + 3)
    assert op.describe().contract_hash == before


def test_sizes_that_change(name):
    op = opkit.custom_op(name, softplus)
    op.register_lowering(rule)
    fast = torch.compile(among(op), backend=opkit_backend, options={"strict": True}, dynamic=True)
    for rows in (3, 5, 1):
        torch.testing.assert_close(fast(X[:rows]), among(softplus)(X[:rows]))


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda b, x, beta: x.reshaped([32]), r"the rule returns f32\[32\], the operator f32\[4, 8\]"),
        (lambda b, x, beta: low.pointwise(b, lambda x: low.cast(x, "f64"), [x]), None),
        (lambda b, x: x, "raised TypeError"),
        (lambda b, x, beta: b.compute(x.source.buffer, x.shape, low.element(x, x.shape).expr), "it did not create"),
        (lambda b, x, beta: b.elementwise(low.cast(low.element(x, x.shape), "f64").expr), r"f64\[4, 8\]"),
        (lambda b, x, beta: None, "the rule returns nothing"),
        (lambda b, x, beta: (x, x), "the rule returns 2 results"),
    ],
)
def test_a_rule_that_is_wrong(name, wrong, message, caplog):
    op = opkit.custom_op(name, softplus)
    op.register_lowering(wrong)
    if message is None:
        compiled(op)(X)  # pointwise casts to the result's type
        return
    with pytest.raises(Exception, match=f"(?s)CompileError.*{name}.*{message}") as caught:
        compiled(op)(X)
    assert isinstance(caught.value.inner_exception.__cause__, RuleError)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "opkit.compiler"):
        torch.testing.assert_close(compiled(op, strict=False)(X), softplus(X))
    assert f"{name}" in caplog.text
    assert "The operator is called." in caplog.text


def test_a_rule_that_does_not_cover_a_call(name, seen, caplog):
    op = opkit.custom_op(name, softplus)

    @op.register_lowering
    def only_matrices(b, x, beta):
        if len(x.shape) != 2:
            raise low.NoRule("matrices alone")
        return rule(b, x, beta)

    torch.testing.assert_close(compiled(op)(X[0]), softplus(X[0]))
    (call,) = [s for s in seen[0].schedule.steps if isinstance(s, Extern)]
    assert call.reason == "matrices alone"
    assert not [record for record in caplog.records if record.name == "opkit.compiler"]


def test_an_operator_that_writes_to_its_arguments_takes_no_rule(name):
    def fill(x: Tensor) -> None:
        x.zero_()

    op = opkit.custom_op(name, fill, mutates_args=("x",))
    with pytest.raises(RuleError, match="writes to its arguments"):
        op.register_lowering(rule)


def test_the_example():
    program = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lowering.py"))
    program["main"]()
