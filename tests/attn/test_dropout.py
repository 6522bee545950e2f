"""Dropout of the reference: what Philox says is kept."""

import random

import pytest
import torch
from attention_oracle import close, inputs, naive

import opkit
from opkit.attn import reference
from opkit.attn.masks import program
from opkit.attn.operator import attention_operator


def philox_words(counter, key):
    """Philox-4x32-10 in Python's integers."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (second >> 32) ^ counter[1] ^ key[0], second % 2**32, (first >> 32) ^ counter[3] ^ key[1], first % 2**32,
        )  # fmt: skip
        key = ((key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32)
    return counter


def test_random_words_are_those_of_philox():
    rng = random.Random(0)
    for _ in range(20):
        counter, key = [rng.randrange(2**32) for _ in range(4)], [rng.randrange(2**32) for _ in range(2)]
        found = reference.philox_words(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(map(int, found)) == philox_words(tuple(counter), tuple(key))


def test_philox_has_the_known_answers():
    """From the authors' Random123 library, kat_vectors: philox 4x32 10."""
    ones = (2**32 - 1,) * 4
    expected = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox_words(ones, ones[:2]) == expected
    pi, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox_words(pi, key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.sweep
@pytest.mark.parametrize("dropout_p", [0.25, 0.6])
@pytest.mark.parametrize("keys", [1, 4, 7])
def test_dropout_keeps_what_philox_says(dropout_p, keys):
    batch, heads, queries, seed = 2, 2, 3, [2**40 + 7, 2**32 - 1]
    q, k, v = inputs(batch, heads, 1, queries, keys, 4, 4)
    kept = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, kept.shape)).tolist():
        word = philox_words((j // 4, i, b * heads + h, 0), tuple(s % 2**32 for s in seed))[j % 4]
        kept[b, h, i, j] = word / 2**32 >= dropout_p
    assert torch.equal(
        reference.retained(torch.tensor(seed), dropout_p, batch, heads, program.Grid(queries, keys, q.device)), kept
    )
    out = attention_operator()(q, k, v, [], [], None, torch.tensor(seed), [], [], 0.5, 0.0, dropout_p, False)
    close(out, naive(q, k, v, kept=kept, dropout_p=dropout_p), torch.float64)


def test_dropout_of_everything_is_zero_with_zero_gradients():
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 3, 3, 4, 4))
    out = opkit.attention(q, k, v, dropout_p=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_dropout_is_repeated_by_torch_s_seed_and_drops_its_share():
    q, k = torch.zeros(4, 4, 64, 8), torch.zeros(4, 4, 64, 8)
    v = torch.ones(4, 4, 64, 1)
    torch.manual_seed(5)
    first, second = (opkit.attention(q, k, v, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(opkit.attention(q, k, v, dropout_p=0.3), first)
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx(1.0, abs=0.02)
