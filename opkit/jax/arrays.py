"""JAX's functions for ATen's other operators, by name: shapes, indices, reductions, products and new tensors.

Their results are converted to torch's dtype: see :mod:`opkit.jax.interpreter`. Arguments have the names of ATen's schemas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from opkit.jax.pointwise import wide

Dims = int | Sequence[int] | None


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Any:
    ahead = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[i - ahead] if n == -1 else n for i, n in enumerate(size)])


def _squeeze(x: Any, dim: Dims = None) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d % max(x.ndim, 1) for d in dims if x.ndim and x.shape[d] == 1))


def _bounds(length: int, start: int | None, end: int | None, step: int) -> slice:
    return slice(*slice(start, end, step).indices(length))


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return lax.slice_in_dim(x, *_limits(x.shape[dim], start, end), step, dim % x.ndim)


def _limits(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(length)
    return first, max(first, last)


def _at(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Return the index of ``index`` along ``dim`` and of everything along the others."""
    return (*[slice(None)] * (dim % x.ndim), index)


def _slice_scatter(
    x: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return x.at[_at(x, dim, _bounds(x.shape[dim], start, end, step))].set(src.astype(x.dtype))


def _split_with_sizes(x: Any, split_sizes: Sequence[int], dim: int = 0) -> list[Any]:
    ends = [sum(split_sizes[:i]) for i in range(1, len(split_sizes))]
    return jnp.split(x, ends, dim)


def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    last = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    along = jnp.arange(src.shape[-1])
    last = last.at[..., along + max(-offset, 0), along + max(offset, 0)].set(src.astype(x.dtype))
    return jnp.moveaxis(last, (-2, -1), (dim1, dim2))


def _constant_pad(x: Any, pad: Sequence[int], value: float = 0) -> Any:
    pairs = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[-2::-2], pad[::-2], strict=True))
    return lax.pad(x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in pairs])


def _repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, repeats)


def _roll(x: Any, shifts: Any, dims: Any = ()) -> Any:
    return jnp.roll(x, tuple(shifts) if dims else shifts[0], tuple(dims) if dims else None)


def _unfold(x: Any, dimension: int, size: int, step: int) -> Any:
    dim = dimension % max(x.ndim, 1)
    count = (x.shape[dim] - size) // step + 1
    windows = jnp.take(x, jnp.arange(count)[:, None] * step + jnp.arange(size), dim)
    return jnp.moveaxis(windows, dim + 1, -1)


# ---- indices ---------------------------------------------------------------------------------------------------------


