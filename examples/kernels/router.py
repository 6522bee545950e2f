"""The router of a mixture of experts in Triton: softmax, the best ``k`` experts of each token, and the gradient.

What is read and written is little, each token's logits once and ``k`` weights and indices: for 128 experts in bfloat16 and
``k = 8``, 256 + 80 bytes, so that 131,072 tokens take 10 us at 4.3 TB/s. What limits it as much is the number of
instructions, so the selection is arranged to need few:

- A logit and its expert become one integer, the *key*: the float's bits, put in the order of the numbers, above the
  expert's number. One maximum yields both, and equal logits go to the first expert.
- No key is removed. With ``best`` the last key found, the next is the largest ``key - best`` in unsigned arithmetic:
  what is not below ``best`` wraps around to small numbers.
- A thread has several pieces of one row (the tile is pieces x rows x columns), so most of a maximum is found without
  talking to other threads.
- With renormalised weights the softmax is taken over the ``k`` best alone, which is the same.

The backward does not need the logits where weights are renormalised; otherwise it computes the softmax again::

    python examples/kernels/router.py

Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017,
https://arxiv.org/abs/1701.06538; Jiang et al., "Mixtral of Experts", 2024, https://arxiv.org/abs/2401.04088.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

import opkit

LOW = [torch.float32, torch.bfloat16, torch.float16]
"""The dtypes of the kernels, which compute in float32."""

LOG2_E = tl.constexpr(math.log2(math.e))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- the operators --------------------------------------------------------------------------------------------------


@opkit.custom_op("kernels::router")
def router(
    logits: Float[Tensor, "*batch experts"], k: int, renormalize: bool = True
) -> tuple[Float[Tensor, "*batch k"], Int64[Tensor, "*batch k"]]:
    """The ``k`` experts of the largest logits, and their weights.

    Args:
        logits: ``(*batch, experts)``, any floating dtype.
        k: at most ``experts``.
        renormalize: let the ``k`` weights of each token sum to 1.

    Returns:
        The weights, ``(*batch, k)`` in the dtype of ``logits``, largest first: the softmax over all experts, computed
        in float32, or float64 for float64 ``logits``. And the experts' numbers; of equal logits, the smaller first.
    """
    index = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    weights = _wide(logits).softmax(-1).gather(-1, index)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), index


@opkit.custom_op("kernels::router_backward")
def router_backward(
    grad: Float[Tensor, "*batch k"],
    logits: Float[Tensor, "*batch experts"],
    weights: Float[Tensor, "*batch k"],
    index: Int64[Tensor, "*batch k"],
    renormalize: bool,
) -> Float[Tensor, "*batch experts"]:
    """The gradient of ``logits`` from that of the weights; ``weights`` and ``index`` are :data:`router`'s results."""
    mean = (_wide(grad) * weights).sum(-1, keepdim=True)
    if renormalize:
        return torch.zeros_like(logits).scatter(-1, index, (weights * (grad - mean)).to(logits.dtype))
    spread = torch.zeros_like(logits, dtype=mean.dtype).scatter(-1, index, _wide(grad))
    return (_wide(logits).softmax(-1) * (spread - mean)).to(logits.dtype)


# ---- keys -----------------------------------------------------------------------------------------------------------


@triton.jit
def _reversed(keys):
    """Negative floats are ordered by their bits the other way round: reverse those above the expert's, or restore them."""
    BITS: tl.constexpr = keys.dtype.primitive_bitwidth
    return keys ^ ((keys >> (BITS - 1)) & (0x7FFFFFFF00000000 if BITS == 64 else 0x7FFF0000))


@triton.jit
def _keys(x, expert, EXPERTS: tl.constexpr):
    """Integers that are ordered as the logits are; of equal logits, the smaller expert's is larger."""
    if x.dtype.primitive_bitwidth == 32:
        bits = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (255 - expert)
        keys = tl.where(expert < EXPERTS, _reversed(bits), -0x8000000000000000)
    else:
        bits = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (255 - expert)
        keys = tl.where(expert < EXPERTS, _reversed(bits), -0x80000000)
    return keys


