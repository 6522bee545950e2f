"""This module implements ``opkit.explain``: it shows what ``torch.compile(backend="opkit")`` makes of a model, form by form."""

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
from opkit.compiler.explained_graph import GraphExplanation, explain_graph


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile ``model``, call it once with these arguments, and return an explanation of what was compiled.

    If results require grad, their gradients with respect to the arguments and the model's parameters are computed too (no
    ``.grad`` is written), so that the explanation includes the backward. Everything that Dynamo compiled before is dropped, as
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
    explanation = Explanation(model)
    explanation.call(*args, **kwargs)
    return explanation


@dataclasses.dataclass
class Explanation:
    """The compiled graphs of a model; ``str()`` is a report, :meth:`to_html` writes it with every form in full.

    Attributes:
        model: the function or module that was compiled.
        graphs: its graphs, in the order in which they were compiled.
        guards: the conditions under which compiled code is used again, a list for each graph that Dynamo captured.
        recompiles: the reasons why Dynamo compiled a function again in :meth:`call`.
        breaks: the reasons for graph breaks.
        result: the result of the latest call.
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
        """The number of kernel launches of all graphs together."""
        return sum(kernel.launches for graph in self.graphs for kernel in graph.kernels)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model again, for example with other sizes, and add what is compiled for that call."""
        token = observer.set(self._add_graph)
        try:
            self.result = self._compiled(*args, **kwargs)
            _backward(self.result, _leaves(self.model, (args, kwargs)))
        finally:
            observer.reset(token)
        self.breaks = private.graph_breaks()
        return self.result

    def _add_graph(self, compiled: CompiledGraph) -> None:
        if compiled.reason and self.graphs and self.graphs[-1].name == compiled.name:  # it failed after planning
            self.graphs[-1] = dataclasses.replace(self.graphs[-1], reason=compiled.reason)
        else:
            self.graphs.append(explain_graph(compiled))

    def __str__(self) -> str:
        return explain_text.report(self.graphs, self.guards, self.recompiles, self.breaks)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page: the report, and every graph's forms in full."""
        body = explain_page.body(self.graphs, self.guards, self.recompiles, self.breaks)
        written = Path(path)
        written.write_text(page.document(explain_text.title(self.graphs), body), encoding="utf-8")
        return written


# ---- gradients -------------------------------------------------------------------------------------------------------


def _leaves(model: Any, arguments: Any) -> list[torch.Tensor]:
    """Return the tensors to compute gradients for."""
    parameters: Iterable[Any] = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return [t for t in [*pytree.tree_leaves(arguments), *parameters] if isinstance(t, torch.Tensor) and t.requires_grad]


def _backward(result: Any, leaves: Sequence[torch.Tensor]) -> None:
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs and leaves:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
