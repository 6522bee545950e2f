"""Infer which arguments an operator writes to when it is defined.

The body is traced on small tensors made from its annotations, once for each combination of its flags; a fake tensor's version
counter shows writes through helpers, views and ``out=``. Without annotations, or where the trace leaves torch, the source is read
instead. Where neither proves anything the definition raises. (At run time ``dispatch.verification`` checks the first call of each
guard set.)

Reading the source is conservative: it proves something only if every call in the body is a torch function, a tensor method or a
helper whose source proves as much, and every write goes to a parameter by name. Anything else ends in "not proved", with
the first construct that was not understood.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import MutationUnknownError
from opkit.op.examples import values
from opkit.op.schema.signature import Signature
from opkit.op.trace import reference_trace

_VALUE_KINDS = ("int", "float", "str", "dtype", "device", "other")
_DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_",
    "poisson", "dropout", "dropout_", "alpha_dropout",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inference:
    """The arguments written to, and the origin of that knowledge."""

    mutates: tuple[str, ...]
    origin: str
    random: bool = False


def infer(operator: str, function: Callable[..., Any], signature: Signature, opaque: bool) -> Inference:
    """Infer which arguments ``function`` writes to.

    Raises:
        MutationUnknownError: neither a trace nor the source proves it.
    """
    reasons: list[str] = []
    if not opaque:
        traced = _by_tracing(function, signature, reasons)
        if traced is not None:
            return traced
    else:
        reasons.append("the operator is opaque")
    read = read_source(function, [p.name for p in signature.parameters])
    if read.proved:
        return Inference(tuple(read.mutates), "its source")
    reasons.append(f"its source does not prove it: {read.reason}")
    raise MutationUnknownError(
        f"{operator}: which arguments the function writes to could not be established ({'; '.join(reasons)}). "
        "Pass mutates_args=() if it writes to none of them, or their names, such as mutates_args=('x',)."
    )


def names_random(function: Callable[..., Any]) -> bool:
    """Return whether the function's own code names a torch function that draws random numbers.

    A hint for functions that are not traced at definition: the tag it leads to only keeps compilers from merging calls.
    """
    code = getattr(function, "__code__", None)
    return code is not None and not _DRAWS.isdisjoint(code.co_names)


def _by_tracing(function: Callable[..., Any], signature: Signature, reasons: list[str]) -> Inference | None:
    for choices in values.EXAMPLE_SIZES:
        combinations = values.calls_to_trace(signature, choices)
        if combinations is None:
            reasons.append("its annotations do not give every tensor's sizes and every argument an example value")
            return None
        inference = _trace_all(function, signature, combinations, reasons)
        if inference is not None:
            return inference
    return None


def _trace_all(
    function: Callable[..., Any], signature: Signature, combinations: list[Any], reasons: list[str]
) -> Inference | None:
    mutated: set[str] = set()
    random = False
    for args, kwargs in combinations:
        trace = reference_trace.trace(function, args, kwargs)
        if trace.opaque is not None:
            reasons.append(f"tracing it failed: {trace.opaque}")
            return None
        random |= trace.random
        owners = list(owners_of(signature, args, kwargs))
        mutated |= {owners[i] for i in trace.mutated}
    unseen = branches_on(function, [p.name for p in signature.parameters if p.kind in _VALUE_KINDS])
    if unseen:
        read = read_source(function, [p.name for p in signature.parameters])
        if not read.proved:
            reasons.append(f"it branches on {unseen}, and not every branch was traced")
            return None
        mutated |= set(read.mutates)
    ordered = tuple(p.name for p in signature.parameters if p.name in mutated)
    return Inference(ordered, "a trace of the reference", random)


def owners_of(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield the parameter of each tensor of a call, in flattened order."""
    positional = [p.name for p in signature.parameters if not p.keyword_only]
    for name, value in [*zip(positional, args, strict=False), *kwargs.items()]:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield name


# ---- reading the source ----------------------------------------------------------------------------------------------


_LEAVES_TORCH = {"numpy", "data_ptr", "__array__", "tolist", "set_", "storage", "untyped_storage", "__dlpack__", "data"}
_WRITES_UNSAID = {"batch_norm", "instance_norm"}  # they update running statistics among their arguments
_SAFE_BUILTINS = {"len", "range", "min", "max", "sum", "tuple", "list", "zip", "enumerate", "int", "float", "bool", "abs",
                  "isinstance", "getattr", "reversed", "sorted", "round", "slice", "str", "all", "any", "map"}  # fmt: skip
_FRESH = {"clone", "empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "empty", "zeros", "ones", "full",
          "full_like", "rand", "randn", "arange"}  # fmt: skip


@dataclasses.dataclass
class Reading:
    """The parameters written to; ``reason`` names the first construct that was not understood, and is empty if none."""

    mutates: set[str] = dataclasses.field(default_factory=set[str])
    reason: str = ""

    @property
    def proved(self) -> bool:
        """Whether the source proves that these are all writes."""
        return not self.reason


