"""This module runs a reference in float64 on the same numbers, without intermediate rounding, for nearly exact results.

A reference may call ``x.float()`` or ``torch.zeros(n, dtype=torch.bfloat16)``; a dispatch mode replaces these dtypes by float64.
The same mode can disturb the result of each step by as much as rounding would, which shows how far apart correct kernels may
be: a result that a step computes exactly (a minimum, a sign, a sum of small integers) is not disturbed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.fills import CONSTANT
from opkit.contract.observed.outcome import CallOutcome
from opkit.contract.prop import CallRefused, NotApplicable
from opkit.contract.subject import Subject

_ULPS = 4  # the error of one step of a correct kernel, in units of rounding
_EXACT = frozenset(
    [
        "abs",
        "neg",
        "relu",
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "max",
        "min",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "where",
        "sign",
        "sgn",
        "round",
        "floor",
        "ceil",
        "trunc",
        "copysign",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "copy_",
        "clone",
        "_to_copy",
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
        "scatter",
        "sort",
        "topk",
        "masked_fill",
        "index_put",
        "fill",
        "fill_",
        "zeros",
        "ones",
        "full",
        "arange",
        "empty",
        "zero_",
        "constant_pad_nd",
        "flip",
        "roll",
        "repeat",
        "isnan",
        "isinf",
        "tril",
        "triu",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "scalar_tensor",
        "threshold",
        "embedding",
        "lift_fresh",
        "lift_fresh_copy",
        "slice_scatter",
        "select_scatter",
        "masked_select",
        "nonzero",
        "isfinite",
        "logical_not",
    ]
)
_EXACT_WHERE_REPRESENTABLE = frozenset(
    ["add", "sub", "mul", "rsub", "sum", "cumsum", "addcmul", "mm", "bmm", "dot", "mv", "addmm", "baddbmm"]
)


class _Unpromotable(Exception):
    """The reference reads the bits of floats, so it cannot run in float64."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float64 or complex128 for a narrower dtype; float8 and integer dtypes stay."""
    if dtype in (torch.float16, torch.bfloat16, torch.float32):
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float64."""
    return tensor.detach().clone().to(wide(tensor.dtype))


def unit(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


@dataclasses.dataclass
class _Noise:
    generator: torch.Generator
    unit: float
    dtype: torch.dtype
    steady: bool  # errors of a sum add up rather than cancel

    def factor(self, like: torch.Tensor, size: float) -> torch.Tensor:
        signs = torch.randint(2, like.shape, generator=self.generator, dtype=torch.int8).to(torch.float64) * 2 - 1
        return 1 + size * signs.to(like.device)

    def longer(self, length: int) -> float:
        return _ULPS * self.unit * (length if self.steady else math.sqrt(length))


class _Promoted(TorchDispatchMode):
    """A mode in which every float is a float64, whatever dtype the function names."""

    def __init__(self, noise: _Noise | None = None) -> None:
        super().__init__()
        self.noise = noise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotApplicable("the reference draws random numbers: two correct results differ")
        if func.overloadpacket.__name__ == "view" and func._overloadname == "dtype":
            raise _Unpromotable
        args, kwargs = pytree.tree_map_only(torch.dtype, wide, (args, kwargs or {}))
        name = func.overloadpacket.__name__
        noise = self.noise
        disturbed = noise is not None and name not in _EXACT and not func.is_view
        if noise is not None and disturbed and self._length(func, args) > 1 and not func._schema.is_mutable:
            args = self._inputs(args, noise.longer(self._length(func, args)), name)
        out = func(*args, **kwargs)
        if disturbed:
            self._disturb(out, name, self._length(func, args), args)
        return out

    @staticmethod
    def _length(func: Any, args: Any) -> int:
        """Return the largest number of terms that are added up for one result."""
        if torch.Tag.pointwise in func.tags:
            return 1
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        whole = not [leaf for leaf in args[1:] if leaf is not None]
        return max([1, *(each.numel() if whole else max(each.shape, default=1) for each in tensors)])

    def _inputs(self, args: Any, size: float, name: str) -> Any:
        def change(leaf: torch.Tensor) -> torch.Tensor:
            if leaf.dtype != torch.float64 or (name in _EXACT_WHERE_REPRESENTABLE and _integral(leaf)):
                return leaf
            return leaf * self.noise.factor(leaf, size)  # pyright: ignore[reportOptionalMemberAccess]

        return pytree.tree_map_only(torch.Tensor, change, args)

    def _disturb(self, out: Any, name: str, length: int, args: Any) -> None:
        noise = self.noise
        assert noise is not None
        for leaf in pytree.tree_leaves(out):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float64:
                continue
            changed = leaf * noise.factor(leaf, noise.longer(length))
            if name in _EXACT_WHERE_REPRESENTABLE:
                changed = torch.where(_is_exact(leaf, noise.dtype, name, args), leaf, changed)
            leaf.copy_(changed)


def _is_exact(result: torch.Tensor, dtype: torch.dtype, name: str, args: Any) -> torch.Tensor:
    """Return where a step does not round in ``dtype``: its result is representable, and no part of a small operand is lost."""
    fits = result == result.to(dtype).double()
    if name in ("add", "sub") and all(isinstance(each, torch.Tensor) for each in args[:2]):
        one, other = args[:2]
        back = result - other if name == "add" else result + other
        fits = fits & ((result - one).abs() == other.abs()) & (back == one)
    return fits


def _integral(tensor: torch.Tensor) -> bool:
    """Return whether all sums of the elements are exact in any order: they are small multiples of a quarter."""
    return bool(((tensor * 4).frac() == 0).all()) and bool((tensor.abs() < 64).all())


@dataclasses.dataclass
class Expected:
    """The reference's results for a case.

    Attributes:
        own: the results in its own dtype; None if it does not support the dtype.
        exact: the results in float64; None if it cannot run in float64.
        why: why it cannot.
    """

    subject: Subject
    case: Case
    own: CallOutcome | None
    exact: CallOutcome | None
    why: str = ""

    def disturbed(self, seed: int) -> CallOutcome | None:
        """Return the exact result, disturbed as by rounding; None if that fails."""
        generator = torch.Generator().manual_seed(seed)
        dtype = working_dtype(self.case)
        steady = any(tensor.fill in CONSTANT for tensor in self.case.tensors())
        noise = _Noise(generator, unit(dtype), dtype, steady)
        try:
            return _run(self.subject, self.case, noise) if self.exact is not None else self._moved(noise)
        except (CallRefused, _Unpromotable):
            return None

    def moved(self, seed: int) -> CallOutcome | None:
        """Return the exact result for arguments that are each off by one rounding of their dtype."""
        generator = torch.Generator().manual_seed(seed)
        noise = _Noise(generator, 0.0, torch.float64, False)
        try:
            call = self.case.make(self.subject.device).map(lambda tensor: _off(tensor, noise, unit))
            return _call(self.subject, call, None)
        except (CallRefused, _Unpromotable):
            return None

    def _moved(self, noise: _Noise) -> CallOutcome | None:
        length = max((max(t.shape, default=1) for t in self.case.tensors()), default=1)
        call = self.case.make(self.subject.device)
        moved = call.map(lambda t: _off(t, noise, lambda _: noise.longer(length)).to(t.dtype))
        return self.subject.call(moved, self.subject.reference)


def _off(tensor: torch.Tensor, noise: _Noise, size: Any) -> torch.Tensor:
    wider = widened(tensor)
    floating = tensor.dtype.is_floating_point
    return wider * noise.factor(wider, size(tensor.dtype)) if floating else wider


def working_dtype(case: Case) -> torch.dtype:
    """Return the dtype in which correct kernels compute: float64 if all floats are float64, otherwise float32."""
    found = {tensor.dtype for tensor in case.tensors() if tensor.differentiable}
    return torch.float64 if found and found <= {torch.float64, torch.complex128} else torch.float32


def expected(subject: Subject, case: Case) -> Expected:
    """Run the reference in its own dtype and in float64.

    Raises:
        CallRefused: the reference gives no result in either.
        NotApplicable: the reference draws random numbers.
    """
    own = refusal = exact = None
    why = ""
    try:
        own = subject.expect(case)
    except CallRefused as error:
        refusal = error
    try:
        exact = _run(subject, case, None)
    except (CallRefused, _Unpromotable) as error:
        why = "it reads the bits of floats" if isinstance(error, _Unpromotable) else str(error)
    if own is None and (exact is None or "not implemented for" not in str(refusal)):
        assert refusal is not None
        raise refusal
    if own is not None and exact is not None and len(own.results) != len(exact.results):
        exact = None
    return Expected(subject, case, own, exact, why)


def _run(subject: Subject, case: Case, noise: _Noise | None) -> CallOutcome:
    return _call(subject, case.make(subject.device).map(widened), noise)


def _call(subject: Subject, call: Call, noise: _Noise | None) -> CallOutcome:
    default = torch.get_default_dtype()
    plain = Call(*pytree.tree_map_only(torch.dtype, wide, (call.args, call.kwargs)))
    try:
        torch.set_default_dtype(torch.float64)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _Promoted(noise):
            return subject.call(plain, subject.reference)
    except CallRefused as refusal:
        if isinstance(refusal.error, (NotApplicable, _Unpromotable)):
            raise refusal.error from None
        raise
    finally:
        torch.set_default_dtype(default)
