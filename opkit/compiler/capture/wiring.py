"""This module derives the :class:`Wiring` of a plain graph from AOTAutograd's metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.cache_key import NotCacheable
from opkit.compiler.run.autograd import GraphResult, Wiring

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
_KINDS = ("non_alias", "unsafe_view_alias", "is_input")


def wiring(metadata: Any, inputs: int, shares_memory: bool, autocast: bool, is_guarded: bool = False) -> Wiring:
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
        tuple(map(_result, metadata.output_info)),
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
    if private.output_kind(output) not in _KINDS:
        yield f"a result is an {private.output_kind(output)}"
    if not issubclass(output.raw_type, torch.Tensor):
        yield f"a result is a {output.raw_type.__name__}"
    if output.requires_grad != getattr(output, "requires_grad_for_backward", output.requires_grad):
        yield "a result was made under no_grad and requires gradients"


def _result(output: Any) -> GraphResult:
    kind = private.output_kind(output)
    return GraphResult(
        output.base_idx if kind == "is_input" else None, output.requires_grad, kind == "unsafe_view_alias"
    )
