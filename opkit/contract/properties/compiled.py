"""The group ``compile``: compiled, exported and captured programs agree with the same programs in eager mode."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.resizing import CHANGES, drawn_above_one, other_sizes, resized
from opkit.contract.calls.specs import Drawing
from opkit.contract.compare.outcome import leaves
from opkit.contract.prop import NotApplicable, Property, Remark, Violation
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import fakes, graphs
from opkit.contract.traced.graphs import state_of

_LAYOUTS = ("contiguous", "transposed", "strided", "offset", "channels_last")
_DRAWN = Drawing(layouts=_LAYOUTS, largest=33, elements=2**11)
_GUARDS = ("Guard failed", "Expected input at", "Runtime assertion failed")  # messages of torch's exported programs
_MIN_SIZES = 4  # an operator that is compiled again at each of so many sizes is not dynamic


def _variants(subject: Subject, case: Case, dynamic: bool) -> Iterator[tuple[str, Case]]:
    """Yield the case, and the next calls of the same compiled program."""
    yield "called with what it was compiled for", case
    yield "called again with other values", case.reseeded()
    if not dynamic:  # any other sizes would be another program
        return
    for other in other_sizes(subject.spec, case)[:2]:
        yield f"called again with other sizes, {other},", other
    for layout in ("transposed", "contiguous"):
        other = _in_layout(subject, case, layout)
        if other != case:
            yield f"called again with another layout, {other},", other
            return


def _in_layout(subject: Subject, case: Case, layout: str) -> Case:
    specs = subject.spec.tensors()
    if any(each.layouts is not None and layout not in each.layouts for each in specs):
        return case
    return case.replace(layout=layout)


def _compiles(backend: Any, plans: tuple[tuple[bool, bool, bool], ...]) -> Callable[[Subject, Case], None]:
    """Return a check of compiled programs. A plan says whether sizes are dynamic, gradients flow, other operations are around."""

    def check(subject: Subject, case: Case) -> None:
        fakes.run_fake(subject, case)
        for dynamic, gradients, among_others in plans:
            with graphs.compiler():
                _same_as_eager(subject, case, backend, dynamic, gradients, among_others)

    return check


def _same_as_eager(
    subject: Subject, case: Case, backend: Any, dynamic: bool, gradients: bool, among_others: bool
) -> None:
    plain = (graphs.among_others if among_others else graphs.alone)(subject)
    case, gradients = _with_gradients(subject, plain, case) if gradients else (case, False)
    program = graphs.compiled(subject, plain, backend, dynamic)
    how = f"compiled by {backend}{' with dynamic sizes' if dynamic else ''}{', among other operations,' * among_others}"
    for number, (where, variant) in enumerate(_variants(subject, case, dynamic)):
        try:
            expected = graphs.eager(subject, plain, variant, gradients)
        except CallRefused:
            if not number:
                raise
            continue
        call = variant.make(subject.device)
        found = graphs.attempt(subject, lambda call=call: graphs.run(program, call, gradients), f"{how} and {where} it")
        graphs.compare(expected, found, f"{how} and {where}")
    _after_state(subject, program, plain, case, gradients, how)


def _after_state(
    subject: Subject, program: graphs.Program, plain: graphs.Program, case: Case, gradients: bool, how: str
) -> None:
    """Run the compiled program once more, after changing the numbers that a function of the operator's module assigns."""
    for state in state_of(subject):
        with state.changed():
            try:
                expected = graphs.eager(subject, plain, case, gradients)
            except CallRefused:
                continue
            where = f"{how} and called again after {state.name} was changed, which its functions read and its module assigns"
            call = case.make(subject.device)
            found = graphs.attempt(subject, lambda call=call: graphs.run(program, call, gradients), f"{where}, it")
            graphs.compare(expected, found, where)


def _with_gradients(subject: Subject, plain: graphs.Program, case: Case) -> tuple[Case, bool]:
    """Return the case with gradients required of every tensor that can have one, if the operator has them in eager mode."""
    able = case.map(lambda _, tensor: dataclasses.replace(tensor, requires_grad=tensor.differentiable))
    try:
        if not fakes.registers_autograd(subject) or not graphs.eager(subject, plain, able, True).gradients:
            return case, False
    except CallRefused:
        return case, False
    return able, True


