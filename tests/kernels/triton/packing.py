"""Python packages with Triton kernels, and a GPU that there is not, for tests of building them ahead of time."""

import dataclasses
import importlib
import itertools
import json
import shutil
import sys

import torch

import opkit
from opkit.op.aot import package as building
from opkit.op.triton import variants

_count = itertools.count()

OPERATORS = """
import opkit, torch, triton
import triton.language as tl
from torch import Tensor

SHIFT = tl.constexpr(0)

@triton.jit
def shifted(value):
    return value + SHIFT

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, shifted(tl.load(x + at, at < n) + tl.load(y + at, at < n)), at < n)

@opkit.custom_op("NAME::plus", mutates_args=())
def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y

plus.register_kernel("cpu", opkit.triton_kernel(
    add, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), n=lambda x: x.numel, OPTIONS
))
"""
BY_PYTHON = """
kernel = opkit.triton_kernel(add, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), n=lambda x: x.numel, BLOCK=128)

@opkit.custom_op("NAME::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3 * x

@thrice.register_kernel(("cpu", "cuda"))
def two_launches(x: Tensor) -> Tensor:
    first, second = torch.empty_like(x), torch.empty_like(x)
    kernel(x=x, y=x, out=first)
    kernel(x=x, y=first, out=second)
    return second
"""
OPTIONS = 'BLOCK=128, examples=[{"x": "fp32[4096]", "y": "fp32[4096]"}]'
CONFIGS = 'configs=[{"BLOCK": 64}, {"BLOCK": 128, "num_warps": 2}], examples=[{"x": "fp32[4096]", "y": "fp32[4096]"}]'


def named(binary):
    """The binary under a name by which the fake driver computes what it is to compute, and checks its parameters."""
    return dataclasses.replace(binary, name=" ".join(["add", *(str(param.size) for param in binary.params)]))


class Package:
    """A Python package in a folder of its own; ``fresh`` imports it as a new process would."""

    def __init__(self, folder):
        self.name = f"triton_packaged{next(_count)}"
        self.place = folder / self.name
        self.place.mkdir(parents=True)
        self.write()

    def write(self, options=OPTIONS, edit=lambda text: text):
        text = OPERATORS.replace("NAME", self.name).replace("OPTIONS", options)
        (self.place / "__init__.py").write_text("from . import ops\n")
        (self.place / "ops.py").write_text(edit(text))

    def forget(self):
        for operator in opkit.operators():
            if operator.name.startswith(f"{self.name}::"):
                opkit.remove(operator.name)
        for module in [name for name in sys.modules if name.split(".")[0] == self.name]:
            del sys.modules[module]
        shutil.rmtree(self.place / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()

    def fresh(self):
        self.forget()
        return importlib.import_module(f"{self.name}.ops")

    def build(self, architectures=("sm_90",), **options):
        self.fresh()
        return building.build(self.name, architectures=architectures, **options)

    @property
    def built(self):
        return self.place / "_opkit"

    def change(self, edit):
        manifest = json.loads((self.built / "manifest.json").read_text())
        edit(manifest)
        (self.built / "manifest.json").write_text(json.dumps(manifest))

    def files(self):
        return {str(path.relative_to(self.built)) for path in self.built.rglob("*") if path.is_file()}


class Gpu:
    """What the fake driver stands for, and what was compiled and found in packages."""

    def __init__(self):
        self.target, self.shared = "sm_90", 232448
        self.compiled, self.found = [], []

    def machine(self, driver):
        return variants.Machine("cpu", lambda: driver, lambda i: self.target, lambda i: "Fake", lambda i: self.shared)


def check(ops, x, y):
    torch.testing.assert_close(ops.plus(x, y), x + y)


def divisible(gpu):
    """What the binary that was found last was told that 16 divides."""
    return gpu.found[-1].form.divisible
