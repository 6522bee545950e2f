"""The builder with which rules add buffers, computes and extern calls to a program.

A buffer may consist of two interleaved parts, each of which is a buffer, so that steps that fill them fuse as usual: the real and
imaginary parts of complex numbers, or the elements at even and at odd positions of a real tensor that are computed separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES, PARTS, is_complex
from opkit.compiler.ir.expr import Expr, const, op, position
from opkit.compiler.ir.graph import Graph, Node, OpaqueValue, Ref, TensorType, TypeName
from opkit.compiler.ir.index import ZERO, Index, contiguous, flat, index
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, Step, Strided, writes
from opkit.compiler.lower.registry import NoRule
from opkit.compiler.lower.rewrites import simplify, slow_cost
from opkit.compiler.lower.scalar import Number, Scalar, cast, formula, number
from opkit.compiler.lower.target import PLAIN, LoweringTarget
from opkit.compiler.lower.tensors import (
    Shape,
    Stored,
    Tensor,
    TensorPair,
    alternating,
    channels_last,
    complex_of,
    formal,
    is_dense,
    lazy,
    parts_of,
    substitution,
    whole,
)

_LAZY_NODES = 24  # an expression of more nodes than this is computed once, not in every use


@dataclasses.dataclass
class Builder:
    """The program so far, and the node that is being lowered.

    Attributes:
        graph: the graph that is lowered.
        node: the node whose rule runs.
        target: the choices for the machine.
        values: the results of earlier nodes, by name.
        reasons: why calls are not merged with what follows them, by the name of the node.
    """

    graph: Graph
    node: Node
    target: LoweringTarget = PLAIN
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    buffers: dict[str, Buffer] = dataclasses.field(default_factory=dict)
    steps: list[Step] = dataclasses.field(default_factory=list)

    # ---- the node ----------------------------------------------------------------------------------------------------

    @property
    def origin(self) -> str:
        """The operator, and the user's line if it is known."""
        return f"{self.node.target} {self.node.origin}".rstrip()

    def result(self, number: int = 0) -> TensorType:
        """Return the type of the node's result, or of one of its results."""
        found = self.node.result
        found = found[number] if isinstance(found, tuple) else found
        if not isinstance(found, TensorType):
            raise NoRule(f"result {number} is not a tensor")
        return found

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def new_buffer(self, dtype: str, shape: Sequence[Index], strides: Sequence[Index] | None = None) -> Buffer:
        """Return a new buffer: with these strides if they leave no gap, else row-major."""
        shape = tuple(shape)
        dense = strides is not None and is_dense(shape, tuple(strides))
        layout = tuple(strides) if strides is not None and dense else contiguous(shape)
        return self.add_buffer(Buffer(self.new_name(self.node.name), dtype, shape, layout))

    def result_buffer(self, number: int = 0) -> Buffer:
        """Return a new buffer for one of the node's results, with the strides of eager mode."""
        kind = self.result(number)
        return self.new_buffer(kind.dtype, kind.shape, kind.strides)

    def add_buffer(self, buffer: Buffer) -> Buffer:
        """Add a buffer and its parts to the program, and return it."""
        self.buffers |= {each.name: each for each in (buffer, *parts_of(buffer))}
        return buffer

    def new_name(self, base: str) -> str:
        """Return a name that no buffer has."""
        if base not in self.buffers:
            return base
        return next(name for k in range(1, len(self.buffers) + 2) if (name := f"{base}_{k}") not in self.buffers)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def compute(
        self,
        buffer: Buffer,
        axes: Sequence[Index],
        body: Expr,
        target: Sequence[Index] | None = None,
        **rest: Any,
    ) -> Tensor:
        """Add a step that fills a buffer, or the part of it at ``target``; ``rest`` is as in ``Compute``."""
        at = tuple(target) if target is not None else formal(axes)
        self.steps.append(Compute(buffer.name, tuple(axes), at, body, origin=self.origin, **rest))
        return whole(buffer)

    def elementwise(self, body: Expr, kind: TensorType | None = None) -> Tensor:
        """Return a tensor with ``body`` (over the result's formal axes) as element; a trivial one is not stored."""
        kind = kind or self.result()
        if self._lazy(body):
            return lazy(body, kind.shape)
        return self._fill(body, self.new_buffer(body.dtype, kind.shape, self._result_strides(body, kind)))

    def cast_elementwise(self, body: Scalar, kind: TensorType | None = None) -> Tensor:
        """Return a tensor with ``body``, converted to the result's dtype, as element."""
        kind = kind or self.result()
        return self.elementwise(cast(body, kind.dtype).expr, kind)

    def _fill(self, body: Expr, buffer: Buffer) -> Tensor:
        """Fill a new buffer with ``body`` (over its formal axes) and return all of it."""
        if _alternates(body, buffer.shape):
            return _interleaved(self, body, buffer)
        return self.compute(buffer, buffer.shape, body)

    def complex_elements(self, bodies: Sequence[Expr], kind: TensorType) -> Tensor:
        """Return a complex tensor with these (over its formal axes) as the real and the imaginary part of its elements."""
        if all(map(self._lazy, bodies)):
            return complex_of(*(lazy(body, kind.shape) for body in bodies))
        memory = self.new_buffer(kind.dtype, kind.shape, kind.strides)
        for part, body in zip(parts_of(memory), bodies, strict=True):
            self.compute(part, kind.shape, body)
        return whole(memory)

    def _result_strides(self, body: Expr, kind: TensorType) -> Shape:
        """Return the strides of an image that is computed from images: theirs, where lowering has chosen them.

        An image may be one of the last dimension's channels: in eager mode these lie apart if a convolution computed them.
        """
        if len(kind.shape) != 4 or not self.target.channels_last:
            return kind.strides
        _, rows, columns, channels = kind.shape
        loads = (node.data for node in body.walk() if node.op == "load")
        read = {flat(at, self.buffers[name].strides) for name, at in loads}
        layouts = [channels_last(kind.shape)]
        if kind.strides == (channels * rows * columns, columns, index(1), rows * columns):
            layouts.append(contiguous(kind.shape))
        return next((each for each in layouts if flat(formal(kind.shape), each) in read), kind.strides)

    def _lazy(self, body: Expr) -> bool:
        """Return whether every use computes a formula again: it reads nothing, and is cheap or the same for all elements."""
        ops = [node.op for node in body.walk()]
        cheap = "index" not in ops or slow_cost(body) <= self.target.max_recomputed_cost
        return cheap and len(ops) <= _LAZY_NODES and not {"load", "random", "call"}.intersection(ops)

    def temporary(self, body: Expr, shape: Sequence[Index]) -> Tensor:
        """Return a tensor between the steps of one rule."""
        return lazy(body, shape) if self._lazy(body) else self.compute(self.new_buffer(body.dtype, shape), shape, body)

    def reduce(
        self,
        reduction: str,
        body: Scalar,
        shape: Sequence[Index],
        dims: Iterable[int],
        dtype: str,
        keep: bool = False,
        strides: Sequence[Index] | None = None,
    ) -> Tensor:
        """Return the reduction over ``dims`` of ``body`` (over the formal axes of ``shape``) as a new tensor of ``dtype``."""
        reduced = frozenset(dims)
        axes = formal(shape)
        remaining = [k for k in range(len(shape)) if keep or k not in reduced]
        extents = [index(1) if k in reduced else shape[k] for k in remaining]
        target = [ZERO if k in reduced else axes[k] for k in remaining]
        buffer = self.new_buffer(dtype, extents, strides)
        if not reduced:
            one = number(0, dtype) if reduction.startswith("arg") else cast(body, dtype)
            return self.compute(buffer, shape, one.expr, target)
        return self.compute(buffer, shape, body.expr, target, reduction=reduction, reduced=reduced)

    def extern(self, reason: str = "", **rest: Any) -> Any:
        """Call the node's operator as it is; ``rest`` is as in ``Extern``."""
        result = self.node.result
        kinds = result if isinstance(result, tuple) else (result,)
        outputs: list[Any] = [self.extern_buffer(kind) if isinstance(kind, TensorType) else kind for kind in kinds]
        args, kwargs = self.external(self.node.args), self.external(self.node.kwargs)
        names = tuple(b.name if isinstance(b, Buffer) else b for b in outputs)
        self._append_call(self.node.target, args, kwargs, names, reason=reason, **rest)
        results = tuple(whole(b) if isinstance(b, Buffer) else b for b in outputs)
        return results if isinstance(result, tuple) else results[0]

    def call(
        self,
        target: str,
        args: Sequence[Any],
        outputs: Sequence[Buffer | None],
        kwargs: dict[str, Any] | None = None,
        out: bool = False,
    ) -> list[Any]:
        """Call an operator of torch on these arguments, tensors among them, with its results in these buffers."""
        arguments = tuple(self.argument(a) for a in args)
        named = {key: self.argument(a) for key, a in (kwargs or {}).items()}
        self._append_call(target, arguments, named, tuple(None if b is None else b.name for b in outputs), out=out)
        return [None if b is None else whole(b) for b in outputs]

    def _append_call(self, target: str, *call: Any, reason: str = "", **rest: Any) -> None:
        reason = reason or self.reasons.get(self.node.name, "")
        self.steps.append(Extern(target, *call, origin=self.origin, reason=reason, effect=self.node.effect, **rest))

    def argument(self, value: Any) -> Any:
        """Return a value as an argument of an extern call."""
        if isinstance(value, Tensor):
            return self.strided(value)
        if isinstance(value, Number):
            return formula(value.expr)
        return [self.argument(v) for v in value] if isinstance(value, list) else value

    def extern_buffer(self, kind: TensorType) -> Buffer:
        """Return a new buffer that torch allocates: with the strides of ``kind``, gaps included."""
        return self.add_buffer(Buffer(self.new_name(self.node.name), kind.dtype, kind.shape, kind.strides))

    def external(self, argument: Any) -> Any:
        """Return an argument of the graph as an argument of an extern call."""
        if isinstance(argument, Ref):
            found = self.values[argument.name]
            if isinstance(found, tuple):
                return [self.strided(f) for f in found]
            if not isinstance(found, Tensor):
                return self.argument(found)
            return self.strided(found)
        if isinstance(argument, dict):
            return {key: self.external(a) for key, a in argument.items()}
        if isinstance(argument, list | tuple) and not isinstance(argument, OpaqueValue | TypeName):
            return type(argument)(self.external(a) for a in argument)
        return argument

    # ---- tensors in memory -------------------------------------------------------------------------------------------

    def strided(self, tensor: Tensor) -> Strided:
        """Return the tensor as torch describes one, copied if it is not one already."""
        found = tensor.strided()
        if found is None:
            found = (viewed(self, tensor) or self.materialised(tensor)).strided()
            assert found is not None
        return found

    def materialised(self, tensor: Tensor, strides: Sequence[Index] | None = None) -> Tensor:
        """Return the tensor in memory of its own."""
        buffer, axes = self.new_buffer(tensor.dtype, tensor.shape, strides), formal(tensor.shape)
        if not is_complex(tensor.dtype):
            return self._fill(tensor.at(axes), buffer)
        for part, each in zip(parts_of(buffer), tensor.parts, strict=True):
            self.compute(part, tensor.shape, each.at(axes))
        return whole(buffer)

    # ---- the program -------------------------------------------------------------------------------------------------

    def program(self, inputs: Sequence[str | Index | OpaqueValue], outputs: Sequence[Any]) -> Program:
        return Program(
            self.graph.name, tuple(inputs), self.buffers, tuple(self.steps), tuple(outputs), self.graph.sizes
        )


