"""This module lowers operators with an elementwise kernel: the kernel becomes a function call in a formula, which fuses.

The function is a scalar function of a shared library, or the kernel itself if its author declares it elementwise; it then
computes runs of elements. It must have no effects but its value: it may be called again, in another order, and by several
threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from opkit.compiler.capture import torch_private as private
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, OF_TORCH, is_complex
from opkit.compiler.ir.expr import Callee, Expr
from opkit.compiler.ir.index import Index
from opkit.compiler.lower import scalar
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Rule
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Tensor
from opkit.kernels.cc import runs, source
from opkit.kernels.cc.dtypes import C_TYPES
from opkit.kernels.cc.native import Elements, NativeKernel
from opkit.kernels.cc.runs import Taken
from opkit.op.dispatch.selection import RegisteredKernel, forced_kernels
from opkit.op.native.function import NativeFunction
from opkit.op.operator import CustomOp


def serves(op: CustomOp[Any, Any]) -> bool:
    """Return whether the operator has an elementwise kernel."""
    return any(_computes_elements(kernel) for kernel in op._operator.kernels.kernels)


def identity(op: CustomOp[Any, Any]) -> str:
    """Return a text that decides its calls in addition to the operator itself: the libraries, and why none may be called."""
    refusal = _refusal(op)
    elementwise = [kernel for kernel in op._operator.kernels.kernels if not refusal and _computes_elements(kernel)]
    return " ".join([refusal, *(f"{each.name} {_file(_library(each))}" for each in elementwise)])


def rule(op: CustomOp[Any, Any]) -> Rule:
    """Return the rule of an operator with an elementwise kernel."""
    names = [each.name for each in private.schema(op._operator.overload).arguments]

    def formula(b: Builder, *args: Any, **kwargs: Any) -> Tensor:
        _refuse(_refusal(op))
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        kernel = _chosen(op, b, arguments)
        elements = _elements(kernel)
        if elements is None:
            return b.elementwise(_run_call(b, kernel.function, arguments))
        return b.elementwise(_scalar_call(b, kernel, elements, arguments))

    return formula


def _scalar_call(b: Builder, kernel: RegisteredKernel, elements: Elements, arguments: Mapping[str, Any]) -> Expr:
    """Return a call of a library's function on numbers."""
    native = kernel.function.native  # pyright: ignore[reportFunctionMemberAccess]
    values = [_value(b, native, elements, name, c_type, arguments) for name, c_type in elements.parameters]
    callee = Callee(elements.symbol, elements.library, tuple(each.dtype for each in values), _dtype(elements.returns))
    return expr.call(callee, *(each.expr for each in values))


def _run_call(b: Builder, function: Any, arguments: Mapping[str, Any]) -> Expr:
    """Return a call of an elementwise kernel."""
    values = [arguments.get(each.name) for each in function.facts.arguments]
    types = runs.types(function.taken, function.native, _dtypes(b, values))
    assert types is not None
    passed = [(each, _run_value(b, each, values, types)) for each in function.taken]
    scalars = [scalar for _, scalar in passed if scalar is not None]
    native = function.native
    instance = source.instance_number(function.bound, native.text, native.variables, function.__name__, types)
    kinds = tuple(each.kind if each.member == "p" or each.kind == "count" else each.member for each, _ in passed)
    library = str(function.build())
    callee = Callee(native.name, library, tuple(each.dtype for each in scalars), b.result().dtype, kinds, instance)
    return expr.call(callee, *(each.expr for each in scalars))


def _run_value(b: Builder, taken: Taken, values: Sequence[Any], types: Mapping[str, str]) -> Scalar | None:
    """Return the argument for a parameter of an elementwise kernel; None for the result and the count, which a call adds."""
    if taken.kind in ("result", "count"):
        return None
    value = taken.constant if taken.kind == "constant" else values[taken.argument]
    if isinstance(value, Tensor):
        return element(value, b.result().shape)
    if not isinstance(value, bool | int | float | Index):
        raise NoRule(f"argument {taken.argument} is not a number")
    c_type = f"{types[taken.c_type]}_t" if taken.c_type in types else taken.c_type
    _refuse(_misfit(value, c_type) if c_type in C_TYPES else "")
    return scalar.number(int(value) if isinstance(value, bool) else value, "f64" if taken.member == "f" else "i64")


def _dtypes(b: Builder, values: Sequence[Any]) -> dict[int, str]:
    """Return torch's names of the arguments' dtypes, by number; the result's is the last."""
    kinds = {k: each.dtype for k, each in enumerate(values) if isinstance(each, Tensor)} | {
        len(values): b.result().dtype
    }
    return {k: DTYPES[kind].torch for k, kind in kinds.items()}


def _file(path: str) -> str:
    """Return a text that distinguishes a library from another one at the same path."""
    try:
        about = os.stat(path)
    except OSError:
        return f"{path} {'' if os.sep not in path else 'missing'}"
    return f"{path} {about.st_size} {about.st_mtime_ns}"


def _elements(kernel: RegisteredKernel) -> Elements | None:
    return kernel.function.native.elements if isinstance(kernel.function, NativeFunction) else None


def _computes_elements(kernel: RegisteredKernel) -> bool:
    native = kernel.function.native if isinstance(kernel.function, NativeFunction) else None
    return native is not None and (native.elements is not None or native.elementwise)


