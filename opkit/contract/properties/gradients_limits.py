"""The group ``gradients``: calls that refuse or record none, narrow dtypes, equal numbers, numbers at a dtype's limits."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator, Sequence

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.calls.specs import Drawing
from opkit.contract.prop import NotApplicable, Property, Remark, Violation, drawn, swept_and_drawn
from opkit.contract.properties.gradients import comparable, gradient_property, needs_reference, traced_both
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import derivatives as d
from opkit.contract.traced.derivatives import AutogradGraph, Gradients
from opkit.op.torch_private import shares_memory

_MISTAKES = (TypeError, AttributeError, LookupError, NameError, ValueError, ArithmeticError)
_DISAGREES = re.compile(
    r"returned an (invalid gradient|incorrect number of gradients)|number of gradients|"
    r"expected shape|the size of tensor a|is invalid for input of size|shapes cannot be multiplied|"
    r"dimension out of range|view size is not compatible|expanded size|to have the same dtype|same dtype",
    re.IGNORECASE,
)
_NARROW = (torch.bfloat16, torch.float16)
_SIZES = (1025, 1, 257, 3, 65, 17, 513, 2, 0)
_DRAWN = Drawing(fills=("positive", "normal"), dtypes=_NARROW, largest=max(_SIZES), elements=8192)
_LEVEL = Drawing(fills=("level", "constant", "zeros"), dtypes=(torch.float32, torch.float64), largest=65, elements=256)
_NEAR = 1e-3  # of a gradient: where the reference's own is further off, it decides nothing
_RUNS = 3  # of the reference, with numbers that are off by one rounding
_ROUNDINGS = 4.0  # of a result and its inputs
_OWN = 8.0  # times the reference's own error in the same dtype
_SMALL = 0.01  # of a rounding of the largest number


# ---- calls that require gradients --------------------------------------------------------------------------------------


def is_mistake(error: BaseException) -> bool:
    """Return whether an exception shows a mistake in the code that ran, rather than a deliberate refusal.

    A ``raise`` statement is deliberate. An exception that Python itself raises is a mistake, and so are gradients whose number,
    shape or dtype torch rejects.
    """
    if isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, RecursionError)):
        return bool(_DISAGREES.search(str(error)))
    return isinstance(error, _MISTAKES) and not _is_from_raise_statement(error)


def _is_from_raise_statement(error: BaseException) -> bool:
    """Return whether the exception comes from a ``raise`` statement or an ``assert``."""
    *_, last = [None, *_frames(error)]
    if last is None:
        return False
    operation = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    return operation in ("RAISE_VARARGS", "RERAISE")


def _frames(error: BaseException) -> Iterator[types.TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _accepts(subject: Subject, case: Case) -> None:
    everything = d.candidates(subject, case)
    d.trace(subject, case, ())
    singles = [(number,) for number in everything] if len(everything) > 1 else []
    refusals = [_try_gradients(subject, case, numbers) for numbers in (everything, *singles)]
    refused = [refusal for refusal in refusals if refusal is not None]
    if len(refused) == len(refusals):
        raise d.not_applicable_or(refused[0]) from refused[0]


def _try_gradients(subject: Subject, case: Case, numbers: Sequence[int]) -> CallRefused | None:
    """Return the operator's deliberate refusal if gradients are required of ``numbers``, or None if the call works."""
    step = "the call"
    try:
        graph = d.trace(subject, case, numbers)
        if reason := d.forward_only(graph):
            raise NotApplicable(reason)
        step = "the backward"
        graph.vjp(d.incoming(graph))
    except NotApplicable:
        raise
    except Exception as caught:
        error = caught.error if isinstance(caught, CallRefused) else caught
        if is_mistake(error):
            raise Violation(_message(numbers, step, error)) from error
        return CallRefused(error)
    return None


def _message(numbers: Sequence[int], step: str, error: BaseException) -> str:
    which = f"tensor{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    first = (str(error).splitlines() or [""])[0]
    return (
        f"with gradients required of {which}, {step} raises {type(error).__name__}: {first}. Without gradients the call works. "
        "If it has no gradient on purpose, raise NotImplementedError."
    )


# ---- where no gradient is recorded ---------------------------------------------------------------------------------------


