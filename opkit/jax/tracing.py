"""Trace functions of torch, and their backwards, to graphs of ATen operators for which there are functions of JAX.

A graph is that of one set of shapes, dtypes and other arguments. It has no writes, and opkit's operators are nodes of it, so that
each keeps its kernels and its gradient. An operator of ATen for which there is no function of JAX is decomposed as torch does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from opkit.errors import MutationError, OpkitError, RuleError
from opkit.jax import interpreter
from opkit.jax.torch_private import UNKNOWN_SIZES, FakeTensorMode, decomposition_table, make_fx
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.rules import vjp
from opkit.op.trace.reference_trace import line_at_fault

_STOP = torch.ops.aten.detach_copy.default
_DETACHES = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function of torch: its leaves, fake tensors in place of arrays, their structure, and where the tensors are."""

    leaves: tuple[Any, ...]
    spec: Any
    at: tuple[int, ...]

    @property
    def tensors(self) -> list[Any]:
        """The fake tensors."""
        return [self.leaves[i] for i in self.at]

    def arguments(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """Return the positional and keyword arguments with these tensors."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced function. ``leaves`` and ``spec`` are its results, with ``_ARRAY`` in place of the graph's tensors."""

    module: fx.GraphModule
    leaves: tuple[Any, ...]
    spec: Any

    def results(self, arrays: Sequence[Any]) -> Any:
        """Return the results with these arrays, in the function's structure."""
        given = iter(arrays)
        leaves = [next(given) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


_ARRAY = object()


class _StoppedGradients(TorchFunctionMode):
    """Record where a function cuts a gradient off, which a graph does not show: by detach(), or without grad mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _DETACHES or not torch.is_grad_enabled():
            return pytree.tree_map(_stopped, result)
        return result


def _stopped(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return _STOP(value) if floating else value


def trace(body: Callable[..., Any], call: Call, name: str) -> Graph:
    """Trace ``body`` for calls like ``call``.

    Raises:
        RuleError: it draws random numbers, its sizes depend on data, it leaves torch, or it calls what JAX has no function for.
        MutationError: it writes to an argument.
    """
    results: list[Any] = []

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = call.arguments(tensors)
        with _StoppedGradients():
            leaves, spec = pytree.tree_flatten(body(*args, **kwargs))
        results[:] = [_ARRAY if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    module = _traced(flat, call.tensors, name)
    return Graph(module, tuple(results[0]), results[1])


@dataclasses.dataclass(frozen=True)
class Backward:
    """A traced backward: a graph from arguments and gradients of results to gradients of arguments.

    Attributes:
        module: its placeholders are the tensor arguments, then a gradient for each result; its results are those of the call,
            then the gradients of arguments.
        forward: the node that calls the operator, whose results are known.
        differentiable: which results have a gradient.
    """

    module: fx.GraphModule
    forward: fx.Node | None
    differentiable: list[bool]


def trace_backward(
    body: Callable[..., Any], call: Call, of: Sequence[int], name: str, operator: Operator | None = None
) -> Backward:
    """Trace the gradients that torch's autograd gives a call of ``body``; if that is an operator, its results are known.

    ``of`` are the numbers of the tensor arguments that need a gradient.

    Raises:
        RuleError: as for :func:`trace`.
    """
    differentiable: list[bool] = []
    fakes = call.tensors

    def results_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = [x.detach().requires_grad_(i in of) for i, x in enumerate(tensors)]
        args, kwargs = call.arguments(inputs)
        with torch.enable_grad():
            leaves = pytree.tree_leaves(body(*args, **kwargs))
        return inputs, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def backward(again: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
        inputs, outputs = results_of(tensors[: len(fakes)])
        pairs = [(x, g) for x, g in zip(outputs, tensors[len(fakes) :], strict=True) if x.requires_grad]
        differentiable[:] = [x.requires_grad for x in outputs]
        wanted = [inputs[i] for i in of]
        if not pairs:
            return [*outputs, *[torch.zeros_like(x) for x in wanted]]
        with _StoppedGradients() if again else contextlib.nullcontext():
            gradients = torch.autograd.grad(
                [x for x, _ in pairs], wanted, [g for _, g in pairs], create_graph=again, allow_unused=True
            )
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True)]
        return [x.detach() for x in (*outputs, *gradients)]

    with _apart():
        outputs = [x.detach() for x in results_of(fakes)[1]]
    try:  # with torch's formulas that can be differentiated again, and with what the backward cuts off
        module = _traced(functools.partial(backward, True), [*fakes, *outputs], name)
    except RuleError:  # such as where a backward that opkit derived takes part
        module = _traced(functools.partial(backward, False), [*fakes, *outputs], name)
    return Backward(module, None if operator is None else _call_of(module, operator), differentiable)


def _call_of(module: fx.GraphModule, operator: Operator) -> fx.Node | None:
    """Return the node that calls the operator, from the first result of its call."""
    node: Any = next(iter(module.graph.find_nodes(op="output"))).args[0][0]
    while isinstance(node, fx.Node) and node.args and node.target is not operator.overload:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target is operator.overload else None


def has_own_gradient(body: Callable[..., Any], call: Call, name: str) -> bool:
    """Return whether an ``autograd.Function`` takes part, whose backward may be another than the derivative of its forward."""
    with _explained(name), _apart():
        floating = [x.is_floating_point() or x.is_complex() for x in call.tensors]
        inputs = [x.detach().requires_grad_(f) for x, f in zip(call.tensors, floating, strict=True)]
        args, kwargs = call.arguments(inputs)
        results = pytree.tree_leaves(body(*args, **kwargs))
    waiting = [x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        # opkit's operators have nodes that are such functions; they are nodes of the graph, with their own gradients
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not hasattr(node, "opkit_call"):
            return True
        following = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(following)
        waiting += following
    return False


# ---- graphs ----------------------------------------------------------------------------------------------------------


@functools.cache
def _decompositions() -> dict[Any, Any]:
    table = decomposition_table.items()
    # what writes is left to functionalisation
    return {op: rule for op, rule in table if interpreter.name_of(op) not in interpreter.ROWS and not _mutable(op)}


def fake(mode: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data, on the CPU."""
    with mode, torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype)


def new_mode() -> Any:
    """Return a mode for fake tensors, which may meet the tensors that a reference holds."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Trace apart from the modes of torch that the caller is in."""
    with private.no_modes(), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except OpkitError:
        raise
    except UNKNOWN_SIZES as error:
        raise RuleError(
            f"{name} cannot be a function of JAX: a size or a branch of it depends on the data of tensors"
            f"{_where(error)}. Compute with sizes that are known from the shapes alone, and with torch.where."
        ) from error
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise RuleError(
            f"{name} cannot be a function of JAX: tracing it raised {type(error).__name__}: {reason}{_where(error)}."
        ) from error


def _where(error: BaseException) -> str:
    line = line_at_fault(error, str(Path(__file__).parent))
    return f" ({line})" if line else ""


def _traced(function: Callable[..., Any], fakes: Sequence[Any], name: str) -> fx.GraphModule:
    with _explained(name), vjp.TRACER, _apart():
        module = make_fx(function, _allow_non_fake_inputs=True)(*fakes)
        for _ in range(3):  # decompositions write to tensors of their own
            pure = torch.func.functionalize(module) if any(map(_writes, module.graph.nodes)) else module
            module = make_fx(pure, decomposition_table=_decompositions(), _allow_non_fake_inputs=True)(*fakes)
            module.graph.eliminate_dead_code(is_impure_node=_stays)
            if not any(map(_writes, module.graph.nodes)):
                break
    _refuse(module, name)
    return module


def _stays(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or _writes(node)


def _writes(node: fx.Node) -> bool:
    return _mutable(node.target)


def _mutable(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _refuse(module: fx.GraphModule, name: str) -> None:
    for node in module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise RuleError(
                f"{name} cannot be a function of JAX: it draws random numbers from torch's generator ({node.target}), which JAX "
                "has not. Draw them outside, by jax.random, and pass them as an argument."
            )
        if node.op == "call_function" and _writes(node):
            raise MutationError(
                f"{name} cannot be a function of JAX: it writes to an argument ({node.target}), and arrays of JAX cannot be "
                "written to. Return the new value."
            )
    missing = interpreter.missing(module)
    if missing:
        raise RuleError(
            f"{name} cannot be a function of JAX: opkit has no function of JAX for {', '.join(missing)}. Write the reference "
            "with other operations, or add a row for it to opkit/jax/arrays.py."
        )
