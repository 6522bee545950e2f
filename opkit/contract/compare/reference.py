"""This module runs a reference in float64 on the same numbers, for nearly exact results, and derives tolerances.

A reference may call ``x.float()`` or ``torch.zeros(n, dtype=torch.bfloat16)``; a dispatch mode replaces these dtypes by float64.
The same mode can disturb the result of each step by as much as rounding would, which shows how far apart correct kernels may
be: a result that a step computes exactly (a minimum, a sign, a sum of small integers) is not disturbed.

Four terms of the tolerance add up, for each element:

- rounding of the result, and of a step or two before it, in the result's dtype;
- the error of the reference in that dtype, at this element and elsewhere in the same result;
- the change of the result when every step is off by a rounding, with as many roundings for a sum as it has terms: this accounts
  for conditioning and cancellation;
- for the 16-bit dtypes, the change when the arguments are off by a rounding, up to a bound: a kernel may round between its steps.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.tensors import CONSTANT
from opkit.contract.compare.outcome import CallOutcome
from opkit.contract.prop import NotApplicable
from opkit.contract.subject import CallRefused, Subject

_ULPS = 4  # the error of one step of a correct kernel, in units of rounding
_EXACT = frozenset((  # operations whose results are not rounded
    "abs", "neg", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "max", "min",
    "amax", "amin", "argmax", "argmin", "where", "sign", "sgn", "round", "floor", "ceil", "trunc", "copysign", "eq",
    "ne", "lt", "le", "gt", "ge", "copy_", "clone", "_to_copy", "cat", "stack", "index", "index_select", "gather",
    "scatter", "sort", "topk", "masked_fill", "index_put", "fill", "fill_", "zeros", "ones", "full", "arange",
    "empty", "zero_", "constant_pad_nd", "flip", "roll", "repeat", "isnan", "isinf", "tril", "triu", "zeros_like",
    "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor",
    "threshold", "embedding", "lift_fresh", "lift_fresh_copy", "slice_scatter", "select_scatter", "masked_select",
    "nonzero", "isfinite", "logical_not",
))  # fmt: skip
_EXACT_WHERE_REPRESENTABLE = frozenset(
    ["add", "sub", "mul", "rsub", "sum", "cumsum", "addcmul", "mm", "bmm", "dot", "mv", "addmm", "baddbmm"]
)
_HALF, _FULL = 2.5, 12.0  # roundings of a result: 16-bit ones are computed in float32, others by a chain of functions
_JUMP = 32.0  # a result that moves by more roundings than this, for one in its arguments, has a jump there
_SAFETY = 2.0
_ABSOLUTE = 4.0
Spread = Callable[[], torch.Tensor | None]


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


# ---- the tolerance -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Goal:
    """The values with which one result is compared.

    Attributes:
        own: the reference's result in its dtype.
        exact: the result in float64; ``own`` if there is none.
        spread: computes how far the result moves when every step is off by a rounding.
        moved: the same for one rounding of each argument.
        floor: differences below this do not count.
        extreme: whether any result is correct where the reference in its own dtype breaks down.
    """

    own: torch.Tensor
    exact: torch.Tensor
    spread: Spread = lambda: None
    moved: Spread = lambda: None
    floor: float = 0.0
    extreme: bool = False


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor, 0.0, 0.0, 0.0)


def rounding(dtype: torch.dtype) -> float:
    """Return the relative distance of two correct results through rounding alone."""
    return unit(dtype) * (_HALF if dtype.itemsize <= 2 else _FULL)


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return 2 * info.smallest_normal * info.eps


def allowed(goal: Goal) -> torch.Tensor:
    """Return the difference that rounding and the reference's own error explain, for each element."""
    dtype, size = goal.own.dtype, _finite(goal.exact.abs())
    error = _finite((widened(goal.own) - goal.exact).abs())
    step = unit(dtype) * _JUMP * (size + (size.mean() if size.numel() else 0.0))
    usual = error[error <= step]
    elsewhere = usual.max() if usual.numel() else error.new_zeros(())
    if error.numel() and usual.numel() < 0.9 * error.numel():  # the reference itself is not more accurate
        elsewhere = error.quantile(0.95) if error.numel() < 2**20 else error.max()
    slack = torch.clamp(_SAFETY * elsewhere - unit(dtype) * size, min=0.0)
    near_zero = _ABSOLUTE * min(unit(dtype), unit(torch.float32))  # intermediate numbers are about as large as 1
    floor = max(_smallest(dtype), near_zero, goal.floor)
    return rounding(dtype) * size + torch.maximum(slack, _SAFETY * error) + floor