def _no_grad(subject: Subject, case: Case) -> None:
    numbers = d.candidates(subject, case)
    plain = d.trace(subject, case, ())
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode():
            graph = _within(subject, case, numbers, name)
            if torch.is_grad_enabled():
                raise Violation(
                    f"gradients are enabled after a call within torch.{name}(): the operator changes the mode"
                )
        _compare_results(graph, plain, f"within torch.{name}()")
        arguments = graph.call.tensors()  # a view within no_grad may require grad, as those of torch.unbind do
        attached = [n for n in graph.attached if not any(shares_memory(graph.outputs[n], t) for t in arguments)]
        if attached:
            raise Violation(
                f"within torch.{name}() result {attached[0]} requires grad: the graph, and all it saved, stays alive"
            )
    if not torch.is_grad_enabled():
        raise Violation("gradients are disabled after a call: the operator changes the mode")
    _compare_results(d.trace(subject, case, numbers), plain, "where gradients are required")


def _within(subject: Subject, case: Case, numbers: Sequence[int], name: str) -> AutogradGraph:
    try:
        return d.trace(subject, case, numbers)
    except CallRefused as refusal:
        error = refusal.error
        if d.planned(error) or name == "inference_mode":
            raise Remark(f"within torch.{name}() it raises {type(error).__name__}: {error}") from error
        raise Violation(f"within torch.{name}() it raises {type(error).__name__}: {error}") from error


def _compare_results(graph: AutogradGraph, plain: AutogradGraph, where: str) -> None:
    if len(graph.outputs) != len(plain.outputs):
        raise Violation(
            f"{where} there are {len(graph.outputs)} floating-point results, otherwise {len(plain.outputs)}"
        )
    scale = max(1.0, d.magnitude([t for t in plain.call.tensors() if t.is_floating_point()]))
    for number, (a, b) in enumerate(zip(graph.outputs, plain.outputs, strict=True)):
        if a.dtype != b.dtype:
            raise Violation(f"{where} result {number} is {a.dtype}, otherwise {b.dtype}")
        if wrong := d.mismatch(a, b, scale):
            raise Violation(f"{where} result {number} differs from that without gradients: {wrong}")


# ---- narrow dtypes -----------------------------------------------------------------------------------------------------


def _skip(subject: Subject) -> str:
    listed = {dtype for each in subject.spec.tensors() for dtype in each.dtypes or ()}
    if not listed & {*_NARROW}:
        return "no argument is of a narrow dtype"
    return needs_reference(subject)


def _incoming(graph: AutogradGraph) -> list[torch.Tensor]:
    """Return positive incoming gradients: a sum in a narrow dtype stops growing once terms are smaller than its steps."""
    return [each.abs() for each in d.incoming(graph)]


def _check(subject: Subject, case: Case) -> None:
    if case.dtype not in _NARROW:
        return
    numbers = d.candidates(subject, case)
    reference = d.trace(subject, case, numbers, subject.reference)
    if not reference.attached:
        raise NotApplicable("the reference has no gradient")
    wide = d.trace(subject, case, numbers, subject.reference, wide=True)
    own, exact = (_pulled(graph, _incoming(reference)) for graph in (reference, wide))
    ours = d.trace(subject, case, numbers)
    if reason := d.forward_only(ours):
        raise NotApplicable(reason)
    if ours.rounds or not comparable(ours, reference):
        return
    got = _pulled(ours, _incoming(ours))
    moved = [_moved(subject, case, numbers, ours, seed) for seed in range(_RUNS)]
    for position, number in enumerate(numbers):
        runs = [run[position] for run in moved if run is not None]
        found = _beyond(got[position], own[position], exact[position], [each for each in runs if each is not None])
        if found:
            raise Violation(
                f"the gradient of {d.argument(subject, case, number)} is not the reference's in float64: {found}"
            )


def _pulled(graph: AutogradGraph, grads: Sequence[torch.Tensor]) -> Gradients:
    try:
        return graph.vjp([g.to(o.dtype) for g, o in zip(grads, graph.outputs, strict=True)])
    except Exception as error:  # gradients.accepts checks whether it may
        raise CallRefused(error) from error


