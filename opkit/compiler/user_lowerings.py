"""This module turns the lowerings of opkit operators into rules of the compiler, which fill in defaults and check results.

They are the functions that users registered with ``register_lowering``, and those of operators with an elementwise kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opkit.compiler import elementwise_kernels
from opkit.compiler.capture import torch_private as private
from opkit.compiler.ir.program import Program, Step, reads, writes
from opkit.compiler.ir.verifier import verify_program
from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.graph_to_program import checked
from opkit.compiler.lower.registry import NoRule, Rule, WrongResult
from opkit.errors import CompilerError, OpkitError, RuleError
from opkit.op import registry
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
    decided = [op for op in operators.values() if op.lowering is not None or elementwise_kernels.serves(op)]
    return " ".join(f"{op._operator.contract_hash()} {elementwise_kernels.identity(op)}" for op in decided)


def _checked_rule(op: CustomOp[Any, Any], overload: Any, on_failure: OnFailure) -> Rule:
    rule, parameters = op.lowering or elementwise_kernels.rule(op), private.schema(overload).arguments

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
