"""C that a file holds for calls of opkit's own operators, whose kernels are in the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Call = tuple[Sequence[Any], dict[str, Any]]
WRITERS: dict[str, Callable[[Iterable[Call]], list[str]]] = {}
"""By an operator's name what writes the translation units for its calls in a graph: positional and keyword arguments of each."""
