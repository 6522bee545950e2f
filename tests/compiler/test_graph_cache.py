"""Dynamo's graphs in the cache on the disk: a hit gives the same values, gradients and errors without AOTAutograd."""

import contextlib
import copy
import importlib
import os
import sys
import textwrap

import fresh_process
import pytest
import torch
from torch import nn
from warm_calls import X, check, cold_and_warm, compiled, counted, mlp, trained

import opkit

pytestmark = pytest.mark.usefixtures("cache")


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_training():
    check(trained(mlp(), X))


@pytest.mark.exhaustive
def test_training_of_complex_numbers():
    z, w = (torch.randn(5, 3, dtype=torch.complex64) for _ in range(2))

    def call(compile):
        given = [each.clone().requires_grad_() for each in (z, w)]
        y = compile(lambda z, w: (z * w).exp().imag + (z.conj() / w).abs())(*given)
        return y.detach(), torch.autograd.grad(y.sum(), given)

    check(call)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks it of every tensor that it makes a fake of
@pytest.mark.parametrize("calls", [0, 2], ids=["compiled then", "compiled before"])
def test_compiled_autograd(calls):
    """It takes AOTAutograd's functions, and ours, which replace them once the backward is compiled, as a graph break."""
    model, x = mlp(), X.clone().requires_grad_()
    call = compiled(model)
    for _ in range(calls):
        call(x).sum().backward()
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    for of in (x, *model.parameters()):
        of.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="opkit", options={"strict": True})):
        call(x).sum().backward()
    torch.testing.assert_close([of.grad for of in (x, *model.parameters())], [*expected])
    if calls:
        whole = torch.compile(backend="opkit", fullgraph=True)
        with (
            torch._dynamo.compiled_autograd._enable(whole),
            pytest.raises(torch._dynamo.exc.Unsupported, match="before compiled autograd"),
        ):
            call(x).sum().backward()


def test_random_numbers_come_from_torchs_seed():
    cold, warm = cold_and_warm(trained(mlp(0.5), X))
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)
    assert not torch.equal(warm[0][0], warm[0][1])


def test_buffers_that_the_forward_writes_to():
    check(trained(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 2, 6, 6)))


def test_inputs_that_require_gradients_and_frozen_parameters():
    model = mlp()
    model[0].requires_grad_(False)
    check(trained(model, X.clone().requires_grad_()))


def test_gradients_of_results_with_other_strides():
    def call(compile):
        x = X.clone().requires_grad_()
        y = compile(lambda x: (x * 2).exp())(x)
        turned = torch.autograd.grad(y, x, torch.ones(6, 5).t(), retain_graph=True)
        return turned, torch.autograd.grad(y, x, torch.ones(()).expand(5, 6))

    check(call)


def test_results_of_all_kinds():
    def function(x, y):
        z = x.exp()
        return z, x, z.argmax(-1), z.detach() + 1, (z * 2).sum(), y, (z + 1).view(-1)

    def call(compile):
        x, y = X.clone().requires_grad_(), torch.ones(3)
        results = compile(function)(x, y)
        assert results[1] is x
        assert results[5] is y
        wanted = [each.requires_grad for each in results]
        (results[0].sum() + results[4]).backward()
        return [each.detach() for each in results], wanted, x.grad

    check(call)


def test_a_result_that_no_gradient_comes_to():
    def call(compile):
        x = X.clone().requires_grad_()
        first, _ = compile(lambda x: (x.exp(), x.sin()))(x)
        return torch.autograd.grad(first.sum(), x)

    check(call)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_an_input_with_a_history_that_gets_no_gradient():
    def call(compile):
        x, w = X.clone().requires_grad_(), torch.ones(6, requires_grad=True)
        early = w * 2
        y = compile(lambda x, early: x.exp() + early.detach())(x, early)
        return torch.autograd.grad(y.sum(), [x, w], allow_unused=True)

    check(call)


@pytest.mark.exhaustive
def test_a_graph_that_is_kept():
    def call(compile):
        x = X.clone().requires_grad_()
        y = compile(lambda x: x.exp().sin())(x)
        return [torch.autograd.grad(y.sum(), x, retain_graph=keep) for keep in (True, True, False)]

    check(call)


