"""Operators run in Triton's interpreter, in a process of their own."""

import importlib.util
from pathlib import Path

import pytest
import torch

import opkit
from opkit.errors import ArgumentError, InterpreterError
from opkit.testing import Interpreter, interpret

_FILE = Path(__file__).parent / "kernels.py"


@pytest.fixture(scope="module")
def interpreter():
    with Interpreter("triton_test_kernels", _FILE) as interpreter:
        yield interpreter


@pytest.fixture
def run(interpreter):
    return lambda op, *args, **kwargs: interpreter(f"triton_tests::{op}", *args, **kwargs)


def rms_norm(x, weight, eps=1e-6):
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [(3, 5, 37), (4, 128), (1, 1), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers(run, shape, dtype):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    out = run("rms_norm", x, weight)
    assert out.dtype is dtype
    torch.testing.assert_close(
        out.double(), rms_norm(x, weight), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-4
    )


def test_rows_that_lie_apart_are_read_where_they_lie(run):
    x, weight = torch.randn(6, 50)[:, :37], torch.randn(37)
    torch.testing.assert_close(run("rms_norm", x, weight).double(), rms_norm(x, weight), rtol=1e-5, atol=1e-5)


def test_strides_of_dimensions_of_one_element_mislead_nobody(run):
    x, weight = torch.randn(1, 5, 37).transpose(0, 1), torch.randn(37)
    assert x.stride(-2) == 5 * 37  # though the rows, which that is told for, lie 37 apart
    torch.testing.assert_close(run("rms_norm", x, weight).double(), rms_norm(x, weight), rtol=1e-5, atol=1e-5)


def test_a_layout_that_the_kernel_is_not_told_is_made_contiguous(run):
    x, weight = torch.randn(37, 6).t(), torch.randn(37)
    out = run("rms_norm", x, weight)
    torch.testing.assert_close(out.double(), rms_norm(x, weight), rtol=1e-5, atol=1e-5)


def test_empty_tensors(run):
    assert run("rms_norm", torch.empty(0, 8), torch.ones(8)).shape == (0, 8)


def test_configs_scalars_and_computed_parameters(run):
    x, y = torch.randn(1000), torch.randn(1000)
    torch.testing.assert_close(run("axpy", x, y, 0.5), 0.5 * x + y)


def test_several_launches_in_one_python_kernel(run):
    x, y = torch.randn(300), torch.randn(300)
    torch.testing.assert_close(run("twice", x, y), 3 * x + 2 * y)


def test_what_is_to_be_zero_is_zeroed(run):
    x = torch.randn(1000)
    torch.testing.assert_close(run("total", x), x.sum(), rtol=1e-4, atol=1e-4)


def test_optional_tensors(run):
    x, bias = torch.randn(100), torch.randn(100)
    torch.testing.assert_close(run("scaled", x), 2 * x)
    torch.testing.assert_close(run("scaled", x, bias), 2 * x + bias)


def test_gradients(interpreter):
    x, weight = torch.randn(4, 37, requires_grad=True), torch.randn(37, requires_grad=True)
    ours = torch.randn(4, 37)
    out, grads = interpreter.differentiate("triton_tests::rms_norm", [ours], x, weight)
    expected = torch.autograd.grad(rms_norm(x, weight), [x, weight], ours.double())
    assert out.shape == (4, 37)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4)


def test_errors_name_the_operator_and_carry_the_trace(run):
    with pytest.raises(
        InterpreterError, match=r"triton_tests::rms_norm, in Triton's interpreter: ShapeError"
    ) as caught:
        run("rms_norm", torch.ones(3, 4), torch.ones(5))
    assert "Traceback" in "".join(caught.value.__notes__)


def test_a_call_that_only_the_reference_takes_is_refused(run):
    with pytest.raises(InterpreterError, match="no Triton kernel takes"):
        run("bare", torch.ones(2))


@pytest.mark.exhaustive  # as the next
def test_a_module_that_fails_says_why(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('out of order')\n")
    with pytest.raises(InterpreterError, match="out of order"):
        Interpreter("broken", file)
    with pytest.raises(InterpreterError, match="no module 'no_such_module', and no file= was given"):
        Interpreter("no_such_module")


@pytest.mark.exhaustive
def test_a_script_that_interprets_while_it_is_imported_says_what_to_do(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("from opkit.testing import Interpreter\nInterpreter('again', __file__)\n")
    with pytest.raises(InterpreterError, match=r"again was to be interpreted while script was .*__main__"):
        Interpreter("script", file)


def test_interpret_finds_the_module_of_an_operator():
    for op in [op for op in opkit.operators() if op.name.startswith("triton_tests::")]:
        opkit.remove(op.name)
    spec = importlib.util.spec_from_file_location("triton_tests_of_interpret", _FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.randn(10)
    torch.testing.assert_close(interpret(module.scaled)(x), 2 * x)


def test_interpret_needs_a_file():
    namespace = {"opkit": opkit, "torch": torch}
    source = "def f(x: torch.Tensor) -> torch.Tensor:\n    return x + 1\n"
    exec(compile(source, "<typed in>", "exec"), namespace)
    op = opkit.custom_op("triton_tests::typed", namespace["f"], mutates_args=())
    with pytest.raises(ArgumentError, match="no file"):
        interpret(op)(torch.ones(1))


def test_what_the_operator_writes_to_is_written_to_here(run):
    x, other = torch.ones(3, 4).t(), torch.ones(4)
    run("add_into", x, torch.ones(4, 3))
    run("add_into", other, torch.ones(1).expand(4))
    assert torch.equal(x, torch.full((4, 3), 2.0))
    assert torch.equal(other, torch.full((4,), 2.0))


def test_expanded_and_negated_tensors(run):
    for x in (torch.randn(3).expand(4, 3), torch.tensor(2.0).expand(5), torch._neg_view(torch.ones(3))):
        torch.testing.assert_close(run("scaled", x), 2 * x)


def test_a_dtype_arrives_as_tritons(run):
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.bool):
        assert torch.equal(run("converted", torch.ones(10), dtype), torch.ones(10, dtype=dtype))


def test_results_have_no_gradients_to_be_mistaken_for_the_operators(run):
    assert not run("scaled", torch.ones(3, requires_grad=True)).requires_grad
