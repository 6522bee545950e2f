"""Choose the tile that a program of a kernel computes, and its warps, from the kernel's shape and expected sizes.

There are three kinds of kernels. Pointwise ones have tiles of neighbouring points. If some of their accesses are contiguous along
an axis that is not the innermost, that axis is the second one of the tile, so that loads and stores both are of neighbouring
elements. Kernels with vector loops have tiles of rows and columns: a row that fits is a tile as a whole ("persistent"), else the
program goes along it in steps. Kernels whose loops run in order have one thread for each point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from opkit.compiler.emit.analysis import roots_of
from opkit.compiler.ir.access import estimate, is_contiguous, rows_are_adjacent, step
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import indices, op, var
from opkit.compiler.ir.index import Axis, Index, Value, is_nonnegative, product, upper
from opkit.compiler.ir.kernel import Accumulator, Kernel, Let, Loop, Statement, Store, Update, parallel, walk
from opkit.compiler.lower.target import TileSizes

MAX_NARROW = 1 << 31  # elements that are counted in 32 bits


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of a kernel.

    Attributes:
        x, r: the rows and columns of a tile; ``r`` is 0 if it has no columns.
        warps: the warps of a program.
        across: the loop of the grid that is the columns of a pointwise kernel.
        persistent: whether the columns of a tile are the whole vector loop.
        wide: whether indices have 64 bits.
    """

    x: int
    r: int
    warps: int
    across: Loop | None = None
    persistent: bool = False
    wide: bool = False


def grid(kernel: Kernel) -> tuple[list[Loop], tuple[Statement, ...]]:
    """Return the loops that are the grid, and the statements in them: without reductions the vector loop is one of them."""
    loops, body = parallel(kernel)
    if len(body) == 1 and isinstance(body[0], Loop) and body[0].how == "vector" and body[0].stop is None:
        inside = body[0].body
        if not any(isinstance(s, Update | Accumulator | Loop) for s in inside):
            return [*loops, body[0]], inside
    return loops, body


def scan(body: Sequence[Statement]) -> Loop | None:
    """Return the loop of a scan, if the statements are one: an accumulator, and a loop that updates it first of all."""
    accumulator, loop = body if len(body) == 2 else (None, None)
    if not isinstance(accumulator, Accumulator) or not isinstance(loop, Loop):
        return None
    first, *rest = loop.body
    updates = isinstance(first, Update) and first.name == accumulator.name and first.at is None
    plain = loop.how == "plain" and loop.stop is None and all(isinstance(s, Store) and s.update is None for s in rest)
    if not updates or not plain:
        return None
    stored = {s.buffer for s in rest if isinstance(s, Store)}
    read = {node.data[0] for root in roots_of(loop.body) for node in root.walk() if node.op == "load"}
    return None if stored & read else loop


def softmax(body: Sequence[Statement]) -> tuple[Sequence[Statement], dict[str, str]]:
    """Return statements with one loop for their first two, if the second only sums exp(x - maximum of x in the first).

    Also returns the name of the maximum for each such sum. Its update is by x, before that of the maximum.
    """
    at = [k for k, s in enumerate(body) if not isinstance(s, Accumulator | Store)][:2]  # a store between them can wait
    first, second = (body[k] for k in at) if len(at) == 2 else (None, None)
    if not isinstance(first, Loop) or not isinstance(second, Loop) or not first.how == second.how == "vector":
        return body, {}
    stores = [s for s in body[: at[1]] if isinstance(s, Store)]
    read = {node.data[0] for root in roots_of(second.body) for node in root.walk() if node.op == "load"}
    if any(isinstance(s, Store) for s in body[: at[0]]) or not read.isdisjoint(s.buffer for s in stores):
        return body, {}
    if not is_nonnegative(first.axis.extent - 1):
        return body, {}
    online: dict[str, str] = {}
    sums: list[Statement] = []
    for power in second.body:
        for x in first.body:
            if isinstance(power, Update) and isinstance(x, Update) and (power.reduction, x.reduction) == ("sum", "max"):
                exceeding = op("sub", x.value, var(x.name, x.value.dtype))
                if power.value is op("exp", exceeding) and x.value.dtype in ("f32", "f64") and power.name not in online:
                    online[power.name] = x.name
                    sums.append(dataclasses.replace(power, value=x.value))
    if len(sums) < len(second.body):
        return body, {}
    accumulators = [s for s in body[: at[1]] if isinstance(s, Accumulator)]
    ordered = sorted([*sums, *first.body], key=lambda s: not isinstance(s, Let))
    merged = dataclasses.replace(first, body=tuple(ordered))
    return [*accumulators, merged, *stores, *body[at[1] + 1 :]], online


def tiles(kernel: Kernel, sizes: Mapping[str, int], chosen: TileSizes) -> Tiles:
    """Return the tiles of a kernel; ``sizes`` are the expected values of its sizes, ``chosen`` are those of tiles."""
    loops, body = grid(kernel)
    points = estimate(product(loop.axis.extent for loop in loops), sizes)
    wide = _is_wide(kernel, loops)
    scanned = scan(body)
    vectors = [s for s in walk(body) if isinstance(s, Loop) and (s.how == "vector" or s is scanned)]
    if vectors:
        return dataclasses.replace(_rows(loops, body, vectors, points, sizes, chosen), wide=wide)
    if any(isinstance(s, Loop) for s in body):
        return Tiles(_fewer(128, points, 32, chosen.programs), 0, 4, wide=wide)
    across = _across(loops, body, sizes)
    if across is not None:
        narrow = max((DTYPES[a.dtype].bytes for a in kernel.arguments), default=4) <= 2
        side = 64 if narrow and points >= 64 * 64 * chosen.programs else 32
        return Tiles(side, side, 8 if side == 64 else 4, across, wide=wide)
    return Tiles(_fewer(chosen.points, points, 128, chosen.programs), 0, 4, wide=wide)


