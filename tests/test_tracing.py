"""``opkit trace``: a program is run, and what its operators did is reported."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from opkit import cli, tracing

PROGRAM = '''
import sys
import torch
from torch import Tensor
import opkit

@opkit.custom_op("tracing::softsign")
def softsign(x: Tensor) -> Tensor:
    return x / (1 + x.abs())

softsign.register_kernel("cpu", opkit.c_kernel("""
void softsign(const T* x, T* out, int64_t x_numel) {
    for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] / (1 + fabs(x[i]));
}
""", dtypes=["float32"]))
x = torch.randn(8, requires_grad=True)
for _ in range(3):
    softsign(x).sum().backward()
softsign(x.detach().double())
opkit.remove("tracing::softsign")
if "compile" in sys.argv:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="opkit", dynamic=False)
    compiled(torch.randn(4)), compiled(torch.randn(5))
if "fail" in sys.argv:
    raise ValueError("<no>")
'''


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*arguments):
    return CliRunner().invoke(cli.app, ["trace", *map(str, arguments)])


def test_kernels_reasons_and_costs(program):
    before = sys.argv, sys.path[:]
    found = tracing.trace(str(program))
    (softsign,) = found.operators
    assert (softsign.calls, softsign.kernels) == (4, {"softsign": 3, "reference": 1})
    assert softsign.refused["softsign"] == {"x has torch.float64; it takes torch.float32": 1}
    assert softsign.refused["reference"] == {"softsign is preferred": 3}
    assert len(softsign.seconds) == len(softsign.dispatch) == 4
    assert all(0 < d < s for d, s in zip(softsign.dispatch, softsign.seconds, strict=True))
    assert (sys.argv, sys.path) == before
    assert not tracing.planning.observers


def test_what_is_compiled_again_and_why(program):
    torch._dynamo.reset()
    found = tracing.trace(str(program), ["compile"])
    assert [each.reason for each in found.graphs] == ["", ""]
    assert "expected 4, actual 5" in found.recompiles[0]
    assert "Compiled graphs" in str(found)


def test_the_command_writes_a_page_and_events(program, tmp_path):
    page, events = tmp_path / "trace.html", tmp_path / "trace.json"
    done = run("--html", page, "--perfetto", events, program, "--an-option", "fail")
    assert done.exit_code == 1
    assert "softsign (3), reference (1)" in done.output
    assert "ValueError: &lt;no&gt;" in page.read_text()
    names = [each.get("name") for each in json.loads(events.read_text())["traceEvents"]]
    assert names.count("tracing::softsign[softsign]") == 3


def test_bad_input_and_programs_without_operators(tmp_path):
    done = run(tmp_path / "none.py")
    assert done.exit_code == 2
    assert "there is no file" in done.output
    (tmp_path / "empty.py").write_text("raise SystemExit(3)")
    done = run(tmp_path / "empty.py")
    assert done.exit_code == 1
    assert "No operator of opkit was called" in done.output
