"""Whether a compiled program gives what eager torch gives, within tolerances that come from float64.

The program also runs in float64, and then a few times with every rounding operator's result disturbed by as much as its dtype
may round: how far those results are apart says how far two correct compilers may be apart, and so does eager's own error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from random_graphs import DTYPES, Program, arguments
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_TIMES = 8.0  # what errors may exceed those seen
_SAMPLES = 3
_MOVES = (
    "cat", "stack", "clone", "detach", "index", "gather", "index_select", "where", "masked_fill", "flip", "roll",
    "neg", "abs", "maximum", "minimum", "amax", "amin", "clamp", "clamp_min", "relu", "leaky_relu", "hardtanh",
    "repeat", "constant_pad_nd", "tril", "triu", "copy_", "fill_", "zero_", "zeros", "zeros_like", "ones_like",
    "full", "full_like", "new_zeros", "new_full", "new_empty", "new_empty_strided", "empty_like", "index_put_",
    "index_put", "empty", "embedding", "scalar_tensor", "argmax", "argmin", "floor", "ceil", "round", "trunc",
    "sign", "masked_fill_", "slice_backward", "select_backward", "isnan",
)  # fmt: skip
"""Operators that round nothing: their results are left as they are, so that what is exact stays exact."""


class _Disturbed(TorchDispatchMode):
    """Disturbs what each rounding operator reads by float32's, and what it gives by the program's, relative precision."""

    def __init__(self, precision: float, seed: int, device: str) -> None:
        super().__init__()
        self.precision, self.generator = precision, torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _MOVES and not func.is_view and name != "_to_copy":
            leaves = result if isinstance(result, (list, tuple)) else [result]
            return self._rewrapped(result, [self._disturb(leaf) for leaf in leaves])
        if name == "_to_copy" and args[0].is_floating_point():
            return self._disturb(result)
        return result

    def _disturb(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float64, device=self.generator.device)
            value.mul_(1 + self.precision * (noise.to(value.device) * 2 - 1))
        return value

    @staticmethod
    def _rewrapped(result: Any, leaves: list[Any]) -> Any:
        return type(result)(leaves) if type(result) in (list, tuple) else leaves[0] if len(leaves) == 1 else result


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call left: its results, then its arguments as they are now, and which results share memory with arguments."""

    values: list[Tensor]
    shared: list[tuple[int, int]]
    grads: list[Tensor]


def called(function: Callable[..., Any], args: Sequence[Tensor], grad: bool = False) -> Outcome:
    """Call, and for ``grad`` pull the sum of squares of all floats back to the arguments."""
    results = list(function(*args))
    shared = [
        (r, a) for r, result in enumerate(results) for a, arg in enumerate(args) if _memory(result) == _memory(arg) != 0
    ]
    grads = _grads(results, args) if grad else []
    values = [each.detach() for each in results] + [each.detach() for each in args]
    if any(each.is_cuda for each in values):
        torch.cuda.synchronize()  # errors of kernels are raised here, not in a later call
    return Outcome(values, shared, grads)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _grads(results: Sequence[Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    wanted = [arg for arg in args if arg.requires_grad]
    pulled = [result for result in results if result.requires_grad]
    if not wanted or not pulled:
        return []
    loss = sum((result * torch.linspace(0.5, 1.5, max(result.numel(), 1), dtype=result.dtype, device=result.device)
                [: result.numel()].reshape(result.shape)).sum() for result in pulled)  # fmt: skip
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(arg) if grad is None else grad for arg, grad in zip(wanted, found, strict=True)]


def precision(program: Program) -> float:
    """The relative precision of the narrowest float that the program names or is given."""
    named = [each.dtype for each in program.inputs] + [
        name for name in DTYPES if any(name in line for line in program.lines)
    ]
    narrow = [torch.finfo(DTYPES[name]).eps for name in named if DTYPES[name].is_floating_point]
    return max([*narrow, torch.finfo(torch.float32).eps])


def mismatch(program: Program, compile_: Callable[..., Any], grad: bool = False, device: str = "cpu") -> str | None:
    """What a compiled program does otherwise than eager on the same device, in words; None where it does the same.

    Raises:
        EagerError: eager torch cannot run it, such as a gradient through what a later line wrote over.
    """
    try:
        eager = called(program.function(), arguments(program, grad=grad, device=device), grad)
        exact = called(program.function(exact=True), arguments(program, exact=True, grad=grad, device=device), grad)
    except RuntimeError as error:
        raise EagerError from error
    torch._dynamo.reset()
    compiled = called(compile_(program.function()), arguments(program, grad=grad, device=device), grad)
    if eager.shared != compiled.shared:
        return f"results share memory with arguments as {compiled.shared}, not as {eager.shared}"
    noisy = [_noisily(program, seed, grad, device) for seed in range(_SAMPLES)]
    for at, (ours, theirs) in enumerate(zip(_all(compiled), _all(eager), strict=True)):
        wrong = _different(ours, theirs, _all(exact)[at], [_all(each)[at] for each in noisy])
        if not wrong and at < len(eager.values) and _strides(ours) != _strides(theirs):
            wrong = f"strides {ours.stride()}, where eager has {theirs.stride()}"
        if wrong:
            return f"value {at} (of {len(eager.values)} results and arguments, then gradients): {wrong}"
    return None


class EagerError(Exception):
    """Eager torch cannot run a program."""


def _all(outcome: Outcome) -> list[Tensor]:
    return outcome.values + outcome.grads


def _strides(value: Tensor) -> list[int]:
    """The strides that tell where elements lie."""
    return (
        [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1] if value.numel() else []
    )


def _noisily(program: Program, seed: int, grad: bool, device: str) -> Outcome:
    args = arguments(program, exact=True, grad=grad, device=device)
    with _Disturbed(precision(program), seed, device):
        return called(program.function(exact=True), args, grad)


def _different(ours: Tensor, theirs: Tensor, exact: Tensor, noisy: Sequence[Tensor]) -> str | None:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype}{list(ours.shape)}, where eager has {theirs.dtype}{list(theirs.shape)}"
    if not theirs.is_floating_point():
        return None if torch.equal(ours, theirs) else _shown(ours, theirs, "0")
    mine, other, exact = ours.double(), theirs.double(), exact.double()
    finite = other.isfinite()
    if (
        not torch.equal(mine[~finite].nan_to_num(7e77), other[~finite].nan_to_num(7e77))
        or not mine[finite].isfinite().all()
    ):
        return _shown(ours, theirs, "where not finite")
    allowed = _TIMES * max(_largest(each[finite] - exact[finite]) for each in (other, *(n.double() for n in noisy)))
    return None if _largest(mine[finite] - other[finite]) <= allowed else _shown(ours, theirs, f"{allowed:.3g}")


def _largest(values: Tensor) -> float:
    """The largest absolute value; infinite where one is not finite."""
    return float(values.abs().nan_to_num(float("inf")).max()) if values.numel() else 0.0


def _shown(ours: Tensor, theirs: Tensor, allowed: str) -> str:
    return f"beyond {allowed}\ncompiled: {ours}\neager:    {theirs}"