def widest(goal: Goal) -> torch.Tensor:
    """Return the difference that rounding, the reference's own error and conditioning explain, for each element."""
    found, size = allowed(goal), _finite(goal.exact.abs())
    spread, moved = goal.spread(), goal.moved()
    if spread is not None:
        found = found + _SAFETY * _finite(spread)
    if moved is not None:
        step = unit(goal.own.dtype) * _JUMP * (size + (size.mean() if size.numel() else 0.0))
        found = found + torch.where(moved <= step, _SAFETY * _finite(moved), 0.0)
    return found


def wrong(got: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Return a mask of the elements that differ by more than rounding explains.

    >>> one = torch.ones(2)
    >>> wrong(torch.tensor([1.0, 1.1]), Goal(one, one.double()))
    tensor([False,  True])
    """
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return _wrong_integers(got, goal)
    if got.dtype.is_complex:
        return _wrong_complex(got, goal)
    bad = _outside(got, goal, allowed(goal))
    return _outside(got, goal, widest(goal)) if bool(bad.any()) else bad


def _outside(got: torch.Tensor, goal: Goal, tolerance: torch.Tensor) -> torch.Tensor:
    value, own = widened(got), widened(goal.own)
    largest = torch.finfo(goal.own.dtype).max
    exact = torch.where(goal.exact.abs() > largest, goal.exact.sign() * float("inf"), goal.exact)
    same = (value == own) | (value == exact) | (value.isnan() & (own.isnan() | exact.isnan()))
    near = ((value - goal.exact).abs() <= tolerance) | ((value - own).abs() <= tolerance)
    at_the_edge = value.isinf() & (goal.exact.abs() + tolerance >= largest) & (value.sign() == goal.exact.sign())
    fragile = _fragile(own, exact) & (goal.extreme | ~value.isfinite())
    return ~(same | near | at_the_edge | fragile)


def _fragile(own: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return where the reference in its dtype and the exact one are of different kinds, or far apart, after an overflow."""
    kinds = (own.isfinite() != exact.isfinite()) | (own.isnan() != exact.isnan())
    largest = _finite(exact).abs().max() if exact.numel() else 0.0
    return kinds | (((own - exact).abs() > 0.5 * exact.abs()) & ((own - exact).abs() > 1e-3 * largest))


def _wrong_integers(got: torch.Tensor, goal: Goal) -> torch.Tensor:
    bad = (got != goal.own) & (got.to(torch.float64) != goal.exact.to(torch.float64))
    spread = goal.spread() if bool(bad.any()) and got.dtype != torch.bool else None
    return bad if spread is None else bad & ((got.double() - goal.exact.double()).abs() > spread)


def _wrong_complex(got: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Compare both parts, with a tolerance by the magnitude of the complex number."""
    found = []
    reach = widest(dataclasses.replace(goal, own=goal.own.abs(), exact=goal.exact.abs()))
    for part in (torch.real, torch.imag):
        one = dataclasses.replace(goal, own=part(goal.own), exact=part(goal.exact))
        error = _SAFETY * _finite((widened(one.own) - one.exact).abs())
        found.append(_outside(part(got), one, reach + error))
    return found[0] | found[1]
