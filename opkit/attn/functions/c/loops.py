"""Loops of C over the tiles of a mask or score function, and the words that hold what it captures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from opkit.attn.functions.expression import coordinates, indexed, loads_of
from opkit.compiler.emit.c.expressions import C_TYPES, apply, convert, number, reinterpret, variable_type
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr

KEYS, MAX_ROWS = 64, 96  # of a tile: kKeys and kBackwardRows
_VARIABLES = ("b", "h", "i", "j", "score")

# ---- words -----------------------------------------------------------------------------------------------------------


def name_order(name: str) -> tuple[str, int]:
    """Return a key that sorts the names of tensors and captured numbers: t2 before t10."""
    return name[0], int(name[1:])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a function's words hold its captured numbers and tensors.

    Attributes:
        numbers: the variables of numbers, each in a word.
        tensors: the names of tensors, each with the word of its address; sizes and strides follow.
        ranks: the numbers of their dimensions.
        count: of all words.
    """

    numbers: tuple[str, ...]
    tensors: dict[str, int]
    ranks: dict[str, int]
    count: int

    @classmethod
    def of(cls, root: Expr) -> Layout:
        names = {node.data for node in root.walk() if node.op == "var"} - set(_VARIABLES)
        numbers = tuple(sorted(names, key=name_order))
        ranks = {load.data[0]: len(load.data[1]) for load in loads_of(root)}
        words: dict[str, int] = {}
        count = len(numbers)
        for name in sorted(ranks, key=name_order):
            words[name] = count
            count += 1 + 2 * ranks[name]
        return cls(numbers, words, ranks, count)


# ---- loops -----------------------------------------------------------------------------------------------------------


