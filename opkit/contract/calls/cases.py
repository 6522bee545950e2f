"""This module describes one call as data: sizes, dtypes, layouts, fills and seeds. Equal cases create equal tensors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from opkit.contract.calls.tensors import fill, layout_of


@dataclasses.dataclass(frozen=True)
class TensorCase:
    """A tensor to create. ``same_as`` is the number of an earlier tensor of the case that is passed again in its place."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    fill: str = "normal"
    seed: int = 0
    low: float | None = None
    high: float | None = None
    requires_grad: bool = False
    same_as: int | None = None

    def make(self, device: str | torch.device = "cpu", margin: int = 0, outside: float | None = None) -> torch.Tensor:
        """Create the tensor.

        Args:
            device: the tensor's device.
            margin: the number of elements of memory before and after the extent of the layout.
            outside: the number in the margins and in gaps between elements; the fill's own numbers by default.
        """
        layout = layout_of(self.layout, self.shape)
        memory = fill(layout.elements + 2 * margin, self.dtype, self.fill, self.seed, self.low, self.high)
        if layout.negated and self.differentiable:
            memory = -memory
        view = torch.as_strided(memory, self.shape, layout.strides, layout.offset + margin)
        if outside is not None:
            inside = torch.as_strided(torch.arange(memory.numel()), view.shape, view.stride(), view.storage_offset())
            values = memory[inside]
            memory.fill_(outside)
            memory[inside] = values
        if device != "cpu":
            view = torch.as_strided(memory.to(device), self.shape, layout.strides, layout.offset + margin)
        if layout.negated and self.differentiable:
            view = torch._neg_view(view)
        return view.requires_grad_() if self.requires_grad else view

    @property
    def impossible(self) -> bool:
        """Whether its bounds leave no number for its elements, such as the bounds of an index into an empty dimension."""
        whole = not self.differentiable and self.dtype != torch.bool and 0 not in self.shape
        return whole and self.low is not None and self.high is not None and int(self.low) > int(self.high)

    @property
    def differentiable(self) -> bool:
        """Whether the dtype can require gradients."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        parts = [f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"]
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += [self.fill] if self.fill != "normal" and (self.differentiable or self.fill == "edges") else []
        parts += [f"seed={self.seed}"] if self.seed else []
        parts += ["requires_grad"] if self.requires_grad else []
        parts += [f"same as tensor {self.same_as}"] if self.same_as is not None else []
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor among the arguments, in the order of :meth:`Case.tensors`."""
        return [leaf for leaf in _leaves((*self.args, *self.kwargs.values())) if isinstance(leaf, torch.Tensor)]

    def map(self, function: Callable[[torch.Tensor], Any]) -> Call:
        """Return the call with ``function(tensor)`` in the place of each tensor; one that is passed twice stays one."""
        done: dict[int, Any] = {}

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in done:
                done[id(leaf)] = function(leaf)
            return done[id(leaf)]

        return Call(_mapped(self.args, change), {name: _mapped(value, change) for name, value in self.kwargs.items()})


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of one call as data: a :class:`TensorCase` for each tensor, lists of these, and plain values."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def make(self, device: str | torch.device = "cpu", **how: Any) -> Call:
        """Create the arguments; ``how`` is passed on to :meth:`TensorCase.make`."""
        tensors: list[torch.Tensor] = []

        def build(leaf: Any) -> Any:
            if not isinstance(leaf, TensorCase):
                return leaf
            again = leaf.same_as is not None and leaf.same_as < len(tensors)
            tensors.append(tensors[leaf.same_as] if again else leaf.make(device, **how))  # type: ignore[index]
            return tensors[-1]

        args = _mapped(self.args, build)
        return Call(args, {name: _mapped(value, build) for name, value in self.kwargs})

    def tensors(self) -> list[TensorCase]:
        """Return every tensor of the case, in the order of the arguments."""
        return [leaf for leaf in _leaves((*self.args, *dict(self.kwargs).values())) if isinstance(leaf, TensorCase)]

    def map(self, function: Callable[[int, TensorCase], TensorCase]) -> Case:
        """Return the case with ``function(number, tensor)`` in the place of each tensor."""
        numbers = iter(range(len(self.tensors())))

        def change(leaf: Any) -> Any:
            return function(next(numbers), leaf) if isinstance(leaf, TensorCase) else leaf

        args = _mapped(self.args, change)
        return Case(args, tuple((name, _mapped(value, change)) for name, value in self.kwargs))

    def replace(self, **changes: Any) -> Case:
        """Return the case with these fields of every tensor changed.

        >>> print(Case((TensorCase((2,)),)).replace(fill="ones"))
        (float32[2] ones)
        """
        return self.map(lambda _, tensor: dataclasses.replace(tensor, **changes))

    def reseeded(self, by: int = 1) -> Case:
        """Return the case with other numbers in its tensors: each seed is ``by`` larger."""
        return self.map(lambda _, tensor: dataclasses.replace(tensor, seed=tensor.seed + by))

    @property
    def dtype(self) -> torch.dtype | None:
        """The first floating or complex dtype among the tensors."""
        return next((tensor.dtype for tensor in self.tensors() if tensor.differentiable), None)

    def __str__(self) -> str:
        named = [f"{name}={_shown(value)}" for name, value in self.kwargs]
        return f"({', '.join([*map(_shown, self.args), *named])})"


