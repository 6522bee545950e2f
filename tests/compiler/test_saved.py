"""Functions that torch.compile(...).aot_compile(...) saves: loaded, they are called without being compiled again."""

import json

import fresh_process
import pytest
import torch

from opkit.compiler.saved_function import SavedFunction
from opkit.errors import CompileError

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
