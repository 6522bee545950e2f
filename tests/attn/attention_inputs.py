"""Queries, keys and values for tests of opkit.attention: in float32, of one seed each."""

import torch

import opkit


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch=2, heads=4, shared=2, queries=5, keys=6, d=8, d_v=3, **options):
    return (
        randn(batch, heads, queries, d, **options),
        randn(batch, shared, keys, d, **options, seed=1),
        randn(batch, shared, keys, d_v, **options, seed=2),
    )


def seen(mask, batch, heads, queries, keys):
    """What ``mask`` lets queries see: results of values of which each has a column of its own."""
    q, k = torch.zeros(batch, heads, queries, 1), torch.zeros(batch, 1, keys, 1)
    v = torch.eye(keys).expand(batch, 1, -1, -1)
    return opkit.attention(q, k, v, mask=mask, kernel="reference") > 0