def _rows(
    loops: Sequence[Loop],
    body: Sequence[Statement],
    vectors: Sequence[Loop],
    rows: float,
    sizes: Mapping[str, int],
    chosen: TileSizes,
) -> Tiles:
    extent = vectors[0].axis.extent
    length = max(1.0, estimate(extent, sizes))
    fits = extent.constant is not None and all(v.axis == vectors[0].axis and v in body for v in vectors)
    whole = power_of_two(length)
    if loops and rows_are_adjacent(accesses(body), loops[-1].axis, vectors[0].axis):
        x = min(max(64, chosen.points // whole), power_of_two(rows))
        if fits and whole * x <= (chosen.wide if len(vectors) > 1 else chosen.step):
            return Tiles(x, whole, _warps(x * whole), persistent=True)
        if rows / x < chosen.programs / 4:  # narrow tiles with more rows of the matrix, for fewer steps
            x = min(x, 16)
            r = min(whole, 2 * chosen.step // x)
            return Tiles(x, r, _warps(x * r), persistent=fits and r == whole)
        elements = chosen.step * (2 if len(vectors) == 1 and _loaded(vectors[0], loops[-1].axis) <= 4 else 1)
        return Tiles(x, max(1, min(elements // 64, whole, elements // x)), _warps(chosen.step))
    if fits and whole <= (chosen.row if len(vectors) > 1 else 2 * chosen.step):
        x = _fewer(max(1, chosen.points // whole), rows, 1, chosen.programs)
        return Tiles(x, whole, _warps(x * whole), persistent=True)
    r = min(whole, chosen.step * (1 + (len(vectors) > 1)))
    return Tiles(max(1, min(chosen.points // r, power_of_two(rows))), r, _warps(r))


def _loaded(loop: Loop, row: Axis) -> int:
    """Return the bytes that are read for each element of a tile; few of them need more elements to be read at once."""
    nodes = dict.fromkeys(node for root in roots_of(loop.body) for node in root.walk() if node.op == "load")
    elements = (node for node in nodes for at in indices(node) if {row, loop.axis} <= at.axes())
    return sum(DTYPES[node.dtype].bytes for node in elements)


def _warps(elements: int) -> int:
    """Return the warps for a tile: a thread has 8 elements of a small one, 16 and 32 of larger ones."""
    each = 8 if elements <= 2048 else 16 if elements <= 8192 else 32
    return max(1, min(16, elements // (32 * each)))


def _fewer(most: int, points: float, least: int, programs: int) -> int:
    """Return the points of a tile: fewer than ``most`` if that would leave a part of the GPU idle."""
    while most > least and points / most < programs:
        most //= 2
    return most


def power_of_two(least: float) -> int:
    return 1 << max(0, int(-(-least // 1)) - 1).bit_length()


# ---- which elements lie next to each other -------------------------------------------------------------------------------


def accesses(body: Iterable[Statement]) -> list[Index]:
    """Return the places that statements read and write."""
    found = [s.at for s in walk(body) if isinstance(s, Store)]
    inside = [s for s in walk(body) if not isinstance(s, Loop)]
    nodes = dict.fromkeys(node for root in roots_of(inside) for node in root.walk() if node.op == "load")
    return found + [at for node in nodes for at in indices(node)]


def _across(loops: Sequence[Loop], body: Sequence[Statement], sizes: Mapping[str, int]) -> Loop | None:
    """Return the loop, not the innermost, along which some accesses are contiguous, and most elements of these."""
    if len(loops) < 2 or any(isinstance(s, Store) and s.update for s in body):
        return None
    inner = loops[-1].axis
    if estimate(inner.extent, sizes) < 8:
        return None
    far = [at for at in accesses(body) if step(at, inner) not in (0, 1, 2, -1, -2)]
    found = {loop: sum(is_contiguous(at, loop.axis) for at in far) for loop in loops[:-1]}
    best = max(found, key=lambda loop: (found[loop], estimate(loop.axis.extent, sizes)))
    return best if found[best] and estimate(best.axis.extent, sizes) >= 8 else None


def _is_wide(kernel: Kernel, loops: Sequence[Loop]) -> bool:
    """Return whether an index may not fit into 32 bits. Those that are read from memory are never narrow."""
    counted = [product(loop.axis.extent for loop in loops)]
    counted += [s.axis.extent for s in walk(kernel.body) if isinstance(s, Loop)]
    found = accesses(kernel.body)
    inside = [s for s in walk(kernel.body) if not isinstance(s, Loop)]
    found += [s.at for s in inside if isinstance(s, Update) and s.at is not None]
    nodes = dict.fromkeys(node for root in roots_of(inside) for node in root.walk())
    found += [at for node in nodes for at in indices(node)]
    for at in [*counted, *found]:
        plain = at.substitute({leaf: 0 for leaf in at.leaves() if isinstance(leaf, Value)})
        most = upper(Index({monomial: abs(c) for monomial, c in plain.terms.items()}))
        if most is None or most.constant is None or most.constant >= MAX_NARROW - (1 << 20):
            return True
    return False
