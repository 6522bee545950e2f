"""C that decides by interval arithmetic whether a mask hides a whole tile, or nothing of it.

Of each integer an interval is computed that holds its values at the tile's elements, of each condition whether it may be false
and whether it may be true. Values of the query alone, or the key alone, that intervals would make too wide (what tensors hold,
remainders) are computed for each row or key, and their least and largest value taken. That is the second attempt: most tiles
are decided by the first, without them.
"""

from __future__ import annotations

from opkit.attn.functions.c.loops import Writer
from opkit.compiler.emit.c.expressions import C_TYPES
from opkit.compiler.ir.dtypes import DTYPES, is_int
from opkit.compiler.ir.expr import Expr

_HELPERS = """\
typedef struct { int64_t lo, hi; } iv;
static iv iv_of(int64_t lo, int64_t hi) { const iv a = {lo, hi}; return a; }
static iv iv_fit(int64_t lo, int64_t hi, int lost, iv type) {
    return lost || lo < type.lo || hi > type.hi ? type : iv_of(lo, hi);
}
static iv iv_add(iv a, iv b, iv type) {
    int64_t lo, hi;
    const int lost = __builtin_add_overflow(a.lo, b.lo, &lo) | __builtin_add_overflow(a.hi, b.hi, &hi);
    return iv_fit(lo, hi, lost, type);
}
static iv iv_sub(iv a, iv b, iv type) {
    int64_t lo, hi;
    const int lost = __builtin_sub_overflow(a.lo, b.hi, &lo) | __builtin_sub_overflow(a.hi, b.lo, &hi);
    return iv_fit(lo, hi, lost, type);
}
static iv iv_neg(iv a, iv type) { return iv_sub(iv_of(0, 0), a, type); }
static iv iv_min(iv a, iv b, iv type) { return iv_of(a.lo < b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi); }
static iv iv_max(iv a, iv b, iv type) { return iv_of(a.lo > b.lo ? a.lo : b.lo, a.hi > b.hi ? a.hi : b.hi); }
static iv iv_hull(iv a, iv b) { return iv_of(a.lo < b.lo ? a.lo : b.lo, a.hi > b.hi ? a.hi : b.hi); }
static iv iv_abs(iv a, iv type) {
    const iv n = iv_neg(a, type);
    if (a.lo >= 0) return a;
    return a.hi <= 0 ? n : iv_fit(0, n.hi > a.hi ? n.hi : a.hi, n.lo == type.lo, type);
}
static iv iv_mul(iv a, iv b, iv type) {
    int64_t at, lo = 0x7fffffffffffffffL, hi = -0x7fffffffffffffffL;
    int lost = 0;
    for (int n = 0; n < 4; ++n) {
        lost |= __builtin_mul_overflow(n & 1 ? a.hi : a.lo, n & 2 ? b.hi : b.lo, &at);
        lo = at < lo ? at : lo;
        hi = at > hi ? at : hi;
    }
    return iv_fit(lo, hi, lost, type);
}
static int64_t iv_down(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static iv iv_floordiv(iv a, iv b, iv type) {
    return b.lo == b.hi && b.lo > 0 ? iv_of(iv_down(a.lo, b.lo), iv_down(a.hi, b.lo)) : type;
}
static iv iv_div(iv a, iv b, iv type) { return b.lo == b.hi && b.lo > 0 ? iv_of(a.lo / b.lo, a.hi / b.lo) : type; }
static iv iv_rem(iv a, iv b, iv type) {
    if (b.lo != b.hi || b.lo <= 0) return type;
    const int64_t turn = iv_down(a.lo, b.lo);
    if (turn != iv_down(a.hi, b.lo)) return iv_of(0, b.lo - 1);
    return iv_of(a.lo - turn * b.lo, a.hi - turn * b.lo);
}
static iv iv_fmod(iv a, iv b, iv type) { return a.lo >= 0 ? iv_rem(a, b, type) : type; }
static iv iv_shr(iv a, iv b, iv type) {
    return b.lo == b.hi && b.lo >= 0 && b.lo < 31 ? iv_of(a.lo >> b.lo, a.hi >> b.lo) : type;
}
static iv iv_lt(iv a, iv b, iv type) { return iv_of(a.hi < b.lo, a.lo < b.hi); }
static iv iv_le(iv a, iv b, iv type) { return iv_of(a.hi <= b.lo, a.lo <= b.hi); }
static iv iv_eq(iv a, iv b, iv type) { return iv_of(a.lo == a.hi && b.lo == b.hi && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi); }
static iv iv_not(iv a, iv type) { return iv_of(!a.hi, !a.lo); }
static iv iv_ne(iv a, iv b, iv type) { return iv_not(iv_eq(a, b, type), type); }
static iv iv_truth(iv a, iv type) { return iv_ne(a, iv_of(0, 0), type); }
static iv iv_cast(iv a, iv type) { return iv_fit(a.lo, a.hi, 0, type); }
static iv iv_where(iv c, iv a, iv b, iv type) { return c.lo ? a : !c.hi ? b : iv_hull(a, b); }"""

_INTEGER = ("add", "sub", "mul", "neg", "abs", "min", "max", "floordiv", "div", "rem", "fmod", "shr")
_COMPARED = ("lt", "le", "eq", "ne")
_LOGIC = {
    "and": "min",
    "mul": "min",
    "min": "min",
    "or": "max",
    "add": "max",
    "max": "max",
    "ne": "ne",
    "xor": "ne",
    "eq": "eq",
}
_TIGHT = ("var", "const", "cast", "add", "sub", "neg", "floordiv", "div", "min", "max", "shr", "lt", "le")
_LEAST, _MOST = "(-9223372036854775807L - 1)", "9223372036854775807L"


