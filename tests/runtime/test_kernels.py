"""Compiled kernels of operators are called without torch."""

import ctypes
import json
import os
import textwrap

import fresh_process
import numpy as np
import pytest
import torch

import opkit.runtime
from opkit.errors import ArgumentError, KernelError

OPERATORS = '''
import opkit, torch
from jaxtyping import Float
from torch import Tensor

@opkit.custom_op("without_torch::scaled_sums")
def scaled_sums(
    x: Float[Tensor, "rows columns"], weight: Float[Tensor, "columns"] | None = None, scale: float = 2.0
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "columns rows"]]:
    product = x * scale if weight is None else x * scale * weight
    return product.sum(1), product.t().contiguous()

scaled_sums.register_kernel("cpu", opkit.c_kernel("""
    void scaled_sums(const T* x, const T* weight, double scale, T* out0, T* out1, int64_t rows, int64_t columns) {
        for (int64_t i = 0; i < rows; i++) {
            out0[i] = 0;
            for (int64_t j = 0; j < columns; j++) {
                out1[j * rows + i] = x[i * columns + j] * scale * (weight ? weight[j] : 1);
                out0[i] += out1[j * rows + i];
            }
        }
    }
""", dtypes=[torch.float32, torch.float64]))

@opkit.custom_op("without_torch::add_to", mutates_args=("x",))
def add_to(x: Float[Tensor, "*s"], shifts: list[int], name: str = "one") -> None:
    x += sum(shifts) + len(name)

add_to.register_kernel("cpu", opkit.c_kernel("""
    const char* add_to(T* x, const int64_t* shifts, int64_t shifts_len, const char* name, int64_t x_numel) {
        if (name[0] == 0) return "the name is empty";
        for (int64_t i = 0; i < x_numel; i++) {
            for (int64_t n = 0; n < shifts_len; n++) x[i] += shifts[n];
            for (const char* c = name; *c; c++) x[i] += 1;
        }
        return 0;
    }
"""))
'''


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "torch_free_ops.py").write_text(textwrap.dedent(OPERATORS))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = ["-m", "opkit", "build", "torch_free_ops", "--programs", "--isa", "baseline", "--output", "built"]
    fresh_process.run(command, environment, folder)
    listed = json.loads((folder / "built" / "manifest.json").read_text())["libraries"]
    return {each["operator"].split("::")[1]: folder / "built" / each["file"] for each in listed}


def test_other_packages_may_set_the_types_of_python_s_functions(kernels, monkeypatch):
    monkeypatch.setattr(ctypes.pythonapi.PyCapsule_New, "argtypes", (ctypes.c_char_p,))  # as JAX does, to others
    sums, _ = opkit.runtime.load_kernel(kernels["scaled_sums"])(np.ones((2, 3)), np.ones(3))
    np.testing.assert_allclose(np.from_dlpack(sums), [6, 6])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_kernel_on_arrays(kernels, dtype):
    kernel = opkit.runtime.load_kernel(kernels["scaled_sums"])
    x, weight = np.random.default_rng(0).standard_normal((5, 3)).astype(dtype), np.array([1, 2, 3], dtype)
    for given in (x, np.asfortranarray(x), x[::2]):
        sums, turned = kernel(given, weight, scale=3)
        np.testing.assert_allclose(np.from_dlpack(sums), (given * 3 * weight).sum(1), rtol=1e-5)
        np.testing.assert_allclose(np.from_dlpack(turned), (given * 3 * weight).T, rtol=1e-5)
    sums, _ = kernel(torch.from_numpy(x))
    np.testing.assert_allclose(torch.from_dlpack(sums), (x * 2).sum(1), rtol=1e-5)
    assert [(each.name, each.type, each.default) for each in kernel.parameters] == [
        ("x", "Tensor", ...), ("weight", "Tensor?", None), ("scale", "float", 2.0)
    ]  # fmt: skip


def test_a_kernel_that_writes_to_its_argument(kernels):
    kernel = opkit.runtime.load_kernel(kernels["add_to"])
    x = np.zeros((2, 3), np.float32)
    assert kernel(x, [1, 2], name="four") is None
    assert (x == 7).all()
    with pytest.raises(RuntimeError, match=r"without_torch::add_to.*the name is empty"):
        kernel(x, [], name="")


def test_what_a_kernel_refuses(kernels, tmp_path):
    kernel = opkit.runtime.load_kernel(kernels["scaled_sums"])
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ArgumentError, match="without x"):
        kernel()
    with pytest.raises(ArgumentError, match="4 arguments"):
        kernel(x, None, 1.0, 2)
    with pytest.raises(ArgumentError, match="weight is a list"):
        kernel(x, [1.0])
    with pytest.raises(RuntimeError, match="weight"):
        kernel(x, np.ones(4, np.float32))
    (tmp_path / "none.so").write_text("none")
    with pytest.raises(KernelError, match="cannot be loaded"):
        opkit.runtime.load_kernel(tmp_path / "none.so")
