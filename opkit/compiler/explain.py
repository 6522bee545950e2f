"""``opkit.explain``: what ``torch.compile(backend="opkit")`` makes of a model, form by form."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit import page
from opkit.compiler import explain_page, explain_text
from opkit.compiler.backend import observer, opkit_backend
from opkit.compiler.capture import torch_private as private
from opkit.compiler.compiled_graph import CompiledGraph
from opkit.compiler.explained_graph import GraphExplanation, explained


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile ``model`` and call it once with these arguments, and tell what became of it.

    Where results require grad, their gradients with respect to the arguments and the model's parameters are computed too
    (no ``.grad`` is written to), so that the backward is told as well. Everything that Dynamo had compiled is forgotten, as
    by :func:`torch.compiler.reset`.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Softmax(-1))
    >>> explanation = explain(model, torch.randn(8, 16))
    >>> explanation.kernels
    1
    >>> [kernel.operators for kernel in explanation.graphs[0].kernels]
    [('aten.tanh.default', 'aten._softmax.default')]
    """
    private.reset()
    found = Explanation(model)
    found.call(*args, **kwargs)
    return found


@dataclasses.dataclass
class Explanation:
    """What became of a model; ``str()`` is a report, :meth:`to_html` the same with every form in full.

    Attributes:
        model: what was compiled.
        graphs: in the order in which they were compiled.
        guards: what must hold for compiled code to be used again, a list for each graph that Dynamo captured.
        recompiles: why Dynamo compiled a function again, at :meth:`call`.
        breaks: why Dynamo ended a graph before its function did.
        result: of the latest call.
    """

    model: Callable[..., Any]
    graphs: list[GraphExplanation] = dataclasses.field(default_factory=list[GraphExplanation])
    guards: list[list[str]] = dataclasses.field(default_factory=list[list[str]])
    recompiles: list[str] = dataclasses.field(default_factory=list[str])
    breaks: list[str] = dataclasses.field(default_factory=list[str])
    result: Any = None

    def __post_init__(self) -> None:
        self._compiled = private.watch_compilation(
            self.model, opkit_backend, self.guards.append, self.recompiles.append
        )

    @property
    def kernels(self) -> int:
        """How many kernels run, all graphs together: a kernel counts each time that it is launched."""
        return sum(kernel.launches for graph in self.graphs for kernel in graph.kernels)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model again, with other sizes for example; what is compiled for it is told too."""
        token = observer.set(self._note)
        try:
            self.result = self._compiled(*args, **kwargs)
            _backward(self.result, _leaves(self.model, (args, kwargs)))
        finally:
            observer.reset(token)
        self.breaks = private.graph_breaks()
        return self.result

    def _note(self, compiled: CompiledGraph) -> None:
        if compiled.reason and self.graphs and self.graphs[-1].name == compiled.name:  # it failed after it was planned
            self.graphs[-1] = dataclasses.replace(self.graphs[-1], reason=compiled.reason)
        else:
            self.graphs.append(explained(compiled))

    def __str__(self) -> str:
        return explain_text.report(self.graphs, self.guards, self.recompiles, self.breaks)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that loads nothing: the report, and every graph's forms in full."""
        body = explain_page.body(self.graphs, self.guards, self.recompiles, self.breaks)
        written = Path(path)
        written.write_text(page.document(explain_text.title(self.graphs), body), encoding="utf-8")
        return written


# ---- gradients -------------------------------------------------------------------------------------------------------


def _leaves(model: Any, given: Any) -> list[torch.Tensor]:
    """The tensors that gradients are asked for."""
    held: Iterable[Any] = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return [t for t in [*pytree.tree_leaves(given), *held] if isinstance(t, torch.Tensor) and t.requires_grad]


def _backward(result: Any, leaves: Sequence[torch.Tensor]) -> None:
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs and leaves:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
