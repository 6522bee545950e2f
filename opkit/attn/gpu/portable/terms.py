"""How terms of a bias's program depend on its tensors, and the gradients of tensors that users' functions read.

The kernel of the gradients of biases sums up what a tensor's gradient consists of by the variables that the tensor is indexed by:
(batch, head, query, key) or some of them. Where a function computes coordinates from these, the sums are then added up in torch
at the coordinates, which has an order. Coordinates that depend on the distance of query and key, as those of relative positions
do, leave a sum for each distance. Where they depend on query and key in another way, the kernel adds to the tensor's elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opkit.attn.functions.affine import affine, difference
from opkit.attn.functions.expression import Function, coordinates, derivatives, indexed
from opkit.attn.gpu.functions import variables_of
from opkit.attn.masks import program
from opkit.compiler.ir.expr import Expr

_COMPARISONS = ("lt", "le", "eq", "ne")


class Term(NamedTuple):
    """How a term of a bias's program depends on one of its tensors.

    Attributes:
        tensor: its number.
        depends: whether on the batch, the head, the query, and on the row and the column of the keys.
        high, wide: rows and columns of the keys; one row but for relative positions.
        distances: whether it is times minus the distance of query and key.
        at: the term's place in the program.
        load, derivative: where a function reads the tensor, and its derivative by what it reads; None of other terms.
        diagonal: whether it depends on the distance of query and key, and on neither otherwise.
    """

    tensor: int
    depends: tuple[bool, bool, bool, bool, bool]
    high: int
    wide: int
    distances: bool = False
    at: int = 0
    load: Expr | None = None
    derivative: Expr | None = None
    diagonal: bool = False

    @property
    def scattered(self) -> bool:
        """Whether the kernel adds to the tensor's elements, in no order."""
        if self.load is None or self.diagonal or not (self.depends[2] and self.depends[4]):
            return False
        return not _is_plain(self.load)


def _is_plain(load: Expr) -> bool:
    """Return whether the coordinates are variables, each another one."""
    (at,) = (at for each, at in indexed(load) if each is load)
    return None not in at and len(set(at)) == len(at)


def terms_of(bias: Sequence[int], shapes: Sequence[Sequence[int]], keys: int) -> Iterator[Term]:
    """The terms of a bias's program whose tensors have these shapes, for so many keys; one for each tensor of a term.

    >>> next(terms_of([program.BIAS_DENSE, 0], [(1, 2, 1, 5)], 5))[:4]
    (0, (False, True, False, False, True), 1, 5)
    """
    for at, (kind, *operands) in enumerate(program.instructions(bias, program.BIAS_OPERANDS)):
        if kind == program.BIAS_FUNCTION:
            yield from _of_function(at, Function.of(operands), keys)
            continue
        first, *others = operands
        wide = [size > 1 for size in shapes[first]]
        if kind == program.BIAS_DENSE:
            yield Term(first, (wide[0], wide[1], wide[2], False, wide[3]), 1, keys, at=at)
        elif kind == program.BIAS_ALIBI:
            yield Term(first, (wide[0], wide[1], False, False, False), 1, keys, True, at)
        else:
            yield from _relative(at, first, others[0], shapes)


def _relative(at: int, of_rows: int, of_columns: int, shapes: Sequence[Sequence[int]]) -> Iterator[Term]:
    high, wide = shapes[of_rows][3], shapes[of_columns][3]
    upright = wide == 1  # one column of keys is read as one row
    sizes = (1, high) if upright else (high, wide)
    for number, by_row in ((of_rows, True), (of_columns, False)):
        b, h, i = (size > 1 for size in shapes[number][:3])
        row, column = (False, by_row) if upright else (by_row, not by_row)
        yield Term(number, (b, h, i, row, column), *sizes, at=at)


