"""Buckets of shapes: calls in one bucket share a tuning result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_EXACT = 16
_OTHER_DTYPES = 1000.0  # further away than any sizes are


def bucket_of(sizes: Mapping[str, int], dtypes: Sequence[str]) -> str:
    """Return the bucket of a call: its dtypes, and its sizes rounded up to powers of two.

    Sizes up to 16 are not rounded: these are counts of heads, experts or channels, where one more or less can make
    another configuration the fastest, and there are few of them.

    Args:
        sizes: the named sizes of the call, or whatever decides how much there is to do.
        dtypes: the element types of its tensors, in order.

    >>> bucket_of({"d": 1000, "batch": 4096, "heads": 12}, ["bf16", "fp32"])
    'bf16 fp32 | batch=4096 d=1024 heads=12'
    """
    return f"{' '.join(dtypes)} | {' '.join(f'{name}={_rounded(sizes[name])}' for name in sorted(sizes))}"


def _rounded(size: int) -> int:
    return size if size <= _EXACT else 1 << (size - 1).bit_length()


def distance(bucket: str, other: str) -> float:
    """Return how far two buckets are apart: by how many doublings their sizes differ; infinite where these do not compare.

    >>> distance("bf16 | d=1024", "bf16 | d=4096"), distance("bf16 | d=1024", "bf16 | m=1")
    (2.0, inf)
    """
    (dtypes, sizes), (others, other_sizes) = _parsed(bucket), _parsed(other)
    if sizes.keys() != other_sizes.keys():
        return math.inf
    doublings = sum(abs(math.log2(max(1, sizes[name]) / max(1, other_sizes[name]))) for name in sizes)
    return doublings + (0.0 if dtypes == others else _OTHER_DTYPES)


def _parsed(bucket: str) -> tuple[str, dict[str, int]]:
    dtypes, _, sizes = bucket.partition(" | ")
    pairs = (item.partition("=") for item in sizes.split())
    return dtypes, {name: int(size) for name, _, size in pairs if size.isdecimal()}
