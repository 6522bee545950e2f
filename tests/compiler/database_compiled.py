"""PyTorch's OpInfo database, compiled and eager: each operator's samples, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7), torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 2e-2), torch.float16: (5e-3, 2e-3),
    torch.complex64: (1e-4, 1e-5), torch.complex128: (1e-7, 1e-7),
}  # fmt: skip
"""Relative and absolute, by the dtype of a result; the same for every backend. Integers and booleans must be equal."""


def full_name(info: Any) -> str:
    """The database's name, with the variant where there is one."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


@functools.cache
def infos() -> dict[str, Any]:
    """The database, by full name; importing it takes a second."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from torch.testing._internal.common_methods_invocations import op_db
    return {full_name(info): info for info in op_db}


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of an operator with one dtype.

    Attributes:
        outcome: "pass", "wrong", "error", or "none" where eager itself has no case: no sample of the dtype, or none that runs
            twice with the same result.
        samples: how many were asked.
        gradients: of how many the gradients were asked as well.
        message: the first difference or error.
    """

    outcome: str
    samples: int = 0
    gradients: int = 0
    message: str = ""


def asked(name: str, dtype: torch.dtype, backend: Any, limit: int) -> Found:
    """Compile an operator for up to ``limit`` samples and compare; the first that differs or fails ends it."""
    info, samples, gradients = infos()[name], 0, 0
    if dtype not in info.supported_dtypes("cpu"):
        return Found("none", message=f"it does not take {dtype}")
    torch._dynamo.reset()
    grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    for sample in itertools.islice(_samples(info, dtype, grad), limit):
        expected = _expected(info.op, sample, grad)
        if expected is None:
            continue
        samples, gradients = samples + 1, gradients + bool(expected[1])
        try:
            wrong = _apart(_results(_compiled(info.op, backend), sample, grad), expected)
        except Exception as error:  # whatever a compiler dies of is a result here
            return Found("error", samples, gradients, f"{type(error).__name__}: {error}"[:600])
        if wrong:
            return Found("wrong", samples, gradients, f"{'gradient ' if wrong[0] else ''}{wrong[1]}"[:600])
    return (
        Found("pass", samples, gradients) if samples else Found("none", message="no sample runs alike twice in eager")
    )


def _samples(info: Any, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    return iter(info.sample_inputs("cpu", dtype, requires_grad=grad))


def _compiled(op: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return torch.compile(function, backend=backend)


Results = tuple[list[Any], list[Any]]


def _expected(op: Callable[..., Any], sample: Any, grad: bool) -> Results | None:
    """Eager's results and gradients; None where eager fails, or does not do the same twice (it draws, or reads unset memory)."""
    try:
        first, second = _results(op, sample, grad), _results(op, sample, grad)
    except Exception:
        return None
    return None if _apart(second, first) else first


def _results(op: Callable[..., Any], sample: Any, grad: bool) -> Results:
    """What a call returns, and the gradients of its float inputs, from copies of the inputs and with torch's seed set."""
    torch.manual_seed(1)
    args, kwargs = pytree.tree_map(_copied, ((sample.input, *sample.args), sample.kwargs))
    returned = op(*args, **kwargs)
    returned = sample.output_process_fn_grad(returned) if grad else returned
    leaves = pytree.tree_leaves(returned)
    pulled = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
    wanted = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.requires_grad]
    grads: Sequence[Any] = ()
    if grad and pulled and wanted:
        grads = torch.autograd.grad(pulled, wanted, [_weights(each) for each in pulled], allow_unused=True)
    return leaves, list(grads)


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) if _dense(value) else None
    made = value.detach().clone() if copy is None else copy.copy_(value.detach())
    return made.requires_grad_(value.requires_grad)


def _dense(value: Tensor) -> bool:
    return not (value.is_conj() or value.is_neg() or 0 in value.stride())


def _weights(result: Tensor) -> Tensor:
    """What a result's gradient is pulled back with: not all ones, which would hide mistakes of order."""
    steps = torch.linspace(0.5, 1.5, max(result.numel(), 1), dtype=torch.float64)[: result.numel()]
    return steps.reshape(result.shape).to(result.dtype)


def _apart(found: Results, expected: Results) -> tuple[bool, str] | None:
    """Whether it is a gradient, and what the first difference is."""
    for grads, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if len(ours) != len(theirs):
            return bool(grads), f"{len(ours)} values, where eager has {len(theirs)}"
        for one, other in zip(ours, theirs, strict=True):
            if wrong := _difference(one, other):
                return bool(grads), wrong
    return None


def _difference(ours: Any, theirs: Any) -> str | None:
    if not isinstance(theirs, Tensor):
        same = ours is None if theirs is None else ours == theirs or (ours != ours and theirs != theirs)
        return None if same else f"{ours!r}, where eager has {theirs!r}"
    relative, absolute = TOLERANCES.get(theirs.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(ours, theirs, rtol=relative, atol=absolute, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return None
