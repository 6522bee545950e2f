"""Operators of opkit in what AOTAutograd made of a graph, found on the disk: as long as nothing about them has changed."""

import contextlib
import importlib
import os
import sys
import textwrap

import fresh_process
import pytest
import torch
from warm_calls import compiled, counted

import opkit


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
