"""Derived gradients: the backward of operators whose author registered none, and forward mode from a registered backward.

The derived backward is the reference's vector-Jacobian product. Eager calls run a graph that ``vjp`` traced and pruned. Where
there is none, the backward runs the whole reference under autograd.

A registered backward is linear in the gradients that it receives, and forward mode is its transpose: with the backward ``B`` of a
call, the tangents of the results are the derivative of ``sum(B(u) * tangents)`` with respect to ``u``, which autograd finds by
running backwards twice.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import RuleError
from opkit.op import torch_private as private
from opkit.op.rules import vjp
from opkit.op.rules.autograd import AutogradCall, grouped, grouped_needs, leaves_of
from opkit.op.trace import reference_trace

_MAX_STATES = 16


@dataclasses.dataclass
class _DerivedGraphs:
    """What was derived from the reference while it read the same values.

    ``graphs`` holds the backward graphs, ``prepared`` how calls use them, and ``flags`` which outputs take gradients.
    """

    graphs: dict[Any, list[vjp.BackwardGraph]] = dataclasses.field(default_factory=dict)
    prepared: dict[Any, vjp.PreparedBackward | None] = dataclasses.field(default_factory=dict)
    flags: dict[Any, list[bool] | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class DerivedRule:
    """The backward rule derived from the reference: its vector-Jacobian product.

    ``derived`` has an entry for each set of values that the reference read; ``unpruned`` says why the last call could not use
    a pruned graph.
    """

    operator: Any
    derived: dict[Any, _DerivedGraphs] = dataclasses.field(default_factory=dict)
    unpruned: str = ""

    def save(self, ctx: Any, call: AutogradCall, args: tuple[Any, ...], output: Any) -> None:
        """Save the inputs, outputs and sizes that the pruned backward reads; all inputs where there is no such graph."""
        prepared = self._prepared(call, args, output) if call.plain else None
        ctx.opkit_prepared = prepared
        if prepared is None:
            self._save_inputs(ctx, args, call.kwargs, output)
            return
        outputs = (output,) if isinstance(output, torch.Tensor) else _tensors(output)
        leaves = args if call.counts is None else leaves_of(args, call.counts)
        saved = [outputs[i] if late else leaves[i] for late, i in prepared.tensors]
        ctx.save_for_backward(
            *saved, *prepared.graph.captured
        )  # saved, so that autograd detects writes to captured tensors
        ctx.opkit_sizes = [op(outputs[i] if late else leaves[i], *rest) for late, i, op, rest in prepared.sizes]
        if prepared.silent:
            ctx.mark_non_differentiable(*[outputs[i] for i in prepared.silent])

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients, by the pruned graph or by running the whole reference under autograd."""
        prepared: vjp.PreparedBackward | None = ctx.opkit_prepared
        if prepared is None:
            return self._backward_by_reference(ctx, *grads)
        run = prepared.graph.run_again if torch.is_grad_enabled() else prepared.graph.run
        saved = ctx.saved_tensors[: len(prepared.tensors)]
        gradients = iter(run(*saved, *ctx.opkit_sizes, *_tensors(list(grads))))
        flat: list[Any] = [None] * prepared.count
        for i in prepared.at:
            if ctx.needs_input_grad[i]:
                flat[i] = next(gradients)
        return tuple(flat) if prepared.grouped is None else tuple(grouped(flat, prepared.grouped))

    def _prepared(self, call: AutogradCall, args: tuple[Any, ...], output: Any) -> vjp.PreparedBackward | None:
        cache, key = self._current().prepared, _call_key(args, call.kwargs)
        if key in cache:
            return cache[key]
        graph = self._graph(args, call.kwargs, output)
        if len(cache) >= 4096:
            cache.clear()
        cache[key] = None if graph is None else vjp.PreparedBackward(graph, call.counts, args)
        return cache[key]

    def _current(self) -> _DerivedGraphs:
        """Return what was derived for the values that the reference reads now."""
        state = self.operator.state.current()
        if state not in self.derived:
            if len(self.derived) >= _MAX_STATES:
                del self.derived[next(iter(self.derived))]
            self.derived[state] = _DerivedGraphs()
        return self.derived[state]

    def _graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> vjp.BackwardGraph | None:
        """Return a graph whose guards hold for the call, or derive one; None where the whole reference must run."""
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        graphs = self._current().graphs.setdefault(_guard_key(args, kwargs), [])
        for graph in graphs:
            if graph.holds([*inputs, *outputs]):
                return graph
        trace = self.operator.known_trace(args, kwargs)
        self._refuse(trace)
        if any(t.layout is not torch.strided for t in inputs):
            self.unpruned = "an argument has a layout that is not traced"
            return None
        if trace.cuts_gradient:
            self.unpruned = "the reference cuts parts off from autograd, which a second derivative must see"
            return None
        inputs, reference = vjp.flat_reference(self.operator.reference, args, kwargs)
        try:
            with private.no_modes(), self.operator.state.running():
                graph = vjp.derive(reference, inputs, [t.requires_grad for t in inputs], outputs)
        except vjp.RandomReferenceError:
            raise self.operator.random_error() from None
        except Exception as error:  # without a trace the whole reference runs, and ``unpruned`` has the reason
            self.unpruned = f"{type(error).__name__}: {error}".split("\n")[0]
            return None
        graphs.append(graph)
        return graph

    def _refuse(self, trace: Any) -> None:
        error = self.operator.refusal(trace)
        if error is not None:
            raise error

    def _flags(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[bool]:
        """Return which leaves of the output take a gradient: those that do in the reference."""
        flags, key = self._current().flags, _guard_key(args, kwargs)
        if key not in flags:
            with self.operator.state.running():
                flags[key] = reference_trace.differentiable(self.operator.reference, args, kwargs)
        floating = [isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in _leaves(output)]
        traced = flags[key]
        return floating if traced is None or len(traced) != len(floating) else traced

    def _save_inputs(self, ctx: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._refuse(self.operator.known_trace(args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        ctx.opkit_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.save_for_backward(*[leaves[i] for i in ctx.opkit_at])
        ctx.opkit_others = ([None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        ctx.opkit_flags = self._flags(args, kwargs, output)
        ctx.opkit_state = self.operator.state.current()
        silent = [x for x, f in zip(_leaves(output), ctx.opkit_flags, strict=True) if not f]
        ctx.mark_non_differentiable(*[x for x in silent if isinstance(x, torch.Tensor)])

    def _backward_by_reference(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if self.operator.state.current() != ctx.opkit_state:
            raise self.operator.changed_error()
        others, spec = ctx.opkit_others
        leaves = list(others)
        for i, tensor in zip(ctx.opkit_at, ctx.saved_tensors, strict=True):
            leaves[i] = tensor
        needs, counts = ctx.needs_input_grad, ctx.opkit_call.counts
        needs = needs[:-1] if counts is None else _leaves(grouped_needs(needs, counts))
        wanted = [i for i in ctx.opkit_at if i < len(needs) and needs[i]]
        seeds = list(itertools.compress(_leaves(grads), ctx.opkit_flags))
        pieces = self.operator.pieces_of(leaves, spec, ctx.opkit_flags, seeds)
        if pieces is not None:
            leaves, seeds = pieces.leaves, pieces.seeds

        def outputs_of(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = list(leaves)
            for i, tensor in zip(wanted, chosen, strict=True):
                values[i] = tensor
            args, kwargs = pytree.tree_unflatten(values, spec)
            return tuple(itertools.compress(_leaves(self.operator.run_reference(*args, **kwargs)), ctx.opkit_flags))

        gradients = dict(zip(wanted, _pull_back(outputs_of, [leaves[i] for i in wanted], seeds), strict=True))
        if pieces is not None:
            gradients = {i: pieces.whole(i, gradient) for i, gradient in gradients.items()}
        flat = [gradients.get(i) for i in range(len(leaves))]
        structured: Any = pytree.tree_unflatten(flat, spec)
        return tuple(structured[0])


def _pull_back(function: Callable[..., Any], inputs: list[Any], grads: list[Any]) -> Sequence[Any]:
    """Pull ``grads`` back through ``function``, differentiable again where a graph is being built."""
    again = torch.is_grad_enabled()
    if (again or private.functorch_level() is not None) and not transposing:
        outputs, pull, *_ = torch.func.vjp(function, *inputs)
        return pull(
            tuple(torch.zeros_like(o) if g is None else g.to(o.dtype) for g, o in zip(grads, outputs, strict=True))
        )
    with torch.enable_grad():
        leaves = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in inputs]
        pairs = [(o, g) for o, g in zip(function(*leaves), grads, strict=True) if o.requires_grad and g is not None]
    if not pairs:
        return [None] * len(inputs)
    outputs, seeds = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, seeds, create_graph=again, allow_unused=True)


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = pytree.tree_leaves((args, kwargs)) if kwargs or any(type(a) in (list, tuple) for a in args) else args
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x)
            for x in leaves
        ]
    )


def _guard_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(
        (x.ndim, x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else (type(x), reference_trace.concrete(x))
        for x in pytree.tree_leaves((args, kwargs))
    )


# ---- forward mode ----------------------------------------------------------------------------------------------------


transposing: list[Any] = []
"""The calls whose backward is being transposed, in any thread: functorch must not begin a level there."""


def forward_from_backward(name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the results of a call with their tangents.

    Args:
        name: the operator's name, for messages.
        call: runs the operator within an autograd node of the registered backward.
        args: the positional arguments; tensors among them carry tangents.
        kwargs: the keyword arguments, likewise.

    Raises:
        RuleError: the backward cannot be differentiated with respect to the gradients that it receives.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    duals = {i: private.unpack_dual(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    moved = {i: tangent for i, (_, tangent) in duals.items() if tangent is not None}
    recorded = torch.is_grad_enabled() and any(primal.requires_grad for primal, _ in duals.values())
    with torch.enable_grad():
        values = [duals[i][0] if i in duals else leaf for i, leaf in enumerate(leaves)]
        for i in moved:
            values[i] = values[i] if values[i].requires_grad else private.requiring_grad(values[i])
        primals, named = pytree.tree_unflatten(values, spec)
        results, structure = pytree.tree_flatten(call(*primals, **named))
        at = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad]
        outputs, inputs = [results[i] for i in at], [values[i] for i in moved]
        seeds = [private.requiring_grad(torch.ones_like(output)) for output in outputs]  # any values will do
        transposing.append(call)
        try:
            tangents = _transposed(name, outputs, inputs, seeds, list(moved.values()))
        finally:
            transposing.pop()
    for i, output, tangent in zip(at, outputs, tangents, strict=True):
        if not recorded and private.functorch_level() is None:  # no outer transform or autograd records them
            output, tangent = output.detach(), tangent.detach()
        results[i] = private.make_dual(output, tangent)
    return pytree.tree_unflatten(results, structure)


def is_differentiable_once(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is of a function with ``once_differentiable``: a node that raises, and leads to no input."""
    return type(gradient.grad_fn).__name__ == "Error"


def _transposed(name: str, outputs: list[Any], inputs: list[Any], seeds: list[Any], tangents: list[Any]) -> list[Any]:
    if not outputs:
        return []
    pulled: Any = torch.autograd.grad(outputs, inputs, seeds, create_graph=True, allow_unused=True)
    pairs = [(gradient, tangent) for gradient, tangent in zip(pulled, tangents, strict=True) if gradient is not None]
    if any(is_differentiable_once(gradient) for gradient, _ in pairs):
        raise RuleError(
            f"{name}: forward-mode derivatives are derived from the registered backward by differentiating it, and it is marked "
            "with once_differentiable. Remove the mark if the backward is made of torch operations, or use reverse mode."
        )
    if not all(gradient.requires_grad or private.known_zero(gradient) for gradient, _ in pairs):
        raise RuleError(
            f"{name}: forward-mode derivatives are derived from the registered backward, which leaves torch or detaches the "
            "gradients that it receives. Compute the backward by torch operations, or use reverse mode."
        )
    pairs = [(gradient, tangent) for gradient, tangent in pairs if gradient.requires_grad]
    if not pairs:
        return [torch.zeros_like(output) for output in outputs]
    transposed: Any = torch.autograd.grad(
        [gradient for gradient, _ in pairs],
        seeds,
        [tangent for _, tangent in pairs],
        create_graph=True,
        allow_unused=True,
    )
    return [torch.zeros_like(s) if f is None else f for f, s in zip(transposed, seeds, strict=True)]
