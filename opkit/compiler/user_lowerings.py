"""This module turns the lowerings of opkit operators into rules of the compiler, which fill in defaults and check results.

They are the functions that users registered with ``register_lowering``, and those of operators with an elementwise kernel.

An elementwise kernel becomes a function call in a formula, which fuses. The function is a scalar function of a shared library, or
the kernel itself if its author declares it elementwise; it then computes runs of elements. It must have no effects but its value:
it may be called again, in another order, and by several threads.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opkit.compiler.capture import torch_private as private
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, OF_TORCH, is_complex
from opkit.compiler.ir.expr import Callee, Expr
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.program import Program, Step, reads, writes
from opkit.compiler.ir.verifier import verify_program
from opkit.compiler.lower import scalar
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.graph_to_program import checked
from opkit.compiler.lower.registry import NoRule, Rule, WrongResult
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Tensor
from opkit.compiler.run.library import library_of
from opkit.errors import CompilerError, OpkitError, RuleError
from opkit.kernels.cc import runs, source
from opkit.kernels.cc.dtypes import C_TYPES
from opkit.kernels.cc.native import Elements, NativeKernel
from opkit.kernels.cc.runs import Taken
from opkit.op import registry
from opkit.op.dispatch.selection import RegisteredKernel, forced_kernels
from opkit.op.native.function import NativeFunction
from opkit.op.operator import CustomOp

OnFailure = Callable[[OpkitError], None]


def operators(targets: Mapping[str, Callable[..., Any]]) -> dict[str, CustomOp[Any, Any]]:
    """Return the operators of a graph that are opkit's, by their targets."""
    known = {op.name: op for op in registry.operators()}
    named = {text: private.qualified_name(target) for text, target in targets.items()} if known else {}
    return {text: known[name] for text, name in named.items() if name in known}


def rules(operators: Mapping[str, CustomOp[Any, Any]], on_failure: OnFailure) -> dict[str, Rule]:
    """Return the rules of operators, by target.

    ``on_failure`` gets the error of a rule that fails; if it returns, the operator is called. The rule of an operator that has
    neither a user's rule nor an elementwise kernel raises ``NoRule`` with the reason why the operator is called.
    """
    return {text: _checked_rule(op, private.overload_named(text), on_failure) for text, op in operators.items()}


def identity(operators: Mapping[str, CustomOp[Any, Any]]) -> str:
    """Return a text that changes whenever the rules do, for the key of a stored plan."""
    decided = [op for op in operators.values() if op.lowering is not None or has_elementwise_kernel(op)]
    return " ".join(f"{op._operator.contract_hash()} {elementwise_identity(op)}" for op in decided)


def _checked_rule(op: CustomOp[Any, Any], overload: Any, on_failure: OnFailure) -> Rule:
    rule, parameters = op.lowering or _elementwise_rule(op), private.schema(overload).arguments

    def lowered(b: Builder, *args: Any, **kwargs: Any) -> Any:
        node, steps, buffers = b.node, len(b.steps), set(b.buffers)
        try:
            value = checked(node, rule(b, *_completed(parameters, args, kwargs), **kwargs))
            _verify(b, b.steps[steps:], buffers)
        except NoRule as why:
            if not isinstance(why, WrongResult):
                raise
            on_failure(RuleError(f"{op.name}: its rule does not fit: {why}"))
            raise
        except Exception as error:
            failure = RuleError(f"{op.name}: its rule raised {type(error).__name__}: {error}")
            failure.__cause__ = error
            on_failure(failure)
            raise NoRule(f"its rule failed: {error}") from error
        return value

    return lowered


def _completed(parameters: Iterable[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the positional arguments, with the defaults of those that a call leaves out."""
    positional = [p for p in parameters if not p.kwarg_only]
    rest = [p for p in positional[len(args) :] if p.name not in kwargs]
    return [*args, *(p.default_value for p in rest)]


def _verify(b: Builder, steps: list[Step], before: set[str]) -> None:
    """Check that a rule's steps are well formed, and write to memory of their own only.

    Raises:
        CompilerError: they are not, or do not.
    """
    touched = {name for step in steps for name in (*reads(step), *writes(step))}
    written = sorted(name for step in steps for name in writes(step) if name in before)
    if written:
        raise CompilerError(f"it writes to {written[0]}, which it did not create")
    buffers = {
        name: dataclasses.replace(b.buffers[name], role="input") if name in before else b.buffers[name]
        for name in touched
        if name in b.buffers
    }
    verify_program(Program(b.node.target, (), buffers, tuple(steps), (), b.graph.sizes))


# ---- elementwise kernels ---------------------------------------------------------------------------------------------


def has_elementwise_kernel(op: CustomOp[Any, Any]) -> bool:
    """Return whether the operator has an elementwise kernel."""
    return any(_computes_elements(kernel) for kernel in op._operator.kernels.kernels)


def elementwise_identity(op: CustomOp[Any, Any]) -> str:
    """Return a text that decides its calls in addition to the operator itself: the libraries, and why none may be called."""
    refusal = _refusal(op)
    elementwise = [kernel for kernel in op._operator.kernels.kernels if not refusal and _computes_elements(kernel)]
    return " ".join([refusal, *(f"{each.name} {_library(each)}" for each in elementwise)])


def _elementwise_rule(op: CustomOp[Any, Any]) -> Rule:
    """Return the rule of an operator with an elementwise kernel."""
    names = [each.name for each in private.schema(op._operator.overload).arguments]

    def formula(b: Builder, *args: Any, **kwargs: Any) -> Tensor:
        _refuse("" if b.target.device == "cpu" else "its elementwise kernels are for the CPU")
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
    function.build()  # one that cannot be built raises here
    callee = Callee(
        native.name, library_of(function), tuple(each.dtype for each in scalars), b.result().dtype, kinds, instance
    )
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
    """Return a text that decides the library; the operator's contract hash decides that of a kernel of its own."""
    elements = _elements(kernel)
    return "" if elements is None else _file(elements.library)


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