class Writer:
    """Writes the loops of a function.

    Args:
        roots: what is computed.
        wanted: the nodes that are read for each element.
        whole: the expression that decides the layout of the words; the first root by default.
        tabulated: whether what depends on the distance is computed once for a head, by the function of :meth:`tabulation`.
    """

    def __init__(
        self, roots: Sequence[Expr], wanted: Sequence[Expr], whole: Expr | None = None, tabulated: bool = False
    ) -> None:
        self.layout = Layout.of(roots[0] if whole is None else whole)
        self.tensors = list(self.layout.tensors)
        self.nodes = list(dict.fromkeys(node for root in roots for node in root.walk()))
        self.number = {node: k for k, node in enumerate(self.nodes)}
        self._variables = dict(indexed(roots[0] if whole is None else whole))
        self._depends: dict[Expr, frozenset[str]] = {}
        for node in self.nodes:
            self._depends[node] = self._dependence(node)
        self.wanted = wanted
        self.tabulated = tabulated

    def _dependence(self, node: Expr) -> frozenset[str]:
        if node.op == "var":
            found = {"i": "i", "j": "j", "score": "ij"}.get(node.data, "")
            return frozenset(found)
        if _is_of_distance(node):
            return frozenset("d")
        return frozenset().union(*(self._depends[each] for each in _inputs(node)))

    def place(self, node: Expr) -> str:
        """Return where a node is computed: "once", for each "row", "key", "distance" or "element"."""
        places = {"": "once", "i": "row", "j": "key", "d": "distance"}
        return places.get("".join(sorted(self._depends[node])), "element")

    def used(self, node: Expr) -> str:
        """Return the array of a node that is computed for each key or distance."""
        return f"{'k' if self.place(node) == 'key' else 'd'}{self.number[node]}"

    def head(self) -> list[str]:
        """Return the definitions of the tile's sizes, the captured numbers and tensors."""
        lines = [
            "const int32_t b = (int32_t)tile[0], h = (int32_t)tile[1], first = (int32_t)tile[2], begin = (int32_t)tile[4];"
        ]
        lines += ["const int64_t rows = tile[3], keys = tile[5], last = tile[4] + keys - 1;"]
        for word, name in enumerate(self.layout.numbers):
            real = name.startswith("x")
            lines.append(
                f"const {'float' if real else 'int64_t'} {name} = {'as_float' if real else ''}(words[{word}]);"
            )
        dtypes = {load.data[0]: load.dtype for load in self._variables}
        for name, dtype in dtypes.items():
            word, rank = self.layout.tensors[name], self.layout.ranks[name]
            lines.append(f"const {C_TYPES[dtype]} *restrict {name} = (const {C_TYPES[dtype]} *)words[{word}];")
            for dim in range(rank):
                lines.append(
                    f"const int64_t {name}_n{dim} = words[{word + 1 + dim}], {name}_s{dim} = words[{word + 1 + rank + dim}];"
                )
        return [*lines, "(void)b, (void)h, (void)first, (void)begin, (void)rows, (void)last;"]

    def once(self) -> list[str]:
        """Return the definitions of what is computed before all loops."""
        return self.definitions("once", [node for node in self.nodes if self.place(node) == "once"])

    def tables(self) -> list[str]:
        """Return the loops that compute what depends on the key, or the distance, alone."""
        lines = self._table("key", "64", ["const int32_t j = begin + (int32_t)n;"], KEYS)
        if self.tabulated:
            return [*lines, *self._entries("const char *", "of->entries")]
        least = ["const int32_t least = begin - first - (int32_t)rows + 1;", "(void)least;"]
        more = ["const int32_t i = 0, j = least + (int32_t)n;", "(void)i;"]
        return [*lines, *least, *self._table("distance", "rows + 63", more, MAX_ROWS + KEYS)]

    def _table(self, place: str, bound: str, more: Sequence[str], size: int = 0) -> list[str]:
        """Return a loop that computes all nodes of a place, and its arrays if they have a size."""
        targets = self._targets(place)
        if not targets:
            return []
        lines = [f"{C_TYPES[node.dtype]} {self.used(node)}[{size}];" for node in targets] if size else []
        stores = [f"{self.used(node)}[n] = {self.text(node, place)};" for node in targets]
        inside = [*more, *self.definitions(place, targets), *stores]
        return [*lines, "SIMD", f"for (int64_t n = 0; n < {bound}; ++n) {{", *(f"    {line}" for line in inside), "}"]

    def _targets(self, place: str) -> list[Expr]:
        """Return the nodes of a place that are read from arrays, the widest first."""
        found = [node for node in self._read_by_elements() if self.place(node) == place and not self._is_plain(node)]
        return sorted(found, key=lambda node: -DTYPES[node.dtype].bytes)

    @property
    def entry_bytes(self) -> int:
        """The bytes of what is computed for one distance."""
        return sum(DTYPES[node.dtype].bytes for node in self._targets("distance"))

    def _entries(self, kind: str, memory: str) -> list[str]:
        """Return the definitions of arrays that lie one after the other in memory."""
        lines: list[str] = []
        offset = 0
        for node in self._targets("distance"):
            pointer = f"{kind.replace('char *', '')}{C_TYPES[node.dtype]} *"
            lines.append(f"{pointer}restrict {self.used(node)} = ({pointer})({memory} + {offset} * of->count);")
            offset += DTYPES[node.dtype].bytes
        return lines

    def tabulation(self) -> list[str]:
        """Return the body of a function that computes what depends on the distance, for all distances of a head."""
        more = ["const int32_t i = 0, j = (int32_t)(n - of->zero);", "(void)i;"]
        return [
            *self.head(),
            *self.once(),
            *self._entries("char *", "entries"),
            *self._table("distance", "of->count", more),
        ]

    def rows(self, body: Sequence[str]) -> list[str]:
        """Return the loop over rows."""
        lines = [
            "const int32_t i = first + (int32_t)r;",
            "const int64_t near = rows - 1 - r;",
            f"const int64_t shift = {'begin - i + of->zero' if self.tabulated and self.entry_bytes else 'near'};",
            "(void)i, (void)near, (void)shift;",
            *self.definitions("row", [node for node in self.nodes if self.place(node) == "row"]),
            *body,
        ]
        return ["for (int64_t r = 0; r < rows; ++r) {", *(f"    {line}" for line in lines), "}"]

    def inner(self, targets: Sequence[Expr], stores: Sequence[str], score: str = "") -> list[str]:
        """Return the loop over the keys of a row, which computes nodes and stores them."""
        own = [node for node in targets if self.place(node) == "element"]
        lines = ["const int32_t j = begin + (int32_t)jj;", "(void)j;"]
        lines += [f"const float score = {score};", "(void)score;"] if score else []
        lines += [*self.definitions("element", own), *stores]
        return ["SIMD", "for (int64_t jj = 0; jj < 64; ++jj) {", *(f"    {line}" for line in lines), "}"]

    def _read_by_elements(self) -> list[Expr]:
        """Return the nodes that elements read from arrays, or that are wanted."""
        found = dict.fromkeys(self.wanted)
        for node in self.nodes:
            if self.place(node) == "element":
                found.update(dict.fromkeys(_inputs(node)))
        return list(found)

    def _is_plain(self, node: Expr) -> bool:
        """Return whether a node is a variable or a constant, which is written where it is used."""
        return node.op in ("var", "const")

    def definitions(self, place: str, targets: Sequence[Expr]) -> list[str]:
        """Return the definitions of what a loop computes itself for some nodes."""
        needed: dict[Expr, None] = {}

        def visit(node: Expr) -> None:
            if node in needed or not self._is_own(node, place):
                return
            for each in _inputs(node):
                visit(each)
            needed[node] = None

        for node in targets:
            visit(node)
        return [
            f"const {variable_type(node.dtype)} v{self.number[node]} = {self._computed(node, place)};"
            for node in needed
        ]

    def _is_own(self, node: Expr, place: str) -> bool:
        """Return whether a loop computes a node itself; that of distances does so for what the distance is computed from."""
        own = self.place(node)
        return not self._is_plain(node) and (own == place or (place == "distance" and own in ("row", "key")))

    def text(self, node: Expr, place: str) -> str:
        """Return a node's value in a loop."""
        if node.op == "const":
            return number(node.data, node.dtype)
        if node.op == "var":
            return node.data
        own = self.place(node)
        if place == "element" and own in ("key", "distance"):
            return f"{self.used(node)}[jj{'' if own == 'key' else ' + shift'}]"
        if place == "entry" and own == "distance":
            return f"{self.used(node)}[n + begin - first - rows + 1 + of->zero]"
        return f"v{self.number[node]}"

    def _computed(self, node: Expr, place: str) -> str:
        if node.op == "load":
            return self._loaded(node, place)
        args = [self.text(each, place) for each in node.args]
        if node.op == "cast":
            return convert(args[0], node.args[0].dtype, node.dtype)
        if node.op == "bitcast":
            return reinterpret(args[0], node.args[0].dtype, node.dtype)
        dtype = node.args[-1].dtype if node.op == "where" else node.args[0].dtype
        return apply(node.op, dtype, args, node.dtype)

    def _loaded(self, node: Expr, place: str) -> str:
        name = node.data[0]
        offsets = [f"{at} * {name}_s{dim}" for dim, at in enumerate(self._places(node, place))]
        element = f"{name}[{' + '.join(offsets) or '0'}]"
        return f"({element} != 0)" if node.dtype == "b1" else element

    def flat(self, node: Expr, place: str) -> str:
        """Return the position of a load's element in its tensor as if that were contiguous."""
        text = "0"
        for dim, at in enumerate(self._places(node, place)):
            text = at if dim == 0 else f"({text}) * {node.data[0]}_n{dim} + {at}"
        return text

    def _places(self, node: Expr, place: str) -> list[str]:
        """Return the coordinates of a load, within the tensor, whose size was compared with the range of variables."""
        places: list[str] = []
        for dim, (at, variable) in enumerate(zip(coordinates(node), self._variables[node], strict=True)):
            text = self.text(at, place) if variable is None else variable
            if variable == "j":
                text = "at_most(j, last)"
            elif variable is None:
                text = f"within({text}, {node.data[0]}_n{dim})"
            places.append(f"(int64_t){text}" if variable in ("b", "h", "i") else text)
        return places


