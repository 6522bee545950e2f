"""What a user's function reads apart from its arguments, and a key by which its expression is cached."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.compat.torch_private import is_dtensor
from opkit.attn.functions import attributes
from opkit.attn.functions.attributes import Paths
from opkit.errors import ArgumentError

Place = tuple[int, str, Any]
"""Where a value is found: the number of the step of another value, and what of that it is."""
Local = Callable[[Any], Tensor | None]
"""Returns this process's tensor of a captured ``DTensor``; None if that of another mesh is not known."""
Step = tuple[Place, str, Any]
"""A value's place, and what of it counts: a fact and what the fact is about, as :mod:`opkit.attn.functions.readers` says."""
ROOT: Place = (-1, "argument", None)


@dataclasses.dataclass
class Captures:
    """What a function reads apart from its arguments.

    Attributes:
        function: the function, None if it is another callable.
        tensors: the tensors in its cells, globals and defaults, and in those of the functions that it calls.
        numbers: its cells that hold integers and floats.
        tensor_cells: its cells that hold tensors, and the place of each in ``tensors``.
        key: decides the expression, together with the captured tensors and numbers; None if something else may decide it.
        shapes: whether ``key`` contains the shapes of tensors.
        steps: how each value was found, and what of it decides ``key``, for :mod:`opkit.attn.functions.readers`.
    """

    function: Any
    tensors: list[Tensor] = dataclasses.field(default_factory=list[Tensor])
    numbers: list[types.CellType] = dataclasses.field(default_factory=list[types.CellType])
    tensor_cells: list[tuple[types.CellType, int]] = dataclasses.field(default_factory=list[tuple[types.CellType, int]])
    key: Any = None
    shapes: bool = True
    steps: list[Step] = dataclasses.field(default_factory=list[Step])
    _opaque: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], shapes: bool = True) -> Captures:
        captures = cls(function if isinstance(function, types.FunctionType) else None, shapes=shapes)
        key = captures._described(function, (), ROOT)
        captures.key = None if captures._opaque else key
        return captures

    def substituted(self, numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> Callable[..., Any]:
        """Return the function with other values in its cells of numbers and of tensors."""
        function = self.function
        cells = dict(zip(map(id, self.numbers), numbers, strict=False))
        cells |= {id(cell): x for (cell, _), x in zip(self.tensor_cells, tensors, strict=True)}
        closure: tuple[types.CellType, ...] = function.__closure__ or ()
        own = tuple(types.CellType(cells[id(cell)]) if id(cell) in cells else cell for cell in closure)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, own
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def _described(self, value: Any, outer: tuple[Any, ...], place: Place, reads: Paths | None = None) -> Any:
        """Return a hashable description of a value that the function may read; collect tensors and numbers on the way.

        ``place`` is where it was found. ``reads`` are the attributes that are all that it reads of the value, None if it may read
        anything.
        """
        at = len(self.steps)
        if isinstance(value, Tensor):
            return self._of_tensor(value, place)
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            self.steps.append((place, "same", value))
            return (type(value), value)
        if isinstance(value, types.BuiltinFunctionType) or _is_of_torch(value):
            self.steps.append((place, "same", value))
            return ("known", value)
        if isinstance(value, tuple):
            self.steps.append((place, "tuple", len(value)))
            return tuple([self._described(each, outer, (at, "item", n)) for n, each in enumerate(value)])
        if isinstance(value, types.FunctionType):
            return self._of_function(value, outer, place)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            self.steps.append((place, "method", None))
            function = value.__func__
            of_self = attributes.read(function.__code__, next(iter(function.__code__.co_varnames), ""))
            within = outer or (value,)
            return (
                "method",
                self._of_function(function, within, (at, "function", None)),
                self._described(value.__self__, within, (at, "self", None), of_self),
            )
        try:
            found = [attributes.plain_value(value, path) for path in reads] if reads is not None else None
        except AttributeError:
            found = None
        if found is None:
            self._opaque = True  # an object, whose content may change
            return None
        same = isinstance(value, (type, types.ModuleType))
        self.steps.append((place, "same", value) if same else (place, "object", type(value)))
        parts = zip(reads or (), found, strict=True)
        return ("object", reads, tuple([self._described(each, outer, (at, "path", path)) for path, each in parts]))

    def _of_tensor(self, tensor: Tensor, place: Place) -> Any:
        first = next((k for k, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        self.tensors.append(tensor)
        self.steps.append((place, "tensor", None))
        if not all(type(n) is int for n in tensor.shape):
            self._opaque = True
            return None
        return ("tensor", first, tensor.dtype, tuple(tensor.shape) if self.shapes else None, tensor.device)

    def _of_function(self, function: Any, outer: tuple[Any, ...], place: Place) -> Any:
        if function in outer:
            self.steps.append((place, "recursive", outer.index(function)))
            return ("recursive", outer.index(function))
        at, inner, scope = len(self.steps), (*outer, function), function.__globals__
        code = function.__code__
        keywords: dict[str, Any] = function.__kwdefaults__ or {}
        self.steps.append((place, "function", (code, len(function.__defaults__ or ()), tuple(keywords))))
        cells = [
            self._of_cell(cell, inner, name, (at, "cell", n))
            for n, (name, cell) in enumerate(zip(code.co_freevars, function.__closure__ or (), strict=True))
        ]
        defaults = [self._described(x, inner, (at, "default", n)) for n, x in enumerate(function.__defaults__ or ())]
        named = [(name, self._described(each, inner, (at, "keyword", name))) for name, each in keywords.items()]
        used = [(name, scope[name], _reads(code, name, scope[name])) for name in names_in(code) if name in scope]
        of_globals = [
            (name, self._described(value, inner, (at, "global", name), reads))
            for name, value, reads in used
            if reads != ()
        ]
        return (code, tuple(cells), tuple(defaults), tuple(named), tuple(of_globals))

    def _of_cell(self, cell: types.CellType, outer: tuple[Any, ...], name: str, place: Place) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:
            self._opaque = True
            return None
        reads = _reads(outer[-1].__code__, name, value)
        if len(outer) > 1:
            return self._described(value, outer, place, reads)
        if isinstance(value, Tensor):
            self.tensor_cells.append((cell, len(self.tensors)))
        elif isinstance(value, (int, float, torch.SymInt)) and not isinstance(value, bool):
            self.numbers.append(cell)
            self.steps.append((place, "same", value))
            return type(value) if not learned(self.function.__code__).needs_numbers else (type(value), value)
        return self._described(value, outer, place, reads)


def local_tensors(tensors: Sequence[Tensor], name: str, local: Local | None) -> tuple[Tensor, ...]:
    """Return captured tensors with this process's in place of ``DTensor``s; ``name`` is the function's, for errors.

    Raises:
        ArgumentError: there is a ``DTensor``, and no ``local``; or it knows none.
    """
    return tuple([_local(x, name, local) if type(x) is not Tensor and is_dtensor(x) else x for x in tensors])


def _local(x: Any, name: str, local: Local | None) -> Tensor:
    found = None if local is None else local(x)
    if found is None:
        raise ArgumentError(
            f"opkit.attention: {name} captures a DTensor of shape {tuple(x.shape)} with placements {tuple(x.placements)}. This "
            "call does not know how processes share its gradient: q is no DTensor of its mesh, or a compiler traces the call. "
            "Capture the tensor x.full_tensor(grad_placements=...) instead, with Partial() where processes have different parts "
            "of q, and Replicate() where each has all of q."
        )
    return found


def _reads(code: types.CodeType, name: str, value: Any) -> Paths | None:
    """Return which attributes of a value code reads, if these are all that it reads of it."""
    return attributes.read(code, name, isinstance(value, types.ModuleType))


@dataclasses.dataclass
class Learned:
    """What calls of a function have shown: whether it needs the values of captured numbers, and whether it reads tensors'."""

    needs_numbers: bool = False
    reads_values: bool = False


@functools.lru_cache(1024)
def learned(code: types.CodeType) -> Learned:
    """Return what is known of functions with this code."""
    return Learned()


def _is_of_torch(value: Any) -> bool:
    """Return whether a value is a module, class or function of torch or Python, which are the same at every call."""
    is_module = isinstance(value, types.ModuleType)
    place = str(value.__name__ if is_module else getattr(value, "__module__", ""))
    known = place.split(".")[0] in ("torch", "math", "operator", "builtins", "functools")
    return known and (is_module or (callable(value) and not isinstance(value, torch.nn.Module)))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names, of globals and attributes, that code and the functions defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