def text(writer: Writer, root: Expr) -> str:
    """Return the C of ``decided(words, tile)``, which returns a State: 0 hidden, 1 full, 2 either or a part."""
    exact = _Intervals(writer, True)
    exact.of(root)
    attempts = [_Intervals(writer, False), exact] if exact.rows or exact.keys else [exact]
    lines = [*writer.head(), *writer.once()]
    for each in attempts:
        found = each.of(root)
        inside = [*each.loops(), *each.lines, f"if (!{found}.hi) return 0;", f"if ({found}.lo) return 1;"]
        lines += ["{", *(f"    {line}" for line in inside), "}"]
    body = "\n".join(f"    {line}" for line in [*lines, "return 2;"])
    name = (
        "static __attribute__((noinline)) int64_t decided(const int64_t *restrict words, const int64_t *restrict tile)"
    )
    return f"{_HELPERS}\n\n{name} {{\n{body}\n}}"


class _Intervals:
    """Writes the intervals of nodes; ``evaluates``: also from the values of each row and key."""

    def __init__(self, writer: Writer, evaluates: bool) -> None:
        self.writer = writer
        self.evaluates = evaluates
        self.names: dict[Expr, str] = {}
        self.lines: list[str] = []
        self.rows: list[Expr] = []
        self.keys: list[Expr] = []

    def of(self, node: Expr) -> str:
        """Return the name of a node's interval."""
        if node not in self.names:
            name = f"iv{self.writer.number[node]}"
            place = self.writer.place(node)
            if self.evaluates and place in ("row", "key") and node.dtype != "u64" and not _is_tight(node):
                (self.rows if place == "row" else self.keys).append(node)
            else:
                self.lines.append(f"const iv {name} = {self._computed(node, place)};")
            self.names[node] = name
        return self.names[node]

    def loops(self) -> list[str]:
        """Return the loops that find the least and the largest of the values of rows and keys."""
        lines: list[str] = []
        for nodes, place, count, own in (
            (self.rows, "row", "rows", "const int32_t i = first + (int32_t)n;"),
            (self.keys, "key", "keys", "const int32_t j = begin + (int32_t)n;"),
        ):
            if not nodes:
                continue
            names = [self.names[node] for node in nodes]
            inside = [own, *self.writer.definitions(place, nodes)]
            clauses = ""
            for name, node in zip(names, nodes, strict=True):
                kind, value = C_TYPES[node.dtype], self.writer.text(node, place)
                limits = ("1", "0") if node.dtype == "b1" else _range(node.dtype)[6:-1].split(", ")[::-1]
                lines.append(f"{kind} lo_{name} = {limits[0]}, hi_{name} = {limits[1]};")
                inside.append(f"const {kind} at_{name} = {value};")
                inside.append(f"lo_{name} = at_{name} < lo_{name} ? at_{name} : lo_{name};")
                inside.append(f"hi_{name} = at_{name} > hi_{name} ? at_{name} : hi_{name};")
                clauses += f" reduction(min:lo_{name}) reduction(max:hi_{name})"
            lines += [f'_Pragma("omp simd{clauses}")', f"for (int64_t n = 0; n < {count}; ++n) {{"]
            lines += [*(f"    {line}" for line in inside), "}"]
            lines += [f"const iv {name} = iv_of(lo_{name}, hi_{name});" for name in names]
        return lines

    def _computed(self, node: Expr, place: str) -> str:
        whole = _range(node.dtype)
        if not (is_int(node.dtype) or node.dtype == "b1") or node.dtype == "u64":
            return whole
        if place == "once":
            value = self.writer.text(node, "once")
            return f"iv_of({value}, {value})"
        if node.op == "var":
            return "iv_of(first, first + rows - 1)" if node.data == "i" else "iv_of(begin, last)"
        name = _rule(node)
        return whole if name is None else f"iv_{name}({', '.join([*map(self.of, node.args), whole])})"


def _rule(node: Expr) -> str | None:
    """Return the name of the function that computes a node's interval from its arguments'; None if there is none."""
    kinds = {each.dtype if each.dtype in ("b1", "u64") else "int" if is_int(each.dtype) else "" for each in node.args}
    if node.op == "load" or kinds & {"u64", ""}:
        return None
    if node.op == "where":
        return "where"
    if node.op == "cast":
        return "truth" if node.dtype == "b1" else "cast"
    if kinds == {"int"}:
        return node.op if node.op in _INTEGER or node.op in _COMPARED else None
    return "not" if node.op == "not" else _LOGIC.get(node.op) if kinds == {"b1"} else None


def _is_tight(node: Expr) -> bool:
    """Return whether intervals of a node of the query or the key alone are exact, or as good as exact."""
    return all(each.op in _TIGHT and (is_int(each.dtype) or each.dtype == "b1") for each in node.walk())


def _range(dtype: str) -> str:
    row = DTYPES[dtype]
    if dtype == "b1":
        return "iv_of(0, 1)"
    if row.kind != "int" or row.bytes == 8:
        return f"iv_of({_LEAST}, {_MOST})"
    bits = 8 * row.bytes
    return f"iv_of({-(2 ** (bits - 1))}L, {2 ** (bits - 1) - 1}L)" if row.signed else f"iv_of(0, {2**bits - 1}L)"