@triton.jit
def _logits(keys, dtype: tl.constexpr):
    """The logits of keys, in float32."""
    if dtype.primitive_bitwidth == 32:
        x = (_reversed(keys) >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        x = (_reversed(keys) >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return x


# ---- kernels --------------------------------------------------------------------------------------------------------


# Tiles of PIECES x ROWS x COLUMNS: the columns of a piece are spread over a few threads, and each has all pieces.
@triton.jit
def _tile(batch, experts, ROWS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None]
    expert = tl.arange(0, PIECES)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    return row, expert, (row < batch) & (expert < experts)


@triton.jit
def _unsigned(x):
    return x.to(tl.uint64 if x.dtype.primitive_bitwidth == 64 else tl.uint32, bitcast=True)


@triton.jit
def _largest(keys):
    return tl.max(tl.max(keys, 0), 1)


@triton.jit
def _router(
    logits, weights, index, batch, EXPERTS: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row, expert, inside = _tile(batch, EXPERTS, ROWS, PIECES, COLUMNS)
    x = tl.load(logits + row * EXPERTS + expert, mask=inside, other=float("-inf"))
    keys = _keys(x, expert, EXPERTS)
    slot = tl.arange(0, SLOTS)[None, :]
    best = _largest(keys)
    first = _logits(best, logits.dtype.element_ty)
    if not RENORMALIZE:
        total = tl.sum(tl.sum(tl.exp2((x.to(tl.float32) - first[None, :, None]) * LOG2_E), 0), 1)
    found = tl.where(slot == 0, best[:, None], 0)
    for i in tl.static_range(1, K):
        best += _largest(_unsigned(keys - best[None, :, None])).to(best.dtype, bitcast=True)
        found = tl.where(slot == i, best[:, None], found)
    scores = tl.exp2((_logits(found, logits.dtype.element_ty) - first[:, None]) * LOG2_E)
    scores = tl.where(slot < K, scores, 0.0)
    if RENORMALIZE:
        total = tl.sum(scores, 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at, inside = row * K + slot, (row < batch) & (slot < K)
    tl.store(weights + at, scores / total[:, None], mask=inside)
    tl.store(index + at, 255 - (found & 255).to(tl.int64), mask=inside)


# What all experts get, nothing or a share of the mean, is stored first; then, by threads that do not wait for memory but
# for one another, what the chosen ones get. To compare each expert with each choice would take several times as long.
@triton.jit
def _router_backward(
    grad, logits, weights, index, out, batch, EXPERTS: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    slot, expert = tl.arange(0, SLOTS)[None, :], tl.arange(0, COLUMNS)[None, :]
    chosen, inside = (row < batch) & (slot < K), (row < batch) & (expert < EXPERTS)
    g = tl.load(grad + row * K + slot, mask=chosen, other=0.0).to(tl.float32)
    w = tl.load(weights + row * K + slot, mask=chosen, other=0.0).to(tl.float32)
    choice = tl.load(index + row * K + slot, mask=chosen, other=0)
    mean = tl.sum(g * w, 1)[:, None]
    others = tl.zeros((ROWS, COLUMNS), tl.float32)
    if not RENORMALIZE:
        x = tl.load(logits + row * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
        shares = tl.exp2((x - tl.max(x, 1)[:, None]) * LOG2_E)
        others = -mean * shares / tl.sum(shares, 1)[:, None]
    tl.store(out + row * EXPERTS + expert, others, mask=inside)
    tl.debug_barrier()
    tl.store(out + row * EXPERTS + choice, w * (g - mean), mask=chosen)


# ---- how they are launched ------------------------------------------------------------------------------------------

WIDEST = 256
FORWARD = [{"COLUMNS": columns, "num_warps": warps} for columns, warps in ((16, 4), (8, 4), (32, 4), (16, 8), (64, 4))]
BACKWARD = [{"TILE": tile, "num_warps": warps} for tile, warps in ((1024, 2), (1024, 1), (1024, 4), (2048, 8))]
SHAPES = [(131072, 128, 8), (131072, 64, 6), (131072, 8, 2), (131072, 256, 8)]
CASES = [(*shape, True) for shape in SHAPES] + [(*SHAPES[0], False)]


def _power(size: int) -> int:
    return triton.next_power_of_2(max(size, 1))


def _fitting(configs: list[dict[str, int]], logits: Any, experts: int) -> list[dict[str, int]]:
    """Those whose pieces are no longer than a row, and of which a thread's keys fill at most half of its registers."""
    words = 8 * (2 if logits.dtype == "float32" else 1)  # of registers, for the keys that 8 columns make
    return [c for c in configs if c["COLUMNS"] <= max(_power(experts), 8) and words * experts <= 128 * c["COLUMNS"]]


def _kernel(function: triton.JITFunction, **options: Any):
    return opkit.triton_kernel(
        function,
        grid=lambda batch, ROWS: triton.cdiv(batch, ROWS),
        EXPERTS=lambda experts: experts,
        K=lambda k: k,
        SLOTS=lambda k: _power(k),
        RENORMALIZE=lambda renormalize: renormalize,
        **options,
    )


def _example(rows: int, experts: int, k: int, renormalize: bool, *choices: str) -> dict[str, Any]:
    chosen = {name: f"{'i64' if name == 'index' else 'bf16'}[{rows}, {k}]" for name in choices}
    return {**chosen, "logits": f"bf16[{rows}, {experts}]", "renormalize": renormalize, **({} if choices else {"k": k})}


router.register_kernel(
    "cuda",
    _kernel(
        _router,
        ROWS=lambda num_warps, COLUMNS: 256 * num_warps // COLUMNS,
        PIECES=lambda experts, COLUMNS: max(_power(experts) // COLUMNS, 1),
        configs=FORWARD,
        prune=_fitting,
        outputs=("weights", "index"),
        examples=[_example(*case) for case in CASES],
    ),
    dtypes=LOW,
    when=lambda logits, k: 0 < k <= logits.shape[-1] <= WIDEST,
)
router_backward.register_kernel(
    "cuda",
    _kernel(
        _router_backward,
        ROWS=lambda TILE, COLUMNS: max(TILE // COLUMNS, 1),
        COLUMNS=lambda experts: _power(experts),
        configs=BACKWARD,
        examples=[_example(*case, "grad", "weights", "index") for case in CASES],
    ),
    dtypes=LOW,
    when=lambda logits: logits.shape[-1] <= WIDEST,
)


def _save(ctx, inputs, output):
    ctx.renormalize = inputs[2]
    ctx.save_for_backward(inputs[0], *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return router_backward(grad, *ctx.saved_tensors, ctx.renormalize), None, None


router.register_autograd(_backward, setup_context=_save)


def main() -> None:
    """The weights are the softmax's largest, and the gradient is that of the softmax written out."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(1000, 60, device=device, requires_grad=True)
    for renormalize in (True, False):
        weights, index = router(logits, 4, renormalize)
        chosen = logits.softmax(-1).gather(-1, index)
        assert torch.equal(chosen.detach().sort(-1, descending=True).values, chosen.detach())
        assert chosen.detach()[:, -1].le(logits.detach().softmax(-1).topk(4).values[:, -1] + 1e-7).all()
        expected = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
        torch.testing.assert_close(weights, expected)
        pull = torch.randn_like(weights)
        (ours,), (theirs,) = (torch.autograd.grad(w, logits, pull, retain_graph=True) for w in (weights, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
