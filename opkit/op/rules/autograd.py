"""Gradients: one autograd node for every backward rule, registered or derived.

The node runs the kernel (or whatever the dispatcher runs below autograd), and the rule saves what its backward needs.
The node is a single-level function: the dispatcher, not ``autograd.Function.apply``, decides at which functorch level it runs.

A node takes tensors one by one: it takes a list of tensors item by item, and a list of numbers or an empty one unflattened. The
*counts* of a call hold a number for each argument: of a list that is flattened its length, of an unflattened one ``~length``, and
None for the others.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.utils import _pytree as pytree

from opkit.errors import RuleError
from opkit.op import torch_private as private


class BackwardRule(Protocol):
    """A backward rule: it saves what its backward needs, and computes the gradients, one for each argument."""

    def save(self, ctx: Any, call: AutogradCall, args: tuple[Any, ...], output: Any) -> None:
        """Save on ``ctx`` what the backward needs."""
        ...

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients of ``args`` from those of the outputs."""
        ...


@dataclasses.dataclass(slots=True)
class AutogradCall:
    """One call on its way through the autograd node. ``plain`` marks eager calls on ordinary tensors.

    ``counts`` are those of its lists (:mod:`opkit.op.rules.autograd`), None where there is none; ``has_flattened`` says
    whether the node takes one of them item by item. Where ``setup`` is set, it alone saves what the backward needs, the node
    takes every list unflattened, and ``unflattened`` holds the position and the length of each.
    """

    run: Callable[..., Any]
    rule: BackwardRule
    kwargs: dict[str, Any]
    plain: bool
    counts: Counts | None = None
    has_flattened: bool = False
    output_spec: Any = None
    setup: Callable[..., Any] | None = None
    unflattened: Sequence[tuple[int, int]] | None = None

    @classmethod
    def of(
        cls, run: Callable[..., Any], rule: BackwardRule, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> AutogradCall:
        """Return a call with these arguments that is not plain."""
        counts = counts_of(args)
        return cls(run, rule, kwargs, False, counts, has_flattened_lists(counts))


def make_function(name: str) -> Any:
    """Return the autograd function of one operator; ``grad_fn`` shows it as ``name``."""
    methods = {"forward": _forward, "backward": _backward, "_compiled_autograd_key": private.compiled_autograd_key}
    return type(name, (private.SingleLevelFunction,), {key: staticmethod(method) for key, method in methods.items()})


def _forward(ctx: Any, *inputs: Any) -> Any:
    call: AutogradCall = inputs[-1]
    ctx.opkit_call = call
    if call.setup is not None:
        output = call.run(*inputs[:-1])
        call.setup(ctx=ctx, inputs=inputs[:-1], output=output)
        return output
    args = inputs[:-1] if call.counts is None or not call.has_flattened else tuple(grouped(inputs, call.counts))
    output = call.run(*args, **call.kwargs)
    call.rule.save(ctx, call, args, output)
    if type(output) is list or (type(output) is tuple and any(type(item) is list for item in output)):
        leaves, call.output_spec = pytree.tree_flatten(output)
        return tuple(leaves)
    return output


@private.untraced
def _backward(ctx: Any, *grads: Any) -> Any:
    call: AutogradCall = ctx.opkit_call
    if call.output_spec is not None:
        structured = pytree.tree_unflatten(list(grads), call.output_spec)
        grads = tuple(structured) if type(structured) is tuple else (structured,)
    gradients = call.rule.backward(ctx, *grads)
    if call.unflattened is not None:
        flat = [*gradients, None]
        for position, _ in call.unflattened:
            flat[position] = None
        return tuple(flat)
    if call.counts is not None:
        gradients = flattened(gradients, call.counts, call.has_flattened)
    return (*gradients, None)


def apply(function: Any, call: AutogradCall, args: Sequence[Any]) -> Any:
    """Run ``call`` through the autograd node ``function``; its ``counts`` are those of ``args``."""
    leaves = args if call.counts is None or not call.has_flattened else leaves_of(args, call.counts)
    return function.apply(*leaves, call)


def restore(call: AutogradCall, output: Any) -> Any:
    """Return the output in the structure in which the kernel returned it."""
    return output if call.output_spec is None else pytree.tree_unflatten(list(output), call.output_spec)


@dataclasses.dataclass
class RegisteredRule:
    """The backward that the author registered with ``register_autograd``, with torch.library's meaning."""

    operator: Any
    backward_function: Callable[..., Any]
    setup_context: Callable[..., Any] | None

    @functools.cached_property
    def _arguments(self) -> tuple[int, bool]:
        """Return how many positional arguments the schema has, and whether it has others."""
        arguments = self.operator.overload._schema.arguments  # pyright: ignore[reportPrivateUsage]
        count = sum(not argument.kwarg_only for argument in arguments)
        return count, count < len(arguments)

    def save(self, ctx: Any, call: AutogradCall, args: tuple[Any, ...], output: Any) -> None:
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
        """Return the author's ``setup_context`` if it takes the arguments of such calls as they are."""
        positional, keyword_only = self._arguments
        complete = len(args) == positional and not keyword_only and not kwargs
        return self.setup_context if complete and not self.operator.signature.flattened else None

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Run the author's backward; its gradients may end early where the rest belong to defaulted arguments."""
        call: AutogradCall = ctx.opkit_call
        needs = ctx.needs_input_grad
        structured = _needs(call, needs)
        try:
            ctx.needs_input_grad = structured
            gradients = self.backward_function(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        count = len(structured)
        if len(gradients) == count:
            return gradients
        full, _ = self._arguments
        if len(gradients) not in (count, full):
            expected = str(count) if count == full else f"{count} or {full}"
            raise RuleError(
                f"{self.operator.name}: the registered backward returned an incorrect number of gradients (expected "
                f"{expected}, got {len(gradients)}). Return one for each argument, None for those that need none."
            )
        return gradients[:count]


def _needs(call: AutogradCall, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return which arguments need a gradient, those in lists one by one."""
    if call.unflattened is None:
        return needs[:-1] if call.counts is None else tuple(grouped_needs(needs, call.counts, call.has_flattened))
    structured: list[Any] = [*needs[:-1]]
    for position, count in call.unflattened:
        structured[position] = [False] * count
    return tuple(structured)


@dataclasses.dataclass
class MissingRule:
    """The rule of an operator without one, registered or derivable: it raises when a gradient is computed."""

    operator: Any

    def save(self, ctx: Any, call: AutogradCall, args: tuple[Any, ...], output: Any) -> None:
        """Save nothing."""

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Raise, naming the line that left torch."""
        raise self.operator.autograd_error()


# ---- lists among the arguments ---------------------------------------------------------------------------------------


Counts = list[int | None]
_NUMBERS = frozenset((int, float, bool))


def _count(arg: Any) -> int | None:
    if type(arg) is not list and type(arg) is not tuple:
        return None
    return len(arg) if arg and type(arg[0]) not in _NUMBERS else ~len(arg)


def counts_of(args: Sequence[Any]) -> Counts | None:
    """Return the counts of arguments like these; None where none is a list."""
    counts = [_count(arg) for arg in args]
    return None if counts.count(None) == len(counts) else counts


def has_flattened_lists(counts: Counts | None) -> bool:
    """Return whether the node takes some list item by item."""
    return counts is not None and any(count is not None and count >= 0 for count in counts)


def unflattened_lists(counts: Counts | None) -> list[tuple[int, int]]:
    """Return the position and the length of each list that the node takes unflattened."""
    return [(position, ~count) for position, count in enumerate(counts or ()) if count is not None and count < 0]


def leaves_of(args: Sequence[Any], counts: Counts | None) -> list[Any]:
    """Return the arguments as the node takes them."""
    if counts is None:
        return list(args)
    leaves: list[Any] = []
    for arg, count in zip(args, counts, strict=True):
        leaves.extend([arg] if count is None or count < 0 else arg)
    return leaves


def grouped(leaves: Sequence[Any], counts: Counts) -> list[Any]:
    """Return the arguments that :func:`leaves_of` flattened; what follows them in ``leaves`` is left out."""
    args: list[Any] = []
    at = 0
    for count in counts:
        if count is None or count < 0:
            args.append(leaves[at])
            at += 1
        else:
            args.append(list(leaves[at : at + count]))
            at += count
    return args


def grouped_needs(needs: Sequence[bool], counts: Counts, has_flattened: bool = True) -> list[Any]:
    """Return which arguments need a gradient, those in lists one by one.

    ``has_flattened`` is :func:`has_flattened_lists` of the counts, if the caller knows it.
    """
    structured = grouped(needs, counts) if has_flattened else needs
    return [
        each if count is None or count >= 0 else [False] * ~count
        for each, count in zip(structured, counts, strict=False)
    ]


def flattened(grads: Sequence[Any], counts: Counts, has_flattened: bool = True) -> list[Any]:
    """Return gradients as the node returns them; an unflattened list has none. ``has_flattened`` as for :func:`grouped_needs`."""
    if not has_flattened:
        return [grad if count is None else None for grad, count in zip(grads, counts, strict=True)]
    flat: list[Any] = []
    for grad, count in zip(grads, counts, strict=True):
        if count is None:
            flat.append(grad)
        elif count < 0:
            flat.append(None)
        elif grad is None:
            flat.extend([None] * count)
        else:
            flat.extend(grad if isinstance(grad, (list, tuple)) else [grad])
    return flat
