"""The values of a call that a Triton kernel uses by name, and the author's functions of them: grids, constexprs and options."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from opkit.errors import DeclarationError, KernelError
from opkit.kernels.facts import Facts, measure, targets

_SCALARS = {"int": "SCALAR", "float": "SCALAR", "bool": "SCALAR", "dtype": "SCALAR", "str": "STRING"}
_LISTS = ("ints", "floats", "bools")


def measured(name: str) -> str:
    """Return the tensor that a name measures, or "".

    >>> measured("x_stride_0"), measured("x")
    ('x', '')
    """
    found = measure(name)
    return found[0] if found else ""


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin of a value of a call.

    Attributes:
        name: as the kernel calls it.
        origin: the end of an ``opk_source``'s name: "TENSOR", "SCALAR", "NAMED_SIZE", "STRIDE", ...
        kind: "tensor", "int", "float", "bool", "dtype", "str" or "ints".
        argument: an argument's number, or the number of arguments plus an output's.
        detail: a dimension, or the number of a named size.
    """

    name: str
    origin: str
    kind: str
    argument: int = 0
    detail: int = 0


class KernelNames:
    """The names by which kernels refer to the arguments, outputs and sizes of an operator."""

    def __init__(self, facts: Facts, outputs: Sequence[str] = ()) -> None:
        self.facts = facts
        self.sizes = facts.sizes
        self._targets = targets(facts, outputs)

    def find(self, name: str) -> Source | None:
        """Return what ``name`` means; None where nothing has it."""
        return self._target(name) or self._size(name) or self._measure(name) or self._pointer(name)

    def known(self) -> list[str]:
        """Return the known names without measures."""
        return [*self._targets, *self.sizes]

    def tensors(self) -> dict[str, int]:
        """Return the numbers of the tensors among arguments and outputs."""
        return {name: target.number for name, target in self._targets.items() if target.kind == "tensor"}

    def _target(self, name: str) -> Source | None:
        target = self._targets.get(name)
        if target is None:
            return None
        if target.kind == "tensor":
            return Source(name, "TENSOR", "tensor", target.number)
        if target.kind in _SCALARS:
            optional = target.optional and target.kind != "str"
            return Source(name, "SCALAR_POINTER" if optional else _SCALARS[target.kind], target.kind, target.number)
        return Source(name, "VALUES", target.kind, target.number) if target.kind in _LISTS else None

    def _size(self, name: str) -> Source | None:
        return Source(name, "NAMED_SIZE", "int", 0, self.sizes.index(name)) if name in self.sizes else None

    def _measure(self, name: str) -> Source | None:
        argument, origin, dimension = measure(name) or ("", "", 0)
        target = self._targets.get(argument)
        if target is None or (target.kind != "tensor") != (origin == "LENGTH"):
            return None
        return Source(name, origin, "int", target.number, dimension)

    def _pointer(self, name: str) -> Source | None:
        bare = name.removesuffix("_ptr")
        found = self._target(bare) if bare != name else None
        return found if found is not None and found.kind == "tensor" else None


_MAX_RESULTS = 4096
EVERYTHING = ("meta", "META")
"""The parameter that receives every known value, as in Triton's grid functions."""


class TensorInfo(NamedTuple):
    """A tensor, as functions of named values see it.

    >>> TensorInfo("bfloat16", (4, 8), (8, 1)).numel
    32
    """

    dtype: str
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]

    @property
    def numel(self) -> Any:
        """The number of elements."""
        count: Any = 1
        for size in self.shape:
            count = count * size
        return count


