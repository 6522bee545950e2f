"""Typical calls of attention, for which ``opkit tune`` searches in advance, as the operators' arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from opkit.attn.masks import program

_DTYPES, _HEADS = ("bf16", "fp16"), (64, 128, 256)
_CAUSAL: tuple[list[int], ...] = ([], [program.BAND, -program.UNLIMITED, 0])
_SIZES, _BIASED, _CACHED = (2, 16, 4096), (1, 16, 2048), (8, 8, 8192)  # batch, heads, sequence
_GROUP = 4  # query heads to one of keys, where queries are decoded


def _tensor(dtype: str, *sizes: int) -> str:
    return f"{dtype}[{', '.join(map(str, sizes))}]"


def _numbers(d: int, mask: list[int]) -> dict[str, Any]:
    """Return the arguments that are not tensors."""
    return {"mask_tensors": [], "bias_tensors": [], "mask": mask, "bias": [], "scale": d**-0.5, "softcap": 0.0}


def _forward(q: str, k: str, d: int, mask: list[int]) -> dict[str, Any]:
    rest = {"sinks": None, "seed": None, "dropout_p": 0.0, "out_is_bshd": False}
    return {"q": q, "k": k, "v": k, **_numbers(d, mask), **rest}


def forward() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention``, with as many queries as keys."""
    for dtype, d, mask in itertools.product(_DTYPES, _HEADS, _CAUSAL):
        x = _tensor(dtype, *_SIZES, d)
        yield _forward(x, x, d, mask)


def decoding() -> Iterator[dict[str, Any]]:
    """Of the same, with one query."""
    for dtype, d in itertools.product(_DTYPES, _HEADS):
        batch, heads, keys = _CACHED
        yield _forward(_tensor(dtype, batch, _GROUP * heads, 1, d), _tensor(dtype, batch, heads, keys, d), d, [])


def backward() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention_backward``."""
    for dtype, d, mask in itertools.product(_DTYPES, _HEADS, _CAUSAL):
        tensors = dict.fromkeys(("gradient", "q", "k", "v", "out"), _tensor(dtype, *_SIZES, d))
        yield {**tensors, "of_lse": None, "lse": _tensor("fp32", *_SIZES), **_numbers(d, mask), "out_is_bshd": False}


def of_biases() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention_bias_backward``: of one dense bias."""
    batch, heads, queries = _BIASED
    for dtype, d in itertools.product(_DTYPES, _HEADS[:2]):
        tensors = dict.fromkeys(("gradient", "q", "k", "v"), _tensor(dtype, *_BIASED, d))
        sums = dict.fromkeys(("delta", "lse"), _tensor("fp32", *_BIASED))
        bias = {"bias_tensors": [_tensor(dtype, batch, heads, queries, queries)], "bias": [program.BIAS_DENSE, 0]}
        yield {**tensors, **sums, **_numbers(d, []), **bias, "wanted": [0]}


def float8() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention_float8``."""
    for d, mask in itertools.product(_HEADS[:2], _CAUSAL):
        tensors = dict.fromkeys(("q", "k", "v"), _tensor("fp8e4m3", *_SIZES, d))
        rest = {"descales": [_tensor("fp32", *_SIZES[:2])] * 3, "sinks": None, "out_is_bshd": False}
        yield {**tensors, **_numbers(d, mask), **rest}
