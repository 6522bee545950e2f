"""PyTorch's OpInfo database, compiled and eager: each operator's samples, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
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
        outcome: "pass", "wrong", "error", "fallback" where the compiler refuses the graph, or "none" where eager itself has no
            case: no sample of the dtype, or none that runs twice with the same result.
        samples: how many were asked.
        gradients: of how many the gradients were asked as well.
        message: the first difference or error.
    """

    outcome: str
    samples: int = 0
    gradients: int = 0
    message: str = ""


def failure(error: Exception) -> tuple[str, str]:
    """Whether a compiler refused a graph ("fallback": without ``strict`` it would run in eager mode) or failed ("error"); why."""
    text = f"{type(error).__name__}: {error}"
    if refused := re.search(r"torch.compile\(backend='opkit'\) cannot compile \S+: (.*)", text):
        return "fallback", refused[1]
    text = text.partition("\n\nSet TORCHDYNAMO_VERBOSE")[0]
    return "error", text.partition(" raised:\n")[2] or text


@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # it rounds more than the tolerances allow
def asked(name: str, dtype: torch.dtype, backend: Any, limit: int, device: str = "cpu") -> Found:
    """Compile an operator for up to ``limit`` samples and compare; the first that differs or fails ends it.

    A result is right if it is within the tolerances of eager's, or of what eager computes in float64.
    """
    info, samples, gradients = infos()[name], 0, 0
    if dtype not in info.supported_dtypes(device):
        return Found("none", message=f"it does not take {dtype}")
    torch._dynamo.reset()
    grad = info.supports_autograd and dtype in info.supported_backward_dtypes(device)
    for sample in itertools.islice(_samples(info, dtype, grad, device), limit):
        expected = _expected(info.op, sample, grad)
        if expected is None:
            continue
        samples, gradients = samples + 1, gradients + bool(expected[1])
        try:
            found = _results(_compiled(info.op, backend), sample, grad)
            wrong = _apart(found, expected)
        except Exception as error:  # whatever a compiler dies of is a result here
            kind, message = failure(error)
            return Found(kind, samples, gradients, message[:600])
        if wrong and not _is_exact(found, expected, info.op, sample, grad):
            return Found("wrong", samples, gradients, f"{'gradient ' if wrong[0] else ''}{wrong[1]}"[:600])
    return (
        Found("pass", samples, gradients) if samples else Found("none", message="no sample runs alike twice in eager")
    )


def _samples(info: Any, dtype: torch.dtype, grad: bool, device: str) -> Iterator[Any]:
    torch.manual_seed(0)
    return iter(info.sample_inputs(device, dtype, requires_grad=grad))


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


def _is_exact(found: Results, expected: Results, op: Callable[..., Any], sample: Any, grad: bool) -> bool:
    """Return whether results of a narrow dtype are those of eager in float64, rounded: then it is eager that is apart."""
    try:
        exact = _results(op, sample, grad, _widened)
        rounded = [
            [value.to(like.dtype) if isinstance(like, Tensor) else value for value, like in zip(*each, strict=True)]
            for each in zip(exact, expected, strict=True)
        ]
    except Exception:  # it takes no float64, or gives something else for it
        return False
    return not _apart(found, (rounded[0], rounded[1]))


def _results(op: Callable[..., Any], sample: Any, grad: bool, copied: Callable[[Any], Any] | None = None) -> Results:
    """What a call returns, and the gradients of its float inputs, from copies of the inputs and with torch's seed set."""
    torch.manual_seed(1)
    args, kwargs = pytree.tree_map(copied or _copied, ((sample.input, *sample.args), sample.kwargs))
    returned = op(*args, **kwargs)
    returned = sample.output_process_fn_grad(returned) if grad else returned
    leaves = pytree.tree_leaves(returned)
    pulled = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
    wanted = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.requires_grad]
    grads: Sequence[Any] = ()
    if grad and pulled and wanted:
        grads = torch.autograd.grad(pulled, wanted, [_weights(each) for each in pulled], allow_unused=True)
    if any(each.is_cuda for each in leaves if isinstance(each, Tensor)):
        torch.cuda.synchronize()  # errors of kernels are raised here, not in a later call
    return leaves, list(grads)


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    copy = (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        if _dense(value)
        else None
    )
    made = value.detach().clone() if copy is None else copy.copy_(value.detach())
    return made.requires_grad_(value.requires_grad)


def _widened(value: Any) -> Any:
    """A copy of a tensor of floats in float64; a dtype of floats becomes float64."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        return _copied(value)
    return _copied(value).detach().double().requires_grad_(value.requires_grad)


def _dense(value: Tensor) -> bool:
    return not (value.is_conj() or value.is_neg() or 0 in value.stride())


def _weights(result: Tensor) -> Tensor:
    """What a result's gradient is pulled back with: not all ones, which would hide mistakes of order."""
    steps = torch.linspace(0.5, 1.5, max(result.numel(), 1), dtype=torch.float64, device=result.device)
    return steps[: result.numel()].reshape(result.shape).to(result.dtype)


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
