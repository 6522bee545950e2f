"""``opkit.to_jax``: an operator, or a function of torch, as a function of JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from torch.utils import _pytree as pytree

from opkit.errors import ArgumentTypeError, MutationError, OpkitError, RuleError
from opkit.jax import dtypes, interpreter, platforms, tracing
from opkit.jax.tracing import Call, Graph
from opkit.op.core import Operator
from opkit.op.dispatch import planning
from opkit.op.dispatch.selection import forced_kernels
from opkit.op.dispatch.verification import check_arguments
from opkit.op.layout.outputs import kind_of, operands, split_arguments
from opkit.op.operator import CustomOp
from opkit.op.torch_compile import latest_registration

_MAX_PIECES = 256
_NUMBERS = ("int", "float", "bool", "ints", "floats", "bools")
_ARRAYS = (jax.Array, np.ndarray, np.generic)


def to_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator, or a function of torch that may call operators, as a function of JAX.

    The reference is traced to a graph of ATen operators, once for each set of shapes, dtypes and other arguments, and
    computed by ``jax.numpy``; so ``jax.jit``, ``jax.vmap``, ``jax.grad`` and ``jax.export`` work. A kernel in C or C++ runs on
    JAX's CPU if it takes the call. Gradients are those of the reference, or of the backward that the author registered; see
    ``docs/jax.md``.

    Args:
        function: an operator that :func:`opkit.custom_op` made, or a function whose tensors are among its arguments, also in
            lists, tuples and dictionaries.

    Returns:
        A function with the same parameters. It takes arrays of JAX or numpy for tensors and returns arrays of JAX. Other
        arguments are Python's: name them in ``static_argnames`` of ``jax.jit``. float64 and int64 become float32 and int32
        unless JAX has ``jax_enable_x64``.

    Raises:
        MutationError: the operator writes to its arguments.
        RuleError: at a call: the reference draws random numbers, its sizes depend on data, or it leaves torch.
        ArgumentTypeError, ShapeError, DtypeError: at a call: an argument does not fit.

    >>> import jax, jax.numpy as jnp, opkit, torch
    >>> @opkit.custom_op("doc::softly", mutates_args=())
    ... def softly(x: torch.Tensor, slope: float = 1.0) -> torch.Tensor:
    ...     return torch.tanh(x * slope)
    >>> jax.jit(jax.grad(lambda x: opkit.to_jax(softly)(x, slope=2.0)))(jnp.zeros(()))
    Array(2., dtype=float32)
    """
    if isinstance(function, CustomOp):
        return _of_operator(function)
    if not callable(function):
        raise ArgumentTypeError(f"opkit.to_jax: expected an operator or a function, got {function!r}.")
    name = getattr(function, "__qualname__", repr(function))
    traced = _Function(name, function, None)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return traced(args, kwargs)

    return call