def _inputs(node: Expr) -> list[Expr]:
    return list(coordinates(node) if node.op == "load" else node.args)


def _is_of_distance(node: Expr) -> bool:
    """Return whether an integer, or a comparison of two, depends on the distance of key and query alone."""
    shift = _shift(node)
    if node.op in ("lt", "le", "eq", "ne"):
        left, right = map(_shift, node.args)
        shift = None if left is None or right is None else (left[0] - right[0], left[1] - right[1])
    return shift is not None and shift[0] == -shift[1] != 0


def _shift(node: Expr) -> tuple[int, int] | None:
    """Return the factors of ``i`` and ``j`` in an integer sum of them and of what depends on neither; None if it is none."""
    if node.dtype not in ("i32", "i64"):  # narrower ones wrap around
        return None
    if node.op == "var":
        return int(node.data == "i"), int(node.data == "j")
    if node.op not in ("add", "sub", "cast", "neg"):
        return (
            (0, 0) if not any(each.op == "var" and each.data in ("i", "j", "score") for each in node.walk()) else None
        )
    parts = [_shift(each) for each in node.args]
    known = [each for each in parts if each is not None]
    if len(known) < len(parts):
        return None
    if node.op == "cast":
        return known[0]
    sign = 1 if node.op == "add" else -1
    if node.op == "neg":
        return -known[0][0], -known[0][1]
    return known[0][0] + sign * known[1][0], known[0][1] + sign * known[1][1]
