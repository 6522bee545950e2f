"""References that read more than their arguments: what they read is as fresh as in a plain function, or they are refused."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opkit
from opkit.errors import RuleError
from opkit.op.trace.reads import Reads, ReferenceState

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SCALE = 2.0
WEIGHT = torch.full((3,), 2.0)
TABLE: dict[str, Any] = {"inner": {"scale": 2.0}}
VARIABLE = contextvars.ContextVar("scale", default=2.0)
LOCAL = threading.local()
ACTIVATION = torch.sin


class Settings:
    kind = 2.0

    def __init__(self) -> None:
        self.scale = 2.0

    def value(self) -> float:
        return self.scale


SETTINGS = Settings()


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def of(settings: Settings) -> float:
    return settings.scale * settings.kind


def environment(x: Tensor) -> Tensor:
    import os as system

    return x * float(system.environ.get("OPKIT_TEST_SCALE", "2"))


def entry_by_variable(x: Tensor) -> Tensor:
    key = "inner"
    return x * TABLE[key]["scale"]


READS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[pytest.MonkeyPatch], Any]]] = {
    "global": (lambda x: x * SCALE, lambda m: m.setitem(globals(), "SCALE", 5.0)),
    "global of a helper": (lambda x: helper(x), lambda m: m.setitem(globals(), "SCALE", 5.0)),
    "helper": (lambda x: helper(x), lambda m: m.setitem(globals(), "helper", lambda x: x * 5)),
    "function of torch's": (lambda x: ACTIVATION(x), lambda m: m.setitem(globals(), "ACTIVATION", torch.cos)),
    "attribute": (lambda x: x * SETTINGS.scale, lambda m: m.setattr(SETTINGS, "scale", 5.0)),
    "attribute in a method": (lambda x: x * SETTINGS.value(), lambda m: m.setattr(SETTINGS, "scale", 5.0)),
    "attribute of what is passed on": (lambda x: x * of(SETTINGS), lambda m: m.setattr(Settings, "kind", 5.0)),
    "entry": (lambda x: x * TABLE["inner"]["scale"], lambda m: m.setitem(TABLE["inner"], "scale", 5.0)),
    "entry by a variable": (entry_by_variable, lambda m: m.setitem(TABLE["inner"], "scale", 5.0)),
    "environment": (environment, lambda m: m.setenv("OPKIT_TEST_SCALE", "5")),
    "context variable": (lambda x: x * VARIABLE.get(), lambda m: VARIABLE.set(5.0)),
    "thread": (lambda x: x * getattr(LOCAL, "scale", 2.0), lambda m: m.setattr(LOCAL, "scale", 5.0, raising=False)),
    "tensor": (lambda x: x * WEIGHT, lambda m: m.setitem(globals(), "WEIGHT", torch.full((3,), 5.0))),
    "tensor written to": (lambda x: x * WEIGHT, lambda m: WEIGHT.fill_(5.0)),
}


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    token = VARIABLE.set(2.0)
    yield
    VARIABLE.reset(token)
    WEIGHT.fill_(2.0)


@pytest.mark.parametrize("kind", READS)
def test_what_is_read_is_noticed_when_it_changes_and_when_it_changes_back(kind: str) -> None:
    function, change = READS[kind]
    state = ReferenceState("reads::any", function)
    before = state.current(versions=True)
    assert before
    assert state.current(versions=True) == before
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert state.current(versions=True) != before
    if kind not in ("context variable", "tensor written to"):
        assert state.current(versions=True) == before
    assert not state.unknown


def test_modules_are_not_imported_before_the_function_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "read_later.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def scaled(x: Tensor) -> Tensor:
        from read_later import SCALE as scale

        return x * scale

    state = ReferenceState("reads::later", scaled)
    before = state.current()
    assert "read_later" not in sys.modules
    scaled(torch.ones(1))
    after = state.current()
    assert after != before
    monkeypatch.setattr(sys.modules["read_later"], "SCALE", 5.0)
    assert state.current() not in (before, after)


@pytest.mark.parametrize(
    ("held", "decides"), [([], False), ({}, False), ([2.0, (WEIGHT, helper)], False), ([()], False), ({"n": 2}, True)]
)
def test_numbers_and_texts_may_decide_sizes(held: Any, decides: bool) -> None:
    assert bool(ReferenceState("reads::sizes", lambda x: x * len(held)).of_sizes()) is decides


def test_functions_that_read_nothing_cost_nothing() -> None:
    def pure(x: Tensor) -> Tensor:
        import math

        y = torch.nn.functional.softmax(x, -1) * math.pi
        return sum([y for _ in range(2)], y)

    reads = Reads(pure)
    assert not reads.paths
    assert not reads.unknown


@pytest.mark.parametrize("kind", ["global of a helper", "attribute of what is passed on", "tensor"])
def test_gradients_beside_a_kernel_are_of_what_is_read_now(kind: str) -> None:
    function, change = READS[kind]
    op = opkit.custom_op("reads::beside", function, schema="(Tensor x) -> Tensor")
    op.register_kernel("cpu", function)
    x = torch.randn(3, requires_grad=True)

    def gradient() -> Tensor:
        return torch.autograd.grad(op(x).sum(), x)[0]

    def expected() -> Tensor:
        return torch.autograd.grad(function(x).sum(), x)[0]

    for _ in range(3):
        torch.testing.assert_close(gradient(), expected())
    with pytest.MonkeyPatch.context() as patch:
        output = op(x)
        before = expected()
        change(patch)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], before)
        torch.testing.assert_close(gradient(), expected())
    torch.testing.assert_close(gradient(), expected())
    opkit.remove(op.name)


def test_a_write_to_a_captured_tensor_before_the_backward_is_an_error() -> None:
    op = opkit.custom_op("reads::written", lambda x: x * WEIGHT, schema="(Tensor x) -> Tensor")
    op.register_kernel("cpu", lambda x: x * WEIGHT)
    output = op(torch.ones(3, requires_grad=True))
    WEIGHT.fill_(5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("kernel", [False, True])
def test_compiled_programs_compute_with_what_is_read_now(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(x: Tensor) -> Tensor:
        return helper(x) * TABLE["inner"]["scale"] + SETTINGS.scale * WEIGHT

    op = opkit.custom_op(f"reads::compiled_{kernel}", mixed, mutates_args=())
    if kernel:
        op.register_kernel("cpu", mixed)
    compiled = torch.compile(lambda x: op(x) + 0, backend="aot_eager", fullgraph=True)
    x = torch.ones(3, requires_grad=True)

    def check() -> None:
        output, expected = compiled(x), mixed(x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x)[0] for y in (output, expected)])

    check()
    for name in ("global of a helper", "entry", "attribute", "tensor"):
        READS[name][1](monkeypatch)
        check()


def test_what_changes_all_the_time_is_read_when_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    context = types.SimpleNamespace(scale=0.0)
    op = opkit.custom_op("reads::volatile", lambda x: x * context.scale, schema="(Tensor x) -> Tensor")
    compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for step in range(12):
            context.scale = float(step)
            torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), float(step)))


def test_caches_are_keyed_by_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    op = opkit.custom_op("reads::hashed", environment, mutates_args=())
    before = op._operator.contract_hash()
    monkeypatch.setenv("OPKIT_TEST_SCALE", "5")
    assert op._operator.contract_hash() != before
    monkeypatch.delenv("OPKIT_TEST_SCALE")
    assert op._operator.contract_hash() == before
    assert "OPKIT_TEST_SCALE" not in os.environ


def test_what_cannot_be_compared_is_not_inlined_and_has_no_derived_gradient() -> None:
    def drifting(x: Tensor) -> Tensor:
        return x * time.perf_counter()

    op = opkit.custom_op("reads::drifting", drifting, mutates_args=())
    compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    exact = torch.ones(3, dtype=torch.float64)
    assert not torch.equal(compiled(exact), compiled(exact))
    x = torch.ones(3, requires_grad=True)
    op(x).sum().backward()
    op.register_kernel("cpu", drifting)
    with pytest.raises(RuleError, match=r"test_reads.py:\d+: calls perf_counter"):
        op(x)
