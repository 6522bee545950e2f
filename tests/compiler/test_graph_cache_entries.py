"""Entries of what AOTAutograd made: what decides which one is found, what mends a damaged one, and what is not kept."""

import contextlib
import hashlib
import json
import logging
import re

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from warm_calls import X, check, cold_and_warm, compiled, counted, misses, mlp, on, trained

import opkit

pytestmark = pytest.mark.usefixtures("cache")


# ---- what decides an entry -------------------------------------------------------------------------------------------


def doubled(number):
    return lambda x: x.exp() + number


OTHERS = [
    (on(X), on(torch.randn(4, 6))),
    (on(X), on(torch.randn(6, 5).t())),
    (on(X), on(X.double())),
    (on(X), on(X, inline=True)),
    (on(X, doubled(2)), on(X, doubled(3))),
    (on(X, doubled(2)), on(X, doubled(2.0))),
    (on(X.clone().requires_grad_()), on(X.clone().requires_grad_(), grad=True)),
    (on(X), on(X, strict=False)),
    (on(X), on(torch.randn(60)[::2].view(5, 6))),
    (on(X), on(torch.randn(31)[1:].view(5, 6))),
    (on(X, grad=True), on(X.clone().requires_grad_(), grad=True)),
]


@pytest.mark.sweep(7)
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
    lambda path, content: path.chmod(0o666),
    lambda path, content: path.write_bytes(path.read_bytes()[:-9]),
    rewritten(lambda content: content.clear()),
    rewritten(lambda content: content.update(wiring=["Wiring", 1], plan=["ExecutionPlan", 1])),
    lambda path, content: path.write_bytes(b"\xff"),
    lambda path, content: path.unlink(),
    rewritten(lambda content: content.update(graphs=[], plan=None)),
    rewritten(lambda content: content.update(plan=["tuple"], graphs=[{}])),
]


@pytest.mark.sweep(3)
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
        assert len(anew) == count or number == 0  # what others may write to is replaced, and closed to them


def scaled(x):
    return x * torch.nn.functional.softmax(x, -1)


REFUSED = [
    (lambda x: checkpoint(torch.exp, x, use_reentrant=False), "other graphs", {}),
    (
        lambda x: x + x.shape[0],
        "sizes that may change|is a SymInt",
        {"dynamic": True},
    ),  # which comes first is Dynamo's choice
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
    assert re.search(reason, caplog.text)


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


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_users_wish_for_no_caches():
    with torch.compiler.config.patch(force_disable_caches=True):
        misses(on(X), on(X))


def test_functions_of_torchs_are_kept():
    def function(x):
        pooled = functional.max_pool2d(functional.gelu(x)[None], 2)
        return torch.ops.aten.relu.default(torch.split(functional.dropout(pooled, 0.5, False), 2, -1)[0])

    check(lambda compile: compile(function)(X))
