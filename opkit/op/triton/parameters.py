"""What a Triton function says of itself: its parameters, its dialect, and where it stands.

Read from the function's signature alone, so that ``triton.jit``, Gluon's ``jit`` and the interpreter's stand-in for them
are one thing here, and Triton need not be imported; of one that is named, from its file.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from opkit.errors import DeclarationError
from opkit.kernels.triton.named import Named, loaded
from opkit.kernels.triton.parsing import Header


@dataclasses.dataclass(frozen=True)
class TritonParameter:
    """One parameter of a Triton function.

    Attributes:
        name: as it is written.
        constexpr: it is known when the kernel is compiled.
        annotation: its annotation as text ("*bf16", "tl.int64"), or "".
        default: its value where nothing stands for its name; ``inspect.Parameter.empty`` where there is none.
        specialised: whether a value of 1, or one that 16 divides, may be compiled in.
        aligned: whether divisibility by 16 may be.
    """

    name: str
    constexpr: bool
    annotation: str
    default: Any
    specialised: bool = True
    aligned: bool = True

    @property
    def has_default(self) -> bool:
        """Whether it may be left out."""
        return self.default is not inspect.Parameter.empty


def unwrapped(function: Any) -> Any:
    """Return the function of a ``triton.jit`` object, as Python has it.

    Raises:
        DeclarationError: it is no such object.
    """
    inner = getattr(loaded(function), "fn", None)
    if not inspect.isfunction(inner):
        raise DeclarationError(
            f"opkit.triton_kernel takes a function decorated with @triton.jit (or Gluon's @gluon.jit), got {function!r}."
        )
    return inner


def parameters_of(function: Any) -> tuple[TritonParameter, ...]:
    """Return the parameters of a ``triton.jit`` object, or of a named one, in order."""
    header = header_of(function)
    if header is not None:
        return tuple(
            TritonParameter(p.name, p.constexpr, p.annotation, p.default, p.specialised, p.aligned)
            for p in header.parameters
        )
    function = loaded(function)
    known = {p.name: p for p in getattr(function, "params", ())}
    return tuple(_parameter(p, known.get(p.name)) for p in inspect.signature(unwrapped(function)).parameters.values())


def _parameter(parameter: inspect.Parameter, known: Any) -> TritonParameter:
    annotation = "" if parameter.annotation is inspect.Parameter.empty else _text(parameter.annotation)
    return TritonParameter(
        parameter.name,
        "constexpr" in annotation,
        annotation,
        parameter.default,
        specialised=not getattr(known, "do_not_specialize", False),
        aligned=not getattr(known, "do_not_specialize_on_alignment", False),
    )


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def is_interpreted(function: Any) -> bool:
    """Return whether ``TRITON_INTERPRET=1`` was set when the function was decorated, so that it runs on CPU tensors."""
    return type(function).__name__ == "InterpretedFunction"


def is_gluon(function: Any) -> bool:
    """Return whether the function is in Gluon."""
    header = header_of(function)
    return bool(getattr(loaded(function), "is_gluon", bool)()) if header is None else header.gluon


def name_of(function: Any) -> str:
    """Return the name of the function."""
    return function.name if isinstance(function, Named) else unwrapped(function).__name__


def module_of(function: Any) -> str:
    """Return the module that defines the function."""
    return function.module if isinstance(function, Named) else unwrapped(function).__module__


def header_of(function: Any) -> Header | None:
    """Return what the file of a named function says of it; None of another, and where the file does not say enough."""
    return function.header if isinstance(function, Named) else None


def location(function: Any) -> tuple[str, int]:
    """Return the file and line at which the function stands."""
    header = header_of(function)
    if header is not None:
        return header.file, header.line
    code = unwrapped(function).__code__
    return code.co_filename, code.co_firstlineno
