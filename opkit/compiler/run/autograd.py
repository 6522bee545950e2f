"""This module wraps compiled graphs in the function that Dynamo's code calls: what AOTAutograd does in plain cases, without it.

In training that is an ``autograd.Function``: its forward returns results and saved tensors, and its backward takes the saved
tensors and then the gradients of results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.compiler.capture import torch_private as private

Boxed = Callable[[list[Any]], Sequence[Any]]
Called = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class GraphResult:
    """A result of the user's function.

    Attributes:
        input: the number of the input that is this result; None for a new tensor.
        differentiable: whether gradients flow through it.
        is_view: whether it is a view of a tensor that the user does not see, which autograd must not know.
    """

    input: int | None
    differentiable: bool
    is_view: bool = False


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The calling convention of the graphs of one graph of Dynamo's.

    Attributes:
        inputs: the number of inputs.
        results: the user's results, which the graph returns first, in order.
        written: the inputs that the graph writes to, which autograd must know.
        detached: the inputs with a history that never get a gradient: they are detached.
        autocast: whether autocast was on; it must not apply a second time.
        deterministic: whether the backward was compiled with deterministic algorithms only.
    """

    inputs: int
    results: tuple[GraphResult, ...]
    written: tuple[int, ...]
    detached: tuple[int, ...]
    autocast: bool
    deterministic: bool


def inference(wiring: Wiring, graph: Boxed) -> Called:
    """Return the function of a graph that needs no gradients."""
    call, returns_inputs = _caller(wiring, graph), _returns_inputs(wiring)

    def run(*inputs: Any) -> list[Any]:
        _count_writes(wiring, inputs)
        before = torch.is_grad_enabled()
        private.set_grad_enabled(False)  # a context manager would take longer than a small kernel
        try:
            results = call([*inputs])
        finally:
            private.set_grad_enabled(before)
        if not returns_inputs:
            return [*results]
        return [value if r.input is None else inputs[r.input] for value, r in zip(results, wiring.results, strict=True)]

    return run


def training(wiring: Wiring, forward: Boxed, backward: Boxed) -> Called:
    """Return the function of a forward graph and its backward graph."""
    untraced: Any = torch.compiler.disable(backward)
    function, returns_inputs = _function(wiring, forward, untraced), _returns_inputs(wiring)

    def run(*inputs: Any) -> list[Any]:
        _count_writes(wiring, inputs)
        arguments = _detached(wiring, inputs) if wiring.detached else inputs
        before = torch.is_grad_enabled()
        private.set_grad_enabled(True)
        try:
            results = function.apply(*arguments)
        finally:
            private.set_grad_enabled(before)
        if not returns_inputs:
            return [*results]
        own = iter(results)
        return [next(own) if r.input is None else inputs[r.input] for r in wiring.results]

    return run


def _returns_inputs(wiring: Wiring) -> bool:
    return any(result.input is not None for result in wiring.results)


def _detached(wiring: Wiring, inputs: Sequence[Any]) -> list[Any]:
    return [value.detach() if n in wiring.detached else value for n, value in enumerate(inputs)]


def _count_writes(wiring: Wiring, inputs: Sequence[Any]) -> None:
    if wiring.written:
        torch.autograd.graph.increment_version([inputs[number] for number in wiring.written])


def _caller(wiring: Wiring, graph: Boxed) -> Boxed:
    """Return the graph, with autocast switched off."""
    if not wiring.autocast:
        return graph

    def call(arguments: list[Any]) -> Sequence[Any]:
        with private.no_autocast():
            return graph(arguments)

    return call


# ---- training --------------------------------------------------------------------------------------------------------


def _function(wiring: Wiring, forward_graph: Boxed, backward_graph: Boxed) -> Any:
    own = [result for result in wiring.results if result.input is None]
    wanted = [number for number, result in enumerate(own) if result.differentiable]
    count, fixed = len(wiring.results), frozenset(range(len(own))) - {*wanted}
    forward, backward = _caller(wiring, forward_graph), _caller(wiring, backward_graph)

    class CompiledTraining(torch.autograd.Function):
        boxed_grads_call = True  # torch 2.13: gradients come in one list, which can be emptied

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            values = forward([*inputs])
            _save(ctx, values[count:])
            return _returned(ctx, wiring, values, fixed)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            _refuse(wiring)
            listed = gradients[0] if isinstance(gradients[0], list) else [*gradients]
            arguments = [*ctx.saved_tensors, *(listed[number] for number in wanted)]
            listed.clear()
            if torch.is_grad_enabled():
                return _once(ctx, backward, arguments)
            private.release_saved_tensors(ctx)
            return tuple(backward(arguments))

    return CompiledTraining


def _save(ctx: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Save tensors for the backward; a view is detached, since it would keep its base and its history alive."""
    ctx.save_for_backward(*[tensor.detach() if private.is_view(tensor) else tensor for tensor in tensors])


def _returned(
    ctx: Any, wiring: Wiring, values: Sequence[torch.Tensor], fixed: frozenset[int]
) -> tuple[torch.Tensor, ...]:
    """Return the results that are new tensors, as autograd must see them; ``fixed`` are not differentiable."""
    made: list[torch.Tensor] = []
    for value, result in zip(values, wiring.results, strict=False):
        if result.input is None:
            made.append(torch.ops.aten._unsafe_view(value, value.shape) if result.is_view else value)
    if fixed:
        ctx.mark_non_differentiable(*(made[number] for number in fixed))
    private.no_zeros_for_undifferentiable(ctx)
    return tuple(made)


def _refuse(wiring: Wiring) -> None:
    """Refuse the calls of a backward that AOTAutograd refuses.

    Raises:
        RuntimeError: deterministic algorithms are on now and were off in the forward, or it runs within vmap.
    """
    if private.is_transformed():
        raise RuntimeError(
            "A compiled backward cannot be called within vmap, grad or vjp. Wrap vmap inside torch.compile."
        )
    if torch.are_deterministic_algorithms_enabled() and not wiring.deterministic:
        raise RuntimeError(
            "This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was "
            "previously generated during the forward function while torch.use_deterministic_algorithms(False) was set."
        )


def _once(ctx: Any, graph: Boxed, arguments: list[Any]) -> Any:
    """Return gradients with ``create_graph=True``: to differentiate them raises, as with AOTAutograd."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, *differentiable: Any) -> tuple[Any, ...]:
            private.release_saved_tensors(ctx)
            return tuple(graph(arguments))

        @staticmethod
        def backward(_: Any, *gradients: Any) -> None:
            raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")

    return Once.apply(torch.empty(0, requires_grad=True), *arguments)
