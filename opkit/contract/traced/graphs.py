"""This module compiles programs that call an operator, compares them with eager ones, and finds the state that they read."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import io
import logging
import os
import types
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from opkit import config
from opkit.contract.calls.cases import Call, Case
from opkit.contract.compare.outcome import first_difference, same_bits
from opkit.contract.prop import NotApplicable, Violation
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import fakes

Program = Callable[..., Any]
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_NARROW_TOLERANCE = 4e-2  # bfloat16 and float16: a compiler rounds elsewhere than eager does
_CACHE = "check-inductor"
_RECOMPILES = 64


@contextlib.contextmanager
def compiler(**options: bool) -> Generator[None]:
    """Reset torch's compiler, so that it has no earlier programs, logs nothing, and changes no setting afterwards.

    ``options`` are further settings of Dynamo.
    opkit's cache stores generated code, by its content, but not whole graphs, whose key does not contain the operator.
    """
    import torch._dynamo
    import torch._inductor.config

    dynamo: dict[str, Any] = {
        "recompile_limit": _RECOMPILES,
        "capture_dynamic_output_shape_ops": True,
        "suppress_errors": False,
        **options,
    }
    inductor: dict[str, Any] = {"fx_graph_cache": False, "fallback_random": True, "emulate_precision_casts": True}
    torch._dynamo.reset()
    try:
        with (
            torch._dynamo.config.patch(**dynamo),
            torch._inductor.config.patch(**inductor),
            torch._functorch.config.patch(enable_autograd_cache=False),
            _cache_folder(),
            _no_logs(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def _cache_folder() -> Generator[None]:
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(config.get().cache_dir / _CACHE)
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)


@contextlib.contextmanager
def _no_logs() -> Generator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def alone(subject: Subject) -> Program:
    """Return a program that calls the operator alone."""

    def program(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return subject.function(*args, **kwargs)

    return program


def among_others(subject: Subject) -> Program:
    """Return a program that calls the operator twice among other operations, on buffers that the compiler allocates."""

    def program(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        own, named = pytree.tree_map(_recomputed, (tuple(args), kwargs))
        first = subject.function(*own, **named)
        after = pytree.tree_map(_recomputed, first)
        subject.function(*own, **named)  # its result is unused, but its writes are returned
        return after, pytree.tree_map(_recomputed, (own, named))

    return program


def _recomputed(leaf: Any) -> Any:
    """Return the same numbers from an operation that a compiler generates code for: it does not simplify -(-x)."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.logical_not().logical_not() if leaf.dtype == torch.bool else leaf.neg().neg()


