"""Functions of rows: what ``query=``, ``key=`` and ``output=`` of :func:`opkit.attention` do to each row of a tensor.

A function sees one row, and is mapped over all of them by ``torch.vmap``, before attention or after it. So gradients, vmap,
export and compilers need no rules, and a compiler makes one kernel of a function and what is next to it. Calls in eager mode run
kernels of ``row_kernels``, if the function has one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opkit.attn import arguments, autocast
from opkit.attn.functions import row_kernels
from opkit.attn.functions.trace import describe, line_of
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError

RowFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_PARAMETERS = {"query": ("x", "b", "h", "q_idx"), "key": ("x", "b", "h", "kv_idx"), "output": ("x", "b", "h", "q_idx")}


def before(
    q: Any, k: Any, v: Any, query: Any, key: Any, output: Any, layout: str, in_parts: bool
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with ``query`` and ``key`` mapped over their rows; check the function ``output``, too.

    Raises:
        ArgumentTypeError: a function is not callable with its arguments, or one of ``q``, ``k`` and ``v`` is no tensor.
        ShapeError, DtypeError: the tensors do not fit the layout, or are in float8.
        ArgumentError: processes divide the sequence.
    """
    if in_parts:
        raise ArgumentError(
            "opkit.attention: query=, key= and output= would number the rows of this process's part, where processes divide the "
            "sequence. Apply them to q, k and the result, with the positions that the part has in the whole sequence."
        )
    arguments.check_layout(layout)
    if not all(isinstance(x, Tensor) and x.dim() == len(layout) and x.dtype in arguments.DTYPES for x in (q, k, v)):
        arguments.explain(q, k, v, layout)
        if query is not None or key is not None:
            raise DtypeError(
                f"opkit.attention: query= and key= would round their results to {q.dtype}, the dtype of q. Apply them to the "
                "wider tensors from which q and k were converted."
            )
    if not torch.compiler.is_dynamo_compiling():
        for name, function in (("query", query), ("key", key), ("output", output)):
            if function is not None:
                _check_signature(function, name)
    return (
        q if query is None else mapped(query, "query", q, layout),
        k if key is None else mapped(key, "key", k, layout),
    )


def _check_signature(function: Any, name: str) -> None:
    wanted = _PARAMETERS[name]
    if not callable(function):
        raise ArgumentTypeError(
            f"opkit.attention: {name} must be a function of ({', '.join(wanted)}), got {type(function).__name__}: {function!r}."
        )
    try:
        inspect.signature(function).bind(*wanted)
    except TypeError as error:
        raise ArgumentTypeError(
            f"opkit.attention: {name}={describe(function)} is called as function({', '.join(wanted)}), which does not fit its "
            f"parameters: {error}."
        ) from error
    except ValueError:  # builtins have no signature
        return


def mapped(function: RowFunction, name: str, x: Tensor, layout: str) -> Tensor:
    """Return what a function makes of each row of a tensor, computed in float32 or float64, in the tensor's dtype.

    Args:
        function: takes a row, (head size,), and int32 numbers of its batch, head and position; returns a row.
        name: "query", "key" or "output".
        x: a tensor in ``layout``.
        layout: as of :func:`opkit.attention`.

    Raises:
        ArgumentTypeError: the function raised, or returned no tensor.
        ShapeError, DtypeError: what it returned is no row of floating numbers.
    """
    if torch.compiler.is_compiling():
        with _OF_ANY_SIZE:
            return _in_operators(_map_flat, name, layout, function, x)
    known = 0 not in x.shape and all(type(n) is int for n in x.shape)
    found = row_kernels.call(function, x, layout, functools.partial(_in_operators, _map_all, name)) if known else None
    if found is not None:
        return found
    try:
        return _in_operators(_map_nested if known else _map_flat, name, layout, function, x)
    except (ArgumentTypeError, DtypeError, ShapeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ArgumentTypeError(
            f"opkit.attention: {name}={describe(function)} raised {type(error).__name__}: {error} {line_of(error, function)} "
            f"torch.vmap maps it; it gets a row of shape ({x.shape[-1]},), and numbers of batch, head and position."
        ) from error


def _in_operators(
    how: Callable[[RowFunction, Tensor, str], Tensor], name: str, layout: str, function: RowFunction, x: Tensor
) -> Tensor:
    """Map a function in torch operations."""
    rows = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)  # a function may write to its row
    run = functools.partial(_checked, function, name)
    off = torch.autocast(x.device.type, enabled=False) if autocast.is_on(x.device.type) else contextlib.nullcontext()
    with off:
        return how(run, rows, layout).to(x.dtype)


