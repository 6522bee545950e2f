"""Name Triton functions in place of importing them, so that compiled kernels are found in the cache without Triton.

:mod:`opkit.kernels.triton.headers` has the figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from opkit.errors import DeclarationError
from opkit.kernels.triton import headers, origins, parsing
from opkit.kernels.triton.headers import Header


@dataclasses.dataclass(frozen=True)
class Named:
    """A function decorated with ``triton.jit`` or Gluon's ``jit``, by its module and its name there.

    Its parameters are read from the file, its module is imported where it must be compiled or run in another way, and a kernel
    compiled before is found by the text of the module's file and of those that it imports from the same package. What the
    module computes when it is imported must follow from these files alone, not from the environment.

    >>> function = Named("opkit.attn.gpu.device.tile_lists", "tile_lists")
    >>> function.header.parameters[0].name
    'tiles'
    """

    module: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def header(self) -> Header | None:
        """What its definition says; None where the file alone does not say enough."""
        return headers.read(self.module, self.name)

    @property
    def origin(self) -> str | None:
        """A digest of all that it is compiled from; None where the files alone do not decide it."""
        return origins.of(self.module)

    def loaded(self) -> Any:
        """Return the function itself, of its module, which is imported.

        Raises:
            DeclarationError: the module cannot be imported, or has no such function.
        """
        try:
            return getattr(origins.load(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise DeclarationError(
                f"The Triton kernel {self.name} of {self.module} cannot be loaded: {error}"
            ) from error

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what decides what it computes."""
        origin = self.origin or parsing.cache_key(self.loaded())
        return [("module", self.module), ("name", self.name), ("origin", origin)]


def loaded(function: Any) -> Any:
    """Return a function of Triton's: itself, or what a :class:`Named` one stands for."""
    return function.loaded() if isinstance(function, Named) else function
