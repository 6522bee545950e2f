"""Parse arguments written as text, such as ``bf16[4096, 1024]``, and make tensors from them.

========================================  ====================================================
text                                      argument
========================================  ====================================================
``bf16[4096, 1024]``                      a tensor; ``fp32[]`` has one element and no dimension
``bf16[4096, 1024]:strides(1, 4096)``     a tensor with these strides
``[fp32[8], fp32[16]]``, ``[1, 2]``       a list
``1``, ``1e-6``, ``inf``, ``True``        a number, a truth value
``"silu"``, ``None``                      a string, None
``bf16``, ``torch.bfloat16``              a dtype
========================================  ====================================================

Dtypes are bf16, fp16, fp32, fp64, fp8e4m3, fp8e5m2, i8, i16, i32, i64, u8, u16, u32, u64, bool, and torch's own names.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from opkit.errors import ArgumentError

SHORT_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4m3": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "bool": torch.bool,
}
_SHORT_NAMES = {dtype: name for name, dtype in SHORT_DTYPES.items()}
_WORDS = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
    "inf": float("inf"),
    "nan": float("nan"),
}
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w)|-inf\b)"""
    r"""|(?P<word>[A-Za-z_][\w.]*)|(?P<mark>[][(),:=]))"""
)
_CALL = re.compile(r"\s*(\w+::[\w.]+)\s*\((.*)\)\s*", re.DOTALL)
_TENSOR = re.compile(r"\s*[A-Za-z_][\w.]*\s*\[.*", re.DOTALL)
_NO_BOUND = 128


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The dtype, sizes and strides of a tensor to make."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def __str__(self) -> str:
        name = _SHORT_NAMES.get(self.dtype, str(self.dtype))
        strides = "" if self.strides is None else f":strides({', '.join(map(str, self.strides))})"
        return f"{name}[{', '.join(map(str, self.sizes))}]{strides}"

    @property
    def elements(self) -> int:
        """The number of elements that its memory spans, gaps between strides included."""
        if 0 in self.sizes:
            return 0
        strides = torch.empty(self.sizes, device="meta").stride() if self.strides is None else self.strides
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, strides, strict=True))


@dataclasses.dataclass(frozen=True)
class ExampleCall:
    """A call of an operator: arguments by name, with a :class:`TensorSpec` for each tensor."""

    operator: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.operator}({', '.join(f'{name}={shown(value)}' for name, value in self.arguments.items())})"


