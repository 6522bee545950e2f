"""torch.compile(backend="opkit") where it fails: eager mode, a script, a warning, and the errors of strict mode."""

import logging
import warnings

import pytest
import torch

from opkit import errors
from opkit.compiler import diagnostics, pipeline
from opkit.compiler.backend import opkit_backend
from opkit.compiler.run import library

pytestmark = pytest.mark.usefixtures("cache")


def compiled(function, strict=True, **more):
    return torch.compile(function, backend=opkit_backend, options={"strict": strict}, **more)


def failing(monkeypatch):
    def wrong(graph, *rest):
        for node in graph.nodes:
            if node.target == "aten.exp.default":
                raise ValueError("no exponentials")

    monkeypatch.setattr(pipeline, "lower", wrong)


def test_a_failure_runs_in_eager_mode_and_leaves_a_script(monkeypatch, settings, caplog, tmp_path):
    failing(monkeypatch)
    settings(cache_dir=tmp_path)
    x = torch.randn(4)
    with caplog.at_level(logging.WARNING, "opkit.compiler"):
        torch.testing.assert_close(compiled(lambda x: x.exp() + 1, strict=False)(x), x.exp() + 1)
    assert "'lower'" in caplog.text
    assert "at the node exp (aten.exp.default" in caplog.text
    assert "no exponentials" in caplog.text
    (script,) = (tmp_path / "failed-graphs").iterdir()
    with pytest.raises(Exception, match="no exponentials"):
        exec(compile(script.read_text(), script, "exec"), {})


def test_a_failure_under_strict_raises(monkeypatch):
    failing(monkeypatch)
    with pytest.raises(Exception, match=r"failed on inference .* in the stage 'lower'") as caught:
        compiled(lambda x: x.exp() + 1)(torch.randn(4))
    assert isinstance(caught.value.inner_exception, errors.CompileError)


def test_no_compiler(settings):
    settings(cc="/no/compiler")
    diagnostics.warn_no_compiler.cache_clear()
    x = torch.randn(4)
    with pytest.warns(errors.NoCompilerWarning, match="/no/compiler"):
        torch.testing.assert_close(compiled(lambda x: x.exp() + 1, strict=False)(x), x.exp() + 1)


def test_a_device_without_a_compiler_is_named_once():
    diagnostics.warn_no_compiler.cache_clear()
    x = torch.empty(4, device="meta")
    with pytest.warns(errors.NoCompilerWarning, match="all graphs on meta, for which opkit has no compiler"):
        compiled(torch.exp, strict=False)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.sin, strict=False)(x).device == x.device
    with pytest.raises(Exception, match="it runs on meta, and code is made for CPUs, and for GPUs with CUDA or HIP"):
        compiled(torch.exp)(x)


def test_a_compiler_that_hangs(settings, tmp_path, caplog):
    """It is stopped, and the graphs run in eager mode: a training goes on."""
    hanging = tmp_path / "gcc"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    hanging.chmod(0o755)
    settings(cache_dir=tmp_path / "cache", cc=hanging, build_timeout=0.3)
    x = torch.randn(4, requires_grad=True)
    with caplog.at_level(logging.WARNING, "opkit.compiler"):
        compiled(lambda x: x.sin().sum(), strict=False)(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert "was stopped" in caplog.text


def test_what_is_not_for_the_compiler_runs_in_eager_mode(caplog):
    x = torch.randn(4).view(torch.float4_e2m1fn_x2)
    with caplog.at_level(logging.WARNING, "opkit.compiler"):
        assert torch.equal(compiled(lambda x: x.view(torch.uint8) + 1, strict=False)(x), x.view(torch.uint8) + 1)
    assert "runs in eager mode: " in caplog.text
    assert "float4_e2m1fn_x2" in caplog.text
    with pytest.raises(Exception, match=r"cannot compile inference \d+: arg0_1 .*float4_e2m1fn_x2"):
        compiled(lambda x: x.view(torch.uint8) + 2)(x)


def test_an_index_out_of_range():
    fast = compiled(lambda x, i: x[i] + 1)
    torch.testing.assert_close(fast(torch.arange(4.0), torch.tensor([1, -1])), torch.tensor([2.0, 4.0]))
    for _ in range(2):
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            fast(torch.arange(4.0), torch.tensor([1, 9]))
    torch.testing.assert_close(fast(torch.arange(4.0), torch.tensor([1, 0])), torch.tensor([2.0, 1.0]))


# fmt: off
def line_that_goes_on(x):
    return x.sin() + \
        x.cos()
# fmt: on


def test_a_line_that_ends_in_a_backslash():
    """The comment that quotes it ends all the same."""
    x = torch.randn(4)
    torch.testing.assert_close(compiled(line_that_goes_on)(x), line_that_goes_on(x))


def test_a_forward_that_fails_after_its_backward_is_compiled(monkeypatch):
    """In eager mode it saves tensors with the strides that the backward is compiled for."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.GELU(), torch.nn.Conv2d(8, 8, 3)
    )
    x, wait = torch.randn(2, 3, 12, 12), library.SegmentsBuild.wait
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    calls = []

    def refuse_first(build):
        calls.append(build)
        if len(calls) == 1:
            raise errors.ToolchainError("refused")
        return wait(build)

    monkeypatch.setattr(library.SegmentsBuild, "wait", refuse_first)
    diagnostics.warn_no_compiler.cache_clear()
    with pytest.warns(errors.NoCompilerWarning, match="refused"):
        result = compiled(model, strict=False)(x)
    result.square().sum().backward()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-4)
    assert len(calls) > 1
