"""``opkit new``: a Python package with one operator, its kernels in C and Triton, and its tests, to start from."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from opkit import terminal

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@NAME@"
version = "0.1.0"
description = "Operators for PyTorch, with kernels that are compiled ahead of time."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["opkit"]

[project.optional-dependencies]
test = ["pytest"]

[tool.setuptools]
packages = ["@NAME@"]

[tool.setuptools.package-data]
@NAME@ = ["*.c", "_opkit/**/*"]
"""

_README = """\
# @NAME@

Operators for PyTorch, made with opkit. From this folder:

```sh
pip install -e '.[test]'
pytest                                # numbers, gradients, fakes, ... of each operator; the Triton kernel without a GPU
opkit tune @NAME@                     # on a GPU: times the Triton kernel's configs
opkit build --wheel dist @NAME@       # compiles the kernels, puts them and the results of tuning into dist/*.whl
```

| file | what it has |
| --- | --- |
| `@NAME@/__init__.py` | the operator: a function of torch, from which opkit derives the rest |
| `@NAME@/silu_mul.c` | its kernel on CPUs |
| `@NAME@/on_gpu.py` | its kernel on GPUs |
| `tests/test_@NAME@.py` | the tests |
"""

_IGNORED = """\
__pycache__/
*.egg-info/
build/
dist/
_opkit/
"""

_OPERATOR = '''\
"""The operators of this package. Each function is the reference: gradients, fakes and tests come from it."""

from pathlib import Path

import opkit
import torch
from jaxtyping import Float
from torch import Tensor

from @NAME@.on_gpu import silu_mul_kernel


@opkit.custom_op("@NAME@::silu_mul")
def silu_mul(gate: Float[Tensor, "*batch d"], up: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Return the SiLU of one half of a projection times the other (Shazeer, 2020)."""
    return torch.nn.functional.silu(gate) * up


on_cpu = opkit.c_kernel(Path(__file__).with_name("silu_mul.c"), dtypes=[torch.float32, torch.bfloat16])
silu_mul.register_kernel("cpu", on_cpu)
silu_mul.register_kernel("cuda", silu_mul_kernel)
'''

_C_KERNEL = """\
// Parameters are found by name: T is each of the dtypes in turn, gate_numel the number of gate's elements.
void silu_mul(const T* gate, const T* up, T* out, int64_t gate_numel) {
    for (int64_t i = 0; i < gate_numel; i++) {
        const float x = (float)gate[i];
        out[i] = (T)(x / (1 + expf(-x)) * (float)up[i]);
    }
}
"""

_TRITON_KERNEL = '''\
"""The kernel on GPUs, in Triton."""

import opkit
import triton
import triton.language as tl


@triton.jit
def _silu_mul(gate, up, out, gate_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, at < gate_numel).to(tl.float32)
    y = tl.load(up + at, at < gate_numel).to(tl.float32)
    tl.store(out + at, x * tl.sigmoid(x) * y, at < gate_numel)


# The fastest of the configs is found by timing. `opkit build` compiles each of them for each of the examples.
silu_mul_kernel = opkit.triton_kernel(
    _silu_mul,
    grid=lambda gate_numel, BLOCK: triton.cdiv(gate_numel, BLOCK),
    configs=[{"BLOCK": 1024, "num_warps": 4}, {"BLOCK": 4096, "num_warps": 8}],
    examples=[{"gate": f"{dtype}[4096, 1024]", "up": f"{dtype}[4096, 1024]"} for dtype in ("bf16", "fp32")],
)
'''

_TESTS = '''\
"""The operator keeps its contract, and its kernels compute what the reference does."""

import torch
from opkit.testing import compile_for, contract, interpret

from @NAME@ import silu_mul

test_contract = contract(silu_mul)  # an item for each property of opkit.check


def test_the_triton_kernel_in_the_interpreter():
    gate, up = torch.randn(3, 37), torch.randn(3, 37)
    torch.testing.assert_close(interpret(silu_mul)(gate, up), torch.nn.functional.silu(gate) * up)


def test_the_triton_kernel_compiles():
    compile_for(silu_mul, ["sm_80", "sm_90"]).raise_for_failures()
'''

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    ".gitignore": _IGNORED,
    "@NAME@/__init__.py": _OPERATOR,
    "@NAME@/silu_mul.c": _C_KERNEL,
    "@NAME@/on_gpu.py": _TRITON_KERNEL,
    "tests/test_@NAME@.py": _TESTS,
}


def new(
    name: Annotated[
        str, typer.Argument(help="The package's name, as in my_ops: small letters, digits and underscores.")
    ],
) -> None:
    """Write a package with one operator, its kernels in C and Triton, and its tests, to a new folder NAME."""
    folder = Path(name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        terminal.refuse(f"{name!r} is no name for a package. Use small letters, digits and underscores, as in my_ops.")
    if folder.exists():
        terminal.refuse(f"{folder.absolute()} exists. Choose another name, or remove it.")
    if importlib.util.find_spec(name) is not None:
        terminal.refuse(f"{name!r} is the name of a module that is installed here. Choose another one.")
    try:
        for path, text in _FILES.items():
            file = folder / path.replace("@NAME@", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("@NAME@", name), encoding="utf-8")
    except OSError as error:
        terminal.refuse(f"{folder.absolute()} cannot be written: {error.strerror or error}.")
    terminal.console().print(
        escape(f"Wrote {folder}/. Continue there: pip install -e '.[test]' && pytest; its README.md has the commands."),
        soft_wrap=True,
    )
