"""The properties ``gradients.accepts`` and ``gradients.no_grad``: calls work with and without gradients."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator, Sequence

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.prop import CallRefused, NotApplicable, Property, Remark, Violation
from opkit.contract.properties.gradients import gradient_property
from opkit.contract.subject import Subject
from opkit.contract.traced import derivatives as d
from opkit.contract.traced.derivatives import AutogradGraph
from opkit.op.torch_private import shares_memory

_MISTAKES = (TypeError, AttributeError, LookupError, NameError, ValueError, ArithmeticError)
_DISAGREES = re.compile(
    r"returned an (invalid gradient|incorrect number of gradients)|number of gradients|"
    r"expected shape|the size of tensor a|is invalid for input of size|shapes cannot be multiplied|"
    r"dimension out of range|view size is not compatible|expanded size|to have the same dtype|same dtype",
    re.IGNORECASE,
)


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


@d.steady
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


@d.steady
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


PROPERTIES: tuple[Property, ...] = (
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
