"""Generate the source of an operator's fast calls (``fastcall``) for its own parameters.

A call is like an earlier one if its arguments have the same types, its flags are equal (numbers, lengths of lists, which
arguments are None), and the guard holds for its tensors, those in lists included, one after another. The guard comes last
because it must be called with as many tensors as it was made for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any

import torch

from opkit.op.core import Operator
from opkit.op.schema.annotations import without_none
from opkit.op.schema.signature import EMPTY, KINDS, OperatorParameter

_SCALAR_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "dtype": torch.dtype, "device": torch.device}
_TENSORS = ("tensor", "tensors")
_LISTS = (list, tuple, Sequence)
_NUMBERS = (int, float, bool)
_NUMBER_LISTS = {"SymInt[]": list[int], "float[]": list[float], "bool[]": list[bool]}
_RESERVED = {"plan", "result", "training", "entry", "keyset", "flags", "known", "before", "type", "len", "tuple", "any"}

CALLS = """
def call({parameters}):
    if {types}:
        flags = ({flags})
        for entry in entries:
            if ({like} and not (profiling() or function_modes() or dispatch_modes())
                    and forward_ad._current_level < 0):
                result = entry.fn({copied})
                if {returned}:
                    returned_argument()
                return result
    if (dispatch_modes() or functorch_level() is not None or function_modes() or profiling() or jit_tracing()
            or forward_ad._current_level >= 0{unusual}):
        return slow({passed})
    if any_autocast():
        return under_autocast(({tensors},), ({flags}), {passed})
    return planned({copied})

def dispatched(keyset, {parameters}):
    if {types}:
        flags = ({flags})
        for entry in entries:
            if {like} and not (profiling() or dispatch_modes()) and forward_ad._current_level < 0:
                result = entry.fn({passed})
                if {returned}:
                    returned_argument()
                return result
    return decide(keyset, {passed})

def bound({parameters}):
    if {types}:
        flags = ({flags})
        for entry in entries:
            if {like}:
                return entry.fn
    return None

def planned({parameters}):
    try:
        plan = plans.get({key})
    except (AttributeError, RuntimeError):  # None for a tensor, which the dispatcher lets through, or a sparse one
        return generic({passed})
    if plan is None:
        plan = new_plan({key}, ({positional}), {named})
    training = {gradients}
    {run}
"""

# What few operators need.
BELOW = """
def below({parameters}):
    if grad_enabled() or profiling() or dispatch_modes():
        return backend({passed})
    if {types}:
        flags = ({flags})
        for entry in entries:
            if {like}:
                result = entry.fn({passed})
                if {returned}:
                    returned_argument()
                return result
    return planned({passed})
"""
ANY_SIZE = """
def any_size(known, training):
    def sized({parameters}):
        plan = known.get({sizes})
        if plan is None:
            plan = plan_for(known, {sizes}, {key}, ({positional}), {named})
        {run_sized}
    return sized
"""

_RUN = """if training:
    if plan.train is None:
        new_training(plan, ({positional}), {named})
    result = plan.train({passed})
else:
    result = plan.run({passed})
if {returned}:
    returned_argument()
plan.uses += 1
if plan.uses >= plan.patience:
    install(training, plan, ({tensors},), ({flags}))
return result"""

_KERNELS = """
def autograd(_opkit_fast):
    def kernel(keyset, {parameters}):
        return _opkit_fast.dispatched(keyset, {passed})
    return kernel

def autocast(_opkit_is_excluded, _opkit_set_excluded, _opkit_key, _opkit_below):
    def kernel({parameters}):
        before = _opkit_is_excluded(_opkit_key)
        _opkit_set_excluded(_opkit_key, True)
        try:
            return _opkit_below[0]({passed})
        finally:
            _opkit_set_excluded(_opkit_key, before)
    return kernel

def backend(_opkit_fast):
    def kernel({parameters}):
        return _opkit_fast.below({passed})
    return kernel
"""


_RECORDED = "(entry.recorded is None or entry.recorded is grad_enabled())"  # the guard does not test grad mode


def has_fast_form(operator: Operator) -> bool:
    """Return whether fast calls can be generated for the operator's signature."""
    schema, parameters = operator.schema, parameters_of(operator)
    known = all(p.kind == "tensor" or p.kind in _SCALAR_TYPES or _is_list(p) for p in parameters)
    named_apart = not any(p.name in _RESERVED or p.name.startswith("_opkit") for p in parameters)
    plain = not (schema.is_mutable or schema._is_view_op())  # pyright: ignore[reportPrivateUsage]
    same_names = [p.name for p in parameters] == [a.name for a in schema.arguments]
    return (
        any(p.kind in _TENSORS for p in parameters)
        and known
        and named_apart
        and plain
        and same_names
        and len(schema.returns) > 0
    )


