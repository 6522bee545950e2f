"""Choose the probabilities that dropout retains: Philox-4x32-10 of their positions, in torch's integers, alike on every device.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011,
https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkit.attn.masks.program import Grid

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def words(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words, in int64, of counters and a key of 32-bit words in int64.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in words((zero,) * 4, (zero,) * 2)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of a product of two words, without leaving int64."""
    left, right = word * (multiplier >> 16), word * (multiplier & 0xFFFF)
    middle = left + (right >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (right & 0xFFFF)


def retained(seed: Tensor, dropout_p: float, batch: int, heads: int, grid: Grid) -> Tensor:
    """Return which probabilities dropout retains: bool, (batch, heads, queries, keys).

    That of (b, h, i, j) is retained where word ``j % 4`` of the counter ``(j // 4, i, b * heads + h, 0)``, divided by 2**32, is
    not below ``dropout_p``. The key is the lower 32 bits of each of the two numbers in ``seed``, int64 (2,).
    """
    key = (seed[0] & _WORD, seed[1] & _WORD)
    rows = torch.arange(batch * heads, device=grid.device).reshape(batch, heads, 1, 1)
    quads = torch.arange((grid.keys + 3) // 4, device=grid.device)
    zero = torch.zeros((), dtype=torch.int64, device=grid.device)
    drawn = torch.stack(torch.broadcast_tensors(*words((quads, grid.rows, rows, zero), key)), dim=-1)
    return drawn.flatten(-2)[..., : grid.keys].double() * 2.0**-32 >= dropout_p