def _index_of(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    values = values.astype(x.dtype)
    if indices[-1] is not None and indices[-1].dtype == bool:
        return _masked_put(x, len(indices) - 1, indices, values, accumulate)
    place = x.at[_index_of(indices)]
    return place.add(values) if accumulate else place.set(values)


def _masked_put(x: Any, ahead: int, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    mask = indices[-1]
    after = x.ndim - ahead - mask.ndim
    if any(index is not None for index in indices[:-1]) or values.ndim > after:
        raise NotImplementedError("a mask as an index, whose number of elements depends on data")
    return jnp.where(mask.reshape(*mask.shape, *[1] * after), x + values if accumulate else values, x)


def _mesh(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Return the index in ``x`` of each element of ``index``, which stands along ``dim``."""
    places = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(x.ndim)]
    places[dim % x.ndim] = index
    return tuple(places)


def _gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    return x[_mesh(x, dim, index)] if x.ndim and index.ndim else x.reshape(-1)[index]


def _scatter(x: Any, dim: int, index: Any, src: Any, reduce: str | None = None, include_self: bool = True) -> Any:
    if not x.ndim or not index.ndim:
        return _scatter(x.reshape(-1), 0, index.reshape(-1), jnp.asarray(src).reshape(-1), reduce).reshape(x.shape)
    src = jnp.asarray(src, x.dtype)
    src = src[tuple(slice(n) for n in index.shape)] if src.ndim else src
    place = x.at[_mesh(x, dim, index)]
    if not include_self:
        x = place.set({"sum": 0, "prod": 1}.get(str(reduce), src))
        place = x.at[_mesh(x, dim, index)]
    methods = {"add": "add", "sum": "add", "multiply": "multiply", "prod": "multiply", "amax": "max", "amin": "min"}
    return place.set(src) if reduce is None else getattr(place, methods[reduce])(src)


def _index_add(x: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> Any:
    return x.at[_at(x, dim, index)].add((alpha * source).astype(x.dtype))


def _sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Any, Any]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, ...]:
    if not x.ndim:
        return _sort(x)
    return tuple(lax.slice_in_dim(each, 0, k, axis=dim % x.ndim) for each in _sort(x, dim, largest))


# ---- reductions ------------------------------------------------------------------------------------------------------


def _axes(dim: Dims) -> Any:
    """Return the axes of a reduction; for ATen no dimensions are all of them."""
    return tuple(dim) or None if isinstance(dim, Sequence) else dim


def _reduction(function: Callable[..., Any], narrow: bool = False) -> Callable[..., Any]:
    def reduce(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
        x = x if narrow else wide(x)
        return function(x, axis=_axes(dim) if x.ndim else None, keepdims=keepdim and x.ndim > 0)

    return reduce


def _extreme(find: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``max`` or ``min``: of everything, or along a dimension with the places, to which alone gradients go."""

    def extreme(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return whole(x)
        if not x.ndim:
            return x, jnp.zeros((), jnp.int32)
        place = find(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, place, dim)
        return (found, place) if keepdim else (jnp.squeeze(found, dim), jnp.squeeze(place, dim))

    return extreme


def _place(find: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: find(x, axis=dim if x.ndim else None, keepdims=keepdim and x.ndim > 0)


def _var(
    x: Any, dim: Dims = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Any:
    dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
    x, axes = wide(x), _axes(dim) if x.ndim else None
    over = range(x.ndim) if axes is None else (axes,) if isinstance(axes, int) else axes
    count = math.prod(x.shape[d] for d in over) - (int(unbiased) if correction is None else correction)
    distances = jnp.square(jnp.abs(x - x.mean(axes, keepdims=True)))
    return distances.sum(axes, keepdims=keepdim) / jnp.asarray(max(count, 0), distances.dtype)


def _group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, size: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    grouped = wide(x).reshape(n, group, -1)
    mean = grouped.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(grouped - mean).mean(-1, keepdims=True) + eps)
    out = ((grouped - mean) * scale).reshape(n, channels, size)
    out = out if weight is None else out * weight[:, None]
    out = out if bias is None else out + bias[:, None]
    return out.reshape(x.shape), mean[..., 0], scale[..., 0]


def _norm(x: Any, ord: float = 2, dim: Dims = None, keepdim: bool = False) -> Any:
    """Return the norm, whose gradient at zero is zero, as torch's is."""
    x = wide(x)
    sizes, axes = jnp.abs(x), _axes(dim) if x.ndim else None
    if ord == 0:
        return (x != 0).sum(axes, keepdims=keepdim)
    if math.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(sizes, axes, keepdims=keepdim)
    if ord == 1:
        return sizes.sum(axes, keepdims=keepdim)
    total = (x * x.conj() if ord == 2 else sizes**ord).real.sum(axes, keepdims=keepdim)
    positive = jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, 0, jnp.sqrt(positive) if ord == 2 else positive ** (1 / ord))


def _scan(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim: function(wide(x), dim) if x.ndim else x


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, half_to_float=False: function(wide(x), axis=dim if x.ndim else None)


# ---- products --------------------------------------------------------------------------------------------------------


def _product(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _add_product(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = _product(a, b)
    product = product if alpha == 1 else alpha * product
    return product if beta == 0 else product + (x if beta == 1 else beta * x)


# ---- new tensors -----------------------------------------------------------------------------------------------------


def _arange(*bounds: Any, step: Any = 1) -> Any:
    start, end = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    step = bounds[2] if len(bounds) == 3 else step
    return start + step * jnp.arange(max(0, math.ceil((end - start) / step)))


def _full(size: Sequence[int], fill_value: Any) -> Any:
    return jnp.full(tuple(size), fill_value)


def _same(x: Any, *_: Any) -> Any:
    return x


ARRAYS: dict[str, Callable[..., Any]] = {
    "_log_softmax": _softmax(jax.nn.log_softmax),
    "_softmax": _softmax(jax.nn.softmax),
    "_to_copy": _same,
    "_unsafe_index": lambda x, indices: x[_index_of(indices)],
    "_unsafe_index_put": _index_put,
    "_unsafe_view": jnp.reshape,
    "addmm": _add_product,
    "alias": _same,
    "all": _reduction(jnp.all, narrow=True),
    "amax": _reduction(jnp.max, narrow=True),
    "amin": _reduction(jnp.min, narrow=True),
    "any": _reduction(jnp.any, narrow=True),
    "arange": _arange,
    "argmax": _place(jnp.argmax),
    "argmin": _place(jnp.argmin),
    "baddbmm": _add_product,
    "bmm": _product,
    "broadcast_in_dim": lax.broadcast_in_dim,
    "bucketize": lambda x, boundaries, right=False: jnp.searchsorted(boundaries, x, "right" if right else "left"),
    "cat": lambda tensors, dim=0: jnp.concatenate([x for x in tensors if x.shape != (0,)] or tensors[:1], dim),
    "clone": _same,
    "constant_pad_nd": _constant_pad,
    "convert_element_type": _same,
    "copy": lambda x, src: jnp.broadcast_to(src, x.shape),
    "cumprod": _scan(jnp.cumprod),
    "cumsum": _scan(jnp.cumsum),
    "detach": _same,  # of autograd itself: see tracing._StoppedGradients
    "detach_copy": lax.stop_gradient,
    "diagonal": _diagonal,
    "diagonal_scatter": _diagonal_scatter,
    "dot": _product,
    "embedding": lambda weight, indices, *_: weight[indices],
    "empty": lambda size: jnp.zeros(tuple(size)),
    "empty_like": jnp.zeros_like,
    "empty_permuted": lambda size, order: jnp.zeros(tuple(size)),
    "empty_strided": lambda size, stride: jnp.zeros(tuple(size)),
    "expand": _expand,
    "fill": lambda x, value: jnp.full(x.shape, value),
    "flip": lambda x, dims: jnp.flip(x, tuple(dims)) if dims else x,
    "full": _full,
    "full_like": lambda x, fill_value: jnp.full(x.shape, fill_value),
    "gather": _gather,
    "index": lambda x, indices: x[_index_of(indices)],
    "index_add": _index_add,
    "index_put": _index_put,
    "index_select": lambda x, dim, index: jnp.take(x, jnp.atleast_1d(index), dim),
    "iota": lambda length, start=0, step=1: start + step * jnp.arange(length),
    "lift_fresh_copy": _same,
    "linalg_vector_norm": _norm,
    "logcumsumexp": _scan(lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim)),
    "logsumexp": _reduction(jax.nn.logsumexp),
    "max": _extreme(jnp.argmax, jnp.max),
    "mean": _reduction(jnp.mean),
    "min": _extreme(jnp.argmin, jnp.min),
    "mm": _product,
    "mv": _product,
    "native_group_norm": _group_norm,
    "new_empty": lambda x, size: jnp.zeros(tuple(size)),
    "new_empty_strided": lambda x, size, stride: jnp.zeros(tuple(size)),
    "new_full": lambda x, size, fill_value: _full(size, fill_value),
    "new_ones": lambda x, size: jnp.ones(tuple(size)),
    "new_zeros": lambda x, size: jnp.zeros(tuple(size)),
    "ones": lambda size: jnp.ones(tuple(size)),
    "ones_like": jnp.ones_like,
    "permute": jnp.transpose,
    "prod": _reduction(jnp.prod),
    "repeat": _repeat,
    "roll": _roll,
    "scalar_tensor": jnp.asarray,
    "scatter": _scatter,
    "scatter_add": lambda x, dim, index, src: _scatter(x, dim, index, src, "add"),
    "scatter_reduce": _scatter,
    "searchsorted": lambda boundaries, x, right=False: jnp.searchsorted(boundaries, x, "right" if right else "left"),
    "select": lambda x, dim, index: x[_at(x, dim, index)],
    "select_scatter": lambda x, src, dim, index: x.at[_at(x, dim, index)].set(src.astype(x.dtype)),
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "sort": _sort,
    "split_with_sizes": _split_with_sizes,
    "squeeze": _squeeze,
    "sum": _reduction(jnp.sum),
    "t": jnp.transpose,
    "topk": _topk,
    "transpose": jnp.swapaxes,
    "unfold": _unfold,
    "unsqueeze": lambda x, dim: jnp.expand_dims(x, dim),
    "var": _var,
    "view": jnp.reshape,
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack((x.real, x.imag), -1),
    "zeros": lambda size: jnp.zeros(tuple(size)),
    "zeros_like": jnp.zeros_like,
}
