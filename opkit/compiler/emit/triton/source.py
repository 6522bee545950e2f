"""Write a kernel of the IR as Triton.

A program computes a tile: ``XBLOCK`` points of the parallel loops (rows, where there are reductions) and, if there are columns,
``RBLOCK`` of these. A vector loop is a loop over tiles of columns, or one tile if it is persistent; values that a later vector
loop needs again are then still in registers. An accumulator has one value for each place of the tile, and is reduced after the
loop. Plain loops stay loops, in which each thread has its points.

In the names of a function, ``p0`` is a buffer, ``a0`` an axis, ``t0`` a value, and ``in_row`` which rows of the tile there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from opkit.compiler.emit.triton.expressions import POINTERS, NotEmittable
from opkit.compiler.emit.triton.tiles import grid, tiles
from opkit.compiler.emit.triton.writer import Writer
from opkit.compiler.ir.index import Index, index, product
from opkit.compiler.ir.kernel import Kernel, Loop, TritonKernel
from opkit.compiler.lower.target import TileSizes


def triton_kernel(kernel: Kernel, name: str, sizes: Mapping[str, int], chosen: TileSizes) -> TritonKernel:
    """Return a kernel as Triton; ``sizes`` are the expected values of its sizes, ``chosen`` are those of tiles.

    Raises:
        NotEmittable: it has something that Triton cannot express here.
    """
    tile = tiles(kernel, sizes, chosen)
    writer = Writer(kernel, tile)
    body = writer.write()
    unknown = [a.dtype for a in kernel.arguments if a.dtype not in POINTERS]
    if unknown:
        raise NotEmittable(f"a buffer of {unknown[0]}")
    constants = (("XBLOCK", tile.x), *((("RBLOCK", tile.r),) if tile.r else ()))
    buffers = [(a.buffer, POINTERS[a.dtype].removeprefix("*" * a.by_value)) for a in kernel.arguments]
    integers = [(f"n_{size}", "i64") for size in kernel.sizes]
    parameters = (*buffers, *integers, *((constant, "constexpr") for constant, _ in constants))
    written = [f"{n}: tl.constexpr" if kind == "constexpr" else n for n, kind in parameters]
    text = "\n".join(["@triton.jit", f"def {name}({', '.join(written)}):", *body]) + "\n"
    loops, _ = grid(kernel)
    programs = _programs([loop for loop in loops if loop is not tile.across], tile.x)
    if tile.across is not None:
        programs = programs * _programs([tile.across], tile.r)
    return TritonKernel(name, text, parameters, constants, programs, tile.warps, writer.checks)


def _programs(loops: Iterable[Loop], block: int) -> Index:
    return (product(loop.axis.extent for loop in loops) + (block - 1)) // index(block)


def module(kernels: Iterable[TritonKernel]) -> str:
    """Return the Python module of kernels."""
    texts = [kernel.text for kernel in kernels]
    used = sorted({name for text in texts for name in re.findall(r"\bopk_\w+", text)})
    imports = [f"from {_FUNCTIONS} import {', '.join(used)}\n"] if used else []
    return "\n\n".join(["\n".join([_HEAD, *imports]), *texts])


_FUNCTIONS = "opkit.compiler.emit.triton.functions"
_HEAD = """import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
