"""Parse shape patterns such as ``Float[Tensor, "*batch d"]``, and check tensors against them.

The pattern language is jaxtyping's: a name is a size (equal names, equal sizes), ``*name`` any number of sizes, ``...``
any number of unnamed sizes, ``_`` one unnamed size, ``#name`` a size that may also be 1, a number is that number, and
``d+1`` or ``2*d`` is computed from names bound before it. jaxtyping itself is recognised by its attributes and never
imported.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from opkit.errors import DefinitionError, DtypeError, ShapeError

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: a // b,
}
_PREFERRED_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


@dataclasses.dataclass(frozen=True)
class PatternDim:
    """One item of a pattern. ``kind`` is "name", "number", "any", "many" or "expression"."""

    kind: str
    text: str
    number: int = 0
    broadcast: bool = False


@dataclasses.dataclass(frozen=True)
class TensorPattern:
    """The sizes and dtypes that an annotation allows. ``dtypes`` is None where every dtype is allowed."""

    text: str
    dims: tuple[PatternDim, ...]
    dtypes: frozenset[torch.dtype] | None

    @property
    def many(self) -> int | None:
        """The position of the item that stands for any number of sizes; None where there is none."""
        return next((i for i, dim in enumerate(self.dims) if dim.kind == "many"), None)

    @property
    def leading_batch(self) -> str | None:
        """The name of a leading ``*name``, the mark of an operator that maps over its leading sizes."""
        return self.dims[0].text if self.dims and self.dims[0].kind == "many" and self.dims[0].text else None

    def example_dtype(self) -> torch.dtype:
        """Return a dtype that the annotation allows, float32 if possible."""
        if self.dtypes is None:
            return torch.float32
        return next((dtype for dtype in _PREFERRED_DTYPES if dtype in self.dtypes), min(self.dtypes, key=str))


ANY_SHAPE = TensorPattern("...", (PatternDim("many", ""),), None)
"""The pattern of tensors without an annotation."""


def is_jaxtyping(annotation: object) -> bool:
    """Return whether ``annotation`` is a jaxtyping annotation such as ``Float[Tensor, "b n"]``."""
    return isinstance(annotation, type) and all(
        hasattr(annotation, name) for name in ("dim_str", "dtypes", "array_type")
    )


def parse(annotation: Any) -> TensorPattern:
    """Return the pattern of a jaxtyping annotation.

    Raises:
        DefinitionError: the shape string cannot be read.
    """
    return parse_shape(annotation.dim_str, _dtypes(annotation.dtypes))


def parse_shape(text: str, dtypes: frozenset[torch.dtype] | None = None) -> TensorPattern:
    """Return the pattern of a shape string such as "*batch d".

    Raises:
        DefinitionError: the shape string cannot be read.
    """
    dims = tuple(_parse_dim(item, text) for item in text.split())
    if sum(dim.kind == "many" for dim in dims) > 1:
        raise DefinitionError(f"the shape pattern {text!r} has more than one item that stands for any number of sizes")
    return TensorPattern(text=text, dims=dims, dtypes=dtypes)


def _dtypes(names: Any) -> frozenset[torch.dtype] | None:
    if not isinstance(names, (tuple, list)):  # jaxtyping's marker for "any dtype"
        return None
    listed = cast("Iterable[object]", names)
    values = (getattr(torch, name, None) for name in listed if isinstance(name, str))
    return frozenset(dtype for dtype in values if isinstance(dtype, torch.dtype))


def _parse_dim(item: str, text: str) -> PatternDim:
    if item in ("...", "*_"):
        return PatternDim("many", "")
    broadcast = "#" in item[:2]
    bare = item.replace("#", "", 1) if broadcast else item
    bare = bare.removeprefix("?")
    if bare.startswith("*"):
        return PatternDim("many", bare[1:], broadcast=broadcast)
    if "=" in bare:  # jaxtyping's documentation form, "name=3"
        bare = bare.split("=", 1)[1]
    if bare.startswith("_"):
        return PatternDim("any", bare)
    if bare.isdigit():
        return PatternDim("number", bare, number=int(bare))
    if bare.isidentifier():
        return PatternDim("name", bare, broadcast=broadcast)
    try:
        ast.parse(bare.strip("{}"), mode="eval")
    except SyntaxError as error:
        raise DefinitionError(f"the size {item!r} of the shape pattern {text!r} cannot be read") from error
    return PatternDim("expression", bare.strip("{}"))


def evaluate(expression: str, sizes: Mapping[str, Any]) -> int | None:
    """Return the value of ``expression`` over ``sizes``; None where it uses a name that is not bound.

    >>> evaluate("2*d+1", {"d": 3})
    7
    """

    def value(node: ast.expr) -> int | None:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes.get(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                a, b = value(left), value(right)
                return None if a is None or b is None else _ARITHMETIC[type(op)](a, b)
            case _:
                return None

    return value(ast.parse(expression, mode="eval").body)


@dataclasses.dataclass
class SizeBinding:
    """The sizes that a call's arguments bound so far, and the argument that bound each."""

    operator: str
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    bound_by: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def check(self, name: str, tensor: torch.Tensor, pattern: TensorPattern) -> None:
        """Check ``tensor``, the argument or output ``name``, against ``pattern`` and bind the sizes it names.

        Raises:
            DtypeError: the dtype is not one the annotation allows.
            ShapeError: the shape does not fit the pattern, or contradicts a size bound before.
        """
        if pattern.dtypes is not None and tensor.dtype not in pattern.dtypes:
            allowed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in pattern.dtypes))
            raise DtypeError(
                f"{self.operator}: {name} has dtype {tensor.dtype}, but its annotation allows only {allowed}. "
                f"Convert it first, for example with {name.split()[-1]}.to({pattern.example_dtype()})."
            )
        shape = tuple(tensor.shape)
        for dim, size in self._pair(name, shape, pattern):
            self._bind(name, shape, pattern, dim, size)

    def _pair(self, name: str, shape: tuple[Any, ...], pattern: TensorPattern) -> Iterable[tuple[PatternDim, Any]]:
        at, dims = pattern.many, pattern.dims
        fewest = len(dims) - (at is not None)
        if len(shape) < fewest or (at is None and len(shape) > fewest):
            count = f"{fewest} or more" if at is not None else str(fewest)
            raise self._error(name, shape, pattern, f"it has {len(shape)} dimensions where {count} are expected")
        if at is None:
            return zip(dims, shape, strict=True)
        after = len(dims) - at - 1
        middle = shape[at : len(shape) - after]
        tail = shape[len(shape) - after :]
        return [*zip(dims[:at], shape[:at], strict=True), (dims[at], middle), *zip(dims[at + 1 :], tail, strict=True)]

    def _bind(self, name: str, shape: tuple[Any, ...], pattern: TensorPattern, dim: PatternDim, size: Any) -> None:
        if dim.kind == "any" or not dim.text or (dim.broadcast and dim.kind == "name" and size == 1):
            return
        if dim.kind == "number":
            expected: Any = dim.number
        elif dim.kind == "expression":
            expected = evaluate(dim.text, self.sizes)
        else:
            expected = self.sizes.get(dim.text)
        if expected is None:
            if dim.kind != "expression":
                self.sizes[dim.text], self.bound_by[dim.text] = size, name
        elif not _agrees(expected, size, dim):
            origin = self.bound_by.get(dim.text)
            source = f", set by {origin}" if origin else ""
            raise self._error(name, shape, pattern, f"{dim.text} is {_show(size)} here but {_show(expected)}{source}")

    def _error(self, name: str, shape: Sequence[Any], pattern: TensorPattern, detail: str) -> ShapeError:
        return ShapeError(
            f"{self.operator}: {name} has shape {_show(tuple(shape))}, expected [{pattern.text}]: {detail}."
        )


def _show(size: Any) -> str:
    if not isinstance(size, tuple):
        return str(size)
    sizes = cast("tuple[Any, ...]", size)
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def _agrees(expected: Any, size: Any, dim: PatternDim) -> bool:
    if dim.kind == "many" and dim.broadcast:
        pairs = zip(reversed(expected), reversed(size), strict=False)
        return all(1 in (a, b) or a == b for a, b in pairs)
    return bool(expected == size)