def shown(value: Any) -> str:
    """Return an argument as text.

    >>> shown([TensorSpec(torch.bfloat16, (4,)), "silu", torch.float16])
    "[bf16[4], 'silu', fp16]"
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, cast('Sequence[Any]', value)))}]"
    if isinstance(value, torch.dtype):
        return _SHORT_NAMES.get(value, str(value))
    if isinstance(value, enum.Enum):
        return repr(value.name)
    return str(value) if isinstance(value, TensorSpec) else repr(value)


# ---- reading ---------------------------------------------------------------------------------------------------------


def parse(text: str) -> Any:
    """Parse one argument: see the module's table.

    Raises:
        ArgumentError: it cannot be read; the message shows where.

    >>> parse("bf16[8, 4]:strides(1, 8)")
    TensorSpec(dtype=torch.bfloat16, sizes=(8, 4), strides=(1, 8))
    """
    reader = _ArgumentReader(text)
    value = reader.value()
    reader.end()
    return value


def parse_call(text: str) -> ExampleCall:
    """Parse a call such as ``demo::rms_norm(x=bf16[8192, 4096], weight=bf16[4096], eps=1e-6)``.

    Raises:
        ArgumentError: it cannot be read; the message shows where.
    """
    match = _CALL.fullmatch(text)
    if match is None:
        raise ArgumentError(f"{text!r} is no call. Write it as in demo::rms_norm(x=bf16[8192, 4096], eps=1e-6).")
    reader = _ArgumentReader(text, match.start(2), match.end(2))
    arguments: dict[str, Any] = {}
    for name, value in reader.named():
        if name in arguments:
            raise ArgumentError(f"{text!r} gives {name} twice.")
        arguments[name] = value
    return ExampleCall(match[1], arguments)


def parse_arguments(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of a call from a dictionary, of Python or JSON, that has tensors as text.

    Args:
        arguments: the arguments by name.
        where: the place that errors name.

    Raises:
        ArgumentError: one of them cannot be read.

    >>> parse_arguments({"x": "bf16[8]", "eps": 1e-6, "mode": "silu"}, "examples=")
    {'x': TensorSpec(dtype=torch.bfloat16, sizes=(8,), strides=None), 'eps': 1e-06, 'mode': 'silu'}
    """

    def read(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [read(name, each) for each in cast("Sequence[Any]", value)]
        if not isinstance(value, str) or not _TENSOR.fullmatch(value):
            return value
        try:
            return parse(value)
        except ArgumentError as error:
            raise ArgumentError(f"{where}, {name}: {error}") from None

    return {name: read(name, value) for name, value in arguments.items()}


def read_file(path: Path) -> list[ExampleCall]:
    """Return the calls in a JSON file such as ``{"demo::rms_norm": [{"x": "bf16[8192, 4096]", "eps": 1e-6}]}``.

    Raises:
        ArgumentError: it cannot be read; the message names the file and what is wrong.
    """
    try:
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ArgumentError(f'{path} holds no object such as {{"demo::rms_norm": [{{"x": "bf16[8, 4]"}}]}}.')
    examples: list[ExampleCall] = []
    for operator, calls in cast("dict[str, Any]", content).items():
        listed: list[Any] = calls if isinstance(calls, list) else [None]
        for number, call in enumerate(listed):
            where = f"{path}, {operator}[{number}]"
            if not isinstance(call, dict):
                raise ArgumentError(f"{where}: expected a list of objects that hold the arguments by name.")
            examples.append(ExampleCall(operator, parse_arguments(cast("dict[str, Any]", call), where)))
    return examples


class _ArgumentReader:
    """Reads arguments from a part of a text, from left to right."""

    def __init__(self, text: str, start: int = 0, end: int | None = None) -> None:
        self._text, self._at, self._end = text, start, len(text) if end is None else end

    def end(self) -> None:
        if self._text[self._at : self._end].strip():
            raise self._error("expected nothing more")

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each ``name=value``, separated by commas."""
        while self._text[self._at : self._end].strip():
            kind, name = self._next("the name of an argument")
            if kind != "word" or not self._take("="):
                raise self._error("expected name=value")
            yield name, self.value()
            if not self._take(","):
                self.end()

    def value(self) -> Any:
        kind, text = self._next("a value")
        if kind == "string":
            return ast.literal_eval(text)
        if kind == "number":
            return float(text) if text == "-inf" or any(mark in text for mark in ".eE") else int(text)
        if text == "[":
            return list(self._items("]", self.value))
        if kind == "word":
            return self._word(text)
        raise self._error(f"expected a value, found {text!r}")

    def _word(self, text: str) -> Any:
        if self._take("["):
            return self._tensor(_dtype(text, self._error), tuple(self._items("]", self._size)))
        if text in _WORDS:
            return _WORDS[text]
        dtype = named_dtype(text)
        if dtype is None:
            raise self._error(f'{text!r} means nothing; a string needs quotes: "{text}"')
        return dtype

    def _tensor(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> TensorSpec:
        if not self._take(":"):
            return TensorSpec(dtype, sizes)
        if self._next("strides(...)")[1] != "strides" or not self._take("("):
            raise self._error("expected strides(...)")
        strides = tuple(self._items(")", self._size))
        if len(strides) != len(sizes):
            raise self._error(f"{len(strides)} strides for {len(sizes)} sizes")
        return TensorSpec(dtype, sizes, strides)

    def _size(self) -> int:
        kind, text = self._next("a size")
        if kind != "number" or not text.isdecimal():
            raise self._error(f"expected a whole number that is not negative, found {text!r}")
        return int(text)

    def _items(self, closing: str, item: Callable[[], Any]) -> Iterator[Any]:
        while not self._take(closing):
            yield item()
            if not self._take(","):
                if not self._take(closing):
                    raise self._error(f"expected ',' or {closing!r}")
                return

    def _take(self, mark: str) -> bool:
        match = _TOKEN.match(self._text, self._at, self._end)
        if match is None or match["mark"] != mark:
            return False
        self._at = match.end()
        return True

    def _next(self, expected: str) -> tuple[str, str]:
        match = _TOKEN.match(self._text, self._at, self._end)
        if match is None or match.lastgroup is None:
            raise self._error(f"expected {expected}")
        self._at = match.end()
        return match.lastgroup, match[match.lastgroup]

    def _error(self, what: str) -> ArgumentError:
        return ArgumentError(f"{self._text!r} cannot be read: {what}, at {self._text[: self._at] + ' <--'!r}.")


def named_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of that name, short or torch's own; None where there is none.

    >>> named_dtype("bf16"), named_dtype("torch.int32"), named_dtype("float")
    (torch.bfloat16, torch.int32, torch.float32)
    """
    dtype = SHORT_DTYPES.get(name) or getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _dtype(name: str, error: Callable[[str], ArgumentError]) -> torch.dtype:
    dtype = named_dtype(name)
    if dtype is None:
        near = difflib.get_close_matches(name, SHORT_DTYPES, n=2) or list(SHORT_DTYPES)
        raise error(f"{name!r} is no dtype; there are {', '.join(near)} and torch's own")
    return dtype


# ---- making ----------------------------------------------------------------------------------------------------------


def make(spec: Any, device: str | torch.device = "cpu", seed: int = 0) -> Any:
    """Make an argument: a tensor for each :class:`TensorSpec` or its text in ``spec``, all else as it is.

    Floating and complex tensors are normally distributed, bool ones are even odds, 8-bit integers are any. Wider integers
    are from 0 up to the smallest size of the floating tensors, so that they can index any dimension of those; without any
    they are below 128. On the device "meta" they have no numbers.

    >>> make("fp32[2, 3]").shape, make([TensorSpec(torch.int64, (4,)), 7])[1]
    (torch.Size([2, 3]), 7)
    """
    return make_all({"": spec}, device, seed)[""]


def make_all(arguments: Mapping[str, Any], device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
    """Make the arguments of a call, each as :func:`make` does.

    Raises:
        ArgumentError: one cannot be made, because memory is short or torch has no such dtype on the device.
    """
    specs = parse_arguments(arguments, "an argument")
    meta = torch.device(device).type == "meta"
    generator = None if meta else torch.Generator(device).manual_seed(seed)
    bound = _bound(pytree.tree_leaves(specs))

    def each(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [each(name, item) for item in cast("list[Any]", value)]
        if not isinstance(value, TensorSpec):
            return value
        try:
            return _tensor(value, generator, bound)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ArgumentError(f"{name}={value} cannot be made on {device}: {reason}") from error

    return {name: each(name, value) for name, value in specs.items()}


def _bound(leaves: Iterable[Any]) -> int:
    """Return the bound that indices stay below."""
    sizes = [size for leaf in leaves if isinstance(leaf, TensorSpec) and _floating(leaf.dtype) for size in leaf.sizes]
    return max(1, min(sizes, default=_NO_BOUND))


def _floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _tensor(spec: TensorSpec, generator: torch.Generator | None, bound: int) -> torch.Tensor:
    if generator is None:
        if spec.strides is None:
            return torch.empty(spec.sizes, dtype=spec.dtype, device="meta")
        return torch.empty_strided(spec.sizes, spec.strides, dtype=spec.dtype, device="meta")
    memory = _values(spec.dtype, spec.elements, generator, bound)
    if spec.strides is None:
        return memory.view(spec.sizes)
    return memory.as_strided(spec.sizes, spec.strides)


def _values(dtype: torch.dtype, count: int, generator: torch.Generator, bound: int) -> torch.Tensor:
    device = generator.device
    if _floating(dtype):
        drawn = torch.float32 if dtype.itemsize == 1 else dtype
        return torch.randn(count, generator=generator, device=device, dtype=drawn).to(dtype)
    low, high = (0, bound)
    if dtype.itemsize == 1:
        low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1)
    drawn = dtype if dtype in (torch.int8, torch.int16, torch.int32, torch.uint8) else torch.int64
    high = min(high, torch.iinfo(drawn).max)
    return torch.randint(low, high, (count,), generator=generator, device=device, dtype=drawn).to(dtype)
