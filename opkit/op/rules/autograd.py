"""Gradients: one autograd node for every rule, given or derived.

The node runs the kernel (or whatever the dispatcher runs below autograd) and lets the rule keep what its backward needs.
It is a single-level function: the dispatcher, not ``autograd.Function.apply``, decides at which functorch level it runs.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from opkit.errors import RuleError
from opkit.op import torch_private as private
from opkit.op.rules import forward, vjp
from opkit.op.rules.listed import Counts, counts_of, flattened, grouped, grouped_needs, leaves_of, spreads
from opkit.op.trace import body as bodies

_MAX_STATES = 16


class Rule(Protocol):
    """A backward rule: what it keeps, and the gradients of the arguments, one an argument."""

    def save(self, ctx: Any, call: Call, args: tuple[Any, ...], output: Any) -> None:
        """Keep on ``ctx`` what the backward needs."""
        ...

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients of ``args``, given those of the outputs."""
        ...


@dataclasses.dataclass(slots=True)
class Call:
    """One call on its way through the autograd node. ``plain`` marks eager calls on ordinary tensors.

    ``counts`` are those of its lists (:mod:`opkit.op.rules.listed`), None where there is none; ``spread`` says whether the node
    takes one of them item by item. Where ``setup`` is given, the rule keeps what its backward needs by that alone, and ``whole``
    has the lists, all of which the node takes whole: the place and the number of items of each.
    """

    run: Callable[..., Any]
    rule: Rule
    kwargs: dict[str, Any]
    plain: bool
    counts: Counts | None = None
    spread: bool = False
    output_spec: Any = None
    setup: Callable[..., Any] | None = None
    whole: Sequence[tuple[int, int]] | None = None

    @classmethod
    def of(cls, run: Callable[..., Any], rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """A call that is not plain, of these arguments."""
        counts = counts_of(args)
        return cls(run, rule, kwargs, False, counts, spreads(counts))


def make_function(name: str) -> Any:
    """The autograd function of one operator; ``name`` is what ``grad_fn`` shows."""
    methods = {"forward": _forward, "backward": _backward, "_compiled_autograd_key": private.compiled_autograd_key}
    return type(name, (private.SingleLevelFunction,), {key: staticmethod(method) for key, method in methods.items()})


def _forward(ctx: Any, *inputs: Any) -> Any:
    call: Call = inputs[-1]
    ctx.opkit_call = call
    if call.setup is not None:
        output = call.run(*inputs[:-1])
        call.setup(ctx=ctx, inputs=inputs[:-1], output=output)
        return output
    args = inputs[:-1] if call.counts is None or not call.spread else tuple(grouped(inputs, call.counts))
    output = call.run(*args, **call.kwargs)
    call.rule.save(ctx, call, args, output)
    if type(output) is list or (type(output) is tuple and any(type(item) is list for item in output)):
        leaves, call.output_spec = pytree.tree_flatten(output)
        return tuple(leaves)
    return output


@private.untraced
def _backward(ctx: Any, *grads: Any) -> Any:
    call: Call = ctx.opkit_call
    if call.output_spec is not None:
        structured = pytree.tree_unflatten(list(grads), call.output_spec)
        grads = tuple(structured) if type(structured) is tuple else (structured,)
    found = call.rule.backward(ctx, *grads)
    if call.whole is not None:
        flat = [*found, None]
        for place, _ in call.whole:
            flat[place] = None
        return tuple(flat)
    if call.counts is not None:
        found = flattened(found, call.counts, call.spread)
    return (*found, None)


def apply(function: Any, call: Call, args: Sequence[Any]) -> Any:
    """Run ``call`` through the autograd node ``function``; its ``counts`` are those of ``args``."""
    leaves = args if call.counts is None or not call.spread else leaves_of(args, call.counts)
    return function.apply(*leaves, call)


def restore(call: Call, output: Any) -> Any:
    """The output in the structure that the kernel returned it in."""
    return output if call.output_spec is None else pytree.tree_unflatten(list(output), call.output_spec)


@dataclasses.dataclass
class GivenRule:
    """The author's ``register_autograd``, with torch.library's meaning."""

    operator: Any
    backward_function: Callable[..., Any]
    setup_context: Callable[..., Any] | None

    @functools.cached_property
    def _arguments(self) -> tuple[int, bool]:
        """How many positional arguments the schema has, and whether it has others."""
        arguments = self.operator.overload._schema.arguments  # pyright: ignore[reportPrivateUsage]
        count = sum(not argument.kwarg_only for argument in arguments)
        return count, count < len(arguments)

    def save(self, ctx: Any, call: Call, args: tuple[Any, ...], output: Any) -> None:
        """Run the author's ``setup_context`` on the arguments with their defaults filled in."""
        if self.setup_context is None:
            return
        inputs, named = args, call.kwargs
        positional, keyword_only = self._arguments
        if keyword_only or len(args) < positional:
            schema = self.operator.overload._schema  # pyright: ignore[reportPrivateUsage]
            inputs, named = private.library_utils.fill_defaults(schema, args, call.kwargs)
        signature = self.operator.signature
        if signature.flattened:
            decoded, named = signature.decode(inputs, named)
            inputs = tuple(decoded)
            output = signature.returns.decode(output) if signature.returns else output
        if keyword_only:
            self.setup_context(ctx=ctx, inputs=inputs, keyword_only_inputs=named, output=output)
        else:
            self.setup_context(ctx=ctx, inputs=inputs, output=output)

    def setup_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """The author's ``setup_context``, if it takes the arguments of such calls as they are."""
        positional, keyword_only = self._arguments
        whole = len(args) == positional and not keyword_only and not kwargs
        return self.setup_context if whole and not self.operator.signature.flattened else None

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The author's backward; its gradients may end early where the rest are of defaulted arguments."""
        call: Call = ctx.opkit_call
        needs = ctx.needs_input_grad
        structured = _needs(call, needs)
        try:
            ctx.needs_input_grad = structured
            found = self.backward_function(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs
        found = found if isinstance(found, tuple) else (found,)
        return found if len(found) == len(structured) else self._counted(found, len(structured))

    def _counted(self, found: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        full, _ = self._arguments
        if len(found) not in (count, full):
            expected = str(count) if count == full else f"{count} or {full}"
            raise RuleError(
                f"{self.operator.name}: the registered backward returned an incorrect number of gradients (expected "
                f"{expected}, got {len(found)}). Return one for each argument, None for those that need none."
            )
        return found[:count]


def _needs(call: Call, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """Which arguments need a gradient, those in lists one by one."""
    if call.whole is None:
        return needs[:-1] if call.counts is None else tuple(grouped_needs(needs, call.counts, call.spread))
    structured: list[Any] = [*needs[:-1]]
    for place, count in call.whole:
        structured[place] = [False] * count
    return tuple(structured)


@dataclasses.dataclass
class MissingRule:
    """No rule was registered and none can be derived: an error, when a gradient is asked for."""

    operator: Any

    def save(self, ctx: Any, call: Call, args: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Raise, naming the line that left torch."""
        raise self.operator.autograd_error()


@dataclasses.dataclass
class _Known:
    """What was derived from the reference in one state: backward graphs, how calls use them, and which outputs take gradients."""

    graphs: dict[Any, list[vjp.BackwardGraph]] = dataclasses.field(default_factory=dict)
    memo: dict[Any, vjp.PreparedBackward | None] = dataclasses.field(default_factory=dict)
    flags: dict[Any, list[bool] | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class DerivedRule:
    """The reference's vector-Jacobian product."""

    operator: Any
    known: dict[Any, _Known] = dataclasses.field(default_factory=dict)  # by what the reference reads
    whole: str = ""  # why the last call could not use a pruned graph

    def save(self, ctx: Any, call: Call, args: tuple[Any, ...], output: Any) -> None:
        """Keep the inputs, outputs and sizes that the pruned backward reads; all inputs where there is no such graph."""
        prepared = self._prepared(call, args, output) if call.plain else None
        ctx.opkit_prepared = prepared
        if prepared is None:
            self._save_whole(ctx, args, call.kwargs, output)
            return
        outputs = (output,) if isinstance(output, torch.Tensor) else _tensors(output)
        leaves = args if call.counts is None else leaves_of(args, call.counts)
        saved = [outputs[i] if late else leaves[i] for late, i in prepared.tensors]
        ctx.save_for_backward(
            *saved, *prepared.graph.captured
        )  # by which autograd sees writes to these before the backward
        ctx.opkit_sizes = [op(outputs[i] if late else leaves[i], *rest) for late, i, op, rest in prepared.sizes]
        if prepared.silent:
            ctx.mark_non_differentiable(*[outputs[i] for i in prepared.silent])

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients by the pruned graph, or by running the whole reference under autograd."""
        prepared: vjp.PreparedBackward | None = ctx.opkit_prepared
        if prepared is None:
            return self._backward_whole(ctx, *grads)
        run = prepared.graph.run_again if torch.is_grad_enabled() else prepared.graph.run
        saved = ctx.saved_tensors[: len(prepared.tensors)]
        found = iter(run(*saved, *ctx.opkit_sizes, *_tensors(list(grads))))
        spread: list[Any] = [None] * prepared.count
        for i in prepared.at:
            if ctx.needs_input_grad[i]:
                spread[i] = next(found)
        return tuple(spread) if prepared.grouped is None else tuple(grouped(spread, prepared.grouped))

    def _prepared(self, call: Call, args: tuple[Any, ...], output: Any) -> vjp.PreparedBackward | None:
        memo, key = self._known().memo, _call_key(args, call.kwargs)
        if key in memo:
            return memo[key]
        graph = self._find_or_derive(args, call.kwargs, output)
        if len(memo) >= 4096:
            memo.clear()
        memo[key] = None if graph is None else vjp.PreparedBackward(graph, call.counts, args)
        return memo[key]

    def _known(self) -> _Known:
        """What is known of the reference while it reads what it reads now."""
        state = self.operator.state.current()
        if state not in self.known:
            if len(self.known) >= _MAX_STATES:
                del self.known[next(iter(self.known))]
            self.known[state] = _Known()
        return self.known[state]

    def _find_or_derive(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> vjp.BackwardGraph | None:
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        known = self._known().graphs.setdefault(_guard_key(args, kwargs), [])
        for graph in known:
            if graph.holds([*inputs, *outputs]):
                return graph
        trace = self.operator.known_trace(args, kwargs)
        self._refuse(trace)
        if any(t.layout is not torch.strided for t in inputs):
            self.whole = "an argument has a layout that is not traced"
            return None
        if trace.cuts_gradient:
            self.whole = "the reference cuts parts off from autograd, which a second derivative must see"
            return None
        return self._derive(known, args, kwargs, outputs)

    def _refuse(self, trace: Any) -> None:
        error = self.operator.refusal(trace)
        if error is not None:
            raise error

    def _derive(self, known: list[vjp.BackwardGraph], args: Any, kwargs: Any, outputs: list[Any]) -> Any:
        inputs, reference = vjp.flat_reference(self.operator.reference, args, kwargs)
        try:
            with private.no_modes(), self.operator.state.running():
                graph = vjp.derive(reference, inputs, [t.requires_grad for t in inputs], outputs)
        except vjp.RandomReferenceError:
            raise self.operator.random_error() from None
        except Exception as error:  # the trace is an optimisation: without it the whole reference runs, and says why
            self.whole = f"{type(error).__name__}: {error}".split("\n")[0]
            return None
        known.append(graph)
        return graph

    def _flags(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[bool]:
        """Which leaves of the output take a gradient: those that do in the reference."""
        flags, key = self._known().flags, _guard_key(args, kwargs)
        if key not in flags:
            with self.operator.state.running():
                flags[key] = bodies.differentiable(self.operator.reference, args, kwargs)
        floating = [isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in _leaves(output)]
        found = flags[key]
        return floating if found is None or len(found) != len(floating) else found

    def _save_whole(self, ctx: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._refuse(self.operator.known_trace(args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        ctx.opkit_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.save_for_backward(*[leaves[i] for i in ctx.opkit_at])
        ctx.opkit_whole = ([None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        ctx.opkit_flags = self._flags(args, kwargs, output)
        ctx.opkit_state = self.operator.state.current()
        silent = [x for x, f in zip(_leaves(output), ctx.opkit_flags, strict=True) if not f]
        ctx.mark_non_differentiable(*[x for x in silent if isinstance(x, torch.Tensor)])

    def _backward_whole(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if self.operator.state.current() != ctx.opkit_state:
            raise self.operator.changed_error()
        kept, spec = ctx.opkit_whole
        leaves = list(kept)
        for i, tensor in zip(ctx.opkit_at, ctx.saved_tensors, strict=True):
            leaves[i] = tensor
        needs, counts = ctx.needs_input_grad, ctx.opkit_call.counts
        needs = needs[:-1] if counts is None else _leaves(grouped_needs(needs, counts))
        wanted = [i for i in ctx.opkit_at if i < len(needs) and needs[i]]

        def outputs_of(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = list(leaves)
            for i, tensor in zip(wanted, chosen, strict=True):
                values[i] = tensor
            args, kwargs = pytree.tree_unflatten(values, spec)
            return tuple(itertools.compress(_leaves(self.operator.run_reference(*args, **kwargs)), ctx.opkit_flags))

        seeds = list(itertools.compress(_leaves(grads), ctx.opkit_flags))
        found = iter(_pull_back(outputs_of, [leaves[i] for i in wanted], seeds))
        spread = [next(found) if i in wanted else None for i in range(len(leaves))]
        structured: Any = pytree.tree_unflatten(spread, spec)
        return tuple(structured[0])


def _pull_back(function: Callable[..., Any], inputs: list[Any], grads: list[Any]) -> Sequence[Any]:
    """``grads`` pulled back through ``function``, differentiable again where a graph is being built."""
    again = torch.is_grad_enabled()
    if (again or private.functorch_level() is not None) and not forward.transposing:
        outputs, pull, *_ = torch.func.vjp(function, *inputs)
        return pull(tuple(g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)))
    with torch.enable_grad():
        leaves = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in inputs]
        pairs = [(o, g) for o, g in zip(function(*leaves), grads, strict=True) if o.requires_grad]
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
        (x.ndim, x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), bodies.concrete(x))
        for x in pytree.tree_leaves((args, kwargs))
    )