def _moved(subject: Subject, case: Case, numbers: Sequence[int], ours: AutogradGraph, seed: int) -> Gradients | None:
    """Return the reference's float64 gradients for numbers and incoming gradients that are off by a rounding of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.finfo(case.dtype or torch.float32).eps / 2

    def off(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return tensor * (1 + unit * signs)

    call, inputs = d.arguments_requiring_grad(subject, case, numbers, wide=True)
    with torch.no_grad():
        for tensor in d.tensors_of_case(case, call):
            if tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.copy_(off(tensor))
    try:
        outputs = subject.call(call, subject.reference).tensors()
        graph = AutogradGraph(call, inputs, tuple(o for o in outputs if o.is_floating_point()))
        return graph.vjp([off(g.to(o.dtype)) for g, o in zip(_incoming(ours), graph.outputs, strict=True)])
    except Exception:  # the reference may not accept the moved numbers: they add nothing to the tolerance
        return None


def _beyond(
    got: torch.Tensor | None, own: torch.Tensor | None, exact: torch.Tensor | None, moved: Sequence[torch.Tensor]
) -> str:
    """Describe where a gradient is off by more than rounding explains, or return ""."""
    if got is None or own is None or exact is None or got.shape != exact.shape or not moved:
        return ""
    a, b, unit = got.detach().double(), exact.detach().double(), torch.finfo(got.dtype).eps / 2
    spread = torch.stack([(each.detach().double() - b).abs() for each in moved]).amax(0)
    allowed = _ROUNDINGS * (unit * b.abs() + spread) + _OWN * (own.detach().double() - b).abs()
    allowed = allowed + _SMALL * unit * d.magnitude([b]) + torch.finfo(got.dtype).smallest_normal
    wrong = ((a - b).abs() > allowed) & b.isfinite() & allowed.isfinite()
    return d.where(a, b, wrong) if bool(wrong.any()) else ""


# ---- equal numbers, and those at the limits of their dtype ---------------------------------------------------------------


def _ties(subject: Subject, case: Case) -> None:
    ours, reference, narrow, wide, numbers = traced_both(subject, case)
    if not comparable(ours, reference):
        return
    grads = d.incoming(ours)
    try:
        found = ours.vjp(grads)
    except Exception as error:
        raise d.not_applicable_or(CallRefused(error)) from error
    scale = d.magnitude(grads)
    for number, mine, own, right in zip(numbers, found, narrow, wide, strict=True):
        if mine is None or own is None or right is None or mine.shape != right.shape:
            continue  # gradients.lost and gradients.reference report it
        exact = right.to(own.dtype)
        sure = own.isfinite() & exact.isfinite() & ((own - exact).abs() <= _NEAR * (scale + exact.abs()))
        if wrong := d.mismatch(torch.where(sure, mine, exact), right, scale, own):
            raise Violation(f"the gradient of {d.argument(subject, case, number)} is not the reference's: {wrong}")


PROPERTIES: tuple[Property, ...] = (
    gradient_property(
        "gradients.ties",
        rule="Where numbers are all equal, or at the limits of their dtype, gradients are the reference's, if that is correct.",
        defect="probabilities from a log-sum-exp, which of huge logits is the maximum itself; all ties taken for the maximum",
        check=_ties,
        cases=drawn(_LEVEL),
        share=0.3,
        cost=0.002,
        skip=needs_reference,
    ),
    gradient_property(
        "gradients.dtypes",
        rule="In bfloat16 and float16, gradients are the reference's in float64, to what rounding explains.",
        defect="a backward that adds up in 16 bits, a cast that is forgotten, a kernel that was written for float32 alone",
        check=_check,
        **swept_and_drawn(_DRAWN, sizes=_SIZES),
        cost=0.004,
        skip=_skip,
    ),
    gradient_property(
        "gradients.no_grad",
        rule="Results are the same whether gradients are required or not, and have no graph where they are not.",
        defect="another formula in training; a grad mode that is switched and not restored; a graph that stays alive",
        check=_no_grad,
    ),
    gradient_property(
        "gradients.accepts",
        rule="A call that works without gradients works with them, forward and backward, or says that it has none.",
        defect="a setup_context with wrong parameters; a backward that fails for one size, for None, or for one input",
        check=_accepts,
        share=0.5,
        cost=0.0012,
    ),
)
