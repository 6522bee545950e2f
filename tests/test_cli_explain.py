"""``opkit explain``: the report of a module's function, and what it refuses."""

import itertools
import re

import pytest
import torch
from typer.testing import CliRunner

from opkit import cli

RUNNER = CliRunner()
NUMBERS = itertools.count()
SOURCE = """
import torch

block = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU()).requires_grad_(False)

def scaled(x, by=1):
    return x.exp() * by
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"explained_by_cli_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    yield name
    torch._dynamo.reset()


def run(*arguments):
    return RUNNER.invoke(cli.app, ["explain", *map(str, arguments)])


def test_a_model(module, tmp_path):
    done = run(f"{module}:block", "--args", "torch.randn(4, 8)", "--time", "--html", tmp_path / "block.html")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("1 graph, 1 kernel, 0 calls of torch's operators\n")
    assert "aten.native_layer_norm.default, aten.gelu.default" in done.output
    assert re.search(r"  time \S+ us: k0\n", done.output)
    page = (tmp_path / "block.html").read_text(encoding="utf-8")
    assert "Loop nest" in page
    assert "Each step was timed alone" in page


def test_a_function_with_named_arguments(module):
    done = run(f"{module}:scaled", "--args", "torch.randn(4), by=3")
    assert done.exit_code == 0, done.output
    assert "aten.exp.default, aten.mul.Tensor" in done.output


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("{}", "", "name a function or a model"),
        ("{}:none", "", "has no function or model called none"),
        ("{}:scaled", "torch.rand(", "SyntaxError"),
        ("{}_not:scaled", "", "cannot be imported"),
    ],
)
def test_what_it_cannot_use(module, target, arguments, message):
    done = run(target.format(module), "--args", arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.gpu
def test_a_function_on_a_gpu(module):
    done = run(f"{module}:scaled", "--args", "torch.randn(1 << 20, device='cuda')")
    assert done.exit_code == 0, done.output
    assert "reads 4,194,304 B, writes 4,194,304 B" in done.output
    assert " registers, " in done.output