def element(tensor: Tensor, shape: Shape, dtype: str | None = None, mask: Expr | None = None) -> Scalar:
    """Return the element of a tensor, broadcast to ``shape``, at the shape's formal axes; as ``dtype`` if given."""
    found = Scalar(tensor.expanded(shape).at(formal(shape), mask))
    return found if dtype is None else cast(found, dtype)


def pointwise(b: Builder, formula: Callable[..., Scalar], tensors: Sequence[Tensor], number: int = 0) -> Tensor:
    """Return a new tensor of ``formula`` of the tensors' elements, computed in the type of the result's arithmetic."""
    kind = b.result(number)
    inner = DTYPES[kind.dtype].compute
    body = formula(*(element(t, kind.shape, inner) for t in tensors))
    return b.cast_elementwise(body, kind)


def paired(b: Builder, first: Tensor, second: Tensor) -> Tensor:
    """Return the complex tensor of two real ones that the node's rule has just computed: interleaved if their layouts agree."""
    one, other = first.source, second.source
    found = complex_of(first, second)
    if not isinstance(one, Stored) or not isinstance(other, Stored):
        return found
    layouts = [(each.dtype, each.shape, each.strides) for each in (one.buffer, other.buffer)]
    new = (f"{b.node.name}.re", f"{b.node.name}.im")
    are_new = all(each.whole is None and each.name.startswith(new) for each in (one.buffer, other.buffer))
    if layouts[0] != layouts[1] or one.buffer == other.buffer or not are_new:
        return found
    memory = Buffer(b.new_name(b.node.name), found.dtype, one.buffer.shape, one.buffer.strides)
    b.buffers[memory.name] = memory
    return complex_of(*(_in_memory(b, each, memory, k) for k, each in enumerate((first, second))))


