"""C of a mask or score function, for tiles of rows and 64 keys, as ``cpp_ext/attention/function.hpp`` calls it.

What a value depends on decides where it is computed: on the head alone, before all loops; on the query alone, once for a row;
on the key alone, once for a tile's 64 keys; on the distance of key and query alone (as relative positions do), once for each
of the tile's distances, of which there are fewer than 160 where the tile has up to 6144 elements. Only what is left is computed
for each element. All 64 keys of a row are computed, those beyond the last one too, so that the number is known beforehand.

Whatever functions compute, they read no element outside their tensors: coordinates that are not variables are clamped.
"""

from __future__ import annotations

from collections.abc import Iterable

from opkit.attn.functions.c import intervals
from opkit.attn.functions.c.loops import KEYS, MAX_ROWS, Writer
from opkit.attn.functions.expression import coordinates, derivatives
from opkit.compiler.emit.c import prelude
from opkit.compiler.emit.c.expressions import TYPEDEFS, convert
from opkit.compiler.ir.expr import Expr

ENTRY, TABULATE = "opkit_function", "opkit_tabulate"
_OF = "const struct distances *restrict of"
_STRUCTS = "struct distances { const char *entries; int64_t count, zero; };"
_SIMD = '#define SIMD _Pragma("omp simd")'
_ENTRY = '__attribute__((visibility("default")))'
_HELPERS = """\
static inline __attribute__((always_inline)) int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline __attribute__((always_inline)) int64_t within(int64_t at, int64_t size) {
    at = at < 0 ? at + size : at;
    at = at < 0 ? 0 : at;
    return at < size ? at : size - 1;
}
static inline __attribute__((always_inline)) float as_float(int64_t word) {
    double value;
    __builtin_memcpy(&value, &word, 8);
    return (float)value;
}
static inline __attribute__((always_inline)) uint64_t packed(const uint8_t *truths) {
    uint64_t bits = 0;
    for (int n = 0; n < 8; ++n) {
        uint64_t eight;
        __builtin_memcpy(&eight, truths + 8 * n, 8);
        bits |= (eight * 0x0102040810204080u >> 56) << (8 * n);
    }
    return bits;
}"""


def mask_text(root: Expr) -> tuple[str, int]:
    """Return the C of a mask, ``LookAt`` of function.hpp; and 0, the bytes of what it tabulates."""
    writer = Writer([root], [root])
    truths = f"{writer.used(root)} + shift" if writer.place(root) == "distance" else "truths"
    row = [f"const uint64_t word = packed({truths}) & limit;", "bits[r] = word;", "any |= word;", "all &= word;"]
    if truths == "truths":
        row = ["uint8_t truths[64];", *writer.inner([root], [f"truths[jj] = {writer.text(root, 'element')};"]), *row]
    body = [
        "const int64_t state = decided(words, tile);",
        "if (state != 2) return state;",
        *writer.head(),
        *writer.once(),
        *writer.tables(),
        "const uint64_t limit = keys >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << keys) - 1;",
        "uint64_t any = 0, all = limit;",
        *writer.rows(row),
        "return any == 0 ? 0 : all == limit ? 1 : 2;",
    ]
    look = _function(f"{_ENTRY} int64_t {ENTRY}", "uint64_t *restrict bits", body)
    return _unit(intervals.text(writer, root), look), 0


def score_text(root: Expr) -> tuple[str, int]:
    """Return the C of a score, ``Score`` and ``Tabulate`` of function.hpp; and the bytes of what is tabulated of a distance."""
    writer = Writer([root], [root], tabulated=True)
    store = f"row[jj] = {convert(writer.text(root, 'element'), root.dtype, 'f32')};"
    row = ["float *restrict row = scores + r * pitch;", *writer.inner([root], [store], "row[jj]")]
    body = [*writer.head(), *writer.once(), *writer.tables(), *writer.rows(row)]
    score = _function(f"{_ENTRY} void {ENTRY}", f"{_OF}, float *scores, int64_t pitch", body)
    return _unit(*_tabulation(writer), score), writer.entry_bytes


def slope_text(root: Expr) -> tuple[str, int]:
    """Return the same of a score's derivatives, ``Slope`` of function.hpp."""
    of = derivatives(root)
    by_loads = {load: slope for load, slope in of.items() if load.op == "load"}
    by_score = next((slope for node, slope in of.items() if node.op == "var"), None)
    roots = [*of.values(), *(each for load in by_loads for each in coordinates(load))]
    writer = Writer(roots, roots, root, tabulated=True)
    parameters = (
        f"{_OF}, const float *restrict before, float *restrict gradients, const uint64_t *restrict seen, "
        "double *const *sums"
    )
    parts = _tabulation(writer)
    body = _of_score(by_score, writer)
    if by_loads:
        body = ["if (sums) of_tensors(words, tile, of, before, gradients, seen, sums);", *body]
        name = "static __attribute__((noinline)) void of_tensors"
        parts.append(_function(name, parameters, _of_tensors(by_loads, writer)))
    return _unit(*parts, _function(f"{_ENTRY} void {ENTRY}", parameters, body)), writer.entry_bytes