@dataclasses.dataclass(frozen=True)
class History(Case):
    """A call, and other calls of the same operator that are made before it is repeated.

    >>> print(History((TensorCase((2,)),), between=(Case((TensorCase((3,)),)),)))
    (float32[2]) around calls of (float32[3])
    """

    between: tuple[Case, ...] = ()

    def __str__(self) -> str:
        others = " and ".join(map(str, self.between))
        return f"{super().__str__()} around calls of {others}" if others else super().__str__()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)  # pyright: ignore
    return change(value)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, torch.Tensor):  # a constant of the spec
        return f"a constant {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value) if isinstance(value, TensorCase) else repr(value)


# ---- the names of tensors ------------------------------------------------------------------------------------------------


def places(case: Case) -> list[str]:
    """Return the place of each tensor of the case among the arguments, in the order of :meth:`Case.tensors`.

    >>> places(Case((TensorCase((2,)), [TensorCase((2,)), 1.0])))
    ['argument 0', 'argument 1[0]']
    """
    positional = [place for number, value in enumerate(case.args) for place in _within(f"argument {number}", value)]
    return positional + [place for name, value in case.kwargs for place in _within(f"argument {name}", value)]


def owners(case: Case, schema: Any) -> list[str]:
    """Return the name of the schema argument to which each tensor of the case belongs."""
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    found = [name for name, value in zip(names, case.args, strict=False) for _ in _within("", value)]
    return found + [name for name, value in case.kwargs for _ in _within("", value)]


def _within(place: str, value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from _within(f"{place}[{number}]", item)
    elif isinstance(value, (TensorCase, torch.Tensor)):
        yield place


def distinct(call: Call) -> list[tuple[int, torch.Tensor]]:
    """Return the tensors of a call with their numbers; one that is passed twice occurs once."""
    seen: dict[int, tuple[int, torch.Tensor]] = {}
    for number, tensor in enumerate(call.tensors()):
        seen.setdefault(id(tensor), (number, tensor))
    return [*seen.values()]


# ---- JSON, for the pipe to a child process -------------------------------------------------------------------------------


class NotSerializable(Exception):
    """A value of the case cannot be written as JSON."""


def to_json(case: Case) -> str:
    """Return the case as one line of JSON.

    Raises:
        NotSerializable: it has a value that is no number, string, dtype, device, tensor, list or tuple.
    """
    return json.dumps(_encode(case))


def from_json(text: str) -> Case:
    """Return the case that :func:`to_json` wrote.

    >>> case = History((TensorCase((2,)), 0.5), between=(Case((TensorCase((3,)), 1.0)),))
    >>> from_json(to_json(case)) == case
    True
    """
    return _decode(json.loads(text))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(_decode, items)),
    "list": lambda items: [*map(_decode, items)],
    "float": float,
    "complex": complex,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "case": lambda fields: Case(*_decode(fields)),
    "history": lambda fields: History(*_decode(fields)),
    "tensor": lambda fields: TensorCase(**{name: _decode(value) for name, value in fields}),
    "plain": lambda value: value,
}


def _encode(value: Any) -> list[Any]:
    if type(value) in (tuple, list):
        return [type(value).__name__, [*map(_encode, cast("list[Any]", value))]]
    if isinstance(value, History):
        return ["history", _encode((value.args, value.kwargs, value.between))]
    if isinstance(value, Case):
        return ["case", _encode((value.args, value.kwargs))]
    if isinstance(value, TensorCase):
        return ["tensor", [[f.name, _encode(getattr(value, f.name))] for f in dataclasses.fields(value)]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) in (float, complex):  # repr is exact, and spells infinities
        return [type(value).__name__, repr(value)]
    if value is None or type(value) in (bool, int, str):
        return ["plain", value]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise NotSerializable(f"{type(value).__name__}: {value!r}")


def _decode(encoded: list[Any]) -> Any:
    kind, value = encoded
    return _DECODERS[kind](value)
