"""This module checks the arguments of a loaded model against those that it was exported with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index, Symbol
from opkit.compiler.run.plan import ExecutionPlan
from opkit.compiler.run.python_text import size_text
from opkit.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Size:
    """A size or stride that changes: its text, its code, and its name if it is a size by itself."""

    text: str
    code: CodeType
    name: str | None

    @classmethod
    def of(cls, at: Index) -> int | Size:
        """Return a number, or the size that an index is."""
        if at.constant is not None:
            return int(at.constant)
        text = size_text(at)
        (monomial, factor), *others = at.terms.items()
        alone = not others and factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol)
        return cls(text, compile(text, "<size>", "eval"), text if alone else None)

    def value(self, sizes: Mapping[str, int]) -> int:
        """Return the number for these sizes."""
        return eval(self.code, {}, dict(sizes))


Sizes = tuple[int | Size, ...]


@dataclasses.dataclass(frozen=True)
class TensorCheck:
    """What a tensor must be; ``is_static`` says that its sizes and strides are numbers."""

    dtype: torch.dtype
    shape: Sizes
    strides: Sizes
    is_static: bool

    def text(self) -> str:
        return described(self.dtype, [n if isinstance(n, int) else n.text for n in self.shape])


def described(dtype: torch.dtype, shape: Sequence[Any]) -> str:
    """Return the text of a tensor: "float32[batch, 4]"."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


class InputChecks:
    """The checks of one entry.

    Args:
        plan: its plan.
        convention: what the manifest says of the entry: the leaves of the arguments, which are written to, the ranges of sizes.
        skipped: how many of the plan's inputs come before the arguments.
    """

    def __init__(self, plan: ExecutionPlan, convention: Mapping[str, Any], skipped: int) -> None:
        self._arguments: Sequence[Sequence[Any]] = convention["arguments"]
        self._written = frozenset(convention["written"])
        self._ranges: Mapping[str, Sequence[Any]] = convention["ranges"]
        self._device = torch.device(plan.device)
        inputs = iter(plan.inputs[skipped:])
        self._expected = [_check(plan, next(inputs)) if len(each) == 1 else None for each in self._arguments]

    def checked(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the inputs of the graph, laid out as they were when it was exported.

        Raises:
            ArgumentError: one is not as it was exported.
        """
        sizes: dict[str, int] = {}
        for (name, *fixed), expected, value in zip(self._arguments, self._expected, leaves, strict=True):
            if fixed:
                if type(value) is not type(fixed[0]) or value != fixed[0]:
                    raise ArgumentError(
                        f"{name}={value!r}: the model was exported with {fixed[0]!r}, which is part of it."
                    )
            elif isinstance(expected, Size):
                if type(value) is not int or value < 0:
                    raise ArgumentError(f"{name}={value!r}: the model takes a size, an integer of at least 0.")
                self._bind(name, expected, value, sizes)
            else:
                self._check_tensor(name, expected, value, sizes)
        found: list[Any] = []
        for (name, *fixed), expected, value in zip(self._arguments, self._expected, leaves, strict=True):
            if isinstance(expected, TensorCheck):
                found.append(self._laid_out(name, expected, value, sizes))
            elif not fixed:
                found.append(value)
        return found

    def _check_tensor(self, name: str, expected: Any, value: Any, sizes: dict[str, int]) -> None:
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(value).__name__}, and the model takes {expected.text()}.")
        shape = tuple(value.shape)
        right = value.dtype is expected.dtype and value.device == self._device and len(shape) == len(expected.shape)
        if right and not expected.is_static:
            for n, size in zip(shape, expected.shape, strict=True):
                if isinstance(size, Size):
                    self._bind(name, size, n, sizes)
        if not right or any(n != s for n, s in zip(shape, expected.shape, strict=True) if isinstance(s, int)):
            raise ArgumentError(
                f"{name} is {described(value.dtype, shape)} on {value.device}, and the model takes {expected.text()} on "
                f"{self._device}."
            )

    def _bind(self, name: str, size: Size, n: int, sizes: dict[str, int]) -> None:
        """Note the value of a size, or check it.

        Raises:
            ArgumentError: it is outside of its range, or differs from that of another argument.
        """
        if size.name is None:
            return
        least, most = self._ranges.get(size.name, (None, None))
        if (least is not None and n < least) or (most is not None and n > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ArgumentError(f"{name} has the size {n}, and the model was exported for {size.name} {limits}.")
        if sizes.setdefault(size.name, n) != n:
            raise ArgumentError(
                f"{name} has the size {n}, and {size.name} is {sizes[size.name]} in another argument or dimension."
            )

    def _laid_out(
        self, name: str, expected: TensorCheck, value: torch.Tensor, sizes: Mapping[str, int]
    ) -> torch.Tensor:
        if expected.is_static:
            strides: Any = expected.strides
        else:
            strides = tuple(s if isinstance(s, int) else s.value(sizes) for s in expected.strides)
            for n, size in zip(value.shape, expected.shape, strict=True):
                if isinstance(size, Size) and size.name is None and size.value(sizes) != n:
                    raise ArgumentError(
                        f"{name} has the size {n}, and the model takes {size.text}, which is {size.value(sizes)}."
                    )
        plain = not (value.is_conj() or value.is_neg())
        if plain and (value.stride() == strides or _same_places(value, strides)):
            return value
        if name in self._written:
            raise ArgumentError(
                f"{name} has the strides {value.stride()}, and the model, which writes to it, was exported for {strides}."
            )
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _same_places(value: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether elements are where these strides say: the stride of a dimension of one element does not matter."""
    places = zip(value.shape, value.stride(), strides, strict=True)
    return all(n == 1 or have == want for n, have, want in places) or 0 in value.shape


def _check(plan: ExecutionPlan, taken: Any) -> TensorCheck | Size | int:
    if isinstance(taken, Index):
        return Size.of(taken)
    buffer = plan.buffers[taken]
    shape, strides = (tuple(map(Size.of, each)) for each in (buffer.shape, buffer.strides))
    is_static = all(isinstance(each, int) for each in (*shape, *strides))
    return TensorCheck(getattr(torch, DTYPES[buffer.dtype].torch), shape, strides, is_static)
