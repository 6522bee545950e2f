"""This module verifies expressions and indices: each op has the arguments that its row of the table requires."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from opkit.compiler.ir.dtypes import DTYPES, is_int
from opkit.compiler.ir.expr import Expr, indices
from opkit.compiler.ir.index import Axis, Div, Index, Mod, Size, Value
from opkit.compiler.ir.ops import OPS
from opkit.errors import CompilerError


@dataclasses.dataclass
class KnownNames:
    """The names that an expression may use.

    Attributes:
        place: where it stands, for messages.
        buffers: the type of each buffer, and by how many coordinates its elements are read.
        sizes: symbolic sizes.
        axes: the extent of each loop around, by number.
        variables: their types.
        readable: the buffers that hold something; None for all.
    """

    place: str
    buffers: dict[str, tuple[str, int]]
    sizes: frozenset[str]
    axes: dict[int, Index] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    readable: frozenset[str] | None = None

    def copy(self) -> KnownNames:
        return dataclasses.replace(
            self, buffers=dict(self.buffers), axes=dict(self.axes), variables=dict(self.variables)
        )

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise CompilerError(f"{self.place}: {otherwise}.")


def verify_expr(root: Expr, known: KnownNames) -> None:
    """
    Raises:
        CompilerError: it is not well formed.
    """
    for node in root.walk():
        row = OPS.get(node.op)
        known.require(row is not None, f"{node.op!r} is not an op of expressions")
        known.require(node.dtype in DTYPES, f"{node.dtype!r} is not a type")
        for at in indices(node):
            verify_index(at, known)
        _RULES.get(node.op, _scalar)(node, known)


def verify_index(at: Index, known: KnownNames) -> None:
    """
    Raises:
        CompilerError: it depends on a loop, a size or a variable that is not known here.
    """
    for atom in at.atoms():
        if isinstance(atom, Div | Mod):
            verify_index(atom.dividend, known)
            verify_index(atom.divisor, known)
        elif isinstance(atom, Axis):
            known.require(atom.number in known.axes, f"{atom} is used outside of its loop")
            extent = known.axes[atom.number]
            known.require(extent == atom.extent, f"{atom} runs to {extent} here, and is used as one to {atom.extent}")
        elif isinstance(atom, Size):
            known.require(atom.name in known.sizes, f"{atom} is not one of the sizes {sorted(known.sizes)}")
        else:
            _value(atom, known)


def _value(atom: Value, known: KnownNames) -> None:
    verify_expr(atom.expr, known)
    known.require(is_int(atom.expr.dtype), f"the index {atom} is of type {atom.expr.dtype}")


# ---- one op ----------------------------------------------------------------------------------------------------------


def _scalar(node: Expr, known: KnownNames) -> None:
    row, types = OPS[node.op], [arg.dtype for arg in node.args]
    known.require(len(types) == row.arity, f"{node.op} takes {row.arity} arguments, and has {len(types)}")
    known.require(len(set(types)) == 1, f"the arguments of {node.op} are of types {', '.join(types)}")
    kind = DTYPES[types[0]].kind
    known.require(kind[0] in row.takes, f"{node.op} does not take {types[0]}")
    wanted = "b1" if row.result == "b1" else types[0]
    known.require(node.dtype == wanted, f"{node.op} of {types[0]} is {wanted}, not {node.dtype}")


def _const(node: Expr, known: KnownNames) -> None:
    wanted = {"bool": bool, "int": int, "float": float}.get(DTYPES[node.dtype].kind)
    known.require(wanted is not None and type(node.data) is wanted, f"{node.data!r} is no constant of {node.dtype}")


def _index(node: Expr, known: KnownNames) -> None:
    known.require(node.dtype == "i64", f"an index is i64, not {node.dtype}")


def _load(node: Expr, known: KnownNames) -> None:
    buffer, coordinates = node.data
    known.require(buffer in known.buffers, f"there is no buffer {buffer} here")
    dtype, rank = known.buffers[buffer]
    known.require(node.dtype == dtype, f"{buffer} holds {dtype}, not {node.dtype}")
    known.require(len(coordinates) == rank, f"{buffer} has {rank} coordinates, and {len(coordinates)} are given")
    known.require(known.readable is None or buffer in known.readable, f"{buffer} is read before it is filled")
    known.require([arg.dtype for arg in node.args] in ([], ["b1"]), f"the mask of {node} is not one b1")


def _var(node: Expr, known: KnownNames) -> None:
    known.require(node.data in known.variables, f"there is no variable {node.data} here")
    wanted = known.variables[node.data]
    known.require(node.dtype == wanted, f"{node.data} is of type {wanted}, not {node.dtype}")


def _random(node: Expr, known: KnownNames) -> None:
    known.require(node.dtype in ("f32", "f64"), f"random numbers are f32 or f64, not {node.dtype}")
    known.require(len(node.args) == 1 and is_int(node.args[0].dtype), "the seed is not one integer")


def _bound(node: Expr, known: KnownNames) -> None:
    types = [arg.dtype for arg in node.args]
    known.require(types == [node.dtype] and is_int(node.dtype), f"{node.op} takes and gives an integer, not {types}")


def _call(node: Expr, known: KnownNames) -> None:
    types, callee = tuple(arg.dtype for arg in node.args), node.data
    known.require(types == callee.arguments, f"{callee.name} takes {callee.arguments}, not {types}")
    known.require(node.dtype == callee.result, f"{callee.name} gives {callee.result}, not {node.dtype}")


def _where(node: Expr, known: KnownNames) -> None:
    types = [arg.dtype for arg in node.args]
    known.require(types == ["b1", node.dtype, node.dtype], f"where of {types} is not {node.dtype}")


def _cast(node: Expr, known: KnownNames) -> None:
    known.require(len(node.args) == 1, "cast takes one argument")


def _bitcast(node: Expr, known: KnownNames) -> None:
    known.require(len(node.args) == 1, "bitcast takes one argument")
    source = node.args[0].dtype
    known.require(DTYPES[source].bytes == DTYPES[node.dtype].bytes, f"{source} has not the size of {node.dtype}")


_RULES: dict[str, Callable[[Expr, KnownNames], None]] = {
    "const": _const,
    "index": _index,
    "load": _load,
    "var": _var,
    "random": _random,
    "bound": _bound,
    "nonzero": _bound,
    "call": _call,
    "where": _where,
    "cast": _cast,
    "bitcast": _bitcast,
}