def _in_memory(b: Builder, part: Tensor, memory: Buffer, k: int) -> Tensor:
    """Return a tensor whose buffer lies in the memory of complex numbers instead."""
    assert isinstance(part.source, Stored)
    old = part.source.buffer
    buffer = dataclasses.replace(old, strides=tuple(s * 2 for s in old.strides), whole=memory, offset=index(k))
    b.buffers[buffer.name] = buffer
    return dataclasses.replace(part, source=dataclasses.replace(part.source, buffer=buffer))


# ---- real numbers ----------------------------------------------------------------------------------------------------


def _alternates(body: Expr, shape: Shape) -> bool:
    """Return whether a formula treats even and odd positions of the last dimension differently."""
    if not shape or shape[-1] % 2 != 0 or shape[-1] == 0:
        return False
    return op("eq", position(formal(shape)[-1] % 2), const(0, "i64")) in body.walk()


def _interleaved(b: Builder, body: Expr, memory: Buffer) -> Tensor:
    """Fill a buffer with ``body``, over its formal axes, by two steps: for its even positions, and its odd ones."""
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
    memory = first.buffer.whole
    if which is None or not (memory.name in lasting or _is_external(b, memory)):
        return None
    shape, strides = (*memory.shape, index(2)), (*(s * 2 for s in memory.strides), index(1))
    real = Buffer(b.new_name(f"{memory.name}_real"), PARTS[memory.dtype], shape, strides)
    _view(b, "aten.view_as_real.default", Strided(memory.name, memory.shape, memory.strides, ZERO), real)
    return Tensor(tensor.dtype, tensor.shape, Stored(real, (*first.coordinates, which), first.copied))


