"""What happened while a model was compiled: graph breaks, graphs that were captured again, and fallbacks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from opkit.bench import torch_private as private
from opkit.compiler.backend import observer
from opkit.compiler.diagnostics import CompiledGraph
from opkit.compiler.ir.program import Extern
from opkit.compiler.lower.rules import EXTERNS


def compiled(module: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return the module compiled by a backend, after everything that was compiled before is dropped."""
    private.reset()
    return torch.compile(module, backend=backend)


def import_compiler(backend: str) -> None:
    """Compile a small function and its gradient, so that what is measured afterwards imports no module of the compiler."""
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda x: (x.sin() * 2).sum(), backend=backend)(x).backward()
    private.reset()


class Fallbacks(Counter[str]):
    """The operators that torch ran because opkit's compiler could not compile them, with the reason, and how often.

    Library calls that the compiler chooses are none: products, convolutions, attention, and others that docs/model_zoo.md names.
    A whole graph that runs in eager mode is one.
    """

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Add the fallbacks of the graphs that are compiled in the block. No plan is read from the disk in it."""
        token = observer.set(self._add)
        try:
            yield
        finally:
            observer.reset(token)

    def _add(self, graph: CompiledGraph) -> None:
        if graph.reason:
            kind = graph.name.split()[0]
            self[f"the whole {kind} graph: {graph.reason.splitlines()[0]}"] += graph.count
        if graph.captured is not None:
            self.update(graph.captured.uncompiled)
        for step in graph.schedule.steps if graph.schedule is not None else ():
            if isinstance(step, Extern) and step.reason and not _is_library_call(step.target):
                self[f"{step.target}: {step.reason}"] += graph.count


_LIBRARY = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward")
_LIBRARY_PREFIXES = ("scaled_dot", "embedding_bag")


def _is_library_call(target: str) -> bool:
    """Return whether calling torch's operator is how the compiler computes it; a reason then says why it is not merged."""
    name = target.removeprefix("aten.").lstrip("_")
    return target in EXTERNS or name.split(".")[0] in _LIBRARY or name.startswith(_LIBRARY_PREFIXES)


def graph_breaks() -> list[str]:
    """Return the reasons for graph breaks since :func:`compiled`."""
    return private.graph_breaks()


def captured_graphs() -> int:
    """Return how many graphs Dynamo captured since :func:`compiled`."""
    return private.captured_graphs()
