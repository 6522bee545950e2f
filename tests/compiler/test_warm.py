"""What AOTAutograd made of a graph, found on the disk: the same values, gradients and errors, and no AOTAutograd."""

import contextlib
import copy
import hashlib
import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import opkit
from opkit.compiler import backend, warm
from opkit.compiler.backend import opkit_backend

pytestmark = pytest.mark.usefixtures("cache")


@contextlib.contextmanager
def counted():
    """How many graphs of Dynamo's go through AOTAutograd."""
    found, original = [], backend._captured_anew
    backend._captured_anew = lambda *given: found.append(given) or original(*given)
    try:
        yield found
    finally:
        backend._captured_anew = original


def compiled(function, **more):
    torch._dynamo.reset()
    return torch.compile(function, backend=opkit_backend, options={"strict": True}, **more)


def cold_and_warm(call):
    """What ``call(compile)`` gives with an empty cache, and with what that left there."""
    with counted() as anew:
        cold = call(compiled)
        assert anew, "nothing was compiled"
        count = len(anew)
        warm = call(compiled)
        assert len(anew) == count, "the entry was not found"
    return cold, warm


def check(call):
    """Cold, warm and eager give the same."""
    cold, warm = cold_and_warm(call)
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)
    torch.testing.assert_close(warm, call(lambda function: function), rtol=1e-4, atol=1e-4)


def misses(first, second):
    """The second call does not use what the first one left."""
    with counted() as anew:
        first(compiled)
        count = len(anew)
        second(compiled)
        assert len(anew) == 2 * count > 0


def trained(model, *inputs, loss=lambda out: out.square().sum()):
    """A function of a way to compile: the loss, gradients and buffers after two steps of a copy of the model."""

    def call(compile):
        mine, given = copy.deepcopy(model), [copy_of(each) for each in inputs]
        fast = compile(mine)
        torch.manual_seed(0)
        losses = [loss(fast(*given)) for _ in range(2)]
        for each in losses:
            each.backward()
        grads = [each.grad for each in (*mine.parameters(), *given) if each.grad is not None]
        return [each.detach() for each in losses], grads, list(mine.buffers())

    return call


def copy_of(tensor):
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def mlp(p=0.0):
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(p), nn.Linear(8, 3))


X = torch.randn(5, 6)


# ---- training --------------------------------------------------------------------------------------------------------


def test_training():
    check(trained(mlp(), X))


def test_training_of_complex_numbers():
    z, w = (torch.randn(5, 3, dtype=torch.complex64) for _ in range(2))

    def call(compile):
        given = [each.clone().requires_grad_() for each in (z, w)]
        y = compile(lambda z, w: (z * w).exp().imag + (z.conj() / w).abs())(*given)
        return y.detach(), torch.autograd.grad(y.sum(), given)

    check(call)


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


def test_a_graph_that_is_kept():
    def call(compile):
        x = X.clone().requires_grad_()
        y = compile(lambda x: x.exp().sin())(x)
        return [torch.autograd.grad(y.sum(), x, retain_graph=keep) for keep in (True, True, False)]

    check(call)


@pytest.mark.parametrize("again", [0, 1])
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
    backend._captured_anew = None
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 2))
fast = torch.compile(model, backend=backend.opkit_backend, options={"strict": True})
x = torch.randn(3, 4)
fast(x).square().sum().backward()
with torch.no_grad():
    print([each.grad.tolist() for each in model.parameters()], model[1].running_mean.tolist(), fast(x).tolist())