def _checked(function: RowFunction, name: str, x: Tensor, b: Tensor, h: Tensor, at: Tensor) -> Tensor:
    result: Any = function(x, b, h, at)
    if not isinstance(result, Tensor):
        raise ArgumentTypeError(
            f"opkit.attention: {name}={describe(function)} returned {type(result).__name__}, expected a tensor."
        )
    if result.dim() != 1:
        raise ShapeError(
            f"opkit.attention: {name}={describe(function)} returned shape {tuple(result.shape)} for a row of shape "
            f"{tuple(x.shape)}, expected one dimension."
        )
    if not result.is_floating_point():
        raise DtypeError(
            f"opkit.attention: {name}={describe(function)} returned {result.dtype}, expected a floating dtype."
        )
    return result


def _map_nested(function: RowFunction, x: Tensor, layout: str) -> Tensor:
    """Map over one dimension after another: what a function gathers by position is not repeated for batches and heads."""
    dims, sizes = layout.replace("t", "s")[:-1], x.shape[:-1]
    several = [dim for dim, size in zip(dims, sizes, strict=True) if size > 1]  # each vmap takes tens of microseconds
    return _map_over(several, function, x, layout)


def _map_all(function: RowFunction, x: Tensor, layout: str) -> Tensor:
    """Map over all dimensions, since torch reads the number in a tensor that is mapped over none, if it is an index."""
    return _map_over(list(layout[:-1]), function, x, layout)


def _map_over(several: list[str], function: RowFunction, x: Tensor, layout: str) -> Tensor:
    dims, sizes = layout.replace("t", "s")[:-1], x.shape[:-1]
    index = [
        torch.arange(sizes[dims.index(d)], dtype=torch.int32, device=x.device) if d in several else _zero(x)
        for d in "bhs"
    ]
    for dim in reversed(several):
        function = torch.vmap(function, in_dims=(0, *(0 if d == dim else None for d in "bhs")))
    result = function(x.squeeze([k for k, dim in enumerate(dims) if dim not in several]), *index)
    return result.reshape(*sizes, result.shape[-1])


def _map_flat(function: RowFunction, x: Tensor, layout: str) -> Tensor:
    """Map over all rows at once: nested vmap does not take sizes that are symbols."""
    dims, sizes = layout.replace("t", "s")[:-1], x.shape[:-1]
    count = math.prod(sizes)

    def numbers(dim: str) -> Tensor:
        if dim not in dims:
            return _zero(x).expand(count)
        number = dims.index(dim)
        every = torch.arange(sizes[number], dtype=torch.int32, device=x.device)
        return every.reshape([-1 if k == number else 1 for k in range(len(dims))]).expand(sizes).reshape(count)

    # next() and not int(), so that compilers take the size for a number: vmap joins no rows of unknown size
    found = x.reshape(count, next(iter(range(x.shape[-1], x.shape[-1] + 1))))
    index = [numbers(dim) for dim in "bhs"]
    try:
        result = torch.vmap(function)(found, *index)
    except IndexError:
        if type(count) is not int or count:
            raise
        found, *index = (F.pad(each, (0, 0) * (each.dim() - 1) + (0, 1)) for each in (found, *index))
        result = torch.vmap(function)(found, *index)[:0]  # vmap finds no dtype of a number of no rows
    return result.reshape(*sizes, result.shape[-1])


def _zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=x.device)


# ---- what vmap computes for one number of rows only --------------------------------------------------------------------


class _OfAnySize(TorchFunctionMode):
    """Replaces functions that vmap would compile again for each number of rows (torch 2.11 to 2.14)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement: Any = _REPLACED.get(func, func)
        return replacement(*args, **(kwargs or {}))


_OF_ANY_SIZE = _OfAnySize()


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    joined = tensors[0]
    dim %= joined.dim()
    for each in tensors[1:]:
        left, right, after = joined.shape[dim], each.shape[dim], (0, 0) * (joined.dim() - 1 - dim)
        place = torch.arange(left + right, device=joined.device).reshape(-1, *(1,) * (joined.dim() - 1 - dim))
        joined = torch.where(place < left, F.pad(joined, (*after, 0, right)), F.pad(each, (*after, left, 0)))
    return joined


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    dims = list(range(-len(shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    F.layer_norm: _layer_norm,
}
