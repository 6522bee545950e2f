"""Triton kernels as their authors declare them: the function with its parameters, and the rules by which it is launched.

The parameters are read from the function's signature alone, so that ``triton.jit``, Gluon's ``jit`` and the interpreter's
stand-in for them are one thing here, and Triton need not be imported. A function that is passed by name is read from its file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from opkit.errors import DeclarationError
from opkit.kernels.triton.named import Named, loaded
from opkit.kernels.triton.parsing import Header, HeaderParameter
from opkit.kernels.tuning.configs import Config


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor (TMA) for a parameter; see :func:`tensor_descriptor`."""

    tensor: str
    block: Any
    shape: Any = None
    layout: Any = None
    padding: str = "zero"


@dataclasses.dataclass(frozen=True, eq=False)
class TritonKernel:
    """A kernel in Triton, as its author declared it; made by :func:`triton_kernel`. ``function`` may be a name."""

    function: Any
    grid: Any
    values: Mapping[str, Any]  # of parameters: constants, functions of named values, or Descriptors
    options: Mapping[str, Any]  # of the compiler, likewise
    configs: tuple[Config, ...] = ()
    prune: Callable[..., Any] | None = None
    outputs: tuple[str, ...] = ()
    bind: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    reset_to_zero: tuple[str, ...] = ()
    pre_hook: Callable[..., Any] | None = None
    targets: tuple[str, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ()
    launcher: Callable[[Any, Mapping[str, Any]], None] = lambda kernel, values: None

    @property
    def name(self) -> str:
        """The name of the Triton function."""
        return name_of(self.function)

    @property
    def jit(self) -> Any:
        """The Triton function itself, which a named one is imported for."""
        return loaded(self.function)

    @functools.cached_property
    def parameters(self) -> tuple[HeaderParameter, ...]:
        """The parameters of the Triton function."""
        return parameters_of(self.function)

    @functools.cached_property
    def forms(self) -> dict[Any, Any]:
        """A cache of the kernel bound for launches by hand, by the kinds of their values."""
        return {}

    @property
    def gluon(self) -> bool:
        """Whether it is in Gluon."""
        return is_gluon(self.function)

    @property
    def interpreted(self) -> bool:
        """Whether it runs in Triton's interpreter, on CPU tensors."""
        return is_interpreted(self.function)

    @property
    def hooked(self) -> bool:
        """Whether Python runs before each launch."""
        return self.pre_hook is not None or any(config.pre_hook for config in self.configs)

    def __deepcopy__(self, memo: Any) -> TritonKernel:
        return self  # a module that holds one can be copied; Triton's functions cannot

    def __repr__(self) -> str:
        file, line = location(self.function)
        return f"<Triton kernel {self.name} ({file}:{line})>"

    def __call__(self, **values: Any) -> None:
        """Launch the kernel on tensors and numbers by name, as a Python kernel does that launches several.

        Strides, sizes and numbers of elements follow from the tensors; sizes that only a grid function
        or a constexpr uses are passed by name too.
        """
        self.launcher(self, values)

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what decides what it computes, for the operator's contract hash."""
        return [*self.launch_parts(), ("configs", self.configs), ("prune", self.prune)]

    def launch_parts(self) -> list[tuple[str, Any]]:
        """Return what decides how long it takes, but for the choice of a config."""
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in _NOT_HASHED]


_NOT_HASHED = {"examples", "targets", "configs", "prune", "launcher"}


def tensor_descriptor(
    tensor: str, *, block: Any, shape: Any = None, layout: Any = None, padding: str = "zero"
) -> Descriptor:
    """Return a tensor descriptor, by which a kernel loads and stores whole blocks (TMA where the GPU has it).

    Args:
        tensor: the operator's argument or output that it describes. Its last dimension must be contiguous, and its
            address and other strides divisible by 16 bytes, where the GPU has TMA.
        block: the block's sizes: a tuple, or a function of named values that returns one.
        shape: describe the contiguous tensor as one of this shape: a tuple or a function; by default as it is.
        layout: for Gluon, the layout of a block in shared memory; one of Gluon's, or of opkit's
            (``opkit.kernels.triton.named.Layout``), which needs no import of Gluon.
        padding: what is read outside of the tensor: "zero" or "nan".

    Raises:
        DeclarationError: ``padding`` is neither of these.

    >>> import opkit
    >>> opkit.tensor_descriptor("x", block=lambda BLOCK: (BLOCK, 64)).tensor
    'x'
    """
    if padding not in ("zero", "nan"):
        raise DeclarationError(f'tensor_descriptor({tensor!r}, padding={padding!r}): it is "zero" or "nan".')
    return Descriptor(tensor, block, shape, layout, padding)


# ---- parameters ------------------------------------------------------------------------------------------------------


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


def parameters_of(function: Any) -> tuple[HeaderParameter, ...]:
    """Return the parameters of a ``triton.jit`` object, or of a named one, in order."""
    header = header_of(function)
    if header is not None:
        return header.parameters
    function = loaded(function)
    known = {p.name: p for p in getattr(function, "params", ())}
    return tuple(_parameter(p, known.get(p.name)) for p in inspect.signature(unwrapped(function)).parameters.values())


def _parameter(parameter: inspect.Parameter, known: Any) -> HeaderParameter:
    annotation = "" if parameter.annotation is inspect.Parameter.empty else parameter.annotation
    if not isinstance(annotation, str):
        annotation = getattr(annotation, "__name__", str(annotation))
    return HeaderParameter(
        parameter.name,
        "constexpr" in annotation,
        annotation,
        parameter.default,
        specialised=not getattr(known, "do_not_specialize", False),
        aligned=not getattr(known, "do_not_specialize_on_alignment", False),
    )


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
    """Return the header of a named function; None for other functions, and where the file alone does not determine it."""
    return function.header if isinstance(function, Named) else None


def location(function: Any) -> tuple[str, int]:
    """Return the file and line at which the function stands."""
    header = header_of(function)
    if header is not None:
        return header.file, header.line
    code = unwrapped(function).__code__
    return code.co_filename, code.co_firstlineno
