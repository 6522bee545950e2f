"""This module handles memory of two interleaved tensors, each of which is a buffer, so that steps that fill them fuse as usual.

The two are the real and imaginary parts of complex numbers, or the elements at even and at odd positions of real tensors that
are computed separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import TYPE_CHECKING

from opkit.compiler.ir.dtypes import PARTS, is_complex
from opkit.compiler.ir.expr import Expr, const, op, position
from opkit.compiler.ir.graph import Ref
from opkit.compiler.ir.index import ZERO, Index, index
from opkit.compiler.ir.program import Buffer, Extern, Strided, writes
from opkit.compiler.lower.rewrites import simplify
from opkit.compiler.lower.tensors import Shape, Stored, Tensor, TensorPair, formal, substitution, whole

if TYPE_CHECKING:
    from opkit.compiler.lower.context import Builder


# ---- complex numbers -------------------------------------------------------------------------------------------------


def complex_of(first: Tensor, second: Tensor) -> Tensor:
    """Return the complex tensor of two real ones of one type and shape."""
    dtype = next(name for name, part in PARTS.items() if part == first.dtype)
    return Tensor(dtype, first.shape, TensorPair(first, second))


def paired(b: Builder, first: Tensor, second: Tensor) -> Tensor:
    """Return the complex tensor of two real ones that the node's rule has just computed: interleaved if their layouts agree."""
    one, other = first.source, second.source
    found = complex_of(first, second)
    if not isinstance(one, Stored) or not isinstance(other, Stored) or not _alike(b, one.buffer, other.buffer):
        return found
    about = one.buffer
    memory = Buffer(b.name(b.node.name), found.dtype, about.shape, about.strides)
    b.buffers[memory.name] = memory
    placed = [_placed(b, each, memory, k) for k, each in enumerate((first, second))]
    return complex_of(*placed)


def _alike(b: Builder, one: Buffer, other: Buffer) -> bool:
    """Return whether two buffers are new, and have the same layout."""
    same = (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides) and one != other
    started = (f"{b.node.name}.re", f"{b.node.name}.im")
    return same and all(each.whole is None and each.name.startswith(started) for each in (one, other))


def _placed(b: Builder, part: Tensor, memory: Buffer, k: int) -> Tensor:
    """Return a tensor whose buffer lies in the memory of complex numbers instead."""
    assert isinstance(part.source, Stored)
    old = part.source.buffer
    buffer = dataclasses.replace(old, strides=tuple(s * 2 for s in old.strides), whole=memory, offset=index(k))
    b.buffers[buffer.name] = buffer
    return dataclasses.replace(part, source=dataclasses.replace(part.source, buffer=buffer))


# ---- real numbers ----------------------------------------------------------------------------------------------------


def alternates(body: Expr, shape: Shape) -> bool:
    """Return whether elements at even places of the last dimension are others than those at odd ones."""
    if not shape or shape[-1] % 2 != 0 or shape[-1] == 0:
        return False
    return op("eq", position(formal(shape)[-1] % 2), const(0, "i64")) in body.walk()


