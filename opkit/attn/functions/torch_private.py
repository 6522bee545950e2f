"""This module holds every private torch name that tracing users' functions needs, as read in torch 2.13.0 and 2.14."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._higher_order_ops.base_hop import BaseHOP as BaseHOP
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from opkit.compiler.capture.conversion import capture
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.target import LoweringTarget

DataDependent = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where a function reads the value of a fake tensor."""


def allow_aliases(operator: BaseHOP) -> None:
    """Let what Dynamo passes to a higher-order operator be views of one tensor, such as queries, keys and values of one product.

    Dynamo refuses views for classes that it does not know by name, since AOTAutograd may trace their subgraphs as functions of
    separate tensors. A subgraph that the operator itself runs, and that does not mutate, may have them.
    """
    from torch._dynamo.variables import higher_order_ops  # Dynamo, which is large, is imported already where it traces

    class Variable(higher_order_ops.BaseHOPVariable):
        supports_aliasing = True

    higher_order_ops._hop_name_to_variable_class[operator.__name__] = Variable  # pyright: ignore[reportPrivateUsage]


class Writes(Exception):
    """A function writes to a tensor."""


class _NoteReads(TorchFunctionMode):
    """Notes whether a function reads the values of a tensor that is not fake, which another call may change."""

    reads = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads |= getattr(func, "__name__", "") in _READS
        return func(*args, **(kwargs or {}))


_READS = frozenset(
    ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__dlpack__",
     "data_ptr", "is_nonzero", "equal", "allclose")
)  # fmt: skip


class _RefuseWrites(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise Writes(str(func))
        return func(*args, **(kwargs or {}))


def traced_graph(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    tensors: Sequence[Tensor],
    device: torch.device,
) -> tuple[Any, bool]:
    """Return a function's ATen graph, and whether it may depend on the values of tensors that the function reads.

    Args:
        function: takes tensors; real ones that it reads otherwise are constants of the graph.
        shapes: the shapes and dtypes of its first arguments, on ``device``.
        tensors: stand for its other arguments, which are tensors like these.
        device: of the call.
    """
    mode = detect_fake_mode(list(tensors)) or FakeTensorMode()

    noted = _NoteReads()

    def guarded(*arguments: Tensor) -> Any:
        with _RefuseWrites(), noted:
            return function(*arguments)

    known, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with _disable_current_modes(), mode, torch.no_grad():
            arguments = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            arguments += [torch.empty(_sizes(x), dtype=x.dtype, device=x.device) for x in tensors]
            return make_fx(guarded, tracing_mode="real", _allow_non_fake_inputs=True)(*arguments), noted.reads
    finally:
        mode.allow_non_fake_inputs = known


def _sizes(x: Tensor) -> list[int]:
    """Return the sizes of a tensor; of those that are symbolic, examples."""
    return [n if type(n) is int else n.node.hint or 2 for n in x.shape]  # pyright: ignore[reportAttributeAccessIssue]


def lowered(graph: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the compiler's program of a graph, and its constants by name."""
    captured = capture(graph, "a function of attention")
    target = LoweringTarget("cpu" if captured.device.type == "cpu" else "cuda")
    return lower(captured.graph, target), captured.constants


# ---- functions of rows -------------------------------------------------------------------------------------------------


class Replaced(TorchFunctionMode):
    """Calls of torch get other tensors in place of some."""

    def __init__(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        super().__init__()
        self._new = {id(each): other for each, other in zip(old, new, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda x: self._new.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


def traced(function: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]]) -> torch.fx.GraphModule:
    """Return the ATen graph of a function of tensors, which are made without memory.

    Raises:
        Writes: it writes to a tensor.
    """
    from opkit.compiler.capture.decompositions import DECOMPOSITIONS  # which only functions of rows need

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _disable_current_modes(), mode, torch.inference_mode(False), torch.no_grad(), _without_loops():
        graph = make_fx(function, DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs())
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default):
        if _writes_every_element(node):
            node.replace_all_uses_with(node.args[2])
    graph.graph.eliminate_dead_code()
    written = [str(node.target) for node in graph.graph.nodes if getattr(_schema(node), "is_mutable", False)]
    if written:
        raise Writes(written[0])
    return graph


@contextlib.contextmanager
def _without_loops() -> Iterator[None]:
    """Let vmap raise an error where it would call an operator for one row after another."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def _schema(node: Any) -> Any:
    return getattr(node.target, "_schema", None)


def _writes_every_element(node: Any) -> bool:
    """Return whether a node adds one value to each zero of a tensor, as the gradient of ``gate[b, h, q_idx]`` does."""
    zeros, indices, values, *accumulates = node.args
    shape = zeros.meta["val"].shape
    if accumulates != [True] or zeros.target != torch.ops.aten.new_zeros.default or values.meta["val"].shape != shape:
        return False

    def counts(dim: int, index: Any) -> bool:
        own = tuple(index.meta["val"].shape) if index is not None else ()
        while index is not None and index.target == torch.ops.aten.view.default:
            index = index.args[0]
        if index is None or index.target != torch.ops.aten.arange.default:
            return False
        return index.args == (shape[dim],) and own == (shape[dim], *[1] * (len(indices) - 1 - dim))

    return all(counts(dim, index) for dim, index in enumerate(indices))


def with_symbols(graph: torch.fx.GraphModule, primes: Mapping[int, int]) -> torch.fx.GraphModule:
    """Return a graph whose sizes that are multiples of primes are products with symbols; ``primes`` has an example of each."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    symbols = {}
    for prime, example in primes.items():
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        symbols[prime] = mode.from_tensor(torch.empty(example, device="meta"), symbolic_context=dynamic).shape[0]
    known: dict[int, Any] = {}

    def size(n: Any) -> Any:
        if type(n) is not int or not n:
            return n
        if n not in known:
            left, factors = n, []
            for prime, symbol in symbols.items():
                while left % prime == 0:
                    left //= prime
                    factors.append(symbol)
            known[n] = math.prod(factors, start=left)
        return known[n]

    def value(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape, strides = [size(n) for n in x.shape], [size(n) for n in x.stride()]
        return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)

    with mode:
        for node in graph.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(value, node.meta["val"])
            schema = _schema(node)
            if schema is None:
                continue
            counts = node.target.overloadpacket is torch.ops.aten.arange
            names = [each.name for each in schema.arguments if counts or "int" in str(each.real_type)]
            node.args = tuple(
                tree_map(size, each) if schema.arguments[k].name in names else each for k, each in enumerate(node.args)
            )
            node.kwargs = {n: tree_map(size, each) if n in names else each for n, each in node.kwargs.items()}
    return graph


def text_of(graph: torch.fx.GraphModule) -> str:
    """Return a text that is equal for graphs that compute the same."""

    def described(value: Any) -> Any:
        return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else value

    lines = []
    for node in graph.graph.nodes:
        held = getattr(graph, node.target).tolist() if node.op == "get_attr" else None
        lines.append(
            (node.op, str(node.target), node.args, node.kwargs, tree_map(described, node.meta.get("val")), held)
        )
    return repr(lines)


def compiled(graph: torch.fx.GraphModule) -> Callable[[list[Tensor]], list[Tensor]]:
    """Start to compile a graph, and return the function that runs it, which empties the list of its inputs.

    Raises:
        CompileError: the compiler has no kernel for it.
    """
    from opkit.compiler.backend import compile_fx_graph
    from opkit.compiler.options import CompileOptions

    return compile_fx_graph(graph, (), "inference", CompileOptions(strict=True, cuda_graphs=False))