def parameters_of(operator: Operator) -> tuple[OperatorParameter, ...]:
    """Return the operator's parameters; those of the schema if Python's are structures."""
    signature = operator.signature
    if not signature.flattened:
        return signature.parameters
    known = {argument.name: argument.type for argument in signature.arguments}
    return tuple([_of_schema(argument, known[argument.name]) for argument in operator.schema.arguments])


def _of_schema(argument: Any, text: str) -> OperatorParameter:
    plain = text.removesuffix("?")
    return OperatorParameter(
        name=argument.name,
        kind=KINDS.get(plain, "other"),
        optional=plain != text,
        keyword_only=argument.kwarg_only,
        default=argument.default_value if argument.has_default_value() else EMPTY,
        annotation=_NUMBER_LISTS.get(plain),
    )


def _is_list(p: OperatorParameter) -> bool:
    return p.kind == "tensors" or _items(p) is not None


def _items(p: OperatorParameter) -> type | None:
    """Return the type of a list's items if they are numbers."""
    bare, _ = without_none(p.annotation)
    items = typing.get_args(bare) if typing.get_origin(bare) in _LISTS else ()
    return items[0] if p.kind == "other" and p.codec is None and items and items[0] in _NUMBERS else None


def kernels(operator: Operator) -> dict[str, Any]:
    """Return functions that make the dispatcher's kernels; see ``_KERNELS``."""
    parameters, namespace = parameters_of(operator), dict[str, Any]()
    declared = passed = "*args, **kwargs"
    if has_fast_form(operator):  # to pass arguments by name takes less time
        if not any(p.keyword_only for p in parameters):  # other operators then have the same source
            parameters = tuple([dataclasses.replace(p, name=f"_{number}") for number, p in enumerate(parameters)])
        declared, passed = _parameter_list(parameters, namespace), _passed(parameters, lambda p: p.name)
    exec(_compiled(_KERNELS.format(parameters=declared, passed=passed)), namespace)
    return namespace


@functools.cache
def _compiled(source: str) -> Any:
    return compile(source, "<opkit kernels>", "exec")


def source(operator: Operator, namespace: dict[str, Any], template: str) -> str:
    """Return the source of a template's functions; the names that they need go to ``namespace``."""
    parameters = parameters_of(operator)
    conditional = any(
        kernel.when is not None or kernel.autotune or kernel.prepared for kernel in operator.kernels.kernels
    )
    flags = "".join(f"{flag}, " for p in parameters for flag in _flags(p, conditional))
    parts = {
        "parameters": _parameter_list(parameters, namespace),
        "types": " and ".join(test for p in parameters for test in _type_tests(p, namespace)) or "True",
        "like": f"{'flags == entry.flags and ' if flags else ''}{_RECORDED} and entry.check({_tensors(parameters)})",
        "tensors": _tensors(parameters),
        "flags": flags,
        "unusual": "".join(_unusual(p, operator, namespace) for p in parameters),
        "key": _key(parameters, conditional, bool(operator.kernels.kernels)),
        "passed": _passed(parameters, lambda p: p.name),
        "copied": _passed(parameters, _copied),
        "positional": "".join(f"{p.name}, " for p in parameters if not p.keyword_only),
        "named": "{" + ", ".join(f"'{p.name}': {p.name}" for p in parameters if p.keyword_only) + "}",
        "gradients": _gradients(parameters),
        "returned": _returned(operator),
        "sizes": _key(parameters, conditional, bool(operator.kernels.kernels), sizes_only=True),
    }
    run = _RUN.format(**parts)
    text = template.format(**parts, run=indent(run, " " * 4).strip(), run_sized=indent(run, " " * 8).strip())
    for name in _HELPERS:  # the helpers' names are prefixed, so that no parameter can hide one
        text = text.replace(f"{name}(", f"_opkit_{name}(").replace(f" {name}:", f" _opkit_{name}:")
    text = text.replace("forward_ad.", "_opkit_forward_ad.").replace("plans.get", "_opkit_plans.get")
    return text.replace("def _opkit_planned(", "def planned(")


_HELPERS = ("profiling", "function_modes", "returned_argument", "dispatch_modes", "functorch_level", "any_autocast", "slow",
            "under_autocast", "jit_tracing", "planned", "decide", "generic", "new_plan", "new_training", "install",
            "grad_enabled", "backend", "plan_for", "entries")  # fmt: skip


def _parameter_list(parameters: tuple[OperatorParameter, ...], namespace: dict[str, Any]) -> str:
    written: list[str] = []
    for p in parameters:
        if p.keyword_only and "*" not in written:
            written.append("*")
        if p.required:
            written.append(p.name)
        else:
            namespace[f"_opkit_default_{p.name}"] = p.default
            written.append(f"{p.name}=_opkit_default_{p.name}")
    return ", ".join(written)


def _passed(parameters: tuple[OperatorParameter, ...], written: Callable[[OperatorParameter], str]) -> str:
    return ", ".join(f"{p.name}={written(p)}" if p.keyword_only else written(p) for p in parameters)