@dataclasses.dataclass(frozen=True)
class Formula:
    """A function of named values, with a cache of its results. ``inputs`` are its parameters."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    known: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict[tuple[Any, ...], Any], compare=False)

    def __call__(self, named: Mapping[str, Any]) -> Any:
        values = [named[name] if name in named else self._everything(name, named) for name in self.inputs]
        key = exact(values)
        try:
            return self.known[key]
        except TypeError:  # symbolic sizes, which stand for many and have no hash
            return self.function(*values)
        except KeyError:
            return self._store(key, self.function(*values))

    @staticmethod
    def _everything(name: str, named: Mapping[str, Any]) -> Any:
        if name not in EVERYTHING:
            raise KeyError(name)
        return named

    def _store(self, key: tuple[Any, ...], value: Any) -> Any:
        if len(self.known) >= _MAX_RESULTS:
            self.known.clear()
        return self.known.setdefault(key, value)


def exact(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return values as a key that distinguishes what Python calls equal: 1, 1.0 and True, and the zeros of both signs.

    >>> exact([1]) == exact([True]), exact([0.0]) == exact([-0.0]), exact([(2,)]) == exact([[2]])
    (False, False, True)
    """
    return tuple([_exact(value) if type(value) in _INEXACT else value for value in values])


def _exact(value: Any) -> Any:
    if type(value) is float:
        return float, value, math.copysign(1.0, value)
    return (bool, value) if type(value) is bool else exact(value)


_INEXACT = frozenset({bool, float, tuple, list})


def formula(name: str, function: Callable[..., Any], means: Callable[[str], bool] = bool) -> Formula:
    """Read a function's parameters; those that have defaults and for which nothing ``means`` keep their defaults.

    Raises:
        DeclarationError: it takes others than named ones.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise DeclarationError(f"the function for {name} takes *args or **kwargs. It must name its parameters.")
    inputs = tuple(p.name for p in parameters if p.default is p.empty or means(p.name))
    positional = all(p.kind is not p.KEYWORD_ONLY for p in parameters) and len(inputs) == len(parameters)
    return Formula(name, function if positional else _by_name(function, inputs), inputs)


def _by_name(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*values: Any) -> Any:
        return function(**dict(zip(names, values, strict=True)))

    return call


def ordered(formulas: Sequence[Formula]) -> tuple[Formula, ...]:
    """Return formulas in an order in which each comes after those whose values it takes; ``meta`` comes last.

    Raises:
        DeclarationError: some take each other's values.
    """
    left, done = {f.name: f for f in formulas}, list[Formula]()
    while left:
        free = [f for f in left.values() if not any(name in left and name != f.name for name in f.inputs)]
        ready = [f for f in free if not any(name in EVERYTHING for name in f.inputs)] or free
        if not ready:
            raise DeclarationError(f"the functions for {', '.join(left)} take each other's values.")
        for f in ready:
            done.append(left.pop(f.name))
    return tuple(done)


def evaluate(where: str, formulas: Sequence[Formula], named: dict[str, Any]) -> dict[str, Any]:
    """Add each formula's value to ``named``, in order.

    Raises:
        KernelError: one of the functions raised; the message names it and its arguments.
    """
    for f in formulas:
        try:
            named[f.name] = f(named)
        except Exception as error:
            raise KernelError(f"{where}: {_blamed(f, named)} {type(error).__name__}: {error}") from error
    return named


def _blamed(f: Formula, named: Mapping[str, Any]) -> str:
    code = getattr(inspect.unwrap(f.function), "__code__", None)
    at = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    values = ", ".join(f"{name}={named.get(name)!r}" for name in f.inputs if name not in EVERYTHING)
    return f"the function for {f.name}{at} failed on {values or 'no values'}:"


def as_grid(where: str, value: Any) -> tuple[Any, Any, Any]:
    """Return a grid's three sizes.

    Raises:
        KernelError: it is no grid.
    """
    if type(value) is int and value >= 0:
        return value, 1, 1
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(sizes) <= 3 or not all(hasattr(size, "__index__") or _symbolic(size) for size in sizes):
        raise KernelError(f"{where}: grid gave {value!r}. It must be one, two or three integers.")
    if any(not _symbolic(size) and size < 0 for size in sizes):
        raise KernelError(f"{where}: grid gave {value!r}. A number of programs cannot be negative.")
    whole: Any = (*sizes, 1, 1)[:3]
    return whole


def _symbolic(size: Any) -> bool:
    return type(size).__name__ == "SymInt"
