"""gradients: where no gradient is recorded, results are the same, and no graph is kept."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.prop import Property, Refusal, Remark, Violation
from opkit.contract.subject import Subject
from opkit.contract.traced import derivatives as d
from opkit.contract.traced.derivatives import Graph
from opkit.op.torch_private import shares_memory


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


def _within(subject: Subject, case: Case, numbers: Sequence[int], name: str) -> Graph:
    try:
        return d.trace(subject, case, numbers)
    except Refusal as refusal:
        error = refusal.error
        if d.planned(error) or name == "inference_mode":
            raise Remark(f"within torch.{name}() it raises {type(error).__name__}: {error}") from error
        raise Violation(f"within torch.{name}() it raises {type(error).__name__}: {error}") from error


def _compare_results(graph: Graph, plain: Graph, where: str) -> None:
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
    Property(
        "gradients.no_grad",
        rule="Results are the same whether gradients are wanted or not, and keep no graph where they are not.",
        defect="another formula in training; a grad mode that is switched and not put back; a graph that is kept alive",
        check=_no_grad,
        cases=d.smooth_cases(),
        share=0.4,
        cost=0.0015,
        skip=d.no_candidates,
    ),
)