@dataclasses.dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program: results, arguments afterwards, and gradients of the arguments that require them."""

    results: tuple[Any, ...]
    arguments: tuple[torch.Tensor, ...]
    gradients: tuple[Any, ...] = ()


def run(program: Program, call: Call, gradients: bool = False) -> ProgramOutcome:
    """Run a program on a call; with ``gradients``, run the backward too."""
    torch.manual_seed(0)
    returned = program(call.args, call.kwargs)
    results = tuple(pytree.tree_leaves(returned))
    tensors = call.tensors()
    grads = _gradients(results, tensors) if gradients else ()
    return ProgramOutcome(tuple(map(_plain, results)), tuple(map(_plain, tensors)), grads)


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _gradients(results: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    outputs = [leaf for leaf in results if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs or not wanted:
        return ()
    incoming = [torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).view(leaf.shape) for leaf in outputs]
    weights = [weight.to(leaf.device, leaf.dtype) for weight, leaf in zip(incoming, outputs, strict=True)]
    return torch.autograd.grad(outputs, wanted, weights, allow_unused=True)


def eager(subject: Subject, program: Program, case: Case, gradients: bool = False) -> ProgramOutcome:
    """Run the program without a compiler.

    Raises:
        CallRefused: the operator raised.
    """
    try:
        return run(program, case.make(subject.device), gradients)
    except Exception as error:
        raise CallRefused(error) from error


def compiled(subject: Subject, program: Program, backend: Any, dynamic: bool | None) -> Program:
    """Compile the program with ``torch.compile``; an operator of the dispatcher may not break the graph."""
    return torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=subject.overload is not None)


def attempt(subject: Subject, run_it: Callable[[], Any], what: str) -> Any:
    """Return ``run_it()``, for a call that the operator accepts in eager mode.

    Raises:
        Violation: it raised.
        NotApplicable: it raised, and the subject is not an operator of the dispatcher.
    """
    try:
        return run_it()
    except Exception as error:
        reason = f"{what} raises {fakes.shortened(error, 400)}"
        if not fakes.has_own_fake(subject):
            raise NotApplicable(reason) from error
        raise Violation(f"{reason}, and eager mode accepts the same call.") from error


def compare(expected: ProgramOutcome, found: ProgramOutcome, where: str) -> None:
    """Check that both are equal, up to the rounding of operations that a compiler fuses.

    Raises:
        Violation: they are not equal.
    """
    for what in ("results", "arguments", "gradients"):
        ours, theirs = getattr(expected, what), getattr(found, what)
        if len(ours) != len(theirs):
            raise Violation(f"{where}, there are {len(theirs)} {what}, and {len(ours)} in eager mode")
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not close(a, b):
                raise Violation(f"{where}, {_NAMES[what]} {number} differs from eager mode's: {first_difference(a, b)}")


_NAMES = {"results": "result", "arguments": "after the call, argument tensor", "gradients": "the gradient of argument"}


def close(a: Any, b: Any) -> bool:
    """Return whether two results are equal: integers exactly, other numbers up to the rounding of their dtype."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        numbers = isinstance(a, float) and isinstance(b, float)
        return bool(abs(a - b) <= 1e-4 * (1 + abs(a))) or same_bits(a, b) if numbers else same_bits(a, b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if same_bits(a, b) or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return same_bits(a, b)
    tolerance = _TOLERANCE.get(a.dtype, _NARROW_TOLERANCE)
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    finite = a.to(wide)[a.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(b.to(wide), a.to(wide), rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)


def exported(subject: Subject, call: Call, dynamic: bool, strict: bool) -> Any:
    """Export the operator with ``torch.export``."""
    from torch.export import Dim, export

    class Module(torch.nn.Module):
        def forward(self, args: Any, kwargs: Any) -> Any:
            return subject.function(*args, **kwargs)

    arguments = (call.args, call.kwargs)
    shapes = pytree.tree_map(lambda leaf: _dims(leaf, Dim.AUTO), arguments) if dynamic else None
    return export(Module(), arguments, dynamic_shapes=shapes, strict=strict)


def _dims(leaf: Any, kind: Any) -> Any:
    return dict.fromkeys(range(leaf.dim()), kind) if isinstance(leaf, torch.Tensor) else None


def reloaded(program: Any) -> Program:
    """Save and load an exported program."""
    memory = io.BytesIO()
    torch.export.save(program, memory)
    memory.seek(0)
    return torch.export.load(memory).module()


# ---- numbers in a module's globals that its functions assign and an operator's functions read -----------------------


@dataclasses.dataclass(frozen=True)
class ModuleState:
    """A number in a module's globals."""

    name: str
    scope: dict[str, Any]

    def changed(self) -> Any:
        """Return a context in which it has another value."""
        value = self.scope[self.name]
        return mock.patch.dict(self.scope, {self.name: not value if isinstance(value, bool) else value + 1})


def state_of(subject: Subject) -> list[ModuleState]:
    """Return the numbers that the operator's functions read, without constants, which no function assigns.

    The functions are its body, reference, kernels, fake implementation and backward, and those of their module that they call.
    """
    found: dict[tuple[int, str], ModuleState] = {}
    for function in _reached([*_functions(subject)]):
        scope = function.__globals__
        for name in function.__code__.co_names:
            if isinstance(scope.get(name), (bool, int, float)) and _assigned(scope, name):
                found[id(scope), name] = ModuleState(name, scope)
    return [*found.values()]


def _functions(subject: Subject) -> Iterator[Any]:
    yield from (subject.reference, subject.target, getattr(subject.target, "_init_fn", None))
    if subject.operator is not None:
        operator = subject.operator._operator
        yield operator.registered.fake
        if operator.registered.autograd is not None:
            yield from (operator.registered.autograd.backward_function, operator.registered.autograd.setup_context)
    else:
        yield from (
            getattr(subject.target, name, None) for name in ("_abstract_fn", "_backward_fn", "_setup_context_fn")
        )
    yield from getattr(subject.target, "_backend_fns", {}).values()


def _reached(waiting: list[Any]) -> Iterator[types.FunctionType]:
    seen: set[int] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop()) if callable(waiting[-1]) else waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        scope = function.__globals__
        called = [scope.get(name) for name in function.__code__.co_names]
        waiting += [f for f in called if isinstance(f, types.FunctionType) and f.__globals__ is scope]


def _assigned(scope: dict[str, Any], name: str) -> bool:
    functions = [f for f in scope.values() if isinstance(f, types.FunctionType) and name in f.__code__.co_names]
    return any(i.opname == "STORE_GLOBAL" and i.argval == name for f in functions for i in dis.get_instructions(f))
