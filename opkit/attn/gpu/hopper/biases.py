"""Biases as users' functions, the only ones that the kernels for sm_90a have; a soft cap before one is a function too."""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeVar

from torch import Tensor

from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.functions.expression import INDEX, Function, load
from opkit.attn.masks import program
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import OF_TORCH
from opkit.compiler.ir.expr import Expr

Call = TypeVar("Call", AttentionCall, GradientCall)
_SCORE, _X0, _X1 = (expr.var(name, "f32") for name in ("score", "x0", "x1"))
_B, _H, _I, _J = (expr.var(name, INDEX) for name in "bhij")
_NUMBER = expr.cast(expr.var("n0", "i64"), INDEX)


class _Operand(NamedTuple):
    """A tensor of a bias.

    Attributes:
        dtype: the compiler's name of it.
        varies: of each dimension, whether it has more than one element.
    """

    dtype: str
    varies: tuple[bool, ...]

    def at(self, name: str, *places: Expr) -> Expr:
        """Return an element in float32."""
        zero = expr.const(0, INDEX)
        chosen = (place if varies else zero for place, varies in zip(places, self.varies, strict=True))
        return expr.cast(load(name, self.dtype, *chosen), "f32")


def as_functions(call: Call) -> Call:
    """Return the call, of the same tensors, with functions in place of the terms of its bias, and of a soft cap before them.

    A call without a bias, or with one that does not fit, is returned as it is.
    """
    if not call.bias or not program.bias_fits(call, functions=True):
        return call
    operands = tuple(_operand(x) for x in call.bias_tensors)
    words = _words(tuple(call.bias), operands, call.k.shape[2] - call.q.shape[2], call.softcap)
    return call._replace(bias=list(words), softcap=0.0)


def _operand(x: Tensor) -> _Operand:
    return _Operand(OF_TORCH[str(x.dtype).removeprefix("torch.")], tuple(size > 1 for size in x.shape))


@functools.lru_cache(maxsize=256)
def _words(bias: tuple[int, ...], operands: tuple[_Operand, ...], ahead: int, softcap: float) -> tuple[int, ...]:
    found = [_capped(softcap).words()] if softcap else []
    for opcode, *words in program.instructions(bias, program.BIAS_OPERANDS):
        if opcode != program.BIAS_FUNCTION:
            words = _term(opcode, words, operands, ahead).words()
        found.append(words)
    return tuple(word for each in found for word in (program.BIAS_FUNCTION, *each))


def _capped(softcap: float) -> Function:
    tanh = expr.op("tanh", expr.op("mul", _SCORE, _X1))
    return Function(expr.op("mul", tanh, _X0), (), (), (softcap, 1 / softcap))


def _term(opcode: int, words: list[int], operands: tuple[_Operand, ...], ahead: int) -> Function:
    """Return what an opcode of :mod:`opkit.attn.masks.program` adds; ``ahead`` is how many more keys than queries there are."""
    first = operands[words[0]]
    if opcode == program.BIAS_DENSE:
        return Function(expr.op("add", _SCORE, first.at("t0", _B, _H, _I, _J)), (words[0],))
    if opcode == program.BIAS_ALIBI:
        distance = expr.op("abs", expr.op("sub", expr.op("add", _I, _NUMBER), _J))
        term = expr.op("mul", first.at("t0", _B, _H), expr.cast(distance, "f32"))
        return Function(expr.op("sub", _SCORE, term), (words[0],), (ahead,))
    assert opcode == program.BIAS_REL
    row = expr.op("floordiv", _J, _NUMBER)
    of_row = first.at("t0", _B, _H, _I, row)
    of_column = operands[words[1]].at("t1", _B, _H, _I, expr.op("sub", _J, expr.op("mul", row, _NUMBER)))
    return Function(expr.op("add", _SCORE, expr.op("add", of_row, of_column)), tuple(words[:2]), (words[2],))
