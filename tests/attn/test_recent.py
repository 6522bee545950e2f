"""Calls of one kind again and again, which skip the lowering of their functions, with other tensors and numbers."""

import gc
import itertools
import weakref

import pytest
import torch

import opkit

_N = 40
_Q, _K, _V = torch.randn(3, 2, 2, _N, 16, generator=torch.Generator().manual_seed(0))


def documents(ids, starts):
    """Return a mask of documents with prefixes, from each token's document and where each document starts."""
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & ((j < starts[ids[b, j]] + 3) | (i >= j))


def check(mask, bias, seen, added):
    """Check a call of functions against one of tensors."""
    found = opkit.attention(_Q, _K, _V, mask=mask, bias=bias)
    torch.testing.assert_close(found, opkit.attention(_Q, _K, _V, mask=seen, bias=added, kernel="reference"))


def tables(seed, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (2, _N), generator=generator).sort().values.to(dtype)
    return ids, torch.randint(0, _N, (4,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_other_tensors(dtype):
    for seed in range(6):
        ids, starts = tables(seed, dtype)
        i, j = torch.arange(_N)[:, None], torch.arange(_N)[None, :]
        seen = (ids[:, :, None] == ids[:, None, :]) & ((j < starts[ids][:, None, :] + 3) | (i >= j))
        check(documents(ids, starts), None, seen[:, None], None)


def test_tensors_of_one_storage():
    both = torch.randn(3, 2, _N)
    tensors = [both[0], both[1], both[0].clone(), both[2], both[1, :, :].contiguous(), both[0]]
    for one, other in itertools.pairwise(tensors):
        seen = one[None, :, None, :] < other[None, :, :, None]
        check(lambda b, h, i, j, one=one, other=other: one[h, j] < other[h, i], None, seen, None)


def test_views_and_writes():
    table = torch.randn(2, _N, _N)
    for view in (table, table, table, table.mT, table.mT, table[:, 1:, 1:], table):
        grown = torch.nn.functional.pad(view, (0, _N - view.shape[2], 0, _N - view.shape[1]))
        check(None, lambda s, b, h, i, j, t=grown: s + t[h, i, j], None, grown[None])
    for _ in range(5):
        table.neg_()
        check(None, lambda s, b, h, i, j: s + table[h, i, j], None, table[None])


def test_numbers_and_types():
    for window in (3, 3, 3, 3, 5, True, 3.0, 3):
        i, j = torch.arange(_N)[:, None], torch.arange(_N)[None, :]
        check(lambda b, h, i, j, w=window: (i - j).abs() < w, None, (i - j).abs() < window, None)


def test_a_table_that_is_learned_later():
    slopes = torch.rand(2)
    for step in range(8):
        slopes.requires_grad_(step >= 4)
        out = opkit.attention(_Q, _K, _V, bias=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
        assert out.requires_grad == (step >= 4)
        if step >= 4:
            (gradient,) = torch.autograd.grad(out.sum(), slopes)
            distance = (torch.arange(_N)[:, None] - torch.arange(_N)[None, :]).abs()
            bias = -slopes[:, None, None] * distance
            expected = torch.autograd.grad(
                opkit.attention(_Q, _K, _V, bias=bias[None], kernel="reference").sum(), slopes
            )
            torch.testing.assert_close(gradient, expected[0], rtol=1e-3, atol=1e-3)


def test_no_tensor_is_kept():
    ids, starts = tables(0)
    for _ in range(6):
        opkit.attention(_Q, _K, _V, mask=documents(ids, starts))
    alive = weakref.ref(starts)
    del starts, ids
    gc.collect()
    assert alive() is None
