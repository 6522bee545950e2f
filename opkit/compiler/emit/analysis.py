"""What any emitter needs to know of a kernel: what its statements read, need and change."""

from __future__ import annotations

from collections.abc import Container, Iterable

from opkit.compiler.ir import expr
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Index, Value
from opkit.compiler.ir.kernel import Accumulator, Let, Loop, Statement, Store, Update

# ---- statements ------------------------------------------------------------------------------------------------------


def roots_of(body: Iterable[Statement]) -> list[Expr]:
    """Return the expressions of the statements themselves, not of loops among them."""
    found: list[Expr] = []
    for s in body:
        found += [s.value] if isinstance(s, Let | Store | Update) else []
        found += values(s.at) if isinstance(s, Store | Update) and s.at is not None else []
    return found


def changed_by(body: Iterable[Statement]) -> frozenset[str]:
    """Return the buffers and accumulators that statements write to."""
    names: set[str] = set()
    for s in body:
        names |= {s.buffer} if isinstance(s, Store) else changed_by(s.body) if isinstance(s, Loop) else set()
        names |= {s.name, f"{s.name}_at"} if isinstance(s, Update | Accumulator) else set()
    return frozenset(names)


# ---- expressions -----------------------------------------------------------------------------------------------------


def values(at: Index) -> list[Expr]:
    """Return the expressions that an index is computed from."""
    return [leaf.expr for leaf in at.leaves() if isinstance(leaf, Value)]


def children(node: Expr) -> list[Expr]:
    """Return the expressions that a node is computed from, also those in its indices."""
    return [*node.args, *(root for at in expr.indices(node) for root in values(at))]


def own_reads(node: Expr) -> list[str]:
    """Return the buffer or variable that a node itself reads."""
    return [node.data[0]] if node.op == "load" else [node.data] if node.op == "var" else []


def postorder(root: Expr, known: Container[object] = ()) -> list[Expr]:
    """Return each node that is not known, after the nodes that it needs."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen and node not in known:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children(node))]
    return order


def use_counts(roots: Iterable[Expr]) -> dict[Expr, int]:
    """Return how often each expression is used by others, or is a root itself."""
    counts: dict[Expr, int] = {}
    seen: set[Expr] = set()
    for root in roots:
        counts[root] = counts.get(root, 0) + 1
        for node in postorder(root, seen):
            seen.add(node)
            for child in children(node):
                counts[child] = counts.get(child, 0) + 1
    return counts
