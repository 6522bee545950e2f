"""What an operator is: one reference, any number of kernels, and rules.

:class:`Operator` holds the facts and answers questions about them. How a call runs is in ``planning`` and ``dispatcher``;
what the author touches is ``operator.CustomOp``.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import OpkitError, RuleError
from opkit.op import torch_private as private
from opkit.op.dispatch.selection import KernelTable, call_device, leaves
from opkit.op.rules.autograd import DerivedRule, GivenRule, MissingRule, Rule, make_function
from opkit.op.rules.vmap import FoldRecord
from opkit.op.schema.signature import Signature
from opkit.op.torch_guards import in_guarded_compilation
from opkit.op.trace import body as bodies
from opkit.op.trace.body import Opaque, Trace
from opkit.op.trace.contract_hash import contract_hash
from opkit.op.trace.mutation import Inference
from opkit.op.trace.state import State

inlining: contextvars.ContextVar[bool | None] = contextvars.ContextVar("opkit_inlining", default=None)
"""While a compiler traces: whether it is to see through all operators, or none; None: each as it was defined."""

knows_lowerings: contextvars.ContextVar[bool] = contextvars.ContextVar("opkit_knows_lowerings", default=False)
"""While a compiler traces: whether it has a use for the rules of :meth:`CustomOp.register_lowering`."""


@dataclasses.dataclass
class GivenRules:
    """What the author registered; everything else is derived."""

    fake: Callable[..., Any] | None = None
    autograd: GivenRule | None = None
    vmap: Callable[..., Any] | None = None
    autocast: dict[str, torch.dtype] = dataclasses.field(default_factory=dict[str, torch.dtype])
    lowering: Callable[..., Any] | None = None


@dataclasses.dataclass(eq=False)
class Operator:
    """The facts of one operator. Functions here take and return schema values ("flat"), whatever the author wrote."""

    name: str
    signature: Signature
    schema_text: str
    function: Callable[..., Any]
    given_reference: Callable[..., Any] | None
    declared_opaque: bool
    inline: bool | None
    autocast: str | None
    mutation: Inference
    tags: tuple[torch.Tag, ...]
    device_types: tuple[str, ...] | None
    kernels: KernelTable
    overload: Any = None
    library: Any = None

    def __post_init__(self) -> None:
        self.namespace, self.opname = self.name.split("::")
        self.given = GivenRules()
        self.body = self.flat(self.function)
        self.reference = self.body if self.given_reference is None else self.flat(self.given_reference)
        self.state = State(self.name, self.given_reference or self.function)
        self.derived = DerivedRule(self)
        self.folds = FoldRecord()
        self.autograd_function = make_function(
            f"GeneratedBackwardFor_{self.namespace}_{self.opname.split('.')[0]}_default"
        )
        self.lock = threading.RLock()
        self.forced = 0  # contexts in which a kernel is forced, in whatever thread
        self.bridged: Any = None
        self.refreshed: Callable[..., None] = lambda: None
        self.traced_hash = ""
        self.traced_state: Any = None
        self.captured: set[str] = set()  # the kernels beside a reference that captures a tensor which requires grad
        self.restrided: set[str] = set()  # the kernels whose results are copied into the reference's layout
        self._traces: dict[Any, Trace] = {}
        self._last_trace: Trace | None = None
        self._verified: set[Any] = set()
        self._hash, self._hashed_state = "", None

    # ---- structure -------------------------------------------------------------------------------------------------

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as a function of schema values."""
        signature = self.signature
        if not signature.flattened:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            positional, named = signature.decode(args, kwargs)
            result = function(*positional, **named)
            return result if signature.returns is None else signature.returns.encode(result)

        call.__wrapped__ = function  # type: ignore[attr-defined]  # pyright: ignore
        return call

    @property
    def mutates(self) -> tuple[str, ...]:
        """The Python parameters that the operator writes to."""
        return self.mutation.mutates

    @property
    def is_out(self) -> bool:
        """Whether the operator writes its results to keyword arguments (``torch.Tag.out``, torch 2.13 and newer)."""
        return getattr(torch.Tag, "out", None) in self.tags

    @property
    def is_inplace(self) -> bool:
        """Whether the operator writes to and returns its first argument (``torch.Tag.inplace``, torch 2.13 and newer)."""
        return getattr(torch.Tag, "inplace", None) in self.tags

    @property
    def schema(self) -> Any:
        """The dispatcher's schema object."""
        return self.overload._schema  # pyright: ignore[reportPrivateUsage]

    @property
    def only_effects(self) -> bool:
        """Whether all that the operator does is outside of tensors: it returns nothing and writes to no argument."""
        return not self.schema.returns and not self.schema.is_mutable

    def device(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """The device type of a call through the schema."""
        index, given = self._device_index, None
        if index is not None:
            given = kwargs.get("device", args[index] if index < len(args) else None)
        return call_device(args, kwargs, given)

    @functools.cached_property
    def _device_index(self) -> int | None:
        return private.library_utils.get_device_arg_index(self.schema)

    def named_tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of a call through the schema, with its schema argument's name."""
        names = [argument.name for argument in self.schema.arguments if not argument.kwarg_only]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    yield name, leaf

    # ---- reference or opaque ---------------------------------------------------------------------------------------

    def traced(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
        """A fresh trace of the reference on fake copies of these arguments."""
        if self.declared_opaque and self.given_reference is None:
            return Trace(opaque=Opaque("it was declared opaque"))
        with self.state.running():
            return bodies.trace(self.reference, args, kwargs)

    def known_trace(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
        """A trace made for this guard set (ranks, dtypes, devices, flags) earlier, or now."""
        # branches depend on numbers too, and what they draw or capture decides whether there is a backward
        key = (guard_key(args, kwargs), self.state.current(), *map(bodies.concrete, _numbers(args, kwargs)))
        found = self._traces.get(key)
        if found is None:
            # a body that raised may have raised at these sizes only: its trace speaks for no others
            exact = (key, *[tuple(map(bodies.concrete, leaf.shape)) for _, leaf in self.named_tensors(args, kwargs)])
            found = self._traces.get(exact)
            if found is None:
                found = self.traced(args, kwargs)
                if len(self._traces) >= _MOST_TRACES:
                    self._traces.clear()
                self._traces[key if found.opaque is None else exact] = found
        self._last_trace = found
        return found

    def transparent(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the reference stays in torch for calls like this one."""
        return self.known_trace(args, kwargs).opaque is None

    def last_trace(self) -> Trace | None:
        """The latest trace of the reference, if it was traced at all."""
        return self._last_trace

    def run_reference(self, *args: Any, **kwargs: Any) -> Any:
        """Run the reference for a tracer of torch's, if there is one: what it reads is guarded.

        Raises:
            RuleError: the reference reads what cannot be guarded, and torch.compile would keep what it is now.
        """
        if in_guarded_compilation():
            if self.state.unknown:
                raise self.state_error("compiled program")
            self.state.guard()
        return self.reference(*args, **kwargs)

    # ---- rules -----------------------------------------------------------------------------------------------------

    def inlinable(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the compiler is to see the reference in place of the operator."""
        if self.only_effects:  # the effect is of the run, and a compiler would have it once, while it traces
            return False
        asked = inlining.get()
        if asked is None and self.given.lowering is not None and knows_lowerings.get():
            return False
        wanted = asked if asked is not None else self.inline
        if wanted is None:
            wanted = not self.kernels.serves(self.device(args, kwargs)) and not self.state.volatile
        return wanted and self.transparent(args, kwargs) and not self.state.unknown

    def rule(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Rule:
        """The backward rule of a call that runs as a unit."""
        if self.given.autograd is not None:
            return self.given.autograd
        if self.mutates or not self.transparent(args, kwargs):
            return MissingRule(self)
        return self.derived

    def self_differentiating(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the reference, run under torch's own autograd, gives the gradients that the author asked for."""
        return self.given.autograd is None and not self.is_out and self.transparent(args, kwargs)

    def composite(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call that needs gradients is best run as the reference itself, whatever kernel it would get."""
        if not self.mutates and self.kernels.serves(self.device(args, kwargs)):
            return False
        return self.self_differentiating(args, kwargs)

    def underivable(self, args: Sequence[Any], kwargs: dict[str, Any]) -> OpkitError | None:
        """Why the reference, though it stays in torch, has no backward that could run apart from the forward."""
        return self.refusal(self.known_trace(args, kwargs))

    def refusal(self, trace: Trace) -> OpkitError | None:
        """The error for a backward beside a kernel that this trace of the reference rules out."""
        if self.state.unknown:
            return self.state_error("backward")
        if trace.random:
            return self.random_error()
        return self.captured_error() if trace.captures_gradient else None

    def autograd_error(self) -> OpkitError:
        """The error for a gradient that was asked for and cannot be had, with the line that left torch."""
        error = RuleError(
            f"Trying to backward through {self.name}.default but no autograd formula was registered. "
            "Please use register_autograd to add one."
        )
        error.add_note(self.opaque_note("backward", "register_autograd"))
        return error

    def fake_error(self, shown: str) -> OpkitError:
        """The error for a fake implementation that is needed and cannot be derived."""
        function = getattr(self.function, "__name__", "op")
        error = RuleError(
            f"There was no fake impl registered for {shown}. This is necessary for torch.compile/export/fx tracing to "
            f"work. Please use `{function}.register_fake` to add an fake impl."
        )
        error.add_note(self.opaque_note("fake implementation", "register_fake"))
        return error

    def opaque_note(self, rule: str, method: str) -> str:
        """Why ``rule`` could not be derived, naming the line at fault and the method that registers it by hand."""
        trace = self.last_trace()
        reason = trace.opaque if trace and trace.opaque else Opaque("it was not traced")
        return f"opkit derives the {rule} of {self.name} from its reference, but the body leaves torch: {reason}. " + (
            f"Register the rule with {method}, or give the operator a reference in torch with reference=."
        )

    def lost_gradient_error(self, argument: str) -> OpkitError:
        """The refusal to overwrite a tensor that takes part in a gradient by a body that cannot be differentiated."""
        error = RuleError(
            f"{self.name} writes to its argument {argument!r}, which requires grad, and its derivative is not known: the "
            f"gradient through {argument} would be silently wrong. Call it under torch.no_grad(), pass "
            f"{argument}.detach(), or give the operator a reference in torch with reference=."
        )
        error.add_note(self.opaque_note("derivative", "reference="))
        return error

    def captured_error(self) -> OpkitError:
        """The refusal to derive a backward that would leave out a tensor which is not an argument."""
        return RuleError(
            f"{self.name}: no backward can be derived, because the reference uses a tensor that requires grad and is not "
            "an argument: beside a kernel its gradient would be lost. Make it an argument of the operator."
        )

    def state_error(self, rule: str) -> OpkitError:
        """The refusal to keep what was made of a reference that may compute something else in the next call."""
        hint = (
            "Register one with register_autograd, or make"
            if rule == "backward"
            else "Define it with opaque=True, or make"
        )
        return RuleError(
            f"{self.name}: no {rule} can be derived, because the reference reads what cannot be compared from call to call: "
            f"{self.state.unknown}. {hint} it an argument of the operator."
        )

    def changed_error(self) -> OpkitError:
        """The refusal to run the reference for a backward where it would not compute what the forward did."""
        return RuleError(
            f"{self.name}: a value that the reference reads beside its arguments changed between forward and backward, and the "
            "backward runs the reference again. Change it after the backward, or make it an argument of the operator."
        )

    def random_error(self) -> OpkitError:
        """The refusal to derive a backward that would draw other random numbers than the forward did."""
        return RuleError(
            f"{self.name}: no backward can be derived, because the reference draws random numbers: run again in the "
            "backward it would not give the forward that a kernel computed. Register one with register_autograd (return "
            "the mask or the random numbers as an output of the operator, and save it)."
        )

    # ---- identity --------------------------------------------------------------------------------------------------

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Everything that decides what the operator computes."""
        given = self.given
        kernels = [(k.name, k.device, k.function, k.when, k.dtypes, k.priority) for k in self.kernels.kernels]
        autograd = given.autograd and (given.autograd.backward_function, given.autograd.setup_context)
        return [
            ("schema", self.name + self.schema_text),
            ("function", self.function),
            ("reference", self.given_reference),
            ("policy", (self.inline, self.autocast, self.declared_opaque, [str(tag) for tag in self.tags])),
            ("kernels", kernels),
            ("rules", (given.fake, autograd, given.vmap, given.autocast, given.lowering)),
        ]

    def contract_hash(self) -> str:
        """The hash of :meth:`contract_parts` and of what the reference reads; recomputed when something of it changed."""
        state: Any = self.state.current(versions=True)
        if not self._hash or state != self._hashed_state:
            with private.no_modes(), torch.inference_mode():
                self._hash = contract_hash([*self.contract_parts(), ("state", state)])
            self._hashed_state = state
        return self._hash

    def changed(self) -> None:
        """Forget what was concluded before a kernel or rule was registered."""
        if self.bridged is not None:
            self.bridged.suspend()
        self._hash = ""
        self._traces.clear()
        self._verified.clear()
        self.restrided.clear()
        self.captured.clear()
        self.derived = DerivedRule(self)
        self.folds = FoldRecord()

    # ---- verification ----------------------------------------------------------------------------------------------

    def needs_verifying(self, kernel: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether ``kernel`` has not been verified for calls like this one; it counts as verified from now on."""
        key = (kernel, guard_key(args, kwargs))
        if key in self._verified:
            return False
        self._verified.add(key)
        return True

    def unverify(self, kernel: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Undo :meth:`needs_verifying`: the call failed."""
        self._verified.discard((kernel, guard_key(args, kwargs)))


def guard_key(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What calls must share for one of them to speak for all: ranks, dtypes, devices, layout and flags, not sizes."""
    return tuple([_guard(leaf) for leaf in leaves(args, kwargs)])


_MOST_TRACES = 4096


def _numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    kinds = (int, float, complex, torch.SymInt, torch.SymFloat)
    return [leaf for leaf in leaves(args, kwargs) if isinstance(leaf, kinds)]


def _guard(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim, leaf.dtype, leaf.device.type, leaf.layout is torch.strided and private.contiguous(leaf)
    if isinstance(leaf, (bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return leaf
    return type(leaf)
