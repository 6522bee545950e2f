"""``opkit tune``: what it runs, prints and keeps, with stand-ins for the GPU and for kernels that tune themselves."""

import json
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

import opkit
from opkit import cli, terminal
from opkit.kernels.tuning import records, tuning
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity
from opkit.op.aot import tuning as op_tuning

RUNNER = CliRunner()

OPERATORS = '''
import torch
import opkit
from jaxtyping import Float
from torch import Tensor
from opkit.kernels.tuning import tuning
from opkit.kernels.tuning.record_format import bucket_of
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity

CONFIGS = [Config({"BLOCK": block}, {"num_warps": 4}) for block in (64, 128, 256)]
TIMES = {64: 0.5, 128: 0.25}
MEASURED = []

def measure(each):
    MEASURED.append(each.label)
    if each.constexprs["BLOCK"] not in TIMES:
        raise MemoryError("shared memory")
    return TIMES[each.constexprs["BLOCK"]]

class Kernel:
    """A stand-in for a Triton kernel of an operator."""

    __name__ = "triton_kernel"

    def __init__(self, name, examples):
        self.name, self.examples = name, examples

    def identities(self):
        return [Identity(self.name, "_fwd", "abc")]

    def __call__(self, x, weight):
        bucket = bucket_of({"d": x.shape[-1]}, [str(x.dtype)])
        chosen = tuning.choose(*self.identities(), CONFIGS, "NVIDIA H200", bucket, measure, False)
        assert chosen.constexprs["BLOCK"] == 128
        return x * weight

@opkit.custom_op("cli_tune::scaled", mutates_args=())
def scaled(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    return x * weight

@opkit.custom_op("cli_tune::made_up", mutates_args=())
def made_up(x: Float[Tensor, "b d"], weight: Float[Tensor, "d"]) -> Float[Tensor, "b d"]:
    return x * weight

@opkit.custom_op("cli_tune::plain", mutates_args=())
def plain(x: Tensor) -> Tensor:
    return x.clone()

example = {"x": "bf16[8, 1024]", "weight": "bf16[1024]"}
for op, examples in ((scaled, [example, example]), (made_up, [])):
    kernel = Kernel(op._operator.name, examples)
    op.register_kernel("cuda")(lambda x, weight: x * weight)
    op.register_kernel("cpu")(kernel)
'''


