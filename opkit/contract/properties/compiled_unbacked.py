"""The property ``compile.unbacked``: a program with a size that is known only when it runs."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.contract.calls.cases import Case
from opkit.contract.calls.resizing import drawn_above_one, resized
from opkit.contract.calls.specs import Drawing
from opkit.contract.prop import NotApplicable, Remark, Violation
from opkit.contract.properties.compiled import compile_property
from opkit.contract.subject import Subject
from opkit.contract.traced import fakes, graphs

_LARGEST = 4  # the unknown size is at most this; 0 and 1 are among its values


def _unbacked(subject: Subject, case: Case) -> None:
    case, dims = _with_unknown(subject, case)
    fakes.run_fake(subject, case)
    expected = {n: _eager(subject, dims, case, n) for n in (3, 0, 1, 2)}
    if expected[3] is None:
        raise NotApplicable("the operator accepts no other size in the place of its first")
    with graphs.compiler(capture_scalar_outputs=True):
        program = _compiled(subject, subject.function, dims)
        for n, wanted in expected.items():
            if wanted is None:
                continue
            try:
                found = graphs.run(program, _call(subject, case, n))
            except Exception as error:
                _raised(subject, case, dims, n, error)
                return
            graphs.compare(wanted, found, f"compiled with a size that is unknown until it runs, and run with {n}")


def _with_unknown(subject: Subject, case: Case) -> tuple[Case, list[int | None]]:
    """Return the case with its first size large enough, and the dimension of each tensor that has this size."""

    def at(size: int) -> Case:
        return resized(subject.spec, case, lambda number, other: other if number else size)

    case, larger = at(_LARGEST), at(_LARGEST + 1)
    dims: list[int | None] = []
    for a, b in zip(case.tensors(), larger.tensors(), strict=True):
        changed = [dim for dim, (size, other) in enumerate(zip(a.shape, b.shape, strict=True)) if size != other]
        if (
            len(changed) > 1
            or any(b.shape[dim] != _LARGEST + 1 for dim in changed)
            or (a.low, a.high) != (b.low, b.high)
        ):
            raise NotApplicable("its first size decides others, or which numbers are allowed")
        dims.append(changed[0] if changed else None)
    if not any(dim is not None for dim in dims):
        raise NotApplicable("its arguments have no size that may vary")
    return case, dims


def _program(function: Callable[..., Any], dims: list[int | None]) -> graphs.Program:
    def program(args: Any, kwargs: Any) -> Any:
        *own, count = args
        n = count.item()
        torch._check(n >= 0)
        torch._check(n <= _LARGEST)
        rows = torch.arange(n, device=count.device)
        leaves, spec = pytree.tree_flatten((own, kwargs))
        at = iter(dims)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and (dim := next(at)) is not None:
                leaves[i] = leaf.index_select(dim, rows)
        own, kwargs = pytree.tree_unflatten(leaves, spec)
        return function(*own, **kwargs)

    return program


def _compiled(subject: Subject, function: Callable[..., Any], dims: list[int | None]) -> graphs.Program:
    return graphs.compiled(subject, _program(function, dims), "aot_eager", False)


def _call(subject: Subject, case: Case, n: int) -> Any:
    call = case.make(subject.device)
    return dataclasses.replace(call, args=(*call.args, torch.tensor(n, device=subject.device)))


def _eager(subject: Subject, dims: list[int | None], case: Case, n: int) -> graphs.ProgramOutcome | None:
    try:
        return graphs.run(_program(subject.function, dims), _call(subject, case, n))
    except Exception:  # the operator need not accept each of these sizes
        return None


def _raised(subject: Subject, case: Case, dims: list[int | None], n: int, error: Exception) -> None:
    message = (
        f"compiled with a size that is unknown until it runs, and run with {n}, it raises {fakes.shortened(error, 400)}"
    )
    if subject.reference is None:
        raise Remark(message) from error
    try:
        torch.compiler.reset()
        graphs.run(_compiled(subject, subject.reference, dims), _call(subject, case, n))
    except Exception:
        raise Remark(f"{message}; so does the reference") from error
    raise Violation(
        f"{message}, and the reference does not. A rule must not branch on whether a size is 0, 1 or larger."
    ) from error


def _no_overload(subject: Subject) -> str:
    if subject.overload is not None:
        return ""
    return "it is no operator of the dispatcher, so that a compiler sees its Python"


PROPERTIES = (
    compile_property(
        "compile.unbacked",
        rule="A program compiled for a size that is known only when it runs gives what eager mode gives, for 0 and 1 as well.",
        defect="a fake implementation that branches on a size, or has a size of its own for tensors of no elements",
        check=_unbacked,
        cases=drawn_above_one(Drawing(largest=9, elements=256)),
        cost=0.7,
        skip=_no_overload,
    ),
)
