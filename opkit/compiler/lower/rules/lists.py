"""Operators on lists of tensors (``_foreach_add`` and the like, of optimisers): the operator's own rule, once for each."""

from __future__ import annotations

import dataclasses
from typing import Any

from opkit.compiler.lower.context import Builder
from opkit.compiler.lower.registry import Rule, Table
from opkit.compiler.lower.rules import arithmetic, pointwise
from opkit.compiler.lower.tensors import Tensor

TABLE = Table()
_ONE = {**pointwise.TABLE, **arithmetic.TABLE}

# The overloads of _foreach_<name>, and those of aten.<name> that each of the tensors goes through.
_OVERLOADS = {"Scalar": "Scalar", "List": "Tensor", "Tensor": "Tensor", "ScalarList": "Scalar"}
_UNARY = ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "tanh", "sin", "cos", "round")
_BINARY = ("add", "sub", "mul", "div")
_OTHERS = {
    "addcmul": {"Scalar": "aten.addcmul.default", "ScalarList": "aten.addcmul.default"},
    "addcdiv": {"Scalar": "aten.addcdiv.default", "ScalarList": "aten.addcdiv.default"},
    "lerp": {"Scalar": "aten.lerp.Scalar", "List": "aten.lerp.Tensor"},
    "maximum": {"List": "aten.maximum.default", "Scalar": "aten.clamp_min.default"},
    "minimum": {"List": "aten.minimum.default", "Scalar": "aten.clamp_max.default"},
    "clamp_min": {"List": "aten.clamp_min.Tensor", "Scalar": "aten.clamp_min.default"},
    "clamp_max": {"List": "aten.clamp_max.Tensor", "Scalar": "aten.clamp_max.default"},
    "pow": {"Scalar": "aten.pow.Tensor_Scalar", "List": "aten.pow.Tensor_Tensor"},
}


def _for_each(rule: Rule, keywords: tuple[str, ...] = ()) -> Rule:
    """Return a rule for lists: every list among the arguments gives one item to each call, other arguments go to all.

    ``keywords`` name the last positional arguments for rules that take them by name.
    """

    def rule_of_lists(b: Builder, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        whole = b.node
        assert isinstance(whole.result, tuple)
        found: list[Tensor] = []
        for k, kind in enumerate(whole.result):
            b.node = dataclasses.replace(whole, name=f"{whole.name}_{k}", result=kind)
            own = [_item(a, k) for a in args]
            named = dict(zip(keywords, own[3:], strict=False)) if keywords else {}
            found.append(rule(b, *(own[:3] if keywords else own), **named, **kwargs))
        b.node = whole
        return tuple(found)

    return rule_of_lists


def _item(argument: Any, k: int) -> Any:
    return argument[k] if isinstance(argument, list | tuple) else argument


def _register(name: str, overload: str, target: str) -> None:
    keywords = ("value",) if name.startswith("addc") else ()
    TABLE.rule(f"aten._foreach_{name}.{overload}")(_for_each(_ONE[target], keywords))


for _name in _UNARY:
    _register(_name, "default", f"aten.{_name}.default")
for _name in _BINARY:
    for _overload, _one in _OVERLOADS.items():
        _register(_name, _overload, f"aten.{_name}.{_one}")
for _name, _targets in _OTHERS.items():
    for _overload, _target in _targets.items():
        _register(_name, _overload, _target)
