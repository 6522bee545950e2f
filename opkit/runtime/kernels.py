"""Call compiled kernels of operators without torch (``opkit.runtime.load_kernel``)."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import struct
from typing import Any, NamedTuple

from opkit.errors import ArgumentError, KernelError
from opkit.runtime.arrays import Array, Taken
from opkit.runtime.library import ERROR_BYTES, Argument, error_buffer, library, message

_NONE, _TENSOR, _INT, _FLOAT, _BOOL, _TEXT, _INTS, _FLOATS, _TENSORS = range(9)


def load_kernel(path: str | os.PathLike[str]) -> Kernel:
    """Load a kernel in C or C++ that ``opkit build --programs`` wrote, and return a function that calls it without torch.

    Args:
        path: the shared library of the kernel.

    Returns:
        A function with the parameters of the operator. It takes NumPy arrays, or other tensors with DLPack on the CPU, for
        tensors, and returns an :class:`Array`, a tuple of them, or the argument that the operator writes to.

    Raises:
        KernelError: the file is no such kernel, or one for GPUs.
    """
    error = error_buffer()
    handle = library().opkit_kernel_load(os.fsencode(path), error, ERROR_BYTES)
    if not handle:
        raise KernelError(f"opkit.runtime.load_kernel: {message(error)}")
    return Kernel(handle)


class Parameter(NamedTuple):
    """A parameter of an operator: its name, its type as in a schema, and its default value; ``...`` for none."""

    name: str
    type: str
    default: Any


class Kernel:
    """A loaded kernel.

    Attributes:
        schema: its operator's, as torch writes it.
        parameters: those of the operator.

    Raises:
        ArgumentError: at a call: an argument is missing, or of another type than the operator takes.
        RuntimeError: at a call: the kernel does not take these shapes or dtypes, or failed; the message says why.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.schema: str = library().opkit_kernel_schema(handle).decode()
        self.parameters = _parameters(self.schema)
        count = library().opkit_kernel_output_count(handle)
        self._aliases = [library().opkit_kernel_output_alias(handle, n) for n in range(count)]

    def __repr__(self) -> str:
        return f"Kernel({self.schema})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel.

        Raises:
            ArgumentError: an argument is none that the operator takes.
            RuntimeError: the kernel does not take such tensors, or failed; the message says why.
        """
        values = self._bound(args, kwargs)
        held: list[Any] = []
        passed = (Argument * len(values))()
        for slot, parameter, value in zip(passed, self.parameters, values, strict=True):
            slot.kind, slot.count, slot.value = _argument(parameter, value, held)
        results, error = (ctypes.c_void_p * len(self._aliases))(), error_buffer()
        if library().opkit_kernel_call(
            self._handle, passed, len(values), results, len(self._aliases), error, ERROR_BYTES
        ):
            raise RuntimeError(message(error))
        found = [
            values[alias] if alias >= 0 else Array(result)  # pyright: ignore[reportArgumentType]
            for alias, result in zip(self._aliases, results, strict=True)
        ]
        return found[0] if len(found) == 1 else tuple(found) if found else None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        names = [each.name for each in self.parameters]
        unknown = [name for name in kwargs if name not in names[len(args) :]]
        if len(args) > len(names) or unknown:
            raise ArgumentError(
                f"{self.schema} was called with {len(args)} arguments and {', '.join(kwargs) or 'no names'}."
            )
        given = dict(zip(names, args, strict=False)) | kwargs
        values = [given.get(each.name, each.default) for each in self.parameters]
        missing = [name for name, value in zip(names, values, strict=True) if value is ...]
        if missing:
            raise ArgumentError(f"{self.schema} was called without {', '.join(missing)}.")
        return values


# ---- arguments -------------------------------------------------------------------------------------------------------


def _argument(parameter: Parameter, value: Any, held: list[Any]) -> tuple[int, int, int]:
    """Return the kind, the count and the union's bits of an argument; ``held`` lives as long as the call."""
    kind = re.sub(r"\(.*?\)|\?", "", parameter.type)
    if value is None:
        return _NONE, 0, 0
    if kind == "Tensor":
        held.append(Taken(value, parameter.name))
        return _TENSOR, 0, held[-1].address
    if kind == "Tensor[]":
        taken = [Taken(each, f"{parameter.name}[{n}]") for n, each in enumerate(value)]
        held += [taken, (ctypes.c_void_p * len(taken))(*(each.address for each in taken))]
        return _TENSORS, len(taken), ctypes.addressof(held[-1])
    if kind.endswith("]"):
        of = ctypes.c_double if kind.startswith("float") else ctypes.c_int64
        held.append((of * len(value))(*value))
        return (_FLOATS if of is ctypes.c_double else _INTS), len(value), ctypes.addressof(held[-1])
    if isinstance(value, str):
        held.append(ctypes.create_string_buffer(value.encode()))
        return _TEXT, 0, ctypes.addressof(held[-1])
    if isinstance(value, bool):
        return _BOOL, 0, int(value)
    if kind == "float" and isinstance(value, int | float):
        return _FLOAT, 0, struct.unpack("<Q", struct.pack("<d", value))[0]
    if isinstance(value, int):
        return _INT, 0, value & (1 << 64) - 1
    raise ArgumentError(f"{parameter.name}={value!r}: the operator takes {parameter.type}.")


def _parameters(schema: str) -> list[Parameter]:
    """Return the parameters in a schema: "demo::scale(Tensor x, float by=1.5, *, int[] dims=[0, 1]) -> Tensor"."""
    text = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    found: list[Parameter] = []
    for part in filter(None, map(str.strip, re.split(r",(?![^\[(]*[\])])", text))):
        if part != "*":
            declared, _, default = part.partition("=")
            of, name = declared.rsplit(" ", 1)
            found.append(Parameter(name, of, ast.literal_eval(default) if default else ...))
    return found
