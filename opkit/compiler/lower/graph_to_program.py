"""Lower a graph to a program: each node by the rule of its operator, or as a call of the operator."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from opkit.compiler.ir.dtypes import is_bits, is_complex
from opkit.compiler.ir.graph import FloatType, Graph, Node, OpaqueValue, Ref, TensorType, TypeName, refs
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.program import FROM_STORAGE, WITH_GAPS, Buffer, Program, Strided
from opkit.compiler.lower.builder import Builder, viewed
from opkit.compiler.lower.registry import NoRule, Rule, WrongResult
from opkit.compiler.lower.rewrites import simplify_program
from opkit.compiler.lower.rules import ALIASING, COMPLEX, EXTERNS, RULES, views
from opkit.compiler.lower.rules.epilogues import with_epilogues
from opkit.compiler.lower.rules.views import base_of
from opkit.compiler.lower.target import PLAIN, LoweringTarget
from opkit.compiler.lower.tensors import Stored, Tensor, is_dense, memories, whole

_AS_STRIDED = "aten.as_strided.default"
_MOVES = frozenset({*views.TABLE, "aten.clone.default", "aten.copy_.default"})


def lower(
    graph: Graph, target: LoweringTarget = PLAIN, tidy: bool = True, rules: Mapping[str, Rule] | None = None
) -> Program:
    """Return the program that computes a graph.

    Args:
        graph: the graph.
        target: the choices for the machine.
        tidy: run the passes that simplify expressions and remove repeated and dead steps.
        rules: the rules of operators that the compiler has none for, by name.
    """
    known = {**RULES, **rules} if rules else RULES
    graph, reasons = with_epilogues(graph, target) if target.device == "cuda" else (graph, {})
    first = graph.nodes[0] if graph.nodes else Node("nothing", "", (), {}, None)
    builder = Builder(graph, first, target, reasons=reasons)
    bases = _bases(graph)
    inputs: list[str | Index | OpaqueValue] = []
    for node in graph.nodes:
        builder.node = node
        value = _input(builder, node) if node.target in ("input", "constant") else _lowered(builder, node, known)
        if node.name in bases and isinstance(value, Tensor):
            value = _in_eager_layout(builder, value)
        builder.values[node.name] = value
        if node.target == "input":
            inputs.append(node.name if isinstance(value, Tensor) else value)
    program = builder.program(inputs, _outputs(builder))
    return simplify_program(program) if tidy else program


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _input(b: Builder, node: Node) -> Any:
    kind = node.result
    if not isinstance(kind, TensorType):
        return kind
    role = "number" if _is_number(b, node, kind) else node.target
    return whole(b.add_buffer(Buffer(node.name, kind.dtype, kind.shape, kind.strides, role)))


def _is_number(b: Builder, node: Node, kind: TensorType) -> bool:
    """Return whether an input is a float64 on the CPU that the graph does not write to."""
    if node.target != "input" or (kind.dtype, kind.shape, kind.device) != ("f64", (), "cpu"):
        return False
    return not any(other.is_in_place and Ref(node.name) in refs((other.args, other.kwargs)) for other in b.graph.nodes)


def _lowered(b: Builder, node: Node, rules: Mapping[str, Rule]) -> Any:
    if isinstance(node.result, Index) and node.target not in EXTERNS:
        return node.result
    if isinstance(node.result, FloatType):
        return rules[node.target](b, *_resolved(b, node.args))
    for written in node.writes:
        _own_memory(b, written)
    mutated = _mutated(b, node)
    for buffer in mutated:
        _copy_before_write(b, buffer)
    steps, buffers = len(b.steps), len(b.buffers)
    try:
        if node.target in EXTERNS:
            raise NoRule("")
        if node.target != "getitem":  # taking one of several results computes nothing
            rules = _for_operands(b, node, rules)
        return checked(node, rules[node.target](b, *_resolved(b, node.args), **_resolved(b, node.kwargs)))
    except NoRule as why:
        for name in list(b.buffers)[buffers:]:
            del b.buffers[name]
        del b.steps[steps:]
        aliases = node.target in ALIASING
        return b.extern(str(why), mutated=frozenset(mutated), aliases=aliases, **EXTERNS.get(node.target, {}))


def _for_operands(b: Builder, node: Node, rules: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """Return the rules for the node's operands and results: those of complex numbers if one is complex.

    Raises:
        NoRule: one is on another device than the graph, memory between the elements is read, or there is no rule.
    """
    kinds = [k for k in _flat(node.result) if isinstance(k, TensorType)]
    operands = list(refs((node.args, node.kwargs)))
    given = [kind for ref in operands for kind in _flat(b.graph.results[ref.name]) if isinstance(kind, TensorType)]
    if any(k.device != b.target.device for k in [*kinds, *given]):
        raise NoRule(f"not on the device of the graph, {b.target.device}")
    has_gaps = node.target in WITH_GAPS and not all(is_dense(k.shape, k.strides) for k in kinds)
    if has_gaps and node.name in _read_by_storage(b.graph):
        raise NoRule("as_strided may read what lies between the elements of a copy")
    dtypes = [v.dtype for ref in operands for v in _flat(b.values[ref.name]) if _is_tensor(v)]
    dtypes += [k.dtype for k in kinds]
    if any(map(is_bits, dtypes)) and node.target not in _MOVES:
        raise NoRule("no arithmetic of float8")
    if any(map(is_complex, dtypes)):
        rules, missing = COMPLEX, "complex numbers"
    else:
        missing = "no rule"
    if node.target not in rules:
        raise NoRule(missing)
    return rules


def _read_by_storage(graph: Graph) -> frozenset[str]:
    """Return the nodes whose memory as_strided reads: those of its tensor, and those that were copied to it with their gaps."""
    nodes = {node.name: node for node in graph.nodes}
    pending = [node.args[0].name for node in graph.nodes if node.target.startswith("aten.as_strided")]
    found: set[str] = set()
    while pending:
        node = base_of(nodes[pending.pop()], nodes, ALIASING)
        if node.name not in found:
            found.add(node.name)
            if node.target in FROM_STORAGE:
                pending.append(node.args[0].name)
    return frozenset(found)


def checked(node: Node, value: Any) -> Any:
    """Return a rule's result, after checking it against the graph.

    Raises:
        WrongResult: its type is not that of the node's result.
    """
    if len(_flat(value)) != len(_flat(node.result)):
        raise WrongResult(f"the rule returns {len(_flat(value))} results, the operator {len(_flat(node.result))}")
    for found, kind in zip(_flat(value), _flat(node.result), strict=True):
        if isinstance(found, Tensor) and isinstance(kind, TensorType):
            if (found.dtype, found.shape) != (kind.dtype, kind.shape):
                raise WrongResult(f"the rule returns {_shown(found)}, the operator {_shown(kind)}")
        elif isinstance(kind, TensorType) or isinstance(found, Tensor):
            raise WrongResult(f"the rule returns {_shown(found)}, the operator {_shown(kind)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, Tensor | TensorType):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _resolved(b: Builder, argument: Any) -> Any:
    """Replace references by values, dtypes by names, and known sizes by numbers in an argument."""
    if isinstance(argument, Ref):
        return b.values[argument.name]
    if isinstance(argument, Index):
        return argument if argument.constant is None else argument.constant
    if isinstance(argument, TypeName):
        return argument.name
    if isinstance(argument, dict):
        return {key: _resolved(b, a) for key, a in argument.items()}
    if isinstance(argument, list | tuple) and not isinstance(argument, OpaqueValue):
        return type(argument)(_resolved(b, a) for a in argument)
    return argument


# ---- writes ----------------------------------------------------------------------------------------------------------


def _mutated(b: Builder, node: Node) -> list[str]:
    """Return the buffers that an in-place node writes to: of its ``writes``, or of its first argument.

    That may be a list of tensors; the fused steps of optimisers write to several lists.
    """
    if not node.is_in_place:
        return []
    lists = node.args if node.target.startswith("aten._fused") else node.args[:1]
    values = [b.values[ref.name] for ref in (node.writes or refs(lists))]
    return list(dict.fromkeys(name for v in values if isinstance(v, Tensor) for name in memories(v)))


def _own_memory(b: Builder, written: Ref) -> None:
    """Give a value memory that an operator can write to, unless it has some: a copy in eager mode may be none here."""
    value = b.values[written.name]
    if _is_copy(value) or value.strided() is None:
        b.values[written.name] = b.materialised(value)


def _copy_before_write(b: Builder, buffer: str) -> None:
    """Copy the values that are views of the buffer here and have memory of their own in eager mode."""
    for name, value in b.values.items():
        if isinstance(value, Tensor) and buffer in memories(value) and _is_copy(value):
            b.values[name] = b.materialised(value)


def _is_copy(tensor: Tensor) -> bool:
    return any(isinstance(leaf.source, Stored) and leaf.source.copied for leaf in tensor.leaves)


# ---- results ---------------------------------------------------------------------------------------------------------


def _bases(graph: Graph) -> frozenset[str]:
    """Return the nodes whose memory results are views of: several results, or one that does not fill it."""
    nodes = {node.name: node for node in graph.nodes}
    found = collections.Counter[str]()
    for output in graph.outputs[: graph.fixed]:
        if isinstance(output, Ref) and isinstance(kind := nodes[output.name].result, TensorType):
            base = base_of(nodes[output.name], nodes, ALIASING)
            found[base.name] += 1 if is_dense(kind.shape, kind.strides) else 2
    return frozenset(name for name, count in found.items() if count > 1)


def _in_eager_layout(b: Builder, tensor: Tensor) -> Tensor:
    """Return the result of the node in memory with the strides of eager mode, copied if it is not in such memory already."""
    kind, strided = b.result(), tensor.strided()
    if strided is not None and not _is_copy(tensor) and _same_layout(strided, kind):
        return tensor
    return b.materialised(tensor, kind.strides)


def _outputs(b: Builder) -> list[Any]:
    types = {node.name: node for node in b.graph.nodes}
    shared = _shared(b)
    outputs: list[Any] = []
    for number, output in enumerate(b.graph.outputs):
        if not isinstance(output, Ref):
            outputs.append(output)
            continue
        b.node = types[output.name]
        value = b.values[output.name]
        fixed = b.graph.fixed is None or number < b.graph.fixed
        outputs.append(_output(b, value, fixed, shared, types) if isinstance(value, Tensor) else value)
    return outputs


def _shared(b: Builder) -> frozenset[str]:
    """Return the buffers whose memory several results share: a write to one result changes the others."""
    results = [b.values[output.name] for output in b.graph.outputs if isinstance(output, Ref)]
    tensors = {id(value): value for value in results if isinstance(value, Tensor)}
    found = collections.Counter(name for tensor in tensors.values() for name in memories(tensor))
    return frozenset(name for name, count in found.items() if count > 1)


def _output(b: Builder, tensor: Tensor, fixed: bool, shared: frozenset[str], nodes: Mapping[str, Node]) -> Strided:
    """Return a result as the graph describes it: with its strides if they are fixed, and copied if eager mode copies it."""
    kind = b.node.result if fixed and isinstance(b.node.result, TensorType) else None
    if kind is not None and not is_dense(kind.shape, kind.strides):
        shared |= frozenset(memories(tensor))  # a view of a larger memory, as its strides show
    strided = tensor.strided()
    if strided is None and (found := viewed(b, tensor, shared)) is not None:
        strided = found.strided()
    if strided is not None and not _is_copy(tensor) and (kind is None or _same_layout(strided, kind)):
        return strided
    if kind is not None and (found := _in_base(b, kind, nodes)) is not None:
        return found
    return b.strided(b.materialised(tensor, b.result().strides))


def _in_base(b: Builder, kind: TensorType, nodes: Mapping[str, Node]) -> Strided | None:
    """Return a result of ``as_strided``, or a view of one, in the memory of its base, if that lies there as in eager mode.

    With symbolic sizes, its elements may be known by quotients only, which are no strides.
    """
    view = base_of(b.node, nodes, ALIASING - {_AS_STRIDED})
    base = base_of(view, nodes, ALIASING)
    whole, value = base.result, b.values[base.name]
    if view.target != _AS_STRIDED or not isinstance(whole, TensorType) or not isinstance(value, Tensor):
        return None
    strided = value.strided()
    if strided is None or _is_copy(value) or not _same_layout(strided, whole) or whole.dtype != kind.dtype:
        return None
    return Strided(strided.buffer, kind.shape, kind.strides, strided.offset + kind.offset - whole.offset)


def _same_layout(strided: Strided, kind: Any) -> bool:
    if not isinstance(kind, TensorType) or any(n == 0 for n in kind.shape):
        return True
    return all(n == 1 or a == b for n, a, b in zip(kind.shape, strided.strides, kind.strides, strict=True))


# ---- arguments -------------------------------------------------------------------------------------------------------


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
