"""This module holds the builder with which rules add buffers, computes and extern calls to a program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES, is_complex
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.graph import Graph, Node, OpaqueValue, Ref, TensorType, TypeName
from opkit.compiler.ir.index import Index, contiguous, index
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, ScalarItem, Step, Strided
from opkit.compiler.lower import interleaved
from opkit.compiler.lower.registry import NoRule
from opkit.compiler.lower.scalar import Scalar, cast, number
from opkit.compiler.lower.target import PLAIN, LoweringTarget
from opkit.compiler.lower.tensors import Lazy, Shape, Tensor, formal, is_dense, lazy, memories, parts_of, whole

_LAZY_NODES = 24  # an expression of constants and positions of more nodes than this is computed once, not in every use


@dataclasses.dataclass
class Builder:
    """The program so far, and the node that is being lowered.

    Attributes:
        graph: the graph that is lowered.
        node: the node whose rule runs.
        target: the choices for the machine.
        values: the results of earlier nodes, by name.
    """

    graph: Graph
    node: Node
    target: LoweringTarget = PLAIN
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
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

    def made(self, dtype: str, shape: Sequence[Index], strides: Sequence[Index] | None = None) -> Buffer:
        """Return a new buffer: with these strides if they leave no gap, else row-major."""
        shape = tuple(shape)
        dense = strides is not None and is_dense(shape, tuple(strides))
        layout = tuple(strides) if strides is not None and dense else contiguous(shape)
        return self.added(Buffer(self.name(self.node.name), dtype, shape, layout))

    def like(self, number: int = 0) -> Buffer:
        """Return a new buffer for one of the node's results, with the strides of eager mode."""
        kind = self.result(number)
        return self.made(kind.dtype, kind.shape, kind.strides)

    def added(self, buffer: Buffer) -> Buffer:
        """Add a buffer and its parts to the program, and return it."""
        self.buffers |= {each.name: each for each in (buffer, *parts_of(buffer))}
        return buffer

    def name(self, base: str) -> str:
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
        if _is_lazy(body):
            return lazy(body, kind.shape)
        return self.filled(body, self.made(body.dtype, kind.shape, self._layout(body, kind)))

    def filled(self, body: Expr, buffer: Buffer) -> Tensor:
        """All of a new buffer, with ``body`` (over its formal axes) as element."""
        if interleaved.alternates(body, buffer.shape):
            return interleaved.interleaved(self, body, buffer)
        return self.compute(buffer, buffer.shape, body)

    def complex_elements(self, bodies: Sequence[Expr], kind: TensorType) -> Tensor:
        """Return a complex tensor with these (over its formal axes) as the real and the imaginary part of its elements."""
        if all(map(_is_lazy, bodies)):
            return interleaved.complex_of(*(lazy(body, kind.shape) for body in bodies))
        memory = self.made(kind.dtype, kind.shape, kind.strides)
        for part, body in zip(parts_of(memory), bodies, strict=True):
            self.compute(part, kind.shape, body)
        return whole(memory)

    def _layout(self, body: Expr, kind: TensorType) -> Shape:
        """Return the strides of an image that is computed from images: theirs, where lowering has chosen them."""
        if len(kind.shape) != 4 or not self.target.channels_last:
            return kind.strides
        loads = [node.data for node in body.walk() if node.op == "load"]
        read = [self.buffers[name] for name, at in loads if at == formal(kind.shape)]
        made = (
            b.strides
            for b in read
            if b.shape == kind.shape and b.strides != kind.strides and is_dense(b.shape, b.strides)
        )
        return next(made, kind.strides)

    def temporary(self, body: Expr, shape: Sequence[Index]) -> Tensor:
        """Return a tensor between the steps of one rule."""
        return lazy(body, shape) if _is_lazy(body) else self.compute(self.made(body.dtype, shape), shape, body)

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
        gone = frozenset(dims)
        axes = formal(shape)
        remaining = [k for k in range(len(shape)) if keep or k not in gone]
        extents = [index(1) if k in gone else shape[k] for k in remaining]
        target = [index(0) if k in gone else axes[k] for k in remaining]
        buffer = self.made(dtype, extents, strides)
        if not gone:
            return self.compute(buffer, shape, _of_one(reduction, body, dtype).expr, target)
        return self.compute(buffer, shape, body.expr, target, reduction=reduction, reduced=gone)

    def extern(self, reason: str = "", **rest: Any) -> Any:
        """Call the node's operator as it is; ``rest`` is as in ``Extern``."""
        outputs = self._extern_outputs()
        args, kwargs = self.external(self.node.args), self.external(self.node.kwargs)
        names = tuple(b.name if isinstance(b, Buffer) else b for b in outputs)
        call = Extern(
            self.node.target, args, kwargs, names, origin=self.origin, reason=reason, effect=self.node.effect, **rest
        )
        self.steps.append(call)
        results = tuple(whole(b) if isinstance(b, Buffer) else b for b in outputs)
        return results if isinstance(self.node.result, tuple) else results[0] if results else None

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
        names = tuple(None if b is None else b.name for b in outputs)
        self.steps.append(Extern(target, arguments, named, names, out=out, origin=self.origin, effect=self.node.effect))
        return [None if b is None else whole(b) for b in outputs]

    def argument(self, value: Any) -> Any:
        """Return a value as an argument of an extern call."""
        if isinstance(value, Tensor):
            return self.strided(value)
        return [self.argument(v) for v in value] if isinstance(value, list) else value

    def _extern_outputs(self) -> list[Any]:
        result = self.node.result
        kinds = result if isinstance(result, tuple) else (result,)
        return [self.allocated(kind) if isinstance(kind, TensorType) else kind for kind in kinds]

    def allocated(self, kind: TensorType) -> Buffer:
        """Return what torch allocates: strides as they are, gaps and all."""
        return self.added(Buffer(self.name(self.node.name), kind.dtype, kind.shape, kind.strides))

    def external(self, argument: Any) -> Any:
        """Return an argument of the graph as an argument of an extern call."""
        if isinstance(argument, Ref):
            return self._external_value(argument.name)
        if isinstance(argument, dict):
            return {key: self.external(a) for key, a in argument.items()}
        if isinstance(argument, list | tuple) and not isinstance(argument, OpaqueValue | TypeName):
            return type(argument)(self.external(a) for a in argument)
        return argument

    def _external_value(self, name: str) -> Any:
        found = self.values[name]
        if isinstance(found, tuple):
            return [self.strided(f) for f in found]
        if not isinstance(found, Tensor):
            return found
        strided = self.strided(found)
        return ScalarItem(strided.buffer) if name in self.numbers else strided

    @functools.cached_property
    def numbers(self) -> set[str]:
        """The nodes whose result is a Python number, which a tensor of no dimensions represents here."""
        return {node.name for node in self.graph.nodes if node.target == "aten._local_scalar_dense.default"}

    # ---- tensors in memory -------------------------------------------------------------------------------------------

    def strided(self, tensor: Tensor) -> Strided:
        """Return the tensor as torch describes one, copied if it is not one already."""
        return tensor.strided() or self._known(interleaved.viewed(self, tensor) or self.materialised(tensor))

    def materialised(self, tensor: Tensor, strides: Sequence[Index] | None = None) -> Tensor:
        """Return the tensor in memory of its own."""
        buffer, axes = self.made(tensor.dtype, tensor.shape, strides), formal(tensor.shape)
        if not is_complex(tensor.dtype):
            return self.filled(tensor.at(axes), buffer)
        for part, each in zip(parts_of(buffer), tensor.parts, strict=True):
            self.compute(part, tensor.shape, each.at(axes))
        return whole(buffer)

    def _known(self, tensor: Tensor) -> Strided:
        found = tensor.strided()
        assert found is not None
        return found

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
    """``formula`` of the tensors' elements in the type in which the result's arithmetic is done, as a new tensor."""
    kind = b.result(number)
    inner = DTYPES[kind.dtype].compute
    body = formula(*(element(t, kind.shape, inner) for t in tensors))
    return b.elementwise(cast(body, kind.dtype).expr, kind)


def _of_one(reduction: str, body: Scalar, dtype: str) -> Scalar:
    """Return a reduction over no dimensions: of the element alone."""
    return number(0, dtype) if reduction.startswith("arg") else cast(body, dtype)


def _is_lazy(body: Expr) -> bool:
    nodes = body.walk()
    return len(nodes) <= _LAZY_NODES and not any(node.op in ("load", "random", "call") for node in nodes)


def reads_buffer(tensor: Tensor, name: str) -> bool:
    """Return whether elements of a tensor lie in the memory of a buffer."""
    return name in memories(tensor)


def is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor.source, Lazy)