def interleaved(b: Builder, body: Expr, memory: Buffer) -> Tensor:
    """Fill a buffer with ``body``, over its formal axes, by two steps: its even places, and its odd ones."""
    shape = memory.shape
    half = (*shape[:-1], shape[-1] // 2)
    strides = (*memory.strides[:-1], memory.strides[-1] * 2)
    parts: list[Tensor] = []
    for k, name in enumerate(("even", "odd")):
        moved = substitution(shape, (*formal(half)[:-1], formal(half)[-1] * 2 + k))
        part = Buffer(f"{memory.name}.{name}", body.dtype, half, strides, whole=memory, offset=memory.strides[-1] * k)
        b.buffers[part.name] = part
        parts.append(b.compute(part, half, simplify(body.substitute(moved))))
    return alternating(parts[0], parts[1], shape)


def alternating(even: Tensor, odd: Tensor, shape: Shape) -> Tensor:
    """Return the real tensor of ``shape`` whose elements are those of two, in turn along its last dimension."""
    *rest, last = formal(shape)
    first, second = (each.mapped(shape, [*rest, last // 2]) for each in (even, odd))
    return Tensor(even.dtype, shape, TensorPair(first, second, last % 2))


# ---- the same memory, seen as numbers of the other kind --------------------------------------------------------------


def viewed(b: Builder, tensor: Tensor, lasting: Container[str] = ()) -> Tensor | None:
    """Return a tensor in memory of the other kind as a view of that memory, for calls and results; None if that is impossible.

    The tensor is a part of complex numbers, or complex numbers made of real ones. The memory must be the caller's or a call's,
    and the graph must not write to it, or it must be among ``lasting``.
    """
    if isinstance(tensor.source, TensorPair) and tensor.source.which is None:
        return _as_complex(b, tensor, tensor.source, lasting)
    first = tensor.source.first.source if isinstance(tensor.source, TensorPair) else tensor.source
    if not isinstance(first, Stored) or first.buffer.whole is None or not is_complex(first.buffer.whole.dtype):
        return None
    which: Index | None = first.buffer.offset
    if isinstance(tensor.source, TensorPair):
        which = tensor.source.which if _are_parts(tensor.source) else None
    if which is None or not (first.buffer.memory in lasting or _is_there(b, first.buffer.whole)):
        return None
    real = _real_view(b, first.buffer.whole)
    return Tensor(tensor.dtype, tensor.shape, Stored(real, (*first.coordinates, which), first.copied))


def _are_parts(pair: TensorPair) -> bool:
    """Return whether the two are the real and the imaginary part of the same numbers."""
    first, second = pair.first.source, pair.second.source
    if not isinstance(first, Stored) or not isinstance(second, Stored):
        return False
    same = first.buffer.whole == second.buffer.whole and first.coordinates == second.coordinates
    return same and first.buffer.offset == 0 and second.buffer.offset == 1


def _is_there(b: Builder, memory: Buffer) -> bool:
    """Return whether memory is the caller's or the result of a call, and the graph does not write to it."""
    is_external = memory.role != "made" or any(memory.name in writes(s) for s in b.steps if isinstance(s, Extern))
    written = {node.args[0] for node in b.graph.nodes if node.target == "aten.copy_.default"}
    return is_external and Ref(memory.name) not in written


def _real_view(b: Builder, memory: Buffer) -> Buffer:
    shape, strides = (*memory.shape, index(2)), (*(s * 2 for s in memory.strides), index(1))
    real = Buffer(b.name(f"{memory.name}_real"), PARTS[memory.dtype], shape, strides)
    return _view(b, "aten.view_as_real.default", Strided(memory.name, memory.shape, memory.strides, ZERO), real)


def _view(b: Builder, target: str, of: Strided, buffer: Buffer) -> Buffer:
    b.buffers[buffer.name] = buffer
    b.steps.append(Extern(target, (of,), {}, (buffer.name,), aliases=True, origin=b.origin))
    return buffer


def _as_complex(b: Builder, tensor: Tensor, pair: TensorPair, lasting: Container[str]) -> Tensor | None:
    first, second = pair.first.strided(), pair.second.strided()
    if first is None or second is None or first.buffer != second.buffer or first.strides != second.strides:
        return None
    numbers = (*first.strides, first.offset)
    if second.offset - first.offset != 1 or any(n % 2 != 0 for n in numbers):
        return None
    if first.buffer not in lasting and not _is_there(b, b.buffers[first.buffer]):
        return None
    real = Strided(first.buffer, (*first.shape, index(2)), (*first.strides, index(1)), first.offset)
    memory = Buffer(b.name(f"{first.buffer}_complex"), tensor.dtype, first.shape, tuple(s // 2 for s in first.strides))
    _view(b, "aten.view_as_complex.default", real, memory)
    return whole(memory)
