"""Tensors of masks for the tests of kernels for sm_90."""

from __future__ import annotations

import torch


def documents(batch, length, count, seed=0):
    """Numbers of documents that lie one after another, of random lengths."""
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < count / length
    return starts.cumsum(1).int()


def shuffled(batch, length):
    return torch.randint(0, 3, (batch, length), generator=torch.Generator().manual_seed(1)).int()


def bools(*sizes):
    return torch.rand(sizes, generator=torch.Generator().manual_seed(2)) < 0.6


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def blocks_of_bools(heads, queries, keys, size=130, share=0.5):
    """Squares, of which each head sees a share; the first head sees nothing of the first keys, a row in five nothing at all."""
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(1, heads, -(-queries // size), -(-keys // size), generator=generator) < share
    seen[:, 0, :, 0] = False
    seen = seen.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :queries, :keys].contiguous()
    seen[:, :, 4::5] = False
    return seen


def packed(*sizes):
    """Numbers of documents of these lengths, (1, all)."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).int()[None]


def padded(*sizes):
    """The same from 1 on, and 0 for the rest of 400."""
    return torch.nn.functional.pad(packed(*sizes) + 1, (0, 400 - sum(sizes)))