@pytest.mark.parametrize("again", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_what_is_refused(again):
    x = X.clone().requires_grad_()
    fast = compiled(lambda x: (x * x).exp())
    fast(x).sum().backward()
    if again:
        fast = compiled(lambda x: (x * x).exp())
    y = fast(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(first, 2 * x * y)
    assert first.requires_grad
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()
    y = fast(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()
    y = fast(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = fast(x)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            y.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_hooks_on_saved_tensors():
    def call(compile):
        packed, x = [], X.clone().requires_grad_()
        fast = compile(lambda x: x.exp().sin())
        fast(x).sum().backward()
        x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t + 0, lambda t: t):
            y = fast(x)
        y.sum().backward()
        return bool(packed), x.grad

    check(call)


@pytest.mark.exhaustive
def test_autocast():
    def call(compile):
        model = copy.deepcopy(model_given)
        with torch.autocast("cpu", torch.bfloat16):
            y = compile(model)(X)
        y.float().sum().backward()
        return y.detach(), [each.grad for each in model.parameters()]

    model_given = mlp()
    cold, warm = cold_and_warm(call)
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)
    assert warm[0].dtype is torch.bfloat16


def test_a_model_in_both_modes():
    model = mlp()

    def call(compile):
        mine = copy.deepcopy(model)
        fast = compile(mine)
        with torch.no_grad():
            before = fast(X)
        after = fast(X)
        assert not before.requires_grad
        after.sum().backward()
        return before, after.detach(), [each.grad for each in mine.parameters()]

    check(call)


# ---- inference -------------------------------------------------------------------------------------------------------


def test_inference():
    model = mlp().requires_grad_(False)
    check(lambda compile: compile(model)(X))


def test_constants_and_arguments_that_are_no_numbers():
    def function(x):
        table = torch.tensor([0.5, 2.0, 1.0])
        return (
            x[:, 1:4] * table,
            x.to(torch.float64),
            torch.zeros(2, dtype=torch.int32, device="cpu"),
            x[..., None, ::2],
        )

    with counted():
        check(lambda compile: [each + 0 for each in compile(lambda x: function(x)[:3])(X)])


@pytest.mark.parametrize("table", [[0.5, 2.0, 1.0], [[1.0], [2.0]]])
def test_constants_of_inference(table):
    check(lambda compile: compile(lambda x: x[:2, :3] * torch.tensor(table))(X))


def test_an_input_that_is_written_to():
    def call(compile):
        x = X.clone()
        version = x._version
        y = compile(lambda x: x.add_(1).exp())(x)
        return x, y, x._version > version

    check(call)


# ---- other processes -------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch
from opkit.compiler import backend
if sys.argv[1] == "warm":
    backend._compile_with_aot_autograd = None
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 2))
fast = torch.compile(model, backend=backend.opkit_backend, options={"strict": True})
x = torch.randn(3, 4)
fast(x).square().sum().backward()
with torch.no_grad():
    print([each.grad.tolist() for each in model.parameters()], model[1].running_mean.tolist(), fast(x).tolist())
"""


@pytest.mark.exhaustive
def test_another_process(tmp_path):
    environment = os.environ | {"OPKIT_CACHE_DIR": str(tmp_path)}
    said = [fresh_process.run(["-c", PROGRAM, how], environment).stdout for how in ("cold", "warm")]
    assert said[0] == said[1] != ""


@pytest.fixture(autouse=True)
def cache(tmp_path, settings):
    settings(cache_dir=tmp_path)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(**parts)``: a module that defines ``warmed::scaled`` and ``warmed::raised``, imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def made(factor="2", raised="x.exp() + 1", kernel=None):
        for name in ("warmed::scaled", "warmed::raised"):
            with contextlib.suppress(opkit.errors.UnknownOperatorError):
                opkit.remove(name)
        sys.modules.pop("warmed_operators", None)
        text = f"""
            import torch, opkit
            FACTOR = {factor}
            @opkit.custom_op("warmed::scaled")
            def scaled(x: torch.Tensor) -> torch.Tensor:
                return x.sin() * FACTOR
            @opkit.custom_op("warmed::raised")
            def raised(x: torch.Tensor) -> torch.Tensor:
                return {raised}
        """
        if kernel is not None:
            text += f"""
            @raised.register_kernel("cpu")
            def fast(x):
                return {kernel}
            """
        (tmp_path / "warmed_operators.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return importlib.import_module("warmed_operators")

    yield made
    for name in ("warmed::scaled", "warmed::raised"):
        with contextlib.suppress(opkit.errors.UnknownOperatorError):
            opkit.remove(name)


def ran(operators):
    """The results and gradients of a compiled function of both operators, and whether AOTAutograd had to run."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    with counted() as anew:
        result = compiled(lambda x: operators.raised(operators.scaled(x) * 0.5))(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    return result.detach(), gradient, bool(anew)


def eager(operators):
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    result = operators.raised(operators.scaled(x) * 0.5)
    return result.detach(), torch.autograd.grad(result.sum(), x)[0]


@pytest.mark.parametrize("kernel", [None, "torch.expm1(x) + 2"], ids=["inlined", "called"])
def test_operators_are_found(module, kernel):
    operators = module(kernel=kernel)
    for again in (False, True):
        *found, anew = ran(operators)
        torch.testing.assert_close(found, [*eager(operators)])
        assert anew is not again


@pytest.mark.parametrize(
    "change",
    [{"factor": "3"}, {"raised": "x.exp() + 2"}, {"kernel": "torch.expm1(x) + 3"}],
    ids=["a constant", "a reference", "a kernel"],
)
def test_what_was_edited_is_made_again(module, change):
    ran(module(kernel="torch.expm1(x) + 2" if "kernel" in change else None))
    operators = module(**change)
    *found, anew = ran(operators)
    assert anew
    torch.testing.assert_close(found[0], eager(operators)[0])


def test_another_process_finds_them(module, tmp_path):
    module(kernel="torch.expm1(x) + 2")
    script = textwrap.dedent("""
        import torch, warmed_operators as o
        from opkit.compiler import backend
        anew, original = [], backend._compile_with_aot_autograd
        backend._compile_with_aot_autograd = lambda *given: anew.append(1) or original(*given)
        x = torch.ones(3, 4, requires_grad=True)
        function = torch.compile(lambda x: o.raised(o.scaled(x)), backend=backend.opkit_backend, options={"strict": True})
        result = function(x)
        result.sum().backward()
        print(len(anew), result[0, 0].item(), x.grad[0, 0].item())
    """)
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"OPKIT_CACHE_DIR": str(tmp_path)}
    said = [fresh_process.run(["script.py"], environment, cwd=tmp_path).stdout for _ in range(2)]
    assert [each.split()[0] for each in said] == ["1", "0"]
    assert said[0].split()[1:] == said[1].split()[1:]
