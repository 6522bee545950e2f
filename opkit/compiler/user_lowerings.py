"""The rules of operators of opkit, as lowering takes them, with defaults and checked: those that authors gave with
``register_lowering``, and those of functions of libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opkit.compiler import elementwise_kernels
from opkit.compiler.capture import torch_private as private
from opkit.compiler.ir.program import Buffer, Program, Step, reads, writes
from opkit.compiler.ir.verifier import verify_program
from opkit.compiler.lower.context import Builder
from opkit.compiler.lower.graph_to_program import checked
from opkit.compiler.lower.registry import NoRule, Rule, WrongResult
from opkit.errors import CompilerError, OpkitError, RuleError
from opkit.op import registry
from opkit.op.operator import CustomOp

Failed = Callable[[OpkitError], None]


def operators(targets: Mapping[str, Callable[..., Any]]) -> dict[str, CustomOp[Any, Any]]:
    """The operators of a graph that are opkit's, by their targets."""
    known = {op.name: op for op in registry.operators()}
    named = {text: private.qualified_name(target) for text, target in targets.items()} if known else {}
    return {text: known[name] for text, name in named.items() if name in known}


def rules(found: Mapping[str, CustomOp[Any, Any]], failed: Failed) -> dict[str, Rule]:
    """Their rules. One that goes wrong is handed to ``failed``; if that returns, the operator is called.

    Those of operators that neither have a rule of their authors' nor such a function say why they are called.
    """
    return {text: _guarded(op, private.overload_named(text), failed) for text, op in found.items()}


def identity(found: Mapping[str, CustomOp[Any, Any]]) -> str:
    """What decides the rules, for the key of a stored plan."""
    decided = [op for op in found.values() if op.lowering is not None or elementwise_kernels.serves(op)]
    return " ".join(f"{op._operator.contract_hash()} {elementwise_kernels.identity(op)}" for op in decided)


def _guarded(op: CustomOp[Any, Any], overload: Any, failed: Failed) -> Rule:
    rule, parameters = op.lowering or elementwise_kernels.rule(op), private.schema(overload).arguments

    def lowered(b: Builder, *args: Any, **kwargs: Any) -> Any:
        node, steps, buffers = b.node, len(b.steps), set(b.buffers)
        try:
            value = checked(node, rule(b, *_completed(parameters, args, kwargs), **kwargs))
            _verify(b, b.steps[steps:], buffers)
        except NoRule as why:
            if not isinstance(why, WrongResult):
                raise
            failed(RuleError(f"{op.name}: its rule does not fit: {why}"))
            raise
        except Exception as error:
            failed(_told(op.name, error))
            raise NoRule(f"its rule failed: {error}") from error
        return value

    return lowered


def _told(name: str, error: Exception) -> OpkitError:
    told = RuleError(f"{name}: its rule raised {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _completed(parameters: Iterable[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The positional arguments, with the defaults of those that a call leaves out."""
    positional = [p for p in parameters if not p.kwarg_only]
    rest = [p for p in positional[len(args) :] if p.name not in kwargs]
    return [*args, *(p.default_value for p in rest)]


def _verify(b: Builder, steps: list[Step], before: set[str]) -> None:
    """Whether a rule's steps are well formed, and write to memory of their own.

    Raises:
        CompilerError: they are not.
    """
    touched = {name for step in steps for name in (*reads(step), *writes(step))}
    written = sorted(name for step in steps for name in writes(step) if name in before)
    if written:
        raise CompilerError(f"it writes to {written[0]}, which it did not make")
    buffers = {name: _own(b.buffers[name], name in before) for name in touched if name in b.buffers}
    verify_program(Program(b.node.target, (), buffers, tuple(steps), (), b.graph.sizes))


def _own(buffer: Buffer, filled: bool) -> Buffer:
    return dataclasses.replace(buffer, role="input") if filled else buffer
