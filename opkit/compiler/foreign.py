"""Operators whose kernel applies a library's function of numbers to each element: as a formula that fuses with others.

The function is taken to have no effects but its value: it may be called again, in another order, and by several threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opkit.compiler.capture import torch_private as private
from opkit.compiler.ir import expr
from opkit.compiler.ir.callee import Callee
from opkit.compiler.ir.dtypes import OF_TORCH, is_complex
from opkit.compiler.ir.index import Index
from opkit.compiler.lower import scalar
from opkit.compiler.lower.context import Builder, element
from opkit.compiler.lower.registry import NoRule, Rule
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Tensor
from opkit.kernels.dtypes import C_TYPES
from opkit.kernels.native import Elements, NativeKernel
from opkit.op.native import NativeFunction
from opkit.op.operator import CustomOp
from opkit.op.selection import Kernel, forced_kernels


def serves(op: CustomOp[Any, Any]) -> bool:
    """Whether the operator has such a kernel."""
    return any(_elements(kernel) is not None for kernel in op._operator.kernels.kernels)


def identity(op: CustomOp[Any, Any]) -> str:
    """What decides its calls beside the operator itself: which libraries there are, and whether they may be called."""
    found = [_elements(kernel) for kernel in op._operator.kernels.kernels]
    return " ".join([_refusal(op), *(f"{each.symbol} {_file(each.library)}" for each in found if each is not None)])


def rule(op: CustomOp[Any, Any]) -> Rule:
    """The rule of such an operator."""
    names = [each.name for each in private.schema(op._operator.overload).arguments]

    def formula(b: Builder, *args: Any, **kwargs: Any) -> Tensor:
        _refuse(_refusal(op))
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        native, elements = _chosen(op, b, given)
        values = [_value(b, native, elements, name, c_type, given) for name, c_type in elements.parameters]
        callee = Callee(
            elements.symbol, elements.library, tuple(each.dtype for each in values), _dtype(elements.returns)
        )
        return b.elementwise(expr.call(callee, *(each.expr for each in values)))

    return formula


def _file(path: str) -> str:
    """A library by what tells it from another one at the same place."""
    try:
        about = os.stat(path)
    except OSError:
        return f"{path} {'' if os.sep not in path else 'absent'}"
    return f"{path} {about.st_size} {about.st_mtime_ns}"


def _elements(kernel: Kernel) -> Elements | None:
    return kernel.function.native.elements if isinstance(kernel.function, NativeFunction) else None


# ---- what stands against it ------------------------------------------------------------------------------------------


def _refuse(reason: str) -> None:
    if reason:
        raise NoRule(reason)


def _refusal(op: CustomOp[Any, Any]) -> str:
    """Why no call of the operator can be such a formula; "" where one can."""
    operator = op._operator
    kernels = [kernel for kernel in operator.kernels.kernels if kernel.device in (None, "cpu")]
    found = [_elements(kernel) for kernel in kernels]
    if not any(found):
        return "no kernel of it is a library's function of numbers"
    if None in found or any(kernel.when or kernel.autotune for kernel in kernels):
        return "which of its kernels is called is decided at the call"
    if operator.kernels.disabled & {None, "cpu"} or forced_kernels.get().get(operator.name):
        return "its kernels are disabled, or one is forced"
    if operator.signature.flattened or operator.mutates or any("nondeterministic" in str(tag) for tag in operator.tags):
        return "its kernel does more than to compute elements"
    state = next((each.symbol for each in found if each is not None and not each.parallel), None)
    return f"{state} may have state: it was declared with parallel=False" if state else ""


def _chosen(op: CustomOp[Any, Any], b: Builder, given: Mapping[str, Any]) -> tuple[NativeKernel, Elements]:
    """The kernel for these dtypes, which is in a library that is there."""
    have = {name: value.dtype for name, value in given.items() if isinstance(value, Tensor)}
    for kernel in op._operator.kernels.kernels:
        elements = _elements(kernel)
        if elements is not None and _takes(kernel, elements, have, b.result().dtype):
            _refuse("" if _is_there(elements) else f"{elements.library}, which has {elements.symbol}, is gone")
            return kernel.function.native, elements  # pyright: ignore[reportFunctionMemberAccess]
    raise NoRule(f"no variant of the function takes {', '.join(have.values())}")


def _takes(kernel: Kernel, elements: Elements, have: Mapping[str, str], result: str) -> bool:
    bind = kernel.function.native.bind  # pyright: ignore[reportFunctionMemberAccess]
    types = {str(bind.get(name, name)): _dtype(c) for name, c in elements.parameters if name in elements.tensors}
    allowed = None if kernel.dtypes is None else {OF_TORCH.get(str(t).removeprefix("torch.")) for t in kernel.dtypes}
    fits = allowed is None or all(dtype in allowed for dtype in have.values())
    return fits and types == dict(have) and _dtype(elements.returns) == result


def _is_there(elements: Elements) -> bool:
    """Whether the library is where it was found when the operator was made; a bare name is the loader's to find."""
    return os.sep not in elements.library or os.path.isfile(elements.library)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _dtype(c_type: str) -> str:
    known = C_TYPES.get(c_type)
    found = OF_TORCH.get(known.dtype or "") if known is not None else None
    return "" if found is None or is_complex(found) else found


def _value(
    b: Builder, native: NativeKernel, elements: Elements, name: str, c_type: str, given: Mapping[str, Any]
) -> Scalar:
    """What the function is given for a parameter."""
    dtype, bound = _dtype(c_type), native.bind.get(name, name)
    value = given.get(bound) if isinstance(bound, str) else bound
    if name in elements.tensors and isinstance(value, Tensor):
        return element(value, b.result().shape)
    if not dtype or not isinstance(value, bool | int | float | Index):
        raise NoRule(f"{elements.symbol} is given {bound} for {name}, which is no argument or number")
    _refuse(_misfit(value, c_type))
    return scalar.number(value, dtype)


def _misfit(value: Any, c_type: str) -> str:
    """Why a number is not passed as it is; "" where it is."""
    known = C_TYPES[c_type]
    if known.kind == "float":
        return "" if not isinstance(value, Index) else "a size is given where a float is taken"
    if isinstance(value, float):
        return f"{value} is given where {c_type} is taken"
    least, most = known.limits
    if isinstance(value, Index):
        return "" if least is None else f"a size may not fit into {c_type}"
    fits = (least is None or value >= least) and (most is None or value <= most)
    return "" if fits else f"{value} does not fit into {c_type}"
