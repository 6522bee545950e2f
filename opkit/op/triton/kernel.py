"""Declare a Triton kernel: the function, and the rules by which it is launched."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from opkit.errors import DeclarationError
from opkit.kernels.triton.named import loaded
from opkit.kernels.tuning.configs import Config
from opkit.op.triton.parameters import TritonParameter, is_gluon, is_interpreted, location, name_of, parameters_of


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
    def parameters(self) -> tuple[TritonParameter, ...]:
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
            (:class:`~opkit.kernels.triton.named.Layout`), which needs no import of Gluon.
        padding: what is read outside of the tensor: "zero" or "nan".

    >>> import opkit
    >>> opkit.tensor_descriptor("x", block=lambda BLOCK: (BLOCK, 64)).tensor
    'x'
    """
    if padding not in ("zero", "nan"):
        raise DeclarationError(f'tensor_descriptor({tensor!r}, padding={padding!r}): it is "zero" or "nan".')
    return Descriptor(tensor, block, shape, layout, padding)
