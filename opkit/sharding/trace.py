"""Trace a reference to a graph of aten operators with one symbol for each size of its arguments.

The sizes of two arguments have one symbol in the end only if the reference demands that they are equal. So a symbol stands for a
size as the author means it ("batch", "d"), whether or not there are annotations.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit.op.rules import vjp
from opkit.op.torch_private import symbolic_tracing
from opkit.sharding.propagation import MAPPED_OPS

_TORCH = str(Path(torch.__file__).parent)


@dataclasses.dataclass
class Trace:
    """A traced reference: its graph, the nodes of its tensor arguments and results, and what it demands of sizes.

    Attributes:
        graph: aten operators; each node has its value, with symbols for sizes, in ``meta["val"]``.
        inputs: the nodes of the tensor arguments.
        outputs: the nodes of the tensor results.
        written: the last value of each argument that is written to, by its position in ``inputs``.
        env: the symbols.
        branches: what the reference compares with a size, beyond the equality of two sizes.
        demands: what torch demands of sizes so that it can reshape a tensor.
        fixed: the sizes (argument, dimension) of which the reference uses the number.
    """

    graph: Any
    inputs: list[Any]
    outputs: list[Any]
    written: dict[int, Any]
    env: Any
    branches: list[Any]
    demands: list[Any]
    fixed: list[tuple[int, int]]

    @property
    def general(self) -> bool:
        """Whether the graph is that of all calls with these numbers of dimensions."""
        return not self.branches and not self.fixed

    def expression(self, size: Any) -> Any:
        """Return a size as an expression of the symbols that stand for it."""
        import sympy

        return self.env.replace(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)

    def shape(self, value: Any) -> tuple[Any, ...]:
        """Return the shape of a fake tensor as expressions."""
        return tuple(map(self.expression, value.shape))


def trace(reference: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
    """Trace a function of schema values; the tensors may be fake, as only sizes, strides, dtypes and devices are read."""
    from torch._decomp import decomposition_table
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    tensors, function = vjp.flat_reference(reference, args, kwargs)
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(
            tensor,
            source=ConstantSource(f"argument_{i}"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.ndim),
        )
        for i, tensor in enumerate(tensors)
    ]
    table = {op: rule for op, rule in decomposition_table.items() if not _known(op)}

    def with_arguments(*inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return function(*inputs), list(inputs)  # functionalisation returns an argument's last value

    functional = dispatch_functionalize(with_arguments, FunctionalTensorMode())
    maker = make_fx(functional, decomposition_table=table, _allow_non_fake_inputs=True)
    with vjp.TRACER, symbolic_tracing(mode), torch.no_grad():
        module = maker(*fakes)
    return _read(module.graph, mode.shape_env)


def _known(op: Any) -> bool:
    return (
        torch.Tag.pointwise in getattr(op, "tags", ())
        or getattr(getattr(op, "overloadpacket", None), "__name__", "") in MAPPED_OPS
    )


def _read(graph: Any, env: Any) -> Trace:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    outputs, last = output.args[0]
    written = {i: node for i, (node, at_first) in enumerate(zip(last, inputs, strict=True)) if node is not at_first}
    branches, demands = _decisions(env)
    made = Trace(graph, inputs, list(outputs), written, env, branches, demands, [])
    shapes = [(made.shape(node.meta["val"]), node.meta["val"].shape) for node in inputs]
    made.fixed.extend(
        (i, dim)
        for i, (shape, sizes) in enumerate(shapes)
        for dim, size in enumerate(sizes)
        if isinstance(size, torch.SymInt) and not shape[dim].free_symbols
    )
    return made


def _decisions(env: Any) -> tuple[list[Any], list[Any]]:
    """Return what the reference compares with a size, and what torch demands of sizes so that it can reshape a tensor.

    What torch compares to choose between equal ways of computing the same, such as a view and a copy, is neither.
    """
    import sympy

    branches: list[Any] = []
    demands: list[Any] = []
    for guard in env.guards:
        expr = env.simplify(guard.expr)
        inside = _TORCH in str(getattr(guard.sloc, "framework_loc", "") or "")
        if expr in (True, False) or (inside and not expr.has(sympy.Eq)):
            continue
        equations = expr.atoms(sympy.Eq)
        demanded = inside and all(_quotient(each) is not None for each in equations)
        (demands if demanded else branches).append(expr)
    return branches, demands


def _quotient(equation: Any) -> Any:
    """Return the quotient of the two sizes of which an equation demands that one is a multiple of the other, else None."""
    import sympy

    left: Any = equation.args[0]
    right: Any = equation.args[1]
    if right.is_zero and left.func.__name__ in ("Mod", "PythonMod"):
        left, right = left.args
    elif (
        not (left.free_symbols and (right.free_symbols or right.is_Integer))
        or left.has(sympy.floor)
        or type(left).__name__ == "FloorDiv"
    ):
        return None
    return sympy.cancel(left / right)


def demands_of(expr: Any, symbols: frozenset[Any]) -> bool:
    """Return whether what torch demands of sizes depends on ``symbols``: those that cancel do not matter."""
    import sympy

    return any(_quotient(equation).free_symbols & symbols for equation in expr.atoms(sympy.Eq))