def _library(kernel: RegisteredKernel) -> str:
    elements = _elements(kernel)
    return elements.library if elements is not None else str(kernel.function.build())  # pyright: ignore[reportFunctionMemberAccess]


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refuse(reason: str) -> None:
    if reason:
        raise NoRule(reason)


def _refusal(op: CustomOp[Any, Any]) -> str:
    """Return the reason why no call of the operator can be a formula, or ""."""
    operator = op._operator
    kernels = [kernel for kernel in operator.kernels.kernels if kernel.device in (None, "cpu")]
    elementwise = [_elements(kernel) for kernel in kernels if _computes_elements(kernel)]
    if not elementwise:
        return "no kernel of it is elementwise, or a library's function of numbers"
    if len(elementwise) < len(kernels) or any(kernel.when or kernel.autotune for kernel in kernels):
        return "which of its kernels is called is decided at the call"
    if any(kernel.function.native.debug for kernel in kernels):  # pyright: ignore[reportFunctionMemberAccess]
        return "its kernel runs in a process of its own, to be debugged"
    if operator.kernels.disabled & {None, "cpu"} or forced_kernels.get().get(operator.name):
        return "its kernels are disabled, or one is forced"
    if operator.signature.flattened or operator.mutates or any("nondeterministic" in str(tag) for tag in operator.tags):
        return "its kernel does more than to compute elements"
    state = next((each.symbol for each in elementwise if each is not None and not each.parallel), None)
    return f"{state} may have state: it was declared with parallel=False" if state else ""


def _chosen(op: CustomOp[Any, Any], b: Builder, arguments: Mapping[str, Any]) -> RegisteredKernel:
    """Return the kernel for these dtypes.

    Raises:
        NoRule: there is none, or its library is gone.
    """
    dtypes = {name: value.dtype for name, value in arguments.items() if isinstance(value, Tensor)}
    for kernel in op._operator.kernels.kernels:
        elements = _elements(kernel)
        if elements is None and _computes_elements(kernel) and _takes_run(kernel, b, arguments):
            return kernel
        if elements is not None and _takes(kernel, elements, dtypes, b.result().dtype):
            _refuse("" if _is_there(elements) else f"{elements.library}, which has {elements.symbol}, is gone")
            return kernel
    raise NoRule(f"no variant of the function takes {', '.join(dtypes.values())}")


def _takes_run(kernel: RegisteredKernel, b: Builder, arguments: Mapping[str, Any]) -> bool:
    """Return whether an elementwise kernel takes the dtypes of a call.

    Raises:
        NoRule: the tensors have different shapes, or the kernel cannot be compiled.
    """
    function: Any = kernel.function
    values = [arguments.get(each.name) for each in function.facts.arguments]
    dtypes = _dtypes(b, values)
    allowed = None if kernel.dtypes is None else {str(t).removeprefix("torch.") for t in kernel.dtypes}
    if allowed is not None and not allowed.issuperset(dtypes[k] for k in dtypes if k < len(values)):
        return False
    shapes = {values[each.argument].shape for each in function.taken if each.kind == "elements"}
    _refuse("" if shapes == {b.result().shape} else "its tensors are not of one shape")
    if runs.types(function.taken, function.native, dtypes) is None:
        return False
    _refuse("" if function.ready() else "it cannot be compiled here")
    return True


def _takes(kernel: RegisteredKernel, elements: Elements, dtypes: Mapping[str, str], result: str) -> bool:
    bind = kernel.function.native.bind  # pyright: ignore[reportFunctionMemberAccess]
    types = {str(bind.get(name, name)): _dtype(c) for name, c in elements.parameters if name in elements.tensors}
    allowed = None if kernel.dtypes is None else {OF_TORCH.get(str(t).removeprefix("torch.")) for t in kernel.dtypes}
    fits = allowed is None or all(dtype in allowed for dtype in dtypes.values())
    return fits and types == dict(dtypes) and _dtype(elements.returns) == result


def _is_there(elements: Elements) -> bool:
    """Return whether the library is still where it was when the operator was defined; the loader finds bare names."""
    return os.sep not in elements.library or os.path.isfile(elements.library)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _dtype(c_type: str) -> str:
    """Return the IR's dtype of a C type, or "" if it has none that is computed with."""
    known = C_TYPES.get(c_type)
    dtype = OF_TORCH.get(known.dtype or "") if known is not None else None
    return "" if dtype is None or is_complex(dtype) else dtype


def _value(
    b: Builder, native: NativeKernel, elements: Elements, name: str, c_type: str, arguments: Mapping[str, Any]
) -> Scalar:
    """Return the argument for a parameter of a library's function."""
    dtype, bound = _dtype(c_type), native.bind.get(name, name)
    value = arguments.get(bound) if isinstance(bound, str) else bound
    if name in elements.tensors and isinstance(value, Tensor):
        return element(value, b.result().shape)
    if not dtype or not isinstance(value, bool | int | float | Index):
        raise NoRule(f"{elements.symbol} is given {bound} for {name}, which is no argument or number")
    _refuse(_misfit(value, c_type))
    return scalar.number(value, dtype)


def _misfit(value: Any, c_type: str) -> str:
    """Return the reason why a number cannot be passed as this C type, or ""."""
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