def _are_parts(pair: TensorPair) -> bool:
    """Return whether the two are the real and the imaginary part of the same numbers."""
    first, second = pair.first.source, pair.second.source
    if not isinstance(first, Stored) or not isinstance(second, Stored):
        return False
    same = first.buffer.whole == second.buffer.whole and first.coordinates == second.coordinates
    return same and first.buffer.offset == 0 and second.buffer.offset == 1


def _is_external(b: Builder, memory: Buffer) -> bool:
    """Return whether memory is the caller's or the result of a call, and the graph does not write to it."""
    external = memory.role != "made" or any(memory.name in writes(s) for s in b.steps if isinstance(s, Extern))
    written = {node.args[0] for node in b.graph.nodes if node.target == "aten.copy_.default"}
    return external and Ref(memory.name) not in written


def _view(b: Builder, target: str, of: Strided, buffer: Buffer) -> None:
    """Add a buffer that is a view of memory, by a call of torch."""
    b.buffers[buffer.name] = buffer
    b.steps.append(Extern(target, (of,), {}, (buffer.name,), aliases=True, origin=b.origin))


def _as_complex(b: Builder, tensor: Tensor, pair: TensorPair, lasting: Container[str]) -> Tensor | None:
    first, second = pair.first.strided(), pair.second.strided()
    if first is None or second is None or first.buffer != second.buffer or first.strides != second.strides:
        return None
    numbers = (*first.strides, first.offset)
    if second.offset - first.offset != 1 or any(n % 2 != 0 for n in numbers):
        return None
    if first.buffer not in lasting and not _is_external(b, b.buffers[first.buffer]):
        return None
    real = Strided(first.buffer, (*first.shape, index(2)), (*first.strides, index(1)), first.offset)
    memory = Buffer(
        b.new_name(f"{first.buffer}_complex"), tensor.dtype, first.shape, tuple(s // 2 for s in first.strides)
    )
    _view(b, "aten.view_as_complex.default", real, memory)
    return whole(memory)
