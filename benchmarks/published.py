"""Run opkit.check on published operators of other libraries.

Collections from PyPI whose operators run on the CPU: each function below gives operators with what they are called with, and
a reference where their documentation says what they compute. What is not installed is left out. The collections need not be
installed with opkit: unpack the wheels into a folder, and name it in PYTHONPATH::

    pip download --no-deps -d wheels bitsandbytes==0.50.2 torchao==0.18.0 optimum-quanto==0.2.7
    for wheel in wheels/*.whl; do python -m zipfile -e "$wheel" published; done
    PYTHONPATH=published python benchmarks/published.py [--examples 25] [bitsandbytes torchao quanto]

docs/check_findings.md says which of the findings were looked into.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

import isolated

import opkit
from opkit.contract.properties import PROPERTIES
from opkit.testing import tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
BYTES = tensor("m k", torch.int8, low=-127, high=127)


class Published(NamedTuple):
    """An operator of a collection."""

    name: str
    op: Any
    args: tuple[Any, ...]
    reference: Callable[..., Any] | None = None


def bitsandbytes() -> Iterator[Published]:
    """8-bit and 4-bit quantisation (bitsandbytes 0.50): kernels in C++ and in torch, fakes by hand."""
    ops = importlib.import_module("torch").ops.bitsandbytes
    code = importlib.import_module("bitsandbytes.functional").create_dynamic_map().sort().values
    wide = tensor("n k", torch.int8, low=-127, high=127)
    yield Published("int8_linear_matmul", ops.int8_linear_matmul.default, (BYTES, wide), _int8_matmul)
    batched = (tensor("*b k", torch.int8, low=-127, high=127), tensor("n k", torch.int8, low=-127, high=127))
    yield Published("int8_linear_matmul, batched", ops.int8_linear_matmul.default, batched, _int8_matmul)
    yield Published("int8_vectorwise_quant", ops.int8_vectorwise_quant.default, (tensor("m k", FLOATING), 0.0))
    yield Published(
        "int8_vectorwise_quant, outliers", ops.int8_vectorwise_quant.default, (tensor("m k", FLOATING), 1.5)
    )
    rows = tensor("m", torch.float32, low=0.0, high=10.0)
    columns = tensor("k", torch.float32, low=0.0, high=10.0)
    yield Published("int8_vectorwise_dequant", ops.int8_vectorwise_dequant.default, (BYTES, rows), _int8_dequant)
    sums = tensor("m k", torch.int32, low=-9999, high=9999)
    yield Published("int8_mm_dequant", ops.int8_mm_dequant.default, (sums, rows, columns, torch.float32, None))
    batched_sums = (tensor("b m k", torch.int32, low=-9999, high=9999), tensor("b m", torch.float32, low=0.0, high=9.0))
    yield Published(
        "int8_mm_dequant, batched", ops.int8_mm_dequant.default, (*batched_sums, columns, torch.float32, None)
    )
    scales = (tensor("m", torch.float32, low=0.0, high=9.0), tensor("n", torch.float32, low=0.0, high=9.0))
    yield Published("int8_scaled_mm", ops.int8_scaled_mm.default, (BYTES, wide, *scales, None, torch.float32))
    yield Published("quantize_blockwise", ops.quantize_blockwise.default, (tensor("*s n", FLOATING), code, 64))
    packed = tensor("n", torch.uint8, low=0, high=255)
    most = tensor("(n+63)//64", torch.float32, low=0.1, high=4.0)
    yield Published(
        "dequantize_blockwise", ops.dequantize_blockwise.default, (packed, most, code, 64, torch.float32), _blocks
    )
    square = (tensor("64 n", torch.uint8, low=0, high=255), tensor("n", torch.float32, low=0.1, high=4.0))
    yield Published(
        "dequantize_blockwise, matrix", ops.dequantize_blockwise.default, (*square, code, 64, torch.float32), _blocks
    )
    yield Published("quantize_4bit", ops.quantize_4bit.default, (tensor("m n", FLOATING), 64, "nf4", torch.uint8))
    halves = (tensor("32 n", torch.uint8, low=0, high=255), tensor("n", torch.float32, low=0.1, high=4.0))
    yield Published("dequantize_4bit", _dequantize_4bit(ops.dequantize_4bit.default), halves)


def _int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.long(), b.long().t()).int()


def _int8_dequant(a: Tensor, stats: Tensor) -> Tensor:
    return a * stats[:, None] / 127


def _blocks(a: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    scales = absmax.repeat_interleave(blocksize)[: a.numel()].reshape(a.shape)
    return (code[a.long()] * scales).to(dtype)


def _dequantize_4bit(op: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def dequantize_4bit(a: Tensor, absmax: Tensor) -> Tensor:
        return op(a.reshape(-1, 1), absmax, 64, "nf4", [64, a.shape[1]], torch.float32)

    return dequantize_4bit


def torchao() -> Iterator[Published]:
    """Affine quantisation (torchao 0.18): composite operators in torch, and two with fakes of their own."""
    importlib.import_module("torchao.quantization.quant_primitives")
    ops = torch.ops.torchao
    x = tensor("m n", (torch.float32, torch.bfloat16))
    scale, zero = tensor("m", torch.float32, low=0.01, high=2.0), tensor("m", torch.int32, low=-5, high=5)

    def quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return ops.quantize_affine(x, [1, x.shape[1]], scale, zero, torch.int8, -128, 127)

    def dequantize(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return ops.dequantize_affine(q, [1, q.shape[1]], scale, zero, torch.int8, -128, 127)

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.choose_qparams_affine(x, "ASYMMETRIC", [1, x.shape[1]], torch.int8, -128, 127, 1e-6)

    def expected(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (q.to(scale.dtype) - zero[:, None]) * scale[:, None]

    yield Published("quantize_affine", quantize, (x, scale, zero))
    yield Published(
        "dequantize_affine", dequantize, (tensor("m n", torch.int8, low=-127, high=127), scale, zero), expected
    )
    yield Published("choose_qparams_affine", choose, (x,))
    eights = ops.quantize_affine_float8_non_decomposed.default
    one = tensor("m 1", torch.float32, low=0.01, high=2.0)
    yield Published("quantize_affine_float8", eights, (x, one, torch.float8_e4m3fn))
    yield Published("quantize_affine_float8, batched", eights, (tensor("b m n"), tensor("b m 1", low=0.01, high=2.0)))
    back = lambda x, scale: ops.dequantize_affine_float8_non_decomposed(x.to(torch.float8_e4m3fn), scale)  # noqa: E731
    yield Published("dequantize_affine_float8", back, (x, one), _float8)


def _float8(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float() * scale


def quanto() -> Iterator[Published]:
    """Weights in 8, 4 and 2 bits (optimum-quanto 0.2): operators in torch, without fakes."""
    importlib.import_module("optimum.quanto")
    ops = torch.ops.quanto
    x, scale = tensor("m n", FLOATING), tensor("m 1", FLOATING, low=0.01, high=2.0)
    by_row = (x, torch.int8, 0, scale)
    yield Published("quantize_symmetric", ops.quantize_symmetric.default, by_row, _symmetric)
    floats = (x, torch.float8_e4m3fn, 0, scale)
    yield Published("quantize_symmetric, float8", ops.quantize_symmetric.default, floats)
    shift = tensor("m 1", FLOATING, low=-1.0, high=1.0)
    yield Published("quantize_affine", ops.quantize_affine.default, (x, 4, 0, None, scale, shift), _affine)
    packed = tensor("m n", torch.uint8, low=0, high=255)
    yield Published("unpack, 4 bits", ops.unpack.default, (packed, 4), _unpacked)
    yield Published("unpack, 2 bits", ops.unpack.default, (packed, 2), _unpacked)
    weights = tensor("n k", torch.int8, low=-127, high=127)
    scales = tensor("n 1", FLOATING, low=0.01, high=0.1)
    for label, activations in (
        ("floating", tensor("m k", FLOATING)),
        ("int8", tensor("m k", torch.int8, low=-127, high=127)),
    ):
        yield Published(f"qbytes_mm, {label}", ops.qbytes_mm.default, (activations, weights, scales), _bytes_mm)


def _symmetric(x: Tensor, dtype: torch.dtype, axis: int, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-128, 127).to(dtype)


def _affine(x: Tensor, bits: int, axis: int, group: Any, scale: Tensor, shift: Tensor) -> Tensor:
    return ((x + shift) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    return torch.cat([(packed.int() >> at & (2**bits - 1)).to(torch.uint8) for at in range(0, 8, bits)])


def _bytes_mm(a: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    return (a.double() @ (weights.double() * scales.double()).t()).to(scales.dtype)


COLLECTIONS: dict[str, tuple[str, Callable[[], Iterator[Published]]]] = {
    "bitsandbytes": ("bitsandbytes", bitsandbytes),
    "torchao": ("torchao", torchao),
    "quanto": ("optimum.quanto", quanto),
}
"""The module to import, and its operators."""


def main() -> None:
    """Check every operator, and print what was found, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*COLLECTIONS])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--examples", type=int, default=25)
    parser.add_argument(
        "--dearest", type=float, default=0.1, help="seconds a case of the most expensive property that is checked"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    properties = [prop.name for prop in PROPERTIES if prop.cost <= options.dearest]
    found = {name: _collection(name, properties, options) for name in options.names}
    print(
        json.dumps(
            {name: {"operators": len(rows), "with findings": sum(map(bool, rows))} for name, rows in found.items()}
        )
    )


def _collection(name: str, properties: list[str], options: argparse.Namespace) -> list[list[Any]]:
    module, listed = COLLECTIONS[name]
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        print(f"{name} is left out: {error}")
        return []
    operators = list(listed())

    def check_one(at: int) -> list[list[str]]:
        _, op, args, reference = operators[at]
        how = {"max_examples": options.examples, "properties": properties, "database": False}
        report = opkit.check(op, args=args, reference=reference, **how)
        return [[each.property, each.message, str(each.case)] for each in report.failures]

    rows = []
    for at, failures, how in isolated.each(check_one, range(len(operators)), options.jobs, 600):
        rows.append(failures if failures is not None else [["process", how, ""]])
        print(f"{name}: {operators[at].name}: {len(rows[-1])} findings", flush=True)
        for property_, message, case in rows[-1]:
            print(f"    {property_}: {message}\n        on {case}", flush=True)
    return rows


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
