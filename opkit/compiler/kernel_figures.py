"""This module counts what a step must do at least: the bytes that it moves, and its floating-point operations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from opkit.compiler.emit.analysis import postorder, roots_of, values
from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.expr import indices
from opkit.compiler.ir.index import Axis, Index, lower, product, upper
from opkit.compiler.ir.kernel import KernelLaunch, Loop, Statement, Store, Update, walk
from opkit.compiler.ir.ops import OPS
from opkit.compiler.ir.program import Buffer, Extern, Strided, reads, writes

LAUNCH_SECONDS = 2e-6  # what a launch takes, however little it does
_FREE = frozenset({"where", "cast", "bitcast"})  # scalar ops that are not counted as operations


@dataclasses.dataclass(frozen=True)
class KernelFigures:
    """What a launch or a call does at least.

    Attributes:
        read, written: the bytes, of each element once.
        operations: the floating-point operations, of which a function such as exp is one; None if their number depends on
            values.
    """

    read: int
    written: int
    operations: int | None

    def seconds(self, bandwidth: float) -> float:
        """Return the least time to move the bytes, at a number of bytes a second."""
        return (self.read + self.written) / bandwidth

    def bound(self, bandwidth: float) -> str:
        """Return "memory", or "latency" if a launch itself takes longer than moving the bytes."""
        return "memory" if self.seconds(bandwidth) >= LAUNCH_SECONDS else "latency"


def figures(launch: KernelLaunch, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> KernelFigures:
    """Return the figures of a launch for these sizes; ``buffers`` are the program's."""
    kernel = launch.kernel
    known = {**sizes, **{name: sizes[of] for name, of in zip(kernel.sizes, launch.sizes, strict=True)}}
    inside = [s for s in walk(kernel.body) if not isinstance(s, Loop)]
    nodes = dict.fromkeys(node for root in roots_of(inside) for node in postorder(root) if node.op == "load")
    stores = [s for s in inside if isinstance(s, Store)]
    loaded = [(node.data[0], at) for node in nodes for at in indices(node)]
    loaded += [(s.buffer, s.at) for s in stores if s.update is not None]
    read = written = 0
    for argument, name in zip(kernel.arguments, launch.buffers, strict=True):
        whole = int(estimate(product(buffers[name].shape), known)) * DTYPES[buffers[name].dtype].bytes
        size = DTYPES[argument.dtype].bytes
        read += min(whole, size * _elements((at for p, at in loaded if p == argument.buffer), known))
        written += min(whole, size * _elements((s.at for s in stores if s.buffer == argument.buffer), known))
    return KernelFigures(read, written, _operations(kernel.body, known))


def call_figures(call: Extern, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> KernelFigures:
    """Return the figures of a call: whole buffers, and the operations of products of matrices and of convolutions."""

    def whole(name: str) -> int:
        return int(estimate(product(buffers[name].shape), sizes)) * DTYPES[buffers[name].dtype].bytes

    read, written = (sum(map(whole, each(call))) for each in (reads, writes))
    return KernelFigures(read, written, _call_operations(call, buffers, sizes))


_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default"})


def _call_operations(call: Extern, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> int | None:
    """Return two operations for each product of elements; None if the operator has no known number."""
    tensors = [each for each in call.args if isinstance(each, Strided)]
    if not call.outputs or not isinstance(call.outputs[0], str):
        return None
    if call.target in _PRODUCTS:
        inner = tensors[-1].shape[-2]
    elif call.target == "aten.convolution.default" and call.args[6] is False:
        inner = product(tensors[1].shape[1:])
    else:
        return None
    return 2 * int(estimate(product(buffers[call.outputs[0]].shape) * inner, sizes))


def _elements(accesses: Iterable[Index], sizes: Mapping[str, int]) -> int:
    """Return how many elements are accessed at most: by each access one for each value of its axes, or all in its range."""
    total = 0.0
    for at in dict.fromkeys(accesses):
        points = estimate(product(axis.extent for axis in _axes(at)), sizes)
        low, high = lower(at), upper(at)
        total += min(points, math.inf if low is None or high is None else estimate(high - low + 1, sizes))
    return int(total)


def _axes(at: Index) -> set[Axis]:
    """Return the axes that an index depends on, also through integers that are read from memory."""
    inner = (each for root in values(at) for node in postorder(root) for each in indices(node))
    return at.axes().union(*map(_axes, inner))


def _operations(body: Iterable[Statement], sizes: Mapping[str, int]) -> int | None:
    loops = [s for s in body if isinstance(s, Loop)]
    inside = [s for s in body if not isinstance(s, Loop)]
    nodes = dict.fromkeys(node for root in roots_of(inside) for node in postorder(root))
    total = sum(is_float(n.dtype) and OPS[n.op].kind == "scalar" and n.op not in _FREE for n in nodes)
    updates = (s for s in inside if isinstance(s, Update) or (isinstance(s, Store) and s.update is not None))
    total += sum(is_float(s.value.dtype) for s in updates)
    for loop in loops:
        each = _operations(loop.body, sizes)
        if each is None or loop.stop is not None:
            return None
        total += each * int(estimate(loop.axis.extent, sizes))
    return total