"""


def test_another_process(cache, child_environment):
    environment = {**child_environment, **os.environ, "OPKIT_CACHE_DIR": str(cache)}
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, how], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for how in ("cold", "warm")
    ]
    assert said[0] == said[1] != ""


# ---- what decides an entry -------------------------------------------------------------------------------------------


def on(x, function=lambda x: x.exp() + 1, grad=False, **options):
    def call(compile):
        with torch.set_grad_enabled(grad):
            torch._dynamo.reset()
            return torch.compile(function, backend=opkit_backend, options={"strict": True, **options})(x)

    return call


def doubled(number):
    return lambda x: x.exp() + number


OTHERS = [
    (on(X), on(torch.randn(4, 6))),
    (on(X), on(torch.randn(6, 5).t())),
    (on(X), on(X.double())),
    (on(X), on(X, inline=True)),
    (on(X), on(X, strict=False)),
    (on(X, doubled(2)), on(X, doubled(3))),
    (on(X, doubled(2)), on(X, doubled(2.0))),
    (on(X), on(torch.randn(60)[::2].view(5, 6))),
    (on(X), on(torch.randn(31)[1:].view(5, 6))),
    (on(X.clone().requires_grad_()), on(X.clone().requires_grad_(), grad=True)),
    (on(X, grad=True), on(X.clone().requires_grad_(), grad=True)),
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_another_graph_has_another_entry(number):
    misses(*OTHERS[number])


def test_state_of_torchs_has_another_entry():
    def state(change, back):
        def call(_):
            change()
            try:
                return on(X, lambda x: x.exp() @ torch.ones(6, 2))(None)
            finally:
                back()

        return call

    plain = state(lambda: None, lambda: None)
    with counted() as anew:
        for change, back in (
            (lambda: None, lambda: None),
            (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
            (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        ):
            with contextlib.suppress(RuntimeError):  # of different dtypes
                state(change, back)(None)
        assert len(anew) == 3
        plain(None)
        assert len(anew) == 3


# ---- entries ---------------------------------------------------------------------------------------------------------


def entries(cache):
    return {path: json.loads(path.read_text().split("\n", 1)[1]) for path in (cache / "graphs").rglob("*.json")}


def rewritten(change):
    """A damage that has the right checksum."""

    def damage(path, content):
        change(content)
        text = json.dumps(content)
        path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")

    return damage


DAMAGES = [
    lambda path, content: path.write_bytes(path.read_bytes()[:-9]),
    lambda path, content: path.write_bytes(b"\xff"),
    lambda path, content: path.unlink(),
    lambda path, content: path.chmod(0o666),
    rewritten(lambda content: content.clear()),
    rewritten(lambda content: content.update(graphs=[], plan=None)),
    rewritten(lambda content: content.update(wiring=["Wiring", 1], plan=["Plan", 1])),
    rewritten(lambda content: content.update(plan=["tuple"], graphs=[{}])),
]


@pytest.mark.parametrize("which", ["wiring", "plan"])
@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damage_is_mended(cache, which, number):
    call = trained(mlp(), X)
    cold, _ = cold_and_warm(call)
    for path, content in entries(cache).items():
        if which in content:
            DAMAGES[number](path, content)
    with counted() as anew:
        torch.testing.assert_close(call(compiled), cold)
        assert anew
        count = len(anew)
        torch.testing.assert_close(call(compiled), cold)
        assert len(anew) == count or number == 3  # what others may write to is replaced, and closed to them


def scaled(x):
    return x * torch.nn.functional.softmax(x, -1)


REFUSED = [
    (lambda x: checkpoint(torch.exp, x, use_reentrant=False), "other graphs", {}),
    (lambda x: x + x.shape[0], "sizes that may change", {"dynamic": True}),
    (lambda x: x.t(), "a result is an alias_of_input", {}),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_not_kept_says_why(number, caplog):
    function, reason, how = REFUSED[number]
    x = X.clone().requires_grad_()
    with counted() as anew, caplog.at_level(logging.DEBUG, "opkit.compiler"):
        for _ in range(2):
            fast = compiled(function, **how)
            torch.testing.assert_close(fast(x), function(x))
        assert len(anew) == 2
    assert reason in caplog.text


def test_operators_of_others_are_not_kept(name, caplog):
    @torch.library.custom_op(name, mutates_args=())
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @shifted.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with caplog.at_level(logging.DEBUG, "opkit.compiler"):
        misses(on(X, lambda x: shifted(x) * 2), on(X, lambda x: shifted(x) * 2))
    assert "no function of torch's or operator of opkit's" in caplog.text


def test_inputs_that_share_memory():
    def call(compile):
        both = torch.arange(12.0)
        y = compile(lambda a, b: a.exp() + b)(both[:6], both[6:])
        return y, both

    check(call)

    def written(compile):
        both = torch.arange(12.0)
        y = compile(lambda a, b: a.add_(1) + b)(both[:6], both[6:])
        return y, both

    misses(written, written)


def test_explain_sees_graphs_that_are_kept():
    function = scaled
    check(lambda compile: compile(function)(X))
    explanation = opkit.explain(function, X)
    assert explanation.kernels == 1
    torch.testing.assert_close(explanation.result, function(X))


def test_the_users_wish_for_no_caches(monkeypatch):
    monkeypatch.setattr(warm.private, "caches_disabled", lambda: True)
    misses(on(X), on(X))


def test_functions_of_torchs_by_name():
    from opkit.compiler.capture.identity import Unnamed, _target

    for function in (
        torch.relu,
        functional.dropout,
        functional.max_pool2d,
        functional.gelu,
        torch.split,
        torch.ops.aten.relu.default,
    ):
        assert _target(function)
    for function in (lambda x: x, scaled, torch.ops.opkit, json.dumps):
        with pytest.raises(Unnamed):
            _target(function)
