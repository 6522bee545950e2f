"""gradients.accepts: a call that works keeps working where gradients are required of it."""

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

_SLIPS = (TypeError, AttributeError, LookupError, NameError, ValueError, ArithmeticError)
_DISAGREES = re.compile(
    r"returned an (invalid gradient|incorrect number of gradients)|number of gradients|"
    r"expected shape|the size of tensor a|is invalid for input of size|shapes cannot be multiplied|"
    r"dimension out of range|view size is not compatible|expanded size|to have the same dtype|same dtype",
    re.IGNORECASE,
)


def slip(error: BaseException) -> bool:
    """Whether an exception is a mistake in the code that was running, and not something that it says on purpose.

    What a ``raise`` says is meant. An exception that Python itself raises, and gradients that torch finds to be of the wrong
    number, shape or dtype, are not.
    """
    if isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, RecursionError)):
        return bool(_DISAGREES.search(str(error)))
    return isinstance(error, _SLIPS) and not _raised(error)


def _raised(error: BaseException) -> bool:
    """Whether the exception comes from a ``raise`` statement or an ``assert``."""
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
    refusals = [_tried(subject, case, numbers) for numbers in (everything, *singles)]
    refused = [refusal for refusal in refusals if refusal is not None]
    if len(refused) == len(refusals):
        raise d.told(refused[0]) from refused[0]


def _tried(subject: Subject, case: Case, numbers: Sequence[int]) -> CallRefused | None:
    """What the operator says on purpose where gradients are required of ``numbers``, or nothing where all is well."""
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
        if slip(error):
            raise Violation(_told(numbers, step, error)) from error
        return CallRefused(error)
    return None


def _told(numbers: Sequence[int], step: str, error: BaseException) -> str:
    which = f"tensor{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    first = (str(error).splitlines() or [""])[0]
    return (
        f"with gradients required of {which}, {step} raises {type(error).__name__}: {first}. Without gradients the call works. "
        "Where there is no gradient on purpose, raise NotImplementedError."
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
        kept = [n for n in graph.attached if not any(shares_memory(graph.outputs[n], t) for t in arguments)]
        if kept:
            raise Violation(
                f"within torch.{name}() result {kept[0]} requires grad: the graph, and all it saved, stays alive"
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
            raise Violation(f"{where} result {number} is another than where no gradient is: {wrong}")


PROPERTIES: tuple[Property, ...] = (
    gradient_property(
        "gradients.no_grad",
        rule="Results are the same whether gradients are wanted or not, and keep no graph where they are not.",
        defect="another formula in training; a grad mode that is switched and not put back; a graph that is kept alive",
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
