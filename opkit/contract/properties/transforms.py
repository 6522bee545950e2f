"""The group ``transforms``: vmap, torch.func's derivatives and functionalization. ``transforms_modes`` has the others."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch

from opkit.contract.calls.cases import Call, Case
from opkit.contract.compare.calls import is_random, observe
from opkit.contract.compare.outcome import leaves
from opkit.contract.prop import NotApplicable, Property, Remark, Violation
from opkit.contract.properties.gradients_higher import direction, inner, size
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import derivatives as d

_BATCHES = (3, 1, 2, 0)
_MAX_DIMS = 9
_FACTOR = 50.0  # of the tolerance, since gradients may cancel: a wrong batching rule is off by more

Flat = Callable[..., tuple[torch.Tensor, ...]]


def flat(subject: Subject, call: Call, tensors: Sequence[torch.Tensor]) -> Flat:
    """Return the operator as a function of ``tensors``, which are among the call's, to its tensor results."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = call.map(lambda each: inputs[places[id(each)]] if id(each) in places else each)
        torch.default_generator.manual_seed(0)
        returned = subject.function(*changed.args, **changed.kwargs)
        return tuple(leaf for leaf in leaves(returned) if isinstance(leaf, torch.Tensor))

    return function


# ---- vmap --------------------------------------------------------------------------------------------------------------


def _samples(subject: Subject, case: Case, count: int) -> list[list[torch.Tensor]]:
    """Return the case's tensors ``count`` times, each time with other numbers."""
    found: list[list[torch.Tensor]] = []
    for sample in range(max(count, 1)):
        other = case.reseeded(10 * sample)
        unique = {id(tensor): tensor for tensor in d.tensors_of_case(other, other.make(subject.device))}
        found.append([*unique.values()])
    return found


