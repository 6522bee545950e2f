"""Programs in C and C++ run saved models without Python."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import opkit
from opkit.kernels.cc import toolchain

ROOT = Path(opkit.__file__).parent
INCLUDE = [f"-I{ROOT / 'runtime/include'}", f"-I{ROOT / 'kernels/include'}"]
LINK = [f"-L{ROOT / 'runtime'}", f"-Wl,-rpath,{ROOT / 'runtime'}", "-lopkit_model"]

C = r"""
#include <opkit_model.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
    char why[512];
    opkit_model *model = opkit_model_load(argv[1], 1, NULL, why, sizeof why);
    if (!model) return puts(why), argc;
    float numbers[12];
    int64_t shape[2] = {3, 4};
    for (int i = 0; i < 12; ++i) numbers[i] = i / 10.0f;
    DLTensor x = {numbers, {1, 0}, 2, {2, 32, 1}, shape, NULL, 0};
    const DLTensor *arguments[] = {&x};
    DLManagedTensor *results[1];
    if (opkit_model_run(model, "", arguments, 1, results, 1, why, sizeof why)) return puts(why), 1;
    const float *found = results[0]->dl_tensor.data;
    for (int64_t i = 0; i < results[0]->dl_tensor.shape[0] * results[0]->dl_tensor.shape[1]; ++i) printf("%.5f ", found[i]);
    results[0]->deleter(results[0]);
    x.ndim = 1;
    if (opkit_model_run(model, "", arguments, 1, results, 1, why, sizeof why) != 2) return 1;
    puts(why);
    printf("%d", (int)opkit_model_input_count(model, "none"));
    opkit_model_free(model);
    return 0;
}
"""

CPP = r"""
#include <ATen/ATen.h>
#include <opkit_torch.hpp>

#include <iostream>

int main(int, char** argv) {
    const at::Device device(argv[2]);
    const opkit::Model model(argv[1], true, device);
    const at::Tensor x = at::arange(24, at::kFloat).reshape({2, 3, 4}).div(10).to(device);
    model({x});
    std::vector<at::Tensor> found = model({x});
    for (const at::Tensor& each : found) std::cout << each.sizes() << each.strides() << each.sum().item<double>() << "\n";
    try {
        model({x.to(at::kDouble)});
    } catch (const std::runtime_error& error) {
        std::cout << error.what();
    }
}
"""


def compiled(folder, language, text, *flags):
    source = folder / f"main.{language}"
    source.write_text(text)
    command = [
        *toolchain.find("c++" if language == "cpp" else "c").command,
        "-w",
        source,
        "-o",
        folder / "main",
        *INCLUDE,
        *LINK,
        *flags,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "main"


def run(program, *arguments):
    done = subprocess.run([program, *arguments], env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_program_in_c(tmp_path):
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Tanh()), torch.arange(12.0).reshape(3, 4) / 10
    opkit.export(model, (x,), path=tmp_path / "model.opk")
    printed, count = run(compiled(tmp_path, "c", C), tmp_path / "model.opk").rsplit("\n", 1)
    found, message = printed.split("input is ")
    torch.testing.assert_close(
        torch.tensor(list(map(float, found.split()))), model(x).detach().flatten(), atol=1e-5, rtol=0
    )
    assert (message, count) == ("float32[3], and the model takes float32[3, 4]", "-1")


class OnlyInTorch(nn.Module):
    """Operators that libtorch computes: with several results, results that are views, lists, dtypes and devices."""

    def forward(self, x):
        values, places = x.sort(-1, descending=True)
        parts = torch.linalg.qr(values.transpose(-1, -2))
        return (
            places * 2,
            parts.Q @ parts.R + 1,
            torch.cumsum(x, 0).to(torch.float64),
            torch.nn.functional.pad(x, (1, 1), "circular"),
        )


class OnGpus(nn.Module):
    """Kernels, products, an operator that libtorch computes, and results of them."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(4, 64), nn.LayerNorm(64)

    def forward(self, x):
        hidden = self.norm(nn.functional.gelu(self.up(x)))
        return hidden * 2, hidden.sort(-1).values.sum(0), x + torch.arange(4, device=x.device)


def check_program_with_libtorch(folder, model, x, *libraries):
    opkit.export(model, (x,), path=folder / "model.opk")
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
    program = compiled(folder, "cpp", CPP, *flags, *libraries, "-ltorch", "-ltorch_cpu", "-lc10")
    *lines, message = run(program, folder / "model.opk", str(x.device)).split("\n")
    for line, expected in zip(lines, model(x), strict=True):
        sizes, _, total = line.replace("[", "").split("]")
        assert sizes == ", ".join(map(str, expected.shape))
        assert float(total) == pytest.approx(float(expected.detach().sum()), rel=1e-4, abs=1e-4)
    assert message == "x is float64[2, 3, 4], and the model takes float32[2, 3, 4]"


@pytest.mark.build
def test_a_program_with_libtorch(tmp_path):
    check_program_with_libtorch(tmp_path, OnlyInTorch(), torch.arange(24.0).reshape(2, 3, 4) / 10)


@pytest.mark.gpu
def test_a_program_with_libtorch_on_a_gpu(tmp_path):
    x = torch.arange(24.0, device="cuda").reshape(2, 3, 4) / 10
    check_program_with_libtorch(tmp_path, OnGpus().eval().cuda(), x, "-Wl,--no-as-needed", "-ltorch_cuda", "-lc10_cuda")