def _recompiles(subject: Subject, case: Case) -> None:
    cases = [*_cases_of_distinct_sizes(subject, case)]
    if len(cases) < _MIN_SIZES:
        raise NotApplicable("the operator accepts too few sizes to find whether it is compiled again for each")
    fakes.run_fake(subject, cases[0])
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def count_after(case: Case) -> int:
        call = case.make(subject.device)
        where = f"compiled with dynamic sizes and called with {case}, it"
        graphs.attempt(subject, lambda: graphs.run(program, call), where)
        return len(compiled)

    with graphs.compiler():
        program = graphs.compiled(subject, graphs.alone(subject), backend, True)
        counts = [count_after(each) for each in [cases[0], *cases]]
    _raise_if_recompiled(subject, counts, cases)


def _raise_if_recompiled(subject: Subject, counts: list[int], cases: list[Case]) -> None:
    if counts[1] > counts[0]:
        message = (
            f"called twice with {cases[0]}, it is compiled twice: something that changes with each call is guarded"
        )
    elif all(b > a for a, b in itertools.pairwise(counts[1:])):
        message = (
            f"compiled with dynamic sizes, it is compiled again for every size, such as {cases[1]} after {cases[0]}: the "
            "fake implementation treats sizes as constants"
        )
    else:
        return
    if not fakes.has_own_fake(subject) or any(str(each.type) == "List[Tensor]" for each in subject.schema.returns):
        raise Remark(message)
    raise Violation(message)


def _cases_of_distinct_sizes(subject: Subject, case: Case) -> Iterator[Case]:
    """Yield cases that the operator accepts, in which different names have different sizes, not all in the same proportion."""
    start = resized(subject.spec, case, lambda number, size: max(size, 2) + 4 * number)
    seen: set[str] = set()
    for change in (lambda number, size: size, *CHANGES):
        found = resized(subject.spec, start, change)
        shapes = str([tensor.shape for tensor in found.tensors()])
        if shapes in seen:
            continue
        seen.add(shapes)
        try:
            subject.run(found)
        except CallRefused:
            continue
        yield found


def _export(subject: Subject, case: Case) -> None:
    fakes.run_fake(subject, case)
    plain = graphs.alone(subject)
    expected = graphs.eager(subject, plain, case)
    for dynamic, strict in ((False, False), (True, True)):
        where = f"exported{' with dynamic sizes' * dynamic}{', strict' * strict}"
        with graphs.compiler():
            call = case.make(subject.device)
            exported = graphs.attempt(
                subject, lambda c=call, d=dynamic, s=strict: graphs.exported(subject, c, d, s), f"{where}, it"
            )
            graphs.compare(expected, graphs.run(exported.module(), case.make(subject.device)), f"{where} and run")
            if dynamic:
                _at_other_sizes(subject, case, exported.module(), where)
            else:
                _round_trip(subject, case, exported, expected)


def _at_other_sizes(subject: Subject, case: Case, program: Any, where: str) -> None:
    for other in other_sizes(subject.spec, case)[:2]:
        try:
            expected = graphs.eager(subject, graphs.alone(subject), other)
        except CallRefused:
            continue
        found = graphs.attempt(
            subject, functools.partial(_guarded, program, other.make(subject.device)), f"{where}, it"
        )
        if found is not None:
            graphs.compare(expected, found, f"{where} and run with other sizes, {other}")


def _guarded(program: Any, call: Call) -> graphs.ProgramOutcome | None:
    """Run an exported program; return None if its guards reject these sizes."""
    try:
        return graphs.run(program, call)
    except Exception as error:
        if any(text in str(error) for text in _GUARDS):
            return None
        raise


def _round_trip(subject: Subject, case: Case, exported: Any, expected: graphs.ProgramOutcome) -> None:
    try:
        program = graphs.reloaded(exported)
    except Exception as error:
        raise Remark(f"torch.export.save or load raises {fakes.shortened(error)}") from error
    found = graphs.attempt(
        subject, lambda: graphs.run(program, case.make(subject.device)), "exported, saved, loaded, it"
    )
    graphs.compare(expected, found, "exported, saved, loaded and run")


