"""The state of one operator: its reference, its kernels and its rules.

:class:`Operator` holds the state and decides what can be derived from it. ``dispatch.planning`` and ``dispatch.dispatcher`` run
calls; ``operator.CustomOp`` is the object that authors hold.
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
from opkit.op.rules.autograd import BackwardRule, MissingRule, RegisteredRule, make_function
from opkit.op.rules.derived import DerivedRule
from opkit.op.rules.transforms import FoldRecord
from opkit.op.schema.signature import Signature
from opkit.op.torch_compile import in_guarded_compilation
from opkit.op.trace import reference_trace
from opkit.op.trace.contract_hash import contract_hash
from opkit.op.trace.mutation import Inference
from opkit.op.trace.reads import ReferenceState
from opkit.op.trace.reference_trace import OpaqueReason, ReferenceTrace

_MAX_TRACES = 4096
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat)

inlining: contextvars.ContextVar[bool | None] = contextvars.ContextVar("opkit_inlining", default=None)
"""While a compiler traces: whether it sees through all operators (True) or none (False); None: each as it was defined."""

knows_lowerings: contextvars.ContextVar[bool] = contextvars.ContextVar("opkit_knows_lowerings", default=False)
"""While a compiler traces: whether it uses the rules of :meth:`CustomOp.register_lowering`."""


@dataclasses.dataclass
class RegisteredRules:
    """The rules that the author registered; all others are derived."""

    fake: Callable[..., Any] | None = None
    autograd: RegisteredRule | None = None
    vmap: Callable[..., Any] | None = None
    autocast: dict[str, torch.dtype] = dataclasses.field(default_factory=dict[str, torch.dtype])
    lowering: Callable[..., Any] | None = None
    sharding: Callable[..., Any] | None = None


@dataclasses.dataclass(eq=False)
class Operator:
    """The state of one operator. Its functions take and return schema values ("flat"), whatever the author wrote."""

    name: str
    signature: Signature
    schema_text: str
    function: Callable[..., Any]
    explicit_reference: Callable[..., Any] | None
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
        self.registered = RegisteredRules()
        self.body = self.flat(self.function)
        self.reference = self.body if self.explicit_reference is None else self.flat(self.explicit_reference)
        self.state = ReferenceState(self.name, self.explicit_reference or self.function)
        self.derived = DerivedRule(self)
        self.folds = FoldRecord()
        self.autograd_function = make_function(
            f"GeneratedBackwardFor_{self.namespace}_{self.opname.split('.')[0]}_default"
        )
        self.lock = threading.RLock()
        self.forced = 0  # the number of contexts that force a kernel, in all threads
        self.bridged: Any = None
        self.refreshed: Callable[..., None] = lambda: None
        self.sharding_rules: dict[Any, Any] = {}  # derived by opkit.sharding, by the form of the call
        self.sharding_renewed: Callable[[], None] = lambda: None  # set by opkit.sharding, as is the next
        self.pieces_of: Callable[..., Any] = lambda *_: None
        self.traced_hash = ""
        self.traced_state: Any = None
        self.captured: set[str] = set()  # the kernels whose reference captures a tensor that requires grad
        self.restrided: set[str] = set()  # the kernels whose results are copied into the reference's layout
        self._traces: dict[Any, ReferenceTrace] = {}
        self._last_trace: ReferenceTrace | None = None
        self._verified: set[Any] = set()
        self._hash, self._hashed_state = "", None

    # ---- structure -------------------------------------------------------------------------------------------------

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` as a function of schema values."""
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
        """Whether the operator only has side effects: it returns nothing and writes to no argument."""
        return not self.schema.returns and not self.schema.is_mutable

    def device(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return the device type of a call through the schema."""
        index, device = self._device_index, None
        if index is not None:
            device = kwargs.get("device", args[index] if index < len(args) else None)
        return call_device(args, kwargs, device)

    @functools.cached_property
    def _device_index(self) -> int | None:
        return private.library_utils.get_device_arg_index(self.schema)

    def named_tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of a call through the schema, with its schema argument's name."""
        names = [argument.name for argument in self.schema.arguments if not argument.kwarg_only]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    yield name, leaf

    # ---- traces of the reference ---------------------------------------------------------------------------------------

    def traced(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ReferenceTrace:
        """Trace the reference on fake copies of these arguments."""
        if self.declared_opaque and self.explicit_reference is None:
            return ReferenceTrace(opaque=OpaqueReason("it was declared opaque"))
        with self.state.running():
            return reference_trace.trace(self.reference, args, kwargs)

    def known_trace(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ReferenceTrace:
        """Return a trace for this guard set (ranks, dtypes, devices, flags), made earlier or now."""
        # branches depend on numbers too, and what a branch draws or captures decides whether there is a backward
        numbers = [leaf for leaf in leaves(args, kwargs) if isinstance(leaf, _NUMBERS)]
        key = (guard_key(args, kwargs), self.state.current(), *map(reference_trace.concrete, numbers))
        trace = self._traces.get(key)
        if trace is None:
            # a body that raised may have raised at these sizes only, so its trace holds for these only
            exact = (
                key,
                *[tuple(map(reference_trace.concrete, leaf.shape)) for _, leaf in self.named_tensors(args, kwargs)],
            )
            trace = self._traces.get(exact)
            if trace is None:
                trace = self.traced(args, kwargs)
                if len(self._traces) >= _MAX_TRACES:
                    self._traces.clear()
                self._traces[key if trace.opaque is None else exact] = trace
        self._last_trace = trace
        return trace

    def transparent(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the reference stays in torch for calls like this one."""
        return self.known_trace(args, kwargs).opaque is None

    def last_trace(self) -> ReferenceTrace | None:
        """Return the latest trace of the reference; None if it was never traced."""
        return self._last_trace

    def run_reference(self, *args: Any, **kwargs: Any) -> Any:
        """Run the reference. If torch.compile is tracing, guard what the reference reads.

        Raises:
            RuleError: the reference reads what cannot be guarded, and torch.compile would bake its current value in.
        """
        if in_guarded_compilation():
            if self.state.unknown:
                raise self.state_error("compiled program")
            self.state.guard()
        return self.reference(*args, **kwargs)

    # ---- rules -----------------------------------------------------------------------------------------------------

    def inlinable(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the compiler sees the reference in place of the operator."""
        if self.only_effects:  # tracing would run the effect once, and compiled programs never
            return False
        override = inlining.get()
        if override is None and self.registered.lowering is not None and knows_lowerings.get():
            return False
        inline = override if override is not None else self.inline
        if inline is None:
            inline = not self.kernels.serves(self.device(args, kwargs)) and not self.state.volatile
        return inline and self.transparent(args, kwargs) and not self.state.unknown

    def rule(self, args: Sequence[Any], kwargs: dict[str, Any]) -> BackwardRule:
        """Return the backward rule of a call that runs as a unit."""
        if self.registered.autograd is not None:
            return self.registered.autograd
        if self.mutates or not self.transparent(args, kwargs):
            return MissingRule(self)
        return self.derived

    def self_differentiating(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether torch's own autograd through the reference gives the gradients that the author specified."""
        return self.registered.autograd is None and not self.is_out and self.transparent(args, kwargs)

    def composite(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether a call that needs gradients runs as the reference itself, whatever kernel it would get."""
        if not self.mutates and self.kernels.serves(self.device(args, kwargs)):
            return False
        return self.self_differentiating(args, kwargs)

    def refusal(self, trace: ReferenceTrace) -> OpkitError | None:
        """Return the error if this trace of the reference rules out a derived backward for calls that a kernel ran."""
        if self.state.unknown:
            return self.state_error("backward")
        if trace.random:
            return self.random_error()
        return self.captured_error() if trace.captures_gradient else None

    def autograd_error(self) -> OpkitError:
        """Return the error for a gradient that cannot be computed, with the line that left torch."""
        error = RuleError(
            f"Trying to backward through {self.name}.default but no autograd formula was registered. "
            "Please use register_autograd to add one."
        )
        error.add_note(self.opaque_note("backward", "register_autograd"))
        return error

    def fake_error(self, shown: str) -> OpkitError:
        """Return the error for a fake implementation that is needed and cannot be derived."""
        function = getattr(self.function, "__name__", "op")
        error = RuleError(
            f"There was no fake impl registered for {shown}. This is necessary for torch.compile/export/fx tracing to "
            f"work. Please use `{function}.register_fake` to add an fake impl."
        )
        error.add_note(self.opaque_note("fake implementation", "register_fake"))
        return error

    def opaque_note(self, rule: str, method: str) -> str:
        """Return why ``rule`` could not be derived: the line at fault, and the method that registers the rule by hand."""
        trace = self.last_trace()
        reason = trace.opaque if trace and trace.opaque else OpaqueReason("it was not traced")
        return f"opkit derives the {rule} of {self.name} from its reference, but the body leaves torch: {reason}. " + (
            f"Register the rule with {method}, or give the operator a reference in torch with reference=."
        )

    def lost_gradient_error(self, argument: str) -> OpkitError:
        """Return the error for a body without a derivative that overwrites a tensor which takes part in a gradient."""
        error = RuleError(
            f"{self.name} writes to its argument {argument!r}, which requires grad, and its derivative is not known: the "
            f"gradient through {argument} would be silently wrong. Call it under torch.no_grad(), pass "
            f"{argument}.detach(), or give the operator a reference in torch with reference=."
        )
        error.add_note(self.opaque_note("derivative", "reference="))
        return error

    def captured_error(self) -> OpkitError:
        """Return the error for a derived backward that would leave out a tensor which is not an argument."""
        return RuleError(
            f"{self.name}: no backward can be derived, because the reference uses a tensor that requires grad and is not "
            "an argument: its gradient would be lost when a kernel runs the call. Make it an argument of the operator."
        )

    def state_error(self, rule: str) -> OpkitError:
        """Return the error for a rule derived from a reference that may compute something else in the next call."""
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
        """Return the error for a backward that runs the reference again after values that it reads have changed."""
        return RuleError(
            f"{self.name}: a value that the reference reads in addition to its arguments changed between forward and "
            "backward, and the backward runs the reference again. Change it after the backward, or make it an argument of the "
            "operator."
        )

    def random_error(self) -> OpkitError:
        """Return the error for a derived backward that would draw other random numbers than the forward did."""
        return RuleError(
            f"{self.name}: no backward can be derived, because the reference draws random numbers: run again in the "
            "backward it would not give the forward that a kernel computed. Register one with register_autograd (return "
            "the mask or the random numbers as an output of the operator, and save it)."
        )

    # ---- identity --------------------------------------------------------------------------------------------------

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return everything that decides what the operator computes."""
        rules = self.registered
        kernels = [(k.name, k.device, k.function, k.when, k.dtypes, k.priority) for k in self.kernels.kernels]
        autograd = rules.autograd and (rules.autograd.backward_function, rules.autograd.setup_context)
        return [
            ("schema", self.name + self.schema_text),
            ("function", self.function),
            ("reference", self.explicit_reference),
            ("policy", (self.inline, self.autocast, self.declared_opaque, [str(tag) for tag in self.tags])),
            ("kernels", kernels),
            ("rules", (rules.fake, autograd, rules.vmap, rules.autocast, rules.lowering)),
        ]

    def contract_hash(self) -> str:
        """Return the hash of :meth:`contract_parts` and of what the reference reads; it is recomputed when either changes."""
        state: Any = self.state.current(versions=True)
        if not self._hash or state != self._hashed_state:
            with private.no_modes(), torch.inference_mode():
                self._hash = contract_hash([*self.contract_parts(), ("state", state)])
            self._hashed_state = state
        return self._hash

    def changed(self) -> None:
        """Forget everything derived before a kernel or rule was registered."""
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
        """Return whether ``kernel`` has not been verified for calls like this one; it counts as verified from now on."""
        key = (kernel, guard_key(args, kwargs))
        if key in self._verified:
            return False
        self._verified.add(key)
        return True

    def unverify(self, kernel: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Undo :meth:`needs_verifying`, because the call failed."""
        self._verified.discard((kernel, guard_key(args, kwargs)))


def guard_key(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what calls of one guard set have in common: ranks, dtypes, devices, layout and flags, not sizes."""
    return tuple([_guard(leaf) for leaf in leaves(args, kwargs)])


def _guard(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim, leaf.dtype, leaf.device.type, leaf.layout is torch.strided and private.contiguous(leaf)
    if isinstance(leaf, (bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return leaf
    return type(leaf)
