"""Tensors of masks for the tests of kernels for sm_90."""

from __future__ import annotations

import random

import torch

from opkit.attn.masks.program import AND, BAND, BAND_AT, DENSE, LENGTH, NOT, OR, SEGMENTS


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


def random_mask(seed, batch, heads, queries, keys):
    """A program of several parts with tensors, and these; what they say is of batches, or of heads, or of none."""
    choose, generator, tensors = random.Random(seed), torch.Generator().manual_seed(seed), []

    def keep(*made):
        tensors.extend(made)
        return range(len(tensors) - len(made), len(tensors))

    def integers(low, high, *sizes):
        return torch.randint(low, high, sizes, generator=generator).int()

    def leaf():
        some, start = choose.choice([1, batch]), choose.randint(-keys // 2, keys // 2)
        kind = choose.choice([BAND, SEGMENTS, LENGTH, DENSE, BAND_AT])
        if kind == BAND:
            return [BAND, start, start + choose.randint(0, keys)]
        if kind == SEGMENTS:
            ids = [
                integers(0, choose.choice([3, 40]), some, size).div(choose.choice([1, 38])).int()
                for size in (queries, keys)
            ]
            return [SEGMENTS, *keep(*(x.cumsum(1).int() if choose.random() < 0.7 else x for x in ids))]
        if kind == LENGTH:
            return [LENGTH, *keep(integers(0, keys + 5, some))]
        if kind == DENSE:
            sizes = some, *(choose.choice([1, size]) for size in (heads, queries, keys))
            return [DENSE, *keep(torch.rand(sizes, generator=generator) < choose.choice([0.1, 0.5, 0.95]))]
        return [
            BAND_AT,
            *keep(integers(-queries // 2, queries // 2, some, queries)),
            start,
            start + choose.randint(0, keys),
        ]

    mask = leaf()
    while not tensors or (len(tensors) < 4 and choose.random() < 0.6):
        mask = [*mask, NOT] if choose.random() < 0.2 else [*mask, *leaf(), choose.choice([AND, AND, OR])]
    return mask, tensors
