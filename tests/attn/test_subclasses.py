"""Tensors of subclasses as arguments of attention: taken by what they mean, or refused, never read as they lie in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_inputs import randn
from torch import Tensor
from torch.utils._pytree import tree_map

import opkit
import opkit.nn
from opkit.errors import ArgumentTypeError, ShapeError
from opkit.masks import ALiBi, Dense, SlidingWindow


def _bias(name: str, queries: int, keys: int) -> Tensor:
    from torch.nn.attention import bias

    return getattr(bias, name)(queries, keys)


def _qkv(queries: int = 4, keys: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return randn(1, 2, queries, 16), randn(1, 2, keys, 16, seed=1), randn(1, 2, keys, 16, seed=2)


def _lower_triangle(queries: int, keys: int, diagonal: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)


class _InExport(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return opkit.attention(q, k, v, mask=bias)


@pytest.mark.parametrize(
    ("name", "queries", "keys", "diagonal"),
    [
        ("causal_lower_right", 4, 6, 2),
        ("causal_upper_left", 4, 6, 0),
        ("causal_lower_right", 6, 4, -2),
        ("causal_upper_left", 6, 4, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(name: str, queries: int, keys: int, diagonal: int) -> None:
    (q, k, v), bias = _qkv(queries, keys), _bias(name, queries, keys)
    seen = _lower_triangle(queries, keys, diagonal)
    want = opkit.attention(q, k, v, mask=seen)
    torch.testing.assert_close(opkit.attention(q, k, v, mask=bias), want)
    torch.testing.assert_close(opkit.nn.functional.scaled_dot_product_attention(q[0], k[0], v[0], bias), want[0])
    with opkit.sdpa_override():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), want)
    banded = opkit.attention(q, k, v, mask=Dense(seen) & SlidingWindow(1, 2))
    torch.testing.assert_close(opkit.attention(q, k, v, mask=SlidingWindow(1, 2) & bias), banded)
    torch.testing.assert_close(opkit.attention(q, k, v, mask=bias & SlidingWindow(1, 2)), banded)


def test_causal_bias_set_override_and_module() -> None:
    (q, k, v), bias = _qkv(), _bias("causal_lower_right", 4, 6)
    want = opkit.attention(q, k, v, mask=_lower_triangle(4, 6, 2))
    opkit.set_sdpa_override(True)
    try:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), want)
    finally:
        opkit.set_sdpa_override(False)
    layer, x = opkit.nn.MultiheadAttention(16, 2, batch_first=True), randn(1, 4, 16)
    own, _ = layer(x, x, x, attn_mask=_bias("causal_upper_left", 4, 4), need_weights=False)
    torch.testing.assert_close(own, layer(x, x, x, is_causal=True, need_weights=False)[0])


def test_causal_bias_compiled_and_exported() -> None:
    (q, k, v), bias = _qkv(), _bias("causal_lower_right", 4, 6)
    want = opkit.attention(q, k, v, mask=_lower_triangle(4, 6, 2))
    compiled = torch.compile(lambda q, k, v, mask: opkit.attention(q, k, v, mask=mask), backend="opkit")
    torch.testing.assert_close(compiled(q, k, v, bias), want)
    exported = torch.export.export(_InExport(), (q, k, v, bias), strict=False)
    torch.testing.assert_close(exported.module()(q, k, v, bias), want)


def test_causal_bias_refused() -> None:
    (q, k, v), bias = _qkv(), _bias("causal_lower_right", 4, 6)
    with pytest.raises(ShapeError, match=r"causal_lower_right\(3, 6\).*\(4, 6\)"):
        opkit.attention(q, k, v, mask=_bias("causal_lower_right", 3, 6))
    with pytest.raises(ArgumentTypeError, match=r"bias is a CausalBias.*Give it as mask="):
        opkit.attention(q, k, v, bias=bias)
    with pytest.raises(ArgumentTypeError, match=r"Dense.*CausalBias"):
        opkit.attention(q, k, v, mask=Dense(bias))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_strides_are_refused() -> None:
    q, k, v = _qkv()
    seen = _lower_triangle(4, 6, 0)
    nested = torch.nested.nested_tensor([randn(2, 3, 16), randn(2, 5, 16)])
    with pytest.raises(ArgumentTypeError, match=r"opkit.attention: q is a nested tensor.*VarLen"):
        opkit.attention(nested, nested, nested)
    ragged = torch.nested.nested_tensor([randn(3, 2, 16), randn(5, 2, 16)], layout=torch.jagged)
    with pytest.raises(ArgumentTypeError, match=r"q is a nested tensor \(NestedTensor\).*VarLen"):
        opkit.attention(ragged, ragged, ragged, layout="bshd")
    with pytest.raises(ArgumentTypeError, match=r"k is a tensor of layout torch.sparse_coo.*to_dense"):
        opkit.attention(q, k.to_sparse(), v)
    with pytest.raises(ArgumentTypeError, match=r"Dense is a tensor of layout torch.sparse_coo.*to_dense"):
        opkit.attention(q, k, v, mask=seen.to_sparse())


class _Halved(Tensor):
    """A tensor of twice what its memory holds, which it says to functions of torch."""

    @staticmethod
    def of(x: Tensor) -> Tensor:
        return (x / 2).as_subclass(_Halved)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def read(x):
            return x.as_subclass(Tensor) * 2 if isinstance(x, _Halved) else x

        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


class _Wrapped(Tensor):
    """A tensor that has no memory, and twice the elements of another, which it says to the dispatcher."""

    @staticmethod
    def __new__(cls, x: Tensor) -> _Wrapped:
        made = Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)
        made.half = x / 2
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def read(x):
            return x.half * 2 if isinstance(x, _Wrapped) else x

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


@pytest.mark.parametrize("make", [_Halved.of, _Wrapped], ids=["function", "dispatch"])
def test_subclasses_say_what_they_hold(make) -> None:
    (q, k, v), bias, slopes, sinks = _qkv(), randn(4, 6, seed=3), torch.tensor([0.5, 0.25]), torch.tensor([0.1, 0.2])
    plain = opkit.attention(q, k, v)
    for _ in range(4):  # until the call is known
        opkit.attention(q, k, v)
    assert_close = torch.testing.assert_close
    assert_close(opkit.attention(make(q), k, v), plain)
    assert_close(opkit.attention(q, make(k), make(v)), plain)
    assert_close(opkit.attention(q, k, v, mask=make(bias)), opkit.attention(q, k, v, bias=bias))
    assert_close(opkit.attention(q, k, v, bias=ALiBi(make(slopes))), opkit.attention(q, k, v, bias=ALiBi(slopes)))
    assert_close(opkit.attention(q, k, v, sinks=make(sinks)), opkit.attention(q, k, v, sinks=sinks))
    pages, table, lengths = randn(3, 2, 2, 16), torch.tensor([[0, 1], [2, 0]]), torch.tensor([3, 4])
    paged = opkit.paged_attention(randn(2, 2, 16), pages, pages, table, lengths)
    assert_close(opkit.paged_attention(randn(2, 2, 16), make(pages), make(pages), table, lengths), paged)
    with opkit.sdpa_override():
        assert_close(F.scaled_dot_product_attention(make(q), k, v), plain)
