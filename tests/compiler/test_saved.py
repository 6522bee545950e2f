"""Functions that torch.compile(...).aot_compile(...) saves: loaded, they are called without being compiled again."""

import json
import os
import shutil

import fresh_process
import pytest
import torch

import opkit
from opkit.compiler.saved_function import SavedFunction
from opkit.errors import CompileError, UnknownOperatorError

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11's compiled functions have no aot_compile"),
]


def model(x, w):
    return torch.nn.functional.gelu(x @ w) + x.shape[0], (x * 2).sum(-1)


def saved(function, given, path, dynamic=None):
    compiled = torch.compile(function, backend="opkit", fullgraph=True, dynamic=dynamic)
    made = compiled.aot_compile((given, {}))
    made.save_compiled_function(path)
    return made


def loaded(path):
    with open(path, "rb") as file:
        return torch.compiler.load_compiled_function(file)


PROGRAM = """
import sys, torch
function = torch.compiler.load_compiled_function(open(sys.argv[1], "rb"))
print(function(torch.ones(2, 4), torch.ones(4, 4))[1].tolist(), "opkit.compiler.lower.graph_to_program" in sys.modules)
"""


def test_inference_with_sizes_that_change(tmp_path, seen):
    w = torch.rand(4, 4)
    made = saved(model, (torch.rand(3, 4), w), tmp_path / "model", dynamic=True)
    seen.clear()
    function = loaded(tmp_path / "model")
    for rows in (3, 5):
        x = torch.rand(rows, 4)
        torch.testing.assert_close(function(x, w), model(x, w))
    torch.testing.assert_close(made(x, w), model(x, w))
    assert not seen
    assert fresh_process.run(["-c", PROGRAM, tmp_path / "model"]).stdout.strip() == "[8.0, 8.0] False"
    with pytest.raises(RuntimeError, match="GuardManager check failed"):
        function(torch.rand(3, 4, dtype=torch.float64), w.double())


def test_training(tmp_path, seen):
    x, w = torch.rand(3, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    saved(model, (x, w), tmp_path / "model")
    seen.clear()
    found = [
        torch.autograd.grad(sum(each.sum() for each in function(x, w)), (x, w))
        for function in (loaded(tmp_path / "model"), model)
    ]
    torch.testing.assert_close(*found)
    assert not seen


def test_what_is_not_saved_says_why(tmp_path):
    with pytest.raises(
        CompileError, match=r"cannot save this function: a result is an alias_of_input\. .*docs/compiler\.md"
    ):
        saved(lambda x: x.view(4, 3), (torch.rand(3, 4),), tmp_path / "view")


def test_another_version_is_refused(tmp_path):
    made = saved(torch.sin, (torch.rand(3),), tmp_path / "sin")
    content = json.loads(SavedFunction.serialize_compile_artifacts(made._artifacts.compiled_fn))
    with pytest.raises(CompileError, match=r"Compile and save it again\."):
        SavedFunction.deserialize_compile_artifacts(json.dumps(content | {"versions": ""}).encode())


KERNEL = (
    "void f(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i] + 1000; }"
)


def test_an_elementwise_kernel_is_found_in_another_cache(tmp_path, settings, name):
    op = opkit.custom_op(name, lambda x: x * 2, schema="(Tensor x) -> Tensor")
    op.register_kernel("cpu", opkit.c_kernel(KERNEL, elementwise=True))
    settings(cache_dir=tmp_path / "first")
    saved(lambda x: op(x.sin()) + 1, (torch.zeros(3),), tmp_path / "model")
    shutil.rmtree(tmp_path / "first")
    settings(cache_dir=tmp_path / "second")
    torch.testing.assert_close(loaded(tmp_path / "model")(torch.zeros(3)), torch.full((3,), 1001.0))
    op.register_kernel("cpu", opkit.c_kernel(KERNEL.replace("1000", "2000"), elementwise=True))
    with pytest.raises(
        CompileError, match=rf"the kernel f of {name}, which has changed since\. Compile the function again"
    ):
        loaded(tmp_path / "model")
    opkit.remove(name)
    with pytest.raises(UnknownOperatorError, match=r"Import the module that defines it first\."):
        loaded(tmp_path / "model")


# ---- modules and operators -----------------------------------------------------------------------------------------------

OPERATORS = """
import sys, torch, opkit

def define():
    for name, more in ("unit", {}), ("fused", {"elementwise": True}):
        op = opkit.custom_op(f"saved_function::{name}", lambda x: x * 2, schema="(Tensor x) -> Tensor")
        code = "void f(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i] + 1000; }"
        op.register_kernel("cpu", opkit.c_kernel(code, **more))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        operators = torch.ops.saved_function
        return operators.fused(operators.unit(torch.nn.functional.gelu(self.norm(x))) + self.shift)

def model():
    torch.manual_seed(0)
    return Model()
"""
SAVE = """
from saved_operators import *
define()
x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
call = torch.compile(model(), backend="opkit", fullgraph=True).forward.aot_compile(((x,), {}))
call.save_compiled_function(sys.argv[1])
"""
LOAD = """
from saved_operators import *
if sys.argv[2] == "with":
    define()
function = torch.compiler.load_compiled_function(open(sys.argv[1], "rb"))
x = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
outputs, modules = [], [model(), model()]
for call, module in (function, modules[0]), (lambda module, x: module(x), modules[1]):
    outputs.append(call(module, x))
    outputs[-1].sum().backward()
torch.testing.assert_close(*outputs)
for name in "norm.running_mean", "norm.weight.grad":
    torch.testing.assert_close(*(eval(f"each.{name}", {"each": each}) for each in modules))
print(outputs[0].min() > 1000)
"""


@pytest.mark.exhaustive
def test_a_module_with_operators_in_a_process_with_another_cache(tmp_path):
    (tmp_path / "saved_operators.py").write_text(OPERATORS)

    def run(program, *arguments, check=True):
        paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": paths, "OPKIT_CACHE_DIR": str(tmp_path / str(len(program)))}
        return fresh_process.run(["-c", program, tmp_path / "model", *arguments], environment, check=check)

    run(SAVE)
    assert run(LOAD, "with").stdout == "tensor(True)\n"
    refused = run(LOAD, "without", check=False)
    assert "calls the operator saved_function::unit, which this process does not have. Import" in refused.stderr