def _of_function(at: int, function: Function, keys: int) -> Iterator[Term]:
    for node, derivative in derivatives(function.root).items():
        if node.op != "load":
            continue
        named = frozenset[str]().union(*map(variables_of, coordinates(node)))
        diagonal = {"i", "j"} <= named and all(map(_by_distance, coordinates(node)))
        b, h, i, j = (name in named for name in "bhij")
        depends = (b, h, i and not diagonal, False, j and not diagonal)
        tensor = function.tensors[int(node.data[0][1:])]
        yield Term(tensor, depends, 1, keys, at=at, load=node, derivative=derivative, diagonal=diagonal)


def _by_distance(node: Expr) -> bool:
    """Return whether an expression depends on query and key by their distance alone, if at all."""
    if not variables_of(node) & {"i", "j"}:
        return True
    terms = difference(node) if node.op in _COMPARISONS else affine(node)
    if terms is not None:
        return terms.get("i", 0) + terms.get("j", 0) == 0
    inner = coordinates(node) if node.op == "load" else node.args
    return bool(inner) and all(map(_by_distance, inner))


def sums_shape(term: Term, sizes: Sequence[int], tile: int) -> tuple[int, ...]:
    """Return the shape of a function's sums: batches, heads, queries, keys, or diagonals of tiles and two tiles of distances."""
    if term.diagonal:
        count = sum(-(-size // tile) for size in sizes[2:]) - 1
        return (*(size if its else 1 for size, its in zip(sizes[:2], term.depends, strict=False)), count, 2 * tile)
    own = (*term.depends[:3], term.depends[4])
    return tuple(size if its else 1 for size, its in zip(sizes, own, strict=True))


def placed(term: Term, sums: Tensor, function: Function, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the gradient of a tensor that a function reads, from its sums, which have :func:`sums_shape`."""
    tensor, load = tensors[term.tensor], term.load
    assert load is not None
    if _is_plain(load) and not term.diagonal:
        return _permuted(load, sums, tensor)
    device = sums.device
    if term.diagonal:
        sums, (queries, keys) = _by_distances(sums, sizes), sizes[2:]
        distances = torch.arange(1 - queries, keys, dtype=torch.int32, device=device)
        i, j = (-distances).clamp(min=0), distances.clamp(min=0)
    else:
        i, j = (torch.arange(sums.shape[dim], dtype=torch.int32, device=device) for dim in (2, 3))
        i = i.unsqueeze(-1)
    b, h = (torch.arange(sums.shape[dim], dtype=torch.int32, device=device) for dim in (0, 1))
    more = (1,) * (sums.dim() - 2)
    variables = {"b": b.reshape(-1, 1, *more), "h": h.reshape(-1, *more), "i": i, "j": j}
    at = [
        torch.where(each < 0, each + size, each).clamp(0, size - 1).expand_as(sums)
        for each, size in zip(function.places(load, variables, tensors), tensor.shape, strict=True)
    ]
    new = torch.zeros(tensor.shape, dtype=sums.dtype, device=device)
    return new.index_put_(tuple(at), sums, accumulate=True)


def _permuted(load: Expr, sums: Tensor, tensor: Tensor) -> Tensor:
    """Return sums with the dimensions in the order in which variables index the tensor, and zeros for what they do not."""
    ((_, at),) = ((each, at) for each, at in indexed(load) if each is load)
    dims = ["bhij".index(axis) for axis in at if axis is not None]
    others = (dim for dim in range(4) if dim not in dims)
    found = sums.permute(*dims, *others).reshape([sums.shape[dim] for dim in dims])
    if found.shape == tensor.shape:
        return found
    new = torch.zeros(tensor.shape, dtype=sums.dtype, device=sums.device)
    new[tuple(slice(size) for size in found.shape)] = found
    return new


def _by_distances(sums: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the sum of each distance of key and query, (batch, head, distances), from those of diagonals of tiles."""
    tile = sums.shape[3] // 2
    whole = torch.zeros((*sums.shape[:2], sums.shape[2] + 1, tile), dtype=sums.dtype, device=sums.device)
    whole[:, :, :-1] += sums[..., :tile]
    whole[:, :, 1:] += sums[..., tile:]
    first = -(-sizes[2] // tile) * tile - sizes[2]
    return whole.flatten(2)[..., first : first + sizes[2] + sizes[3] - 1]
