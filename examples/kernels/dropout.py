"""Dropout in Triton whose mask is a function of a seed: nothing is stored for the gradient, which is dropout again.

Each element is dropped with probability ``p`` and otherwise divided by ``1 - p``. 2 elements of memory traffic for each of
``x``, 4 bytes in bfloat16, in either direction (125 us for 2**27 elements at 4.3 TB/s); a stored mask would add a byte.
Random numbers are the other limit: one call of Philox gives 128 bits for about 80 instructions, which one for each element,
or for each four, would make the longest part of the kernel. 16 bits decide here, so a call serves eight elements, and ``p``
counts in steps of 1 / 65536.

The reference computes the same bits in torch, so that kernel and reference agree in every element::

    python examples/kernels/dropout.py

Source: Srivastava et al., "Dropout", 2014, https://jmlr.org/papers/v15/srivastava14a.html; Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405, for Philox4x32-10, which Triton has too.
"""

import rows
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit

ROUNDS, WORD = 10, 0xFFFFFFFF
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product of two numbers of 32 bits, held in int64."""
    low, high = a & 0xFFFF, a >> 16
    middle = high * b + (low * b >> 16)
    return middle >> 16, (middle << 16 | (low * b & 0xFFFF)) & WORD


def philox(counter: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four numbers of 32 bits for each counter of 64 bits; all are held in int64."""
    a, b, c, d = counter & WORD, counter >> 32, counter * 0, counter * 0
    keys = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(ROUNDS):
        (high_a, low_a), (high_c, low_c) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ keys[0], low_c, high_a ^ d ^ keys[1], low_a
        keys = [(key + step) & WORD for key, step in zip(keys, KEY_STEPS, strict=True)]
    return a, b, c, d


def _sixteen_bits(x: Tensor, seed: int) -> Tensor:
    """A number below 65536 for each element of ``x``: eight for each counter, low halves before high ones."""
    words = torch.stack(philox(torch.arange((x.numel() + 7) // 8, device=x.device), seed), -1)
    halves = torch.stack([words & 0xFFFF, words >> 16], -1)
    return halves.flatten()[: x.numel()].view(x.shape)


def _scale(p: float) -> float:
    return 1 / (1 - p + 1e-30)  # nothing is left to scale where p is 1, but it is no error either


@opkit.custom_op("kernels::dropout")
def dropout(x: Float[Tensor, "*shape"], p: float, seed: int) -> Float[Tensor, "*shape"]:
    """Set elements to zero with probability ``p``, and divide the others by ``1 - p``.

    Args:
        x: any shape, any floating dtype.
        p: from 0 to 1; rounded up to a multiple of 1 / 65536.
        seed: 64 bits; the mask follows from it and from the elements' numbers in row-major order.

    Returns:
        The shape and dtype of ``x``.
    """
    survives = _sixteen_bits(x, seed).float() >= p * 65536
    return torch.where(survives, rows.wide(x) * _scale(p), 0.0).to(x.dtype)


# A thread has eight neighbours, the 16 bytes of one load in bfloat16, and joins its own numbers in their order: the words
# 0, 1, 2, 3 of a call, the low half of each before the high one.
@triton.jit(do_not_specialize=["seed"])
def _dropout(x, out, x_numel, seed, threshold, scale, BLOCK: tl.constexpr):
    call = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    word0, word1, word2, word3 = tl.randint4x(seed, call)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    numbers = tl.join(words & 0xFFFF, words >> 16).reshape(BLOCK).to(tl.int32)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < x_numel).to(tl.float32)
    tl.store(out + at, tl.where(numbers >= tl.ceil(threshold).to(tl.int32), a * scale, 0.0), mask=at < x_numel)


dropout.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _dropout,
        grid=lambda x_numel, BLOCK: triton.cdiv(x_numel, BLOCK),
        threshold=lambda p: p * 65536,
        scale=_scale,
        BLOCK=2048,
        num_warps=128 // rows.LANES,
        examples=[{"x": "bf16[16384, 4096]", "p": 0.1, "seed": 2**40 + 1}],
    ),
    dtypes=rows.LOW,
)


def _save(ctx, inputs, output):
    _, ctx.p, ctx.seed = inputs


def _gradient(ctx, grad):
    return dropout(grad, ctx.p, ctx.seed), None, None


dropout.register_autograd(_gradient, setup_context=_save)


def main() -> None:
    """Drop a tenth, see that a tenth is dropped, and that the gradient is dropped where the elements are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(1000, 1000, device=device, requires_grad=True)
    y = dropout(x, 0.1, 42)
    assert abs((y == 0).double().mean().item() - 0.1) < 1e-3
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.9).item()}
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)
    with opkit.use_kernel(dropout, "reference"):
        assert torch.equal(dropout(x, 0.1, 42), y)
    print(dropout.select(x, 0.1, 42))


if __name__ == "__main__":
    main()