def read_source(function: Callable[..., Any], parameters: Sequence[str], depth: int = 0) -> Reading:
    """Read ``function``'s source for writes to ``parameters``."""
    tree = _tree(function)
    if tree is None:
        return Reading(reason="it cannot be read")
    reader = _SourceReader(function, parameters, depth)
    for statement in tree.body:
        reader.visit(statement)
    return reader.reading


def branches_on(function: Callable[..., Any], names: Iterable[str]) -> str:
    """Return the first of ``names`` that a condition in ``function`` depends on; empty where there is none."""
    tree = _tree(function)
    wanted = set(names)
    for node in ast.walk(tree) if tree is not None else ():
        test = getattr(node, "test", None) or getattr(node, "subject", None)
        for item in ast.walk(test) if isinstance(test, ast.AST) else ():
            if isinstance(item, ast.Name) and item.id in wanted:
                return item.id
    return ""


def _tree(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):  # no source, or a lambda cut out of an expression
        return None
    node = parsed.body[0] if parsed.body else None
    return node if isinstance(node, ast.FunctionDef) else None


class _SourceReader(ast.NodeVisitor):
    """Collects writes to parameters; notes the first construct that could hide one."""

    def __init__(self, function: Callable[..., Any], parameters: Sequence[str], depth: int) -> None:
        self.reading = Reading()
        self.parameters = set(parameters)
        self.fresh: set[str] = set()
        self.depth = depth
        scope = getattr(function, "__globals__", {})
        cells: Any = inspect.getclosurevars(function).nonlocals if isinstance(function, types.FunctionType) else {}
        self.scope: dict[str, Any] = {**vars(builtins), **scope, **cells}

    def _doubt(self, node: ast.AST, what: str) -> None:
        if not self.reading.reason:
            self.reading.reason = f"{what} on line {getattr(node, 'lineno', 0)} of the function"

    def _written(self, target: ast.expr, node: ast.AST) -> None:
        root = target
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id in self.parameters:
            self.reading.mutates.add(root.id)
        elif not (isinstance(root, ast.Name) and root.id in self.fresh):
            self._doubt(node, "a write to something that may be a view of an argument")

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, (ast.Subscript, ast.Attribute)):
                self._written(target, node)
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    self._rebound(name.id, node)
        self.visit(node.value)

    def _rebound(self, name: str, node: ast.Assign) -> None:
        if name in self.parameters and isinstance(node.targets[0], ast.Name):
            self._doubt(node, f"{name} is assigned to again")
        called = getattr(node.value, "func", None)
        if isinstance(node.value, ast.BinOp) or getattr(called, "attr", getattr(called, "id", "")) in _FRESH:
            self.fresh.add(name)
        else:
            self.fresh.discard(name)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._written(node.target, node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg == "out":
                self._written(keyword.value, node)
            elif keyword.arg is None or (keyword.arg == "inplace" and ast.unparse(keyword.value) != "False"):
                self._doubt(node, f"an argument {keyword.arg or '**'} that may request a write")
        self._called(node)
        self.generic_visit(node)

    def _called(self, node: ast.Call) -> None:
        target = self._resolve(node.func)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _WRITES_UNSAID:
            self._doubt(node, f"a call of {name}")
        elif target is None and isinstance(node.func, ast.Attribute):
            self._method(node, node.func)
        elif (getattr(target, "__module__", "") or "").split(".")[0] == "torch" or target in _torch_builtins(name):
            if name.endswith("_") and not name.startswith("__") and node.args:
                self._written(node.args[0], node)
        elif name in _SAFE_BUILTINS and target is getattr(builtins, name, None):
            pass
        else:
            self._helper(node, target, name)

    def _method(self, node: ast.Call, func: ast.Attribute) -> None:
        if func.attr in _LEAVES_TORCH or not hasattr(torch.Tensor, func.attr):
            self._doubt(node, f".{func.attr}()")
        elif func.attr.endswith("_") and not func.attr.startswith("__"):
            self._written(func.value, node)

    def _helper(self, node: ast.Call, target: Any, name: str) -> None:
        if not isinstance(target, types.FunctionType) or self.depth > 4 or node.keywords:
            self._doubt(node, f"a call of {name or 'something'}")
            return
        names = list(inspect.signature(target).parameters)
        inner = read_source(target, names, self.depth + 1)
        if not inner.proved:
            self._doubt(node, f"a call of {name}, where there is {inner.reason}")
        for parameter, argument in zip(names, node.args, strict=False):
            if parameter in inner.mutates:
                self._written(argument, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "data":
            self._doubt(node, ".data")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Ignore a ``raise``: writes in its expression do not matter, because the call fails."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._doubt(node, "a function defined inside")

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._doubt(node, "a lambda")

    def _resolve(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return None if node.id in self.parameters else self.scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        return None


def _torch_builtins(name: str) -> tuple[Any, ...]:
    # C functions such as torch.sin and torch.nn.functional.gelu carry no __module__
    owners = (torch, torch.nn.functional, torch.special, torch.linalg, torch.fft)
    return tuple(getattr(owner, name) for owner in owners if name and hasattr(owner, name))