def _tabulation(writer: Writer) -> list[str]:
    if not writer.entry_bytes:
        return []
    return [_function(f"{_ENTRY} void {TABULATE}", f"{_OF}, char *entries", writer.tabulation())]


def _of_score(slope: Expr | None, writer: Writer) -> list[str]:
    if slope is not None and slope.op == "const" and slope.data == 1:
        return []
    if slope is None:
        return ["for (int64_t n = 0; n < tile[3] * 64; ++n) gradients[n] = 0.0f;"]
    store = f"row[jj] = row[jj] * {convert(writer.text(slope, 'element'), slope.dtype, 'f32')};"
    lines = ["float *restrict row = gradients + r * 64;", "const float *restrict earlier = before + r * 64;"]
    row = [*lines, *writer.inner([slope], [store], "earlier[jj]")]
    return [*writer.head(), *writer.once(), *writer.tables(), *writer.rows(row)]


def _of_tensors(slopes: dict[Expr, Expr], writer: Writer) -> list[str]:
    """Return the body of a function that adds the gradients of loads to those of their tensors.

    Of a row the 64 parts are computed first. Where all belong to one element, their sum is added; where the element depends on
    the distance alone, parts of the same distance are added up first; else each is added by itself.
    """
    at = {load: coordinates(load) for load in slopes}
    roots = [*slopes.values(), *(each for places in at.values() for each in places)]
    adds: list[str] = []
    stores: list[str] = []
    totals: list[str] = []
    ends: list[str] = []
    lines = ["const float *restrict after = gradients + r * 64, *restrict earlier = before + r * 64;"]
    for n, (load, slope) in enumerate(slopes.items()):
        tensor = writer.tensors.index(load.data[0])
        places = {writer.place(each) for each in at[load]}
        lines.append(f"float part{n}[64];")
        part = f"after[jj] * {convert(writer.text(slope, 'element'), slope.dtype, 'f32')}"
        stores.append(f"part{n}[jj] = word >> jj & 1 ? {part} : 0.0f;")
        if places <= {"once", "row"}:
            adds += [
                f"if (sums[{tensor}]) {{",
                "    float total[16] = {0};  // in an order that no vector width decides",
                "    for (int jj = 0; jj < 64; jj += 16)",
                f"        for (int lane = 0; lane < 16; ++lane) total[lane] += part{n}[jj + lane];",
                f"    double *to = sums[{tensor}] + {writer.flat(load, 'row')};",
                "    for (int lane = 0; lane < 16; ++lane) *to += total[lane];",
                "}",
            ]
        elif places <= {"once", "distance"}:
            totals.append(f"float total{n}[{MAX_ROWS + KEYS}] = {{0}};")
            adds += ["SIMD", f"for (int jj = 0; jj < 64; ++jj) total{n}[jj + near] += part{n}[jj];"]
            add = f"if (total{n}[n] != 0) sums[{tensor}][{writer.flat(load, 'entry')}] += total{n}[n];"
            ends.append(f"if (sums[{tensor}]) for (int64_t n = 0; n < rows + 63; ++n) {add}")
        else:
            lines.append(f"int64_t at{n}[64];")
            stores.append(f"at{n}[jj] = {writer.flat(load, 'element')};")
            add = f"if (word >> jj & 1) sums[{tensor}][at{n}[jj]] += part{n}[jj];"
            adds.append(f"if (sums[{tensor}]) for (int jj = 0; jj < 64; ++jj) {add}")
    row = [
        "const uint64_t word = seen[r];",
        "if (!word) continue;",
        *lines,
        *writer.inner(roots, stores, "earlier[jj]"),
        *adds,
    ]
    return [*writer.head(), *writer.once(), *writer.tables(), *totals, *writer.rows(row), *ends]


def _function(name: str, parameters: str, body: Iterable[str]) -> str:
    lines = [f"{name}(const int64_t *restrict words, const int64_t *restrict tile, {parameters}) {{"]
    return "\n".join([*lines, *(f"    {line}" for line in body), "}"])


def _unit(*parts: str) -> str:
    body = "\n\n".join(parts)
    return "\n".join([TYPEDEFS, _SIMD, prelude.text(body), _STRUCTS, _HELPERS, "", body, ""])
