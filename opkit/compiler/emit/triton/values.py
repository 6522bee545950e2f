"""The expressions of a kernel as lines of Triton."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from opkit.compiler.emit.analysis import own_reads, postorder, values
from opkit.compiler.emit.triton.expressions import (
    NARROW,
    TYPES,
    NotEmittable,
    applied,
    constant,
    converted,
    index_text,
    number,
    tensor,
)
from opkit.compiler.ir.expr import Expr, const, make, rewrite
from opkit.compiler.ir.index import Atom, Axis, Index, Symbol, Value
from opkit.compiler.ir.kernel import Accumulator


@dataclasses.dataclass(frozen=True)
class Named:
    """A name or text in the source, and whether it differs along the rows (``x``) and along the columns (``r``) of a tile."""

    text: str
    x: bool = False
    r: bool = False

    def along(self, *others: Named) -> Named:
        return Named(self.text, self.x or any(o.x for o in others), self.r or any(o.r for o in others))


Known = dict[Expr, Named]


class ValueWriter:
    """Writes values for the points of a tile.

    Attributes:
        axes, variables: their names in the source.
        accumulators: the accumulators so far.
        in_x, in_r: the names of which rows and columns of the tile there are; None if all are.
        columns: whether what is written is for each column.
        running: which points are still in a loop that may end early.
        checks: whether a value was asserted.
        exact: whether quotients and roots of float32 are rounded to the nearest.
        eviction: what loads say about the cache.
        by_value: the buffers whose one element the kernel takes.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.count = 0
        self.axes: dict[int, Named] = {}
        self.variables: dict[str, Named] = {}
        self.accumulators: dict[str, Accumulator] = {}
        self.in_x: str | None = None
        self.in_r: str | None = None
        self.columns = False
        self.running: Named | None = None
        self.checks = False
        self.exact = True
        self.eviction = ""
        self.by_value = frozenset[str]()

    def _write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def _name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def _expression(self, root: Expr, known: Known) -> Named:
        short = self._short(root)
        for node in postorder(short, known):
            found = self._node(node, known)
            if node.op not in ("const", "var") or ("(" in found.text and node.op == "var"):
                name = self._name()
                self._write(f"{name} = {found.text}")
                found = Named(name, found.x, found.r)
            known[node] = found
        known[root] = known[short]
        return known[root]

    def _short(self, root: Expr) -> Expr:
        """Return an expression with the functions of ``SHORT`` if results are narrow."""
        return root if self.exact else _shortened(root)

    def _node(self, node: Expr, known: Known) -> Named:
        args = [known[a] for a in node.args]
        texts = [a.text for a in args]
        if node.op in _LEAVES:
            return _LEAVES[node.op](self, node, args, known)
        if node.op == "cast":
            return Named(converted(texts[0], node.args[0].dtype, node.dtype)).along(*args)
        if node.op == "bitcast":
            return Named(f"{texts[0]}.to({TYPES[node.dtype]}, bitcast=True)").along(*args)
        return Named(applied(node.op, node.args[-1].dtype, texts, self.exact)).along(*args)

    def _var(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        held = self.variables[node.data]
        accumulator = self.accumulators.get(node.data)
        if accumulator is not None and accumulator.dtype in NARROW:
            return Named(f"{held.text}.to({TYPES[node.dtype]})").along(held)
        return held

    def _index(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        at = self._place(node.data, known)
        return Named(tensor(at.text, "i64")).along(at)

    def _load(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        buffer, (coordinate,) = node.data
        if buffer in self.by_value:
            return Named(buffer)
        place = self._place(coordinate, known)
        at = place.along(*args)
        masks = [args[0].text] if args else []
        mask = self._mask(at, *masks, other=number(0, node.dtype) if args else None)
        eviction = self.eviction if at.r else ""
        loaded = f"tl.load({buffer} + {self._spread(place, at.x, at.r)}{mask}{eviction})"
        return Named(f"({loaded} != 0)" if node.dtype == "b1" else loaded).along(at)

    def _bound(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        extent, a = self._place(node.data, known), args[0].along()
        at = a.along(extent)
        n = converted(tensor(extent.text, "i64"), "i64", node.dtype)
        self._assert(f"(({a.text} >= -{n}) & ({a.text} < {n}))", "an index is out of range", at)
        return Named(f"tl.where({a.text} < 0, {a.text} + {n}, {a.text})").along(at)

    def _nonzero(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        self._assert(f"({args[0].text} != 0)", "a divisor is zero", args[0])
        return args[0]

    def _assert(self, condition: str, message: str, at: Named) -> None:
        self.checks = True
        absent = [f" | ({mask} == 0)" for mask in self._masks(at)]
        self._write(f'tl.device_assert({condition}{"".join(absent)}, "{message}")')

    def _random(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        at = self._place(node.data, known)
        return Named(f"opk_random_{node.dtype}({args[0].text}, {tensor(at.text, 'i64')})").along(at, *args)

    def _const(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        return Named(constant(node.data, node.dtype))

    def _function(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        return Named(f"{node.data}({args[0].text})").along(args[0])

    def _call(self, node: Expr, args: Sequence[Named], known: Known) -> Named:
        raise NotEmittable(f"a call of {node.data.name}")

    # ---- places ------------------------------------------------------------------------------------------------------

    def _masks(self, at: Named) -> list[str]:
        """Return which places there are, of those that ``at`` differs for."""
        found = [self.in_x if at.x else None, self.in_r if at.r else None, self.running and self.running.text]
        return [mask for mask in found if mask]

    def _mask(self, at: Named, *more: str, other: str | None = None) -> str:
        masks = [*self._masks(at), *more]
        text = f", mask={' & '.join(masks)}" if masks else ""
        return text + (f", other={other}" if other is not None else "")

    def _spread(self, at: Named, x: bool, r: bool) -> str:
        """Return a place with one value for each row and each column, where these are wanted."""
        columns = next((a.text for a in self.axes.values() if a.r), "")
        return f"{at.text}{' + 0 * row' * (x and not at.x)}{f' + 0 * {columns}' * (r and not at.r)}"

    def _place(self, at: Index, known: Known) -> Named:
        for root in values(at):
            self._expression(root, known)

        def spell(atom: Atom) -> str:
            if isinstance(atom, Value):
                return known[atom.expr].text + ("" if atom.expr.dtype == "i64" else ".to(tl.int64)")
            return self._atom(atom)

        used = [self.axes[a.number] for a in at.axes()] + [known[root] for root in values(at)]
        return Named(f"({index_text(at, spell)})").along(*used)

    def _plain(self, at: Index) -> str:
        """Return an index without values."""
        return index_text(at, self._atom)

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, Axis):
            return self.axes[atom.number].text
        assert isinstance(atom, Symbol)
        return f"n_{atom.name}"


_LEAVES = {
    "const": ValueWriter._const,
    "var": ValueWriter._var,
    "index": ValueWriter._index,
    "load": ValueWriter._load,
    "bound": ValueWriter._bound,
    "nonzero": ValueWriter._nonzero,
    "random": ValueWriter._random,
    "call": ValueWriter._call,
    "short": ValueWriter._function,
}


SHORT = {"erf": "opk_one_plus_erf", "tanh": "opk_one_plus_tanh"}
"""What computes 1 + f(x) in fewer instructions than f(x), accurately enough for narrow floats, where the sum is small too."""


@functools.lru_cache(maxsize=1 << 12)
def _shortened(root: Expr) -> Expr:
    def changed(node: Expr) -> Expr:
        one = const(1.0, "f32")
        if one in node.args and node.op == "add":
            other = node.args[node.args[0] is one]
            return make("short", "f32", other.args, SHORT[other.op]) if other.op in SHORT else node
        square = node.args[1] if node.op == "sub" and node.args[0] is one else node
        if (
            square.op == "mul"
            and square is not node
            and square.args[0] is square.args[1]
            and square.args[0].op == "tanh"
        ):
            return make("short", "f32", square.args[0].args, "opk_one_minus_tanh_squared")
        return node

    return rewrite(root, changed)


def forget(known: Known, changed: Iterable[str]) -> None:
    """Remove the values that depend on variables or buffers that have changed."""
    names = frozenset(changed)
    for node in [node for node in known if not names.isdisjoint(_reads(node))]:
        del known[node]


@functools.lru_cache(maxsize=1 << 14)
def _reads(root: Expr) -> frozenset[str]:
    return frozenset(name for node in root.walk() for name in own_reads(node))