def _copied(p: OperatorParameter) -> str:
    """Copy a list, because the dispatcher also passes one that the caller does not hold."""
    if not _is_list(p):
        return p.name
    return f"({p.name} and {p.name}[:])" if p.optional else f"{p.name}[:]"


def _returned(operator: Operator) -> str:
    """Return the test for a result that is an argument; several results are in a tuple, which is none."""
    one = len(operator.schema.returns) == 1
    return (
        " or ".join(
            f"result is {p.name}" for p in parameters_of(operator) if one and p.kind == "tensor" and not p.optional
        )
        or "False"
    )


def _tensors(parameters: tuple[OperatorParameter, ...]) -> str:
    """Return the tensors of a call, one after another."""
    absent = "*(() if {0} is None else ({0},))"
    spread = {"tensor": ("{0}", absent), "tensors": ("*{0}", "*({0} or ())")}
    return ", ".join(spread[p.kind][p.optional].format(p.name) for p in parameters if p.kind in spread)


def _flags(p: OperatorParameter, conditional: bool) -> list[str]:
    """Return what two calls must have equal in an argument to be alike, in addition to what the guard tests."""
    absent = f"None if {p.name} is None else " if p.optional else ""
    if p.kind == "tensors":
        return [f"({absent}len({p.name}))"]
    if _is_list(p):
        return [f"({absent}tuple({p.name}))"]
    if p.kind == "tensor":
        return [f"{p.name} is None"] if p.optional else []
    return [p.name] if p.kind != "float" or conditional else []


def _type_tests(p: OperatorParameter, namespace: dict[str, Any]) -> list[str]:
    if p.kind == "tensor":
        return []
    if _is_list(p):
        namespace["_opkit_list"] = list
        tests = f"type({p.name}) is _opkit_list" + "".join(f" and {test}" for test in _item_tests(p, namespace))
        return [f"({p.name} is None or {tests})" if p.optional else tests]
    namespace[f"_opkit_type_{p.kind}"] = _SCALAR_TYPES[p.kind]
    test = f"type({p.name}) is _opkit_type_{p.kind}"
    return [f"({p.name} is None or {test})" if p.optional else test]


def _item_tests(p: OperatorParameter, namespace: dict[str, Any]) -> list[str]:
    item = _items(p)
    if item is None:
        return []
    namespace |= {"_opkit_set": set, "_opkit_map": map, "_opkit_type": type, f"_opkit_only_{item.__name__}": {item}}
    return [f"(not {p.name} or _opkit_set(_opkit_map(_opkit_type, {p.name})) == _opkit_only_{item.__name__})"]


def _unusual(p: OperatorParameter, operator: Operator, namespace: dict[str, Any]) -> str:
    if p.kind in _TENSORS:
        test = _unusual_tensor(p.name if p.kind == "tensor" else "_opkit_item", bool(operator.kernels.kernels))
    else:
        test = f"not ({' and '.join(_type_tests(p, namespace))})"
        return f" or {test}"
    if p.kind == "tensors":
        wrong = f"any([{test} for _opkit_item in {p.name}])"
        test = f"(type({p.name}) is not _opkit_list or {wrong})"
    return f" or ({p.name} is not None and {test})" if p.optional else f" or {test}"


def _unusual_tensor(name: str, kernels: bool) -> str:
    # a body or kernel may read raw memory: no lazy negation or zeros, and for a kernel no sparse layout
    test = f"type({name}) not in _opkit_plain_types or {name}.is_neg() or {name}.is_conj() or {name}._is_zerotensor()"
    if kernels:
        test += f" or {name}.layout is not _opkit_strided"
    return f"({test})"


def _key(parameters: tuple[OperatorParameter, ...], conditional: bool, kernels: bool, sizes_only: bool = False) -> str:
    parts: list[str] = []
    for p in parameters:
        if p.kind in _TENSORS:
            name = p.name if p.kind == "tensor" else "_opkit_item"
            text = f"{name}.shape" if sizes_only else f"{name}.shape, {name}.dtype, {name}.device"
            text += f", {name}.stride()" if kernels else ""
            if p.kind == "tensors":
                text = f"(*[({text}) for _opkit_item in {p.name}],)"
            parts.append(f"None if {p.name} is None else ({text})" if p.optional else text)
        elif not sizes_only:
            parts += _flags(p, conditional)
    return f"({', '.join(parts)},)"


def _gradients(parameters: tuple[OperatorParameter, ...]) -> str:
    wanted: list[str] = []
    for p in parameters:
        if p.kind in _TENSORS:
            test = (
                f"{p.name}.requires_grad"
                if p.kind == "tensor"
                else f"any([_opkit_item.requires_grad for _opkit_item in {p.name}])"
            )
            wanted.append(f"({p.name} is not None and {test})" if p.optional else test)
    return f"grad_enabled() and ({' or '.join(wanted)})"