def run(*arguments):
    return RUNNER.invoke(cli.app, ["tune", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, settings):
    settings(cache_dir=tmp_path / "cache")
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of operators whose kernels tune themselves on what passes for a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(op_tuning, "device", lambda: "cpu")
    (tmp_path / "cli_tune_ops.py").write_text(OPERATORS)
    yield "cli_tune_ops"
    for operator in opkit.operators():
        if operator._operator.name.startswith("cli_tune::"):
            opkit.remove(operator._operator.name)
    sys.modules.pop("cli_tune_ops", None)


def measured():
    return len(sys.modules["cli_tune_ops"].MEASURED)


def lines(result):
    return [line.rstrip() for line in result.stdout.splitlines()]


def test_examples_are_tuned_and_recorded(module):
    result = run(module, "--op", "cli_tune::scaled")
    assert result.exit_code == 0, result.output
    assert lines(result) == [
        "cli_tune::scaled(x=bf16[8, 1024], weight=bf16[1024]) [_fwd]: BLOCK=128, num_warps=4  0.25 ms, "
        "2.00x the slowest, 2.00x the first  (tuned)",
        "1 call tuned, 0 failed.",
    ]
    assert measured() == 3
    tuning.forget()
    assert "(recorded)" in run(module, "--op", "cli_tune::scaled").stdout
    assert measured() == 3
    assert "(tuned)" in run(module, "--op", "cli_tune::scaled", "--force").stdout
    assert measured() == 6


def test_calls_are_made_up_for_operators_without_examples(module):
    result = run(module)
    assert result.exit_code == 0, result.output
    tuned = [line.partition(" [")[0] for line in lines(result)[:-1]]
    assert [line for line in tuned if "made_up" in line] == [
        f"cli_tune::made_up(x={dtype}[1024, 1024], weight={dtype}[1024])" for dtype in ("bf16", "fp16", "fp32")
    ]
    assert lines(result)[-1] == "4 calls tuned, 0 failed."
    assert "plain" not in result.stdout


def test_shapes_are_given(module, tmp_path):
    (tmp_path / "shapes.json").write_text(
        json.dumps({"cli_tune::scaled": [{"x": "fp16[2, 32]", "weight": "fp16[32]"}]})
    )
    shapes = ("--shapes", "cli_tune::scaled(x=fp32[4, 64], weight=fp32[64])")
    result = run(module, *shapes, "--shapes-file", tmp_path / "shapes.json")
    assert result.exit_code == 0, result.output
    assert [line.partition(":  ")[0].partition(" [_")[0] for line in lines(result)[:-1]] == [
        "cli_tune::scaled(x=fp32[4, 64], weight=fp32[64])",
        "cli_tune::scaled(x=fp16[2, 32], weight=fp16[32])",
    ]
    (record,) = records.listed()
    assert [entry.bucket for entry in record.entries] == ["torch.float16 | d=32", "torch.float32 | d=64"]


def test_a_call_that_chooses_nothing_is_said(module):
    result = run(module, "--shapes", "cli_tune::plain(x=fp32[4])")
    assert (result.exit_code, lines(result)[0]) == (0, "cli_tune::plain(x=fp32[4]): nothing to tune")


def test_a_call_that_fails_is_named_and_the_others_are_tuned(module):
    wrong, right = (f"cli_tune::scaled(x=fp32[4, {d}], weight=fp32[64])" for d in (63, 64))
    result = run(module, "--shapes", wrong, "--shapes", right)
    assert result.exit_code == 1
    assert re.match(r"cli_tune::scaled\(x=fp32\[4, 63\], weight=fp32\[64\]\): ShapeError: .*64", lines(result)[0])
    assert "(tuned)" in result.stdout
    assert lines(result)[-1] == "1 call tuned, 1 failed."


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--shapes", "cli_tune::scaled(x=bf17[8])"), "'bf17' is no dtype"),
        (("--shapes", "cli_tune::scaled(x=bf16[8])"), "weight is missing"),
        (("--shapes", "cli_tune::scald(x=bf16[8])"), "Did you mean cli_tune::scaled"),
        (("--shapes-file", "none.json"), "none.json cannot be read"),
        (("--op", "cli_tune::plain"), "cli_tune::plain has no kernel on the GPU"),
        (("--op", "cli_tune::nothing"), "no operator named 'cli_tune::nothing'"),
        (("--show", "--force"), "--force are for tuning"),
    ],
)
def test_bad_input(module, arguments, complaint):
    result = run(module, *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.output


def test_a_module_is_asked_for():
    result = run()
    assert result.exit_code == 2
    assert "opkit tune my_ops" in result.stderr


def test_a_module_without_kernels_on_the_gpu(module, tmp_path):
    (tmp_path / "cli_tune_none.py").write_text("")
    result = run("cli_tune_none")
    assert result.exit_code == 2
    assert "cli_tune_none defines no operator with a kernel on the GPU" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(module, monkeypatch):
    monkeypatch.undo()
    result = run("opkit.errors")
    assert result.exit_code == 2
    assert "torch finds no GPU" in result.stderr
    assert "--import" in result.stderr


def test_switched_off(settings):
    settings(tune="off")
    result = run("opkit.errors")
    assert result.exit_code == 2
    assert "OPKIT_TUNE=off" in result.stderr


# ---- what is recorded ------------------------------------------------------------------------------------------------


def remember(operator="cli_tune::scaled", hash="abc"):
    tried = [tuning.Tried(Config({"BLOCK": 64}, {"num_warps": 4}).to_json(), 0.123456)]
    records.remember(Identity(operator, "_fwd", hash), "NVIDIA H200", "bf16 | d=1024", tried)


def test_show_prints_each_result(module):
    remember()
    remember("demo::[red]x", hash="old")
    result = run("--show")
    assert result.exit_code == 0
    shown = lines(result)
    assert re.match(r"operator +kernel +device +bucket +config +ms +date +stale", shown[0])
    assert re.match(
        r"cli_tune::scaled +_fwd +NVIDIA H200 +bf16 \| d=1024 +BLOCK=64, num_warps=4 +0\.1235 +20\d\d-\d\d-\d\d \d\d:\d\d +no$",
        shown[1],
    )
    assert shown[2].startswith("demo::[red]x")
    assert shown[3].startswith("2 results in ")
    assert len(lines(run("--show", "--op", "demo::[red]x"))) == 3


def test_show_says_what_is_stale(module, monkeypatch):
    remember(hash="old")
    assert "it was made for the kernel before it changed" in run(module, "--show").stdout
    remember()
    monkeypatch.setattr(records, "triton_version", lambda: "99.1")
    assert "and this is 99.1" in run("--show").stdout


def test_nothing_to_show():
    result = run("--show")
    assert (result.exit_code, len(lines(result))) == (0, 1)
    assert lines(result)[0].startswith("0 results in ")


def test_export_and_import(tmp_path, settings):
    remember()
    result = run("--export", tmp_path / "h200.json")
    assert lines(result) == [f"Wrote 1 result to {tmp_path}/h200.json"]
    settings(cache_dir=tmp_path / "other")
    result = run("--import", tmp_path / "h200.json", "--show")
    assert result.exit_code == 0
    assert lines(result)[0] == f"Imported 1 result from {tmp_path}/h200.json into {tmp_path}/other/triton_tuning"
    assert lines(result)[2].startswith("cli_tune::scaled")


@pytest.mark.parametrize("option", ["--export", "--import"])
def test_what_cannot_be_taken_along(tmp_path, option):
    (tmp_path / "file.json").write_text("{}")
    result = run(option, tmp_path / "file.json")
    assert result.exit_code == 2
    assert re.search(
        r"There are no tuning results|file\.json is no file of tuning results: .* no 'format'", result.stderr
    )


def test_a_bar_is_shown_on_a_terminal(module, monkeypatch):
    wide = terminal.Console(force_terminal=True, width=200, color_system=None)
    monkeypatch.setattr(terminal, "console", lambda: wide)
    with wide.capture() as shown:
        assert run(module, "--op", "cli_tune::scaled").exit_code == 0
    assert "0/1" in shown.get() or "1/1" in shown.get()