def _of_operator(op: CustomOp[Any, Any]) -> Callable[..., Any]:
    operator: Operator = op._operator  # pyright: ignore[reportPrivateUsage]
    traced = _function_of(op)

    @functools.wraps(operator.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = traced(*operator.signature.encode(args, kwargs))
        return result if operator.signature.returns is None else operator.signature.returns.decode(result)

    return call


@functools.cache
def _function_of(op: CustomOp[Any, Any]) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """Return a function of a call through the operator's schema.

    Raises:
        MutationError: the operator writes to its arguments.
    """
    operator: Operator = op._operator  # pyright: ignore[reportPrivateUsage]
    if operator.schema.is_mutable:
        raise MutationError(
            f"{operator.name} cannot be a function of JAX: it writes to {', '.join(operator.mutates)}, and arrays of JAX "
            "cannot be written to. Give opkit.to_jax an operator that returns the new value."
        )
    function = _Function(operator.name, operator.reference, operator)

    def call(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        values = [
            _argument(operator, argument, value)
            for argument, value in zip(operator.schema.arguments, operands(operator, args, kwargs), strict=True)
        ]
        return function(*split_arguments(operator, values))

    return call


def _argument(operator: Operator, argument: Any, value: Any) -> Any:
    """Return an argument as the schema has it.

    Raises:
        ArgumentTypeError: it is none.
    """
    kind, where = kind_of(argument), f"{operator.name}: the argument {argument.name}"
    if value is None:
        return None
    if kind in ("tensor", "tensors"):
        return pytree.tree_map(lambda leaf: _array(leaf, where), value)
    if any(isinstance(leaf, Tracer) for leaf in pytree.tree_leaves(value)):
        raise ArgumentTypeError(
            f"{where} must be a Python value, got {value} while JAX traces. Make it static, as in "
            f'jax.jit(..., static_argnames="{argument.name}").'
        )
    if kind in _NUMBERS:
        return pytree.tree_map(
            lambda leaf: leaf.item() if isinstance(leaf, _ARRAYS) and leaf.ndim == 0 else leaf, value
        )
    if kind == "dtype" and not isinstance(value, torch.dtype):
        return dtypes.to_torch(value)
    return value


def _array(value: Any, where: str) -> Any:
    if not isinstance(value, (*_ARRAYS, int, float, complex)):
        hint = " jax.numpy.asarray(x.numpy()) makes one of a tensor." if isinstance(value, torch.Tensor) else ""
        raise ArgumentTypeError(f"{where} must be an array of JAX or numpy, got {type(value).__name__}.{hint}")
    return jnp.asarray(value)


# ---- one function ----------------------------------------------------------------------------------------------------


def _call_operator(op: CustomOp[Any, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _function_of(op)(args, kwargs)


@dataclasses.dataclass
class _Piece:
    """A function for one set of shapes, dtypes and other arguments: ``run`` takes and returns arrays."""

    run: Callable[..., list[Any]]
    structure: Callable[[Sequence[Any]], Any]


@dataclasses.dataclass
class _Function:
    """A function of torch (of an operator: its reference, of schema values) as one of JAX."""

    name: str
    body: Callable[..., Any]
    operator: Operator | None
    pieces: dict[Any, _Piece] = dataclasses.field(default_factory=dict)
    made_with: str = ""  # the latest registration of a kernel or a rule, of any operator

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS))
        arrays = [jnp.asarray(leaves[i]) for i in at]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                _array(leaf, f"{self.name}: the argument {i}")
        for i, array in zip(at, arrays, strict=True):
            leaves[i] = (array.shape, array.dtype)
        piece = self._piece(leaves, spec, at)
        return piece.structure(piece.run(*arrays))

    def _piece(self, leaves: list[Any], spec: Any, at: tuple[int, ...]) -> _Piece:
        key = self._key(leaves, spec, at)
        if self.made_with != latest_registration():
            self.pieces.clear()
            self.made_with = latest_registration()
        if key is None:
            return self._new_piece(leaves, spec, at)
        if key not in self.pieces:
            if len(self.pieces) >= _MAX_PIECES:
                del self.pieces[next(iter(self.pieces))]
            self.pieces[key] = self._new_piece(leaves, spec, at)
        return self.pieces[key]

    def _key(self, leaves: list[Any], spec: Any, at: tuple[int, ...]) -> Any:
        """Return all that a piece depends on; None if that cannot be compared."""
        operator = self.operator
        state: Any = ()
        if operator is not None:
            if operator.state.unknown:
                return None
            state = operator.state.current(versions=True)
        forced = tuple(sorted(forced_kernels.get().items()))
        key = str(spec), at, tuple([(type(leaf), _comparable(leaf)) for leaf in leaves]), dtypes.x64(), forced, state
        try:
            hash(key)
        except TypeError:
            return None
        return None if any(map(_holds_tensors, leaves)) else key

    def _new_piece(self, leaves: list[Any], spec: Any, at: tuple[int, ...]) -> _Piece:
        try:
            return self._made(self._call_of(leaves, spec, at))
        except OpkitError:
            integers = [i for i in at if leaves[i][1] == jnp.int32]
            if dtypes.x64() or not integers:
                raise
            try:  # int32 stands for int64 as well; not in kernels, which would read such an array as it is not
                return self._made(self._call_of(leaves, spec, at, torch.int64), with_kernels=False)
            except OpkitError:
                pass
            raise

    def _call_of(self, leaves: list[Any], spec: Any, at: tuple[int, ...], integer: torch.dtype = torch.int32) -> Call:
        mode, values = tracing.new_mode(), list(leaves)
        for i in at:
            shape, dtype = leaves[i]
            of_torch = dtypes.to_torch(dtype)
            if of_torch is None:
                raise ArgumentTypeError(f"{self.name}: torch has no dtype for an array of {dtype}.")
            if not all(isinstance(size, int) for size in shape):
                raise ArgumentTypeError(f"{self.name}: an array has the shape {shape}; each size must be a number.")
            values[i] = tracing.fake(mode, shape, integer if of_torch is torch.int32 else of_torch)
        return Call(tuple(values), spec, at)

    def _made(self, call: Call, with_kernels: bool = True) -> _Piece:
        operator, by_platform = self.operator, {}
        args, kwargs = call.arguments(call.tensors)
        if operator is not None:
            check_arguments(operator, args, kwargs)
            by_platform = platforms.kernels_of(operator, args, kwargs) if with_kernels else {}
            if by_platform and not operator.transparent(args, kwargs):
                return self._opaque(operator, platforms.dispatched(by_platform, None), call)
            _check_transparent(operator, args, kwargs)
        graph = self._traced(call)
        reference = self._computed(graph)
        if not call.at:
            return _Piece(jax.jit(reference), graph.results)
        return _Piece(jax.jit(self._differentiable(call, by_platform, reference)), graph.results)

    def _traced(self, call: Call) -> Graph:
        if self.operator is None:
            return tracing.trace(self.body, call, self.name)
        with self.operator.state.running():
            return tracing.trace(self.body, call, self.name)

    def _computed(self, graph: Graph) -> Callable[..., list[Any]]:
        def reference(*arrays: Any) -> list[Any]:
            return interpreter.run(graph.module, arrays, self.name, _call_operator)

        reference.__name__ = self.name.replace("::", "_")
        return reference

    def _differentiable(
        self, call: Call, by_platform: dict[str, Any], reference: Callable[..., list[Any]]
    ) -> Callable[..., list[Any]]:
        """Return the forward with its gradient."""
        operator = self.operator
        forward = platforms.dispatched(by_platform, reference) if by_platform else reference
        if operator is not None and operator.registered.autograd is not None:
            return self._with_backward(forward, operator.overload, call, operator)
        if tracing.has_own_gradient(self.body, call, self.name):
            return self._with_backward(forward, self.body, call, None)
        return _with_tangents(forward, reference) if by_platform else reference

    def _with_backward(
        self, forward: Callable[..., list[Any]], body: Callable[..., Any], call: Call, operator: Operator | None
    ) -> Callable[..., list[Any]]:
        """Return ``forward`` with the gradient that torch's autograd gives ``body``; it can be differentiated again."""
        run = jax.custom_vjp(forward)

        @functools.cache
        def backward_of(of: tuple[int, ...]) -> Callable[..., list[Any]]:
            """Return the gradients of some arguments as a function of the arguments, the results and their gradients."""
            traced = tracing.trace_backward(body, call, of, self.name, operator)

            def backward(arrays: Sequence[Any], results: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
                known = {} if traced.forward is None else {traced.forward: results if len(results) > 1 else results[0]}
                seeds = [
                    gradient if differentiable and gradient is not None else jnp.zeros_like(result)
                    for gradient, differentiable, result in zip(gradients, traced.differentiable, results, strict=True)
                ]
                found = interpreter.run(traced.module, [*arrays, *seeds], self.name, _call_operator, known)
                return found[len(results) :]

            return jax.jit(backward)

        def save(*primals: Any) -> tuple[Any, Any]:
            arrays = [primal.value for primal in primals]
            results = run(*arrays)
            # as structure, since what is saved are arrays
            needs = [() if primal.perturbed else None for primal in primals]
            return results, (arrays, results, needs)

        def pull(saved: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
            arrays, results, needs = saved
            of = tuple(i for i, need in enumerate(needs) if need is not None)
            absent = jax.custom_derivatives.SymbolicZero
            present = [None if isinstance(g, absent) or g.dtype == jax.dtypes.float0 else g for g in gradients]
            gradient_of = dict(zip(of, backward_of(of)(arrays, results, present), strict=True))
            return tuple(gradient_of.get(i) for i in range(len(arrays)))

        run.defvjp(save, pull, symbolic_zeros=True)
        return run

    def _opaque(self, operator: Operator, kernel: Callable[..., list[Any]], call: Call) -> _Piece:
        """Return the kernel alone, of an operator whose body leaves torch."""
        single = len(operator.schema.returns) == 1

        def structure(arrays: Sequence[Any]) -> Any:
            return arrays[0] if single else tuple(arrays)

        if operator.registered.autograd is not None:
            return _Piece(jax.jit(self._with_backward(kernel, operator.overload, call, operator)), structure)
        run = jax.custom_jvp(kernel)

        def refuse(primals: Any, tangents: Any) -> Any:
            raise operator.autograd_error()

        run.defjvp(refuse)
        return _Piece(jax.jit(run), structure)


def _comparable(leaf: Any) -> Any:
    return repr(leaf) if isinstance(leaf, (float, complex)) else leaf


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    """Return whether an argument, such as a mask, holds tensors, which may be written to until the next call."""
    if isinstance(value, torch.Tensor):
        return True
    parts = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).values()
    known = isinstance(value, (type, CustomOp))
    return depth > 0 and not known and any(_holds_tensors(part, depth - 1) for part in parts)


def _check_transparent(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise a RuleError if the reference leaves torch."""
    trace = operator.known_trace(args, kwargs)
    if trace.opaque is not None:
        _, refused = planning.eligible(operator, args, kwargs)
        kernels = "".join(f"\n  {name} does not run: {reason}" for name, reason in refused.items())
        raise RuleError(
            f"{operator.name} cannot be a function of JAX: its body leaves torch, or depends on data: {trace.opaque}. Give the "
            f"operator a reference in torch with reference=, or a kernel in C and a fake implementation.{kernels}"
        )


def _with_tangents(forward: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` with the derivatives of ``reference``, of any order and in both modes."""
    run = jax.custom_jvp(forward)

    def push(primals: Any, tangents: Any) -> Any:
        return run(*primals), jax.jvp(reference, primals, tangents)[1]

    run.defjvp(push)
    return run
