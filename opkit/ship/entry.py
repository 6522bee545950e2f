"""This module reduces an exported program to a graph that the compiler takes: weights are constants, or inputs of the graph."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    TensorArgument,
)

from opkit.compiler.capture.attention_masks import remove_constant_masks
from opkit.compiler.capture.decompositions import DECOMPOSITIONS
from opkit.errors import CompileError
from opkit.ship import torch_private as private

_WEIGHTS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}
_MUTATIONS = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
)
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range")


@dataclasses.dataclass(frozen=True)
class Argument:
    """A leaf of the arguments of an entry.

    Attributes:
        name: its name.
        value: the number, text or None that it must be; ``...`` for a tensor or a size.
    """

    name: str
    value: Any = ...


@dataclasses.dataclass(frozen=True)
class EntryGraph:
    """A function of a model as a graph.

    Attributes:
        module: the graph. It takes the tensors of ``state``, then those arguments that are tensors and sizes. Constants are
            attributes.
        state: the names of weights that the graph takes: those that it writes to, and all if weights can be replaced.
        tensors: the tensors of ``state``.
        arguments: the leaves of the arguments.
        written: the names of the arguments that it writes to.
        ranges: the least and the largest value of sizes that change, by name; None for no limit.
        results: of each leaf of the results, its number among the outputs of the graph, or the value itself in a tuple.
        in_spec, out_spec: the structures of arguments and results.
    """

    module: fx.GraphModule
    state: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    arguments: tuple[Argument, ...]
    written: tuple[str, ...]
    ranges: Mapping[str, tuple[int | None, int | None]]
    results: tuple[int | tuple[Any], ...]
    in_spec: Any
    out_spec: Any


def entry_graph(program: ExportedProgram, label: str, freeze: bool) -> EntryGraph:
    """Return the graph of an exported program.

    Raises:
        CompileError: the program has effects, or arguments that are objects.
    """
    with _without_constant_masks(program.graph_module):
        program = program.run_decompositions({**private.composite_decompositions(), **DECOMPOSITIONS})
    module, signature = program.graph_module, program.graph_signature
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    written = {spec.target for spec in signature.output_specs if spec.kind in _MUTATIONS}
    state: list[str] = []
    tensors: list[torch.Tensor] = []
    arguments: list[Argument] = []
    placeholders: list[fx.Node] = []
    weights = _weights(program)
    for node in [node for node in module.graph.nodes if node.op == "placeholder"]:
        spec = specs[node.name]
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(_argument(spec.arg, label))
            if arguments[-1].value is ...:
                placeholders.append(node)
            else:
                module.graph.erase_node(node)
        elif spec.kind in _WEIGHTS:
            if spec.target in written or (not freeze and spec.kind is not InputKind.CONSTANT_TENSOR):
                state.append(str(spec.target))
                tensors.append(weights[str(spec.target)])
                placeholders.insert(len(state) - 1, node)
            else:
                _make_constant(module, node, weights[str(spec.target)])
        else:
            raise CompileError(
                f"opkit.export: {label} takes {node.name}, a {spec.kind.name.lower()}, which no file holds."
            )
    results = _set_results(module, signature, label)
    erase_checks(module)
    _sort_placeholders(module, placeholders)
    module.graph.eliminate_dead_code()
    module.recompile()
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    changed = tuple(str(s.target) for s in signature.output_specs if s.kind is OutputKind.USER_INPUT_MUTATION)
    ranges = {str(symbol): private.limits(values) for symbol, values in program.range_constraints.items()}
    return EntryGraph(
        module, tuple(state), tuple(tensors), tuple(arguments), changed, ranges, results, in_spec, out_spec
    )  # fmt: skip


@contextlib.contextmanager
def _without_constant_masks(module: fx.GraphModule) -> Iterator[None]:
    """Remove masks of attention that are constant, until the block ends: the program is the user's."""
    original = module.graph
    module.graph = copy.deepcopy(original)
    try:
        remove_constant_masks(module)
        yield
    finally:
        module.graph = original
        module.recompile()


def _weights(program: ExportedProgram) -> Mapping[str, torch.Tensor]:
    found = {**program.constants, **program.state_dict}
    return {name: value.detach() for name, value in found.items() if isinstance(value, torch.Tensor)}


def _argument(spec: Any, label: str) -> Argument:
    if isinstance(spec, ConstantArgument):
        return Argument(spec.name, spec.value)
    if isinstance(spec, SymBoolArgument | SymFloatArgument) or not hasattr(spec, "name"):
        raise CompileError(f"opkit.export: {label} takes {spec}, which is neither a tensor nor a number.")
    if not isinstance(spec, TensorArgument) and not type(spec).__name__ == "SymIntArgument":
        raise CompileError(
            f"opkit.export: {label} takes {spec.name}, a {type(spec).__name__.removesuffix('Argument')}."
        )
    return Argument(spec.name)


def _make_constant(module: fx.GraphModule, node: fx.Node, tensor: torch.Tensor) -> None:
    """Put an attribute of the module in the place of a placeholder."""
    new = add_constant(module, node, tensor)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def add_constant(module: fx.GraphModule, before: fx.Node, tensor: torch.Tensor) -> fx.Node:
    """Add a constant tensor to a graph, and return its node."""
    name = f"constant_{len(module._buffers)}"
    module.register_buffer(name, tensor, persistent=False)
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(name)
    node.meta = {"val": tensor}
    return node


def erase_checks(module: fx.GraphModule) -> None:
    """Remove the checks of an exported graph: inputs are checked before it runs."""
    for node in reversed(list(module.graph.nodes)):
        if getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in _CHECKS and not node.users:
            module.graph.erase_node(node)


def _set_results(module: fx.GraphModule, signature: Any, label: str) -> tuple[int | tuple[Any], ...]:
    """Write what the program mutates inside of the graph, and return its other results as in ``EntryGraph.results``."""
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    nodes = {node.name: node for node in module.graph.nodes}
    inputs = {str(spec.target): spec.arg.name for spec in signature.input_specs if spec.target is not None}
    kept: list[Any] = []
    results: list[int | tuple[Any]] = []
    for spec, value in zip(signature.output_specs, output.args[0], strict=True):
        if spec.kind in _MUTATIONS:
            is_input = spec.kind is OutputKind.USER_INPUT_MUTATION
            target = nodes[str(spec.target) if is_input else inputs[str(spec.target)]]
            with module.graph.inserting_before(output):
                copy = module.graph.call_function(torch.ops.aten.copy_.default, (target, value))
            copy.meta = {"val": target.meta["val"]}
        elif spec.kind is not OutputKind.USER_OUTPUT:
            raise CompileError(f"opkit.export: {label} returns a {spec.kind.name.lower()}, which no file holds.")
        elif isinstance(value, fx.Node):
            results.append(len(kept))
            kept.append(value)
        else:
            results.append((value,))
    output.args = (tuple(kept),)
    return tuple(results)


def _sort_placeholders(module: fx.GraphModule, order: Sequence[fx.Node]) -> None:
    first = next(iter(module.graph.nodes))
    for node in order:
        if node is first:
            first = first.next
        else:
            first.prepend(node)
