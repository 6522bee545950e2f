"""This module does what AOTAutograd does around compiled graphs in plain cases, without it.

:class:`Wiring` is the calling convention, which is derived from AOTAutograd's metadata, and stored. From it comes the function
that Dynamo's code calls.

In training that is an ``autograd.Function``: its forward returns results and saved tensors, and its backward takes the saved
tensors and then the gradients of results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.cache_key import NotCacheable
from opkit.compiler.run import torch_private as calls
from opkit.compiler.run.wiring import GraphResult, Wiring

Boxed = Callable[[list[Any]], Sequence[Any]]
Called = Callable[..., list[Any]]


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
    function, returns_inputs = _function(wiring, forward, backward), _returns_inputs(wiring)

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


_untraced = functools.partial(
    torch.compiler.disable,
    reason="it was compiled before compiled autograd was on. Compile it while that is on, or trace backwards without fullgraph",
)


class _BoxedGradients(type(torch.autograd.Function)):
    """The type of functions whose gradients come in one list, which can be emptied, unless compiled autograd calls them."""

    @property
    def boxed_grads_call(cls) -> bool:  # torch 2.13 and newer read it
        return not private.compiles_backwards()


def _function(wiring: Wiring, forward_graph: Boxed, backward_graph: Boxed) -> Any:
    own = [result for result in wiring.results if result.input is None]
    wanted = [number for number, result in enumerate(own) if result.differentiable]
    count, fixed = len(wiring.results), frozenset(range(len(own))) - {*wanted}
    forward, backward = _caller(wiring, forward_graph), _caller(wiring, backward_graph)

    class CompiledTraining(torch.autograd.Function, metaclass=_BoxedGradients):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            values = forward([*inputs])
            # a view is detached, since it would keep its base and its history alive
            ctx.save_for_backward(*[t.detach() if calls.is_view(t) else t for t in values[count:]])
            return _returned(ctx, wiring, values, fixed)

        @staticmethod
        @_untraced
        def backward(ctx: Any, *gradients: Any) -> Any:
            _refuse(wiring)
            listed = gradients[0] if isinstance(gradients[0], list) else [*gradients]
            arguments = [*ctx.saved_tensors, *(listed[number] for number in wanted)]
            listed.clear()
            if torch.is_grad_enabled():
                return _once(ctx, backward, arguments)
            calls.release_saved_tensors(ctx)
            return tuple(backward(arguments))

    return CompiledTraining


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
    calls.no_zeros_for_undifferentiable(ctx)
    return tuple(made)


def _refuse(wiring: Wiring) -> None:
    """Refuse the calls of a backward that AOTAutograd refuses.

    Raises:
        RuntimeError: deterministic algorithms are on now and were off in the forward, or it runs within vmap.
    """
    if calls.is_transformed():
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
            calls.release_saved_tensors(ctx)
            return tuple(graph(arguments))

        @staticmethod
        def backward(_: Any, *gradients: Any) -> None:
            raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")

    return Once.apply(torch.empty(0, requires_grad=True), *arguments)


# ---- from AOTAutograd's metadata -------------------------------------------------------------------------------------

# Fields of ViewAndMutationMeta, some of them in one version of torch only, and why a graph is not plain if they are set.
_REFUSED = {
    "mutated_inp_runtime_indices": "inputs are written to outside of the graph",
    "num_intermediate_bases": "results are views of one tensor",
    "num_symints_saved_for_bw": "sizes are saved",
    "num_tensors_saved_with_no_vc_check": "tensors are saved that may be written to",
    "num_opaque_objects_saved_for_bw": "objects are saved",
    "tokens": "operators have effects",
    "num_backward_tokens": "operators have effects",
    "num_graphsafe_rng_states": "random states are saved",
    "is_rng_op_functionalized": "random states are inputs",
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw": "the backward writes to inputs",
    "act_input_indices": "inputs are awaited",
    "dynamic_outputs": "sizes may change",
}
_INPUT_REFUSED = ("mutates_metadata", "mutates_storage_metadata", "mutation_inductor_storage_resize")
_OUTPUT_KINDS = ("non_alias", "unsafe_view_alias", "is_input")


def wiring_of(metadata: Any, inputs: int, shares_memory: bool, autocast: bool, is_guarded: bool = False) -> Wiring:
    """Return how the graph that is being compiled is called.

    Args:
        metadata: AOTAutograd's metadata, or None.
        inputs: the number of inputs of Dynamo's graph.
        shares_memory: whether some inputs share a storage.
        autocast: whether autocast was on for Dynamo's graph: it is off while AOTAutograd's graphs are compiled.
        is_guarded: whether guards on the sizes are saved with the graph, so that sizes may change.

    Raises:
        NotCacheable: the graph is not plain.
    """
    for reason in _reasons(metadata, inputs, is_guarded):
        raise NotCacheable(reason)
    if shares_memory and metadata.mutated_graph_handled_indices:
        raise NotCacheable("inputs share memory, and one is written to")
    return Wiring(
        inputs,
        tuple(map(_graph_result, metadata.output_info)),
        tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
        tuple(n for n, info in enumerate(metadata.input_info) if info.requires_grad and not info.is_leaf),
        autocast,
        torch.are_deterministic_algorithms_enabled(),
    )


def connected(found: Wiring, gradients: tuple[Any, ...]) -> Wiring:
    """Return the wiring with the inputs to detach: those that have a history and get no gradient.

    Raises:
        NotCacheable: the backward graph does not return one gradient for each input.
    """
    if len(gradients) != found.inputs:
        raise NotCacheable("the backward has more results than there are inputs")
    return dataclasses.replace(found, detached=tuple(n for n in found.detached if gradients[n] is None))


def _reasons(metadata: Any, inputs: int, is_guarded: bool) -> Iterator[str]:
    if metadata is None:
        yield "AOTAutograd has no metadata of it"
        return
    refused = {name: reason for name, reason in _REFUSED.items() if not (is_guarded and name == "dynamic_outputs")}
    yield from (reason for name, reason in refused.items() if getattr(metadata, name, None))
    if metadata.grad_enabled_mutation is not None:
        yield "it changes the grad mode"
    if len(metadata.input_info) != inputs:
        yield "inputs are the same tensor, or views of one"
    if private.has_subclasses(metadata):
        yield "there are tensors of subclasses"
    if any(getattr(info, name) for info in metadata.input_info for name in _INPUT_REFUSED):
        yield "the sizes or the storage of an input are changed"
    yield from (reason for each in metadata.output_info for reason in _result_reasons(each))


def _result_reasons(output: Any) -> Iterator[str]:
    if private.output_kind(output) not in _OUTPUT_KINDS:
        yield f"a result is an {private.output_kind(output)}"
    if not issubclass(output.raw_type, torch.Tensor):
        yield f"a result is a {output.raw_type.__name__}"
    if output.requires_grad != getattr(output, "requires_grad_for_backward", output.requires_grad):
        yield "a result was made under no_grad and requires gradients"


def _graph_result(output: Any) -> GraphResult:
    kind = private.output_kind(output)
    return GraphResult(
        output.base_idx if kind == "is_input" else None, output.requires_grad, kind == "unsafe_view_alias"
    )
