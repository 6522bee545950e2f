"""This module traces an operator once on fake tensors with symbolic sizes, and evaluates the trace at other sizes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.resizing import drawn_above_one, other_sizes
from opkit.contract.calls.specs import Drawing
from opkit.contract.compare.outcome import CallOutcome, described
from opkit.contract.prop import NotApplicable, Remark, Violation
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import fakes

LAYOUTS = ("contiguous", "offset", "transposed", "strided", "padded", "channels_last", "expanded")
CASES = drawn_above_one(Drawing(layouts=LAYOUTS, largest=33))
"""Calls whose named sizes are above 1, since compilers specialize on 0 and 1."""

_CONSTANT_AT = 3  # a size that is a constant at this many sizes is one at every size


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether it is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def unknown(size: Any) -> bool:
    """Return whether a size is a symbol that has no value until the program runs."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


@dataclasses.dataclass(frozen=True)
class SymbolicTrace:
    """One run with symbolic sizes: the arguments before it, its outcome, and the assumptions that it made."""

    arguments: tuple[tuple[Any, ...], ...]  # sizes, strides and offset of each tensor, as expressions
    outcome: CallOutcome
    env: Any

    def values(self, call: Call) -> dict[Any, int] | None:
        """Return each symbol's value in another call; None if the trace does not hold for it and torch traces again."""
        found: dict[Any, int] = {}
        pairs = [
            (expression, number)
            for tensor, expressions in zip(call.tensors(), self.arguments, strict=True)
            for expression, number in zip(expressions, _numbers(tensor), strict=True)
        ]
        for expression, number in pairs:
            if getattr(expression, "is_symbol", False) and found.setdefault(expression, number) != number:
                return None
        holds = all(evaluated(expression, found) == number for expression, number in pairs)
        return found if holds and self._assumed(found) else None

    def _assumed(self, values: dict[Any, int]) -> bool:
        """Return whether guards, equalities and ranges hold."""
        import sympy

        ranges = self.env.var_to_range
        guards = [evaluated(guard.expr, values) for guard in self.env.guards]
        equal = [evaluated(symbol - other, values) == 0 for symbol, other in self.env.replacements.items()]
        return (
            not any(guard == sympy.false for guard in guards)
            and all(equal)
            and all(ranges[s].lower <= number <= ranges[s].upper for s, number in values.items() if s in ranges)
        )

    def constants(self) -> set[tuple[int, int]]:
        """Return the sizes, by tensor and dimension, that were symbols before the run and are constants after it."""
        return {
            (number, dim)
            for number, (expressions, fake) in enumerate(zip(self.arguments, self.outcome.call.tensors(), strict=True))
            for dim in range(fake.dim())
            if getattr(expressions[dim], "is_symbol", False) and self.env.replace(expressions[dim]).is_number
        }


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _expression(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else number


def evaluated(expression: Any, values: dict[Any, int]) -> Any:
    """Evaluate an expression with numbers in place of symbols: a number, or an expression if symbols remain."""
    if isinstance(expression, (int, bool)):
        return expression
    import sympy

    replaced = expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    return int(replaced) if replaced.is_Integer else replaced


def traced(subject: Subject, case: Case, duck_shape: bool) -> SymbolicTrace:
    """Trace the operator on tensors with symbolic sizes.

    Raises:
        CallRefused: the operator raised.
    """
    mode = fakes.symbolic_mode(duck_shape)
    call = fakes.fake_call(mode, case.make(subject.device), fakes.symbolic_tensor)
    before = tuple(tuple(map(_expression, _numbers(tensor))) for tensor in call.tensors())
    return SymbolicTrace(before, fakes.call_fake(subject, call, mode, symbolic=True), mode.shape_env)


def check_symbolic(subject: Subject, case: Case) -> None:
    """Trace at the case's sizes, and compare with the kernel at these and at others."""
    real = subject.run(case)
    trace = _traced(subject, case, duck_shape=False)
    _compare(trace, real, case, case)
    large = [size for tensor in case.tensors() for size in tensor.shape if size > 1]
    if len(set(large)) < len(large):  # otherwise no two sizes get the same symbol
        _compare(_traced(subject, case, duck_shape=True), real, case, case)
    others = [*_accepted(subject, other_sizes(subject.spec, case))]
    retraced = [_compare(trace, outcome, case, other) for other, outcome in others]
    if all(retraced) and trace.constants():
        _constant(subject, trace, [other for other, _ in others])


def _accepted(subject: Subject, found: list[Case]) -> Iterator[tuple[Case, CallOutcome]]:
    for case in found:
        try:
            yield case, subject.run(case)
        except CallRefused:
            continue


def _traced(subject: Subject, case: Case, duck_shape: bool) -> SymbolicTrace:
    try:
        return traced(subject, case, duck_shape)
    except CallRefused as refusal:
        try:
            fakes.run_fake(subject, case)
        except CallRefused as static:
            raise static from refusal  # fake.accepts reports it
        if not fakes.has_own_fake(subject):
            raise NotApplicable(f"what it calls takes no symbolic sizes: {fakes.shortened(refusal.error)}") from refusal
        raise Violation(
            f"the fake implementation accepts sizes that are numbers, but with symbolic sizes it raises "
            f"{fakes.shortened(refusal.error)}. torch.compile(dynamic=True) and torch.export call it with these."
        ) from refusal


def _compare(trace: SymbolicTrace, real: CallOutcome, first: Case, second: Case) -> bool:
    """Return whether the trace does not hold for the second case; raise Violation if it holds and is wrong."""
    call = second.make()  # only the layout matters, not the device
    values = trace.values(call)
    if values is None:
        return True
    fakes_of, kernels = fakes.named_tensors(trace.outcome), fakes.named_tensors(real)
    if len(fakes_of) != len(kernels):
        raise Violation(
            f"{_where(first, second)} the fake implementation gives {len(trace.outcome.results)} results, "
            f"and the kernel {len(real.results)}"
        )
    for (name, kernel), (_, fake) in zip(kernels, fakes_of, strict=True):
        found = _difference(kernel, fake, values)
        if found:
            raise Violation(
                f"{_where(first, second)} {name} has {found}. Compute sizes from x.shape, and branch on none."
            )
    return False


def _where(first: Case, second: Case) -> str:
    return f"traced with symbolic sizes on {first}, and evaluated " + ("there," if first == second else f"on {second},")


def _difference(kernel: Any, fake: Any, values: dict[Any, int]) -> str:
    if not isinstance(kernel, torch.Tensor) or not isinstance(fake, torch.Tensor):
        value = evaluated(_expression(fake), values) if isinstance(fake, (int, torch.SymInt)) else fake
        integer = isinstance(kernel, int) and isinstance(value, int)
        return f"the value {kernel}, and {value} by the trace" if integer and kernel != value else ""
    for what, ours, symbolic in _measures(kernel, fake):
        numbers = [evaluated(_expression(each), values) for each in symbolic]
        known = [(a, b) for a, b in zip(ours, numbers, strict=False) if isinstance(b, int)]
        if len(ours) != len(numbers) or any(a != b for a, b in known):
            by = "" if list(map(str, symbolic)) == list(map(str, numbers)) else f" ({', '.join(map(str, symbolic))})"
            return f"{what} {[*ours]}, and {numbers} by the trace{by}"
    return "" if kernel.dtype == fake.dtype else f"dtype {kernel.dtype}, and {fake.dtype} by the trace"


def _measures(kernel: torch.Tensor, fake: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    yield "shape", kernel.shape, fake.shape
    if kernel.layout == torch.strided and kernel.numel() and not any(map(unknown, fake.shape)):  # as fake.strides does
        large = [dim for dim, size in enumerate(kernel.shape) if size > 1]
        yield "strides", [kernel.stride(dim) for dim in large], [fake.stride(dim) for dim in large]
        yield "offset", [kernel.storage_offset()], [fake.storage_offset()]


def _constant(subject: Subject, trace: SymbolicTrace, others: list[Case]) -> None:
    """Raise for sizes that are constants wherever the operator is traced."""
    always = trace.constants()
    for other in others[: _CONSTANT_AT - 1]:
        always &= _traced(subject, other, duck_shape=False).constants()
    if not always or len(others) < _CONSTANT_AT - 1:
        return
    tensor, dim = min(always)
    message = (
        f"each size of dimension {dim} of tensor {tensor} becomes a constant: a program is compiled again for every "
        f"size, as for {others[0]}, and cannot be exported with dynamic sizes"
    )
    lists = any(str(each.type) == "List[Tensor]" for each in subject.schema.returns) if subject.schema else True
    if lists or not fakes.has_own_fake(subject):
        raise Remark(message)
    raise Violation(
        f"{message}. The fake implementation must not turn sizes into numbers: no int(n), range(n), n in (...)."
    )


def check_unbacked(subject: Subject, case: Case) -> None:
    """Check the fake implementation's bounds on sizes that depend on data against the kernel's sizes."""
    mode = fakes.static_mode()
    fake = fakes.run_fake(subject, case, mode)
    results = [leaf for leaf in fake.results if isinstance(leaf, torch.Tensor)]
    if not any(unknown(size) for tensor in results for size in tensor.shape):
        raise NotApplicable("no size of a result depends on data")
    values: dict[Any, int] = {}
    for number, (ours, tensor) in enumerate(zip(subject.run(case).tensors(), results, strict=False)):
        _bind(f"result {number} {described(ours)}", ours, tensor, values)
        _bounds(f"result {number} {described(ours)}", values, mode.shape_env)
    _relations(values, mode.shape_env)


def _bind(name: str, ours: torch.Tensor, fake: torch.Tensor, values: dict[Any, int]) -> None:
    for size, symbolic in zip(ours.shape, fake.shape, strict=False):
        expression = _expression(symbolic)
        if getattr(expression, "is_symbol", False):
            values.setdefault(expression, size)
        found = evaluated(expression, values)
        if isinstance(found, int) and found != size:
            raise Violation(
                f"{name} has a size of {size}, which the fake implementation says is {symbolic} = {found}, as in another "
                "place. Each size that may differ needs its own new_dynamic_size()."
            )


def _bounds(name: str, values: dict[Any, int], env: Any) -> None:
    for symbol, size in values.items():
        bounds = env.var_to_range[symbol]
        if not bounds.lower <= size <= bounds.upper:
            raise Violation(
                f"{name} has a size of {size}, and the fake implementation says that it is from {bounds.lower} to "
                f"{bounds.upper}. Give new_dynamic_size(min=..., max=...) bounds that hold for all data."
            )


def _relations(values: dict[Any, int], env: Any) -> None:
    """Check the relations that the fake implementation states with torch._check."""
    import sympy

    asserts = [each for several in env.deferred_runtime_asserts.values() for each in several]
    for stated in asserts:
        if evaluated(stated.expr, values) == sympy.false:
            raise Violation(f"the fake implementation states {stated.expr}, which does not hold where {values}")