def _combinations(tensors: Sequence[torch.Tensor]) -> list[tuple[int | None, ...]]:
    """Return tuples of mapped dimensions: all in the first, each alone, last and middle ones, and mixtures."""
    choices = [dict.fromkeys([0, None, -1, tensor.dim() // 2]) for tensor in tensors]
    simple = [
        tuple(0 for _ in tensors),
        *(tuple(0 if n == m else None for n in range(len(tensors))) for m in range(len(tensors))),
    ]
    every = itertools.islice(itertools.product(*choices), 64)
    found = [each for each in dict.fromkeys([*simple, *every]) if any(dim is not None for dim in each)]
    step = max(1, len(found) // _MAX_DIMS)
    return [*dict.fromkeys([*found[: len(simple)], *found[len(simple) :: step]])]


def _stacked(samples: list[list[torch.Tensor]], dims: Sequence[int | None], count: int) -> list[torch.Tensor]:
    return [
        samples[0][place] if dim is None else torch.stack([each[place] for each in samples], dim).narrow(dim, 0, count)
        for place, dim in enumerate(dims)
    ]


def _vmap(subject: Subject, case: Case) -> None:
    if not subject.functional:
        raise NotApplicable("it writes to its arguments")
    if is_random(subject, case):
        return  # torch.vmap may draw in another order
    call = case.make(subject.device)
    tensors = [*{id(tensor): tensor for tensor in d.tensors_of_case(case, call)}.values()]
    if not tensors:
        raise CallRefused(ValueError("no tensor to map"))
    function = flat(subject, call, tensors)
    samples = _samples(subject, case, 4)
    with _quiet():
        for number, dims in enumerate(_combinations(tensors)):
            count = 3 if number == 0 else _BATCHES[number % len(_BATCHES)]
            _mapped(function, samples[: max(count, 1)], dims, count, number % 2)
        _nested(function, samples)
        _per_sample(function, samples)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Disable C++'s warnings about operators that torch maps by a loop: there is one for each call."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    switch = functorch._set_vmap_fallback_warning_enabled  # torch 2.13: its state cannot be read, and is on
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _one_by_one(function: Flat, samples: Sequence[list[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    return [function(*(tensor.clone() for tensor in each)) for each in samples]  # a plain function may write to them


def _nested(function: Flat, samples: Sequence[list[torch.Tensor]]) -> None:
    """Check two nested batches; the inner one is the last dimension, and all tensors are mapped."""
    wanted = _one_by_one(function, samples)
    grids = [torch.stack([torch.stack(t[:2], -1), torch.stack(t[2:], -1)]) for t in zip(*samples, strict=True)]
    try:
        got = torch.vmap(torch.vmap(function, in_dims=-1))(*grids)
    except Exception:  # the test of one batch checks whether it can be mapped at all
        return
    for number, result in enumerate(got):
        each = [result_of[number] for result_of in wanted]
        if len({t.shape for t in each}) > 1:
            return  # sizes that depend on data cannot be stacked
        right = torch.stack(each).reshape(2, 2, *each[0].shape)
        _same(result, right, f"torch.vmap of torch.vmap, two times two of them: result {number}", "a loop's")


def _per_sample(function: Flat, samples: Sequence[list[torch.Tensor]]) -> None:
    """Check that per-sample gradients by torch.vmap of torch.func.grad are those of a loop over torch.func.grad."""
    places = tuple(place for place, tensor in enumerate(samples[0]) if tensor.is_floating_point())
    if not places:
        return
    gradient: Flat = torch.func.grad(lambda *inputs: _total(function, cast("Any", inputs)), places)
    try:
        wanted = _one_by_one(gradient, samples[:3])
        got = torch.vmap(gradient)(*(torch.stack(t) for t in zip(*samples[:3], strict=True)))
    except Exception:  # a missing transform is no defect
        return
    for place, mine, each in zip(places, got, zip(*wanted, strict=True), strict=True):
        right = torch.stack(each)
        if wrong := d.mismatch(mine, right, max(1.0, d.magnitude([right])), factor=_FACTOR):
            raise Violation(f"torch.vmap of torch.func.grad: the gradient of tensor {place} is not a loop's: {wrong}")


def _total(function: Flat, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number that depends on every element of every floating-point result with another weight."""
    results = [t for t in function(*inputs) if t.is_floating_point()]
    terms = [(t * (1 + torch.arange(t.numel()).reshape(t.shape) % 7 / 7)).sum() for t in results]
    return torch.stack([term.double() for term in terms]).sum()


def _mapped(
    function: Flat, samples: list[list[torch.Tensor]], dims: tuple[int | None, ...], count: int, out_dim: int
) -> None:
    chosen = [[s[p] if dim is not None else samples[0][p] for p, dim in enumerate(dims)] for s in samples]
    try:
        wanted = _one_by_one(function, chosen)
    except Exception as error:
        raise CallRefused(error) from error
    out_dims = tuple(-1 if out_dim and result.dim() else 0 for result in wanted[0])
    try:
        got = torch.vmap(function, in_dims=dims, out_dims=out_dims)(*_stacked(samples, dims, count))
    except Exception as error:
        if count == 0:
            return  # torch's own loop does not accept an empty batch
        raise Remark(f"torch.vmap with in_dims={dims} raises {type(error).__name__}: {str(error)[:200]}") from error
    if [t.shape for each in wanted for t in each] != [t.shape for _ in wanted for t in wanted[0]]:
        return  # sizes that depend on data cannot be stacked
    for number, result in enumerate(got):
        right = torch.stack([each[number] for each in wanted], out_dims[number]).narrow(out_dims[number], 0, count)
        _same(result, right, f"torch.vmap with in_dims={dims}, {count} of them: result {number}", "a loop's")


def _same(got: torch.Tensor, right: torch.Tensor, what: str, whose: str) -> None:
    if got.dtype != right.dtype or got.shape != right.shape:
        raise Violation(
            f"{what} is {got.dtype} of shape {list(got.shape)}, where {whose} is {right.dtype} of {list(right.shape)}"
        )
    exact = not (got.is_floating_point() or got.is_complex())
    if exact and not torch.equal(got, right):
        raise Violation(f"{what} is not {whose}")
    if not exact and (wrong := d.mismatch(got, right, 1.0)):
        raise Violation(f"{what} is not {whose}: {wrong}")


# ---- torch.func --------------------------------------------------------------------------------------------------------


def _functional(subject: Subject, case: Case) -> None:
    graph, numbers, right, grads = d.supported(subject, case)
    if not graph.attached:
        raise NotApplicable("no result requires grad")
    if graph.rounds or not d.finite(graph.outputs):
        return
    call, inputs = d.arguments_requiring_grad(subject, case, numbers)
    call, inputs = _detached(call, inputs)
    floating = flat(subject, call, inputs)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in floating(*tensors) if t.is_floating_point() or t.is_complex())

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        terms = [(g * out).sum() for g, out in zip(grads, function(*tensors), strict=True)]
        return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()

    places = tuple(range(len(inputs)))
    computed: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
        "torch.func.vjp": lambda: torch.func.vjp(function, *inputs)[1](tuple(grads)),
    }
    if not any(t.is_complex() for t in (*inputs, *graph.outputs)):
        computed["torch.func.grad"] = lambda: torch.func.grad(total, places)(*inputs)
        computed["torch.func.jacrev"] = lambda: torch.func.jacrev(total, places)(*inputs)
        computed["torch.func.jacfwd"] = lambda: torch.func.jacfwd(total, places)(*inputs)
        if d.finite(graph.outputs):
            _forward_agrees(subject, total, inputs, right, grads)
    with _quiet():
        for name, compute in computed.items():
            _agrees(subject, case, name, compute, numbers, right, grads)


def _forward_agrees(
    subject: Subject,
    total: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    right: d.Gradients,
    grads: Sequence[torch.Tensor],
) -> None:
    along = tuple(direction(tensor, number) for number, tensor in enumerate(inputs))
    try:
        found = torch.func.jvp(total, tuple(inputs), along)[1]
    except Exception:  # a missing transform is no defect
        return
    wanted = sum(map(inner, right, along))
    scale = sum(map(size, right, along)) + d.magnitude(grads)
    near = 10 * max(d.tolerances(tensor.dtype)[0] for tensor in inputs)
    lost = d.vanished(found) and subject.operator is None
    if not lost and wanted == wanted and not abs(float(found) - wanted) <= near * scale:
        raise Violation(
            f"torch.func.jvp in a random direction is {float(found):.7g}; by the backward it is {wanted:.7g}"
        )


def _detached(call: Call, inputs: Sequence[torch.Tensor]) -> tuple[Call, tuple[torch.Tensor, ...]]:
    plain = {id(tensor): tensor.detach() for tensor in inputs}
    return call.map(lambda tensor: plain.get(id(tensor), tensor)), tuple(plain[id(tensor)] for tensor in inputs)


def _agrees(
    subject: Subject,
    case: Case,
    name: str,
    compute: Callable[[], Sequence[torch.Tensor]],
    numbers: Sequence[int],
    right: d.Gradients,
    grads: Sequence[torch.Tensor],
) -> None:
    try:
        got = compute()
    except Exception:  # a missing transform is no defect
        return
    if all(d.vanished(each) for each in got) and subject.operator is None:
        return  # torch.library gives zeros where an operator has no rule for a transform
    scale = 4 * d.magnitude(grads)
    for number, mine, wanted in zip(numbers, got, right, strict=True):
        if wrong := d.mismatch(mine, wanted, scale, factor=4):
            raise Violation(
                f"{name}: the gradient of {d.argument(subject, case, number)} is not the backward's: {wrong}"
            )


# ---- functionalization -------------------------------------------------------------------------------------------------


def _functionalize(subject: Subject, case: Case) -> None:
    plain = observe(subject, case)
    call = case.make(subject.device)
    try:
        found = observe(subject, call, torch.func.functionalize(subject.function))
    except CallRefused as refusal:
        raise Remark(f"torch.func.functionalize raises {refusal}") from refusal
    for number, (a, b) in enumerate(zip(found.tensors(), plain.tensors(), strict=True)):
        _same(a.detach(), b.detach(), f"under torch.func.functionalize, result {number}", "an eager call's")
    for number, (a, b) in enumerate(zip(call.tensors(), plain.call.tensors(), strict=True)):
        _same(
            a.detach(),
            b.detach(),
            f"after torch.func.functionalize, tensor argument {number}",
            "what an eager call leaves",
        )


def transform_property(name: str, *, check: Callable[[Subject, Case], None], **row: Any) -> Property:
    """Return a property with the defaults of the group; its violations count only if equal calls give equal results."""
    usual = {"cases": d.smooth_cases(elements=64), "share": 0.3, "cost": 0.002, "backward": True}
    return Property(name, check=d.steady(check), **usual | row)


PROPERTIES: tuple[Property, ...] = (
    transform_property(
        "transforms.vmap",
        rule="torch.vmap gives what a loop gives, whichever arguments are mapped, and in whichever dimension.",
        defect="a batching rule that forgets in_dims, an unmapped argument, or where the mapped dimension ends up",
        check=_vmap,
        share=0.5,
        cost=0.006,
    ),
    transform_property(
        "transforms.functional",
        rule="torch.func's vjp, grad, jacrev and jacfwd agree with the backward.",
        defect="a setup_context or a jvp that is wrong where a transform calls it",
        check=_functional,
        cost=0.006,
        skip=d.no_candidates,
    ),
    transform_property(
        "transforms.functionalize",
        rule="Functionalization changes neither results nor what is written to arguments.",
        defect="a mutation that the schema does not declare, and functionalization loses",
        check=_functionalize,
        cases=d.smooth_cases(),
        share=0.4,
    ),
)