def _functionalize(subject: Subject, case: Case) -> None:
    from torch._subclasses.functional_tensor import dispatch_functionalize

    def plain(args: Any, kwargs: Any) -> Any:
        returned = subject.function(*args, **kwargs)
        for leaf in leaves(returned):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaf.add_(1)  # changes an argument if the result is in its memory
        return returned, [*args, *kwargs.values()]  # written arguments are results, too

    expected = dataclasses.replace(graphs.eager(subject, plain, case), arguments=())
    try:
        found = graphs.run(dispatch_functionalize(plain), case.make(subject.device))
    except Exception as error:
        raise NotApplicable(f"torch does not functionalise it: {fakes.shortened(error)}") from error
    graphs.compare(expected, dataclasses.replace(found, arguments=()), "functionalised")


def _cuda_graph(subject: Subject, case: Case) -> None:
    plain = graphs.alone(subject)
    expected = graphs.eager(subject, plain, case)
    call, graph = case.make(subject.device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        copy = call.map(torch.Tensor.clone)
        plain(copy.args, copy.kwargs)  # work that is done once, such as compiling a kernel, stays outside the graph
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                returned = graphs.run(plain, call)
        except Exception as error:
            raise Violation(f"captured in a CUDA graph, it raises {fakes.shortened(error)}") from error
    graph.replay()
    torch.cuda.synchronize()
    graphs.compare(expected, returned, "captured in a CUDA graph and replayed")


def _no_cuda(subject: Subject) -> str:
    on_cuda = torch.device(subject.device).type == "cuda" and torch.cuda.is_available()
    return "" if on_cuda else "arguments are not on a CUDA device"


def _no_opkit_backend(subject: Subject) -> str:
    import torch._dynamo

    return "" if "opkit" in torch._dynamo.list_backends() else 'torch.compile has no backend "opkit" yet'


_PLANS = ((False, True, False), (True, False, True))
_RULE = (
    "A program compiled by {} gives what eager mode gives, also at sizes, values, layouts and module state that it was not "
    "compiled for."
)

compile_property = functools.partial(Property, cases=drawn_above_one(_DRAWN), share=0.02, forked=False)

PROPERTIES = (
    compile_property(
        "compile.functionalize",
        rule="Functionalized, the operator, and writes to its results, give what they give in eager mode.",
        defect="a result in the memory of an argument, or of another result, which the schema does not declare",
        check=_functionalize,
        cost=0.01,
        share=0.1,
    ),
    compile_property(
        "compile.recompiles",
        rule="With dynamic sizes, the operator is not compiled again for each size.",
        defect="a fake implementation that turns sizes into numbers",
        check=_recompiles,
        cost=0.5,
    ),
    compile_property(
        "compile.aot_eager",
        rule=_RULE.format("aot_eager"),
        defect="an undeclared write is dropped or reordered; a backward that reads elements; a fake that reads a global",
        check=_compiles("aot_eager", _PLANS),
        cost=1.5,
    ),
    compile_property(
        "compile.export",
        rule="torch.export takes the operator; the program gives what eager mode gives, at other sizes and when loaded too.",
        defect="an operator that runs Python on elements, or takes sizes for constants, cannot leave the process",
        check=_export,
        cost=1.0,
    ),
    compile_property(
        "compile.inductor",
        rule=_RULE.format("Inductor"),
        defect="strides that the fake implementation has wrong, a result in a reused buffer, a kernel that needs a layout",
        check=_compiles("inductor", _PLANS),
        cost=8.0,
    ),
    compile_property(
        "compile.opkit",
        rule=_RULE.format("opkit"),
        defect="what the other backends' properties are there for",
        check=_compiles("opkit", _PLANS),
        cost=3.0,
        skip=_no_opkit_backend,
    ),
    compile_property(
        "compile.cuda_graph",
        rule="Captured in a CUDA graph and replayed, the operator gives what it gives without.",
        defect="a kernel that synchronises, launches on the default stream, or caches pointers",
        check=_cuda_graph,
        cost=0.05,
        share=0.1,
        skip=_no_cuda,
    ),
)
