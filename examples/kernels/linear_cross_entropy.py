"""Cross-entropy in Triton: of logits, and of a linear layer whose logits are never all in memory.

**Of logits.** The forward reads each row once, with a running maximum and sum for each of a thread's columns, and merges
them at the end: 2 bytes a logit in bfloat16, so 8192 rows of 32,000 take 122 us at 4.3 TB/s. It returns each row's
log-sum-exp too; with it the backward is elementwise, ``(exp(logit - lse) - (class == target)) * grad / count``: 2 bytes
read and 2 written, 244 us.

**Of a linear layer.** ``hidden @ weight.T`` is taken for some thousand rows at a time by cuBLAS. One kernel makes of such a
chunk, in place, the loss and the gradient of the logits, which two further products turn into the gradients of ``hidden``
and ``weight``; so both are ready when the forward is, and the backward only scales them. At 8192 tokens, a width of 4096 and
128,256 classes the three products are 26 TFLOP, 33 ms at 780 TFLOP/s; what the kernel adds, a read and a write of the
logits, is 1 ms. Memory: a chunk of logits (512 MB, or an eighth of them all), where all of them are 2 GB, and as much again
for their gradient::

    python examples/kernels/linear_cross_entropy.py

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867; Wijmans et
al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, https://arxiv.org/abs/2411.09009; Hsu et al., "Liger
Kernel", 2024, https://arxiv.org/abs/2410.10989 (gradients in the forward, by chunks).
"""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

import opkit

LOW = [torch.float32, torch.bfloat16, torch.float16]
"""The dtypes of the kernels, which compute in float32."""

CHUNK_BYTES = 2**29
LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _row_losses(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of all rows, 0 for ignored ones; the rows' log-sum-exps; how many rows count."""
    valid = targets != ignore_index
    lse = _wide(logits).logsumexp(-1)
    picked = _wide(logits).gather(-1, torch.where(valid, targets, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(valid, lse - picked, 0.0), lse, valid.sum()


def _gradient(logits: Tensor, lse: Tensor, targets: Tensor, count: Tensor, ignore_index: int) -> Tensor:
    """The gradient of the mean loss, in float32 or wider."""
    valid = (targets != ignore_index).unsqueeze(-1)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    shares = (_wide(logits) - lse.unsqueeze(-1)).exp() - (classes == targets.unsqueeze(-1)).to(lse.dtype)
    return torch.where(valid, shares / count, 0.0)


# ---- the operators --------------------------------------------------------------------------------------------------


@opkit.custom_op("kernels::cross_entropy")
def cross_entropy(
    logits: Float[Tensor, "n classes"], targets: Int64[Tensor, "n"], ignore_index: int = -100
) -> tuple[Float[Tensor, ""], Float[Tensor, "n"], Float[Tensor, ""]]:
    """The mean negative log-likelihood of ``targets`` under ``softmax(logits)``.

    Args:
        logits: ``(n, classes)``, any floating dtype.
        targets: ``(n,)``, each in ``[0, classes)`` or equal to ``ignore_index``; others make the kernel's loss NaN.
        ignore_index: a target that counts neither in the sum nor in the number of rows.

    Returns:
        The loss, NaN where no row counts; each row's log-sum-exp, ``(n,)``, which takes no gradient; and the number of
        rows that count. All in float32, or float64 for float64 ``logits``.
    """
    losses, lse, count = _row_losses(logits, targets, ignore_index)
    return losses.sum() / count, lse, count.to(lse.dtype)


@opkit.custom_op("kernels::cross_entropy_backward")
def cross_entropy_backward(
    grad: Float[Tensor, ""],
    logits: Float[Tensor, "n classes"],
    targets: Int64[Tensor, "n"],
    lse: Float[Tensor, "n"],
    count: Float[Tensor, ""],
    ignore_index: int,
) -> Float[Tensor, "n classes"]:
    """The gradient of ``logits`` from that of the loss; ``lse`` and ``count`` are :data:`cross_entropy`'s results."""
    return (_gradient(logits, lse, targets, count, ignore_index) * grad).to(logits.dtype)


@opkit.custom_op("kernels::linear_cross_entropy_parts")
def linear_cross_entropy_parts(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "classes d"],
    targets: Int64[Tensor, "n"],
    ignore_index: int,
    with_hidden: bool,
    with_weight: bool,
) -> tuple[Float[Tensor, ""], Tensor, Tensor]:
    """What :func:`linear_cross_entropy` returns, and the gradients of ``hidden`` and ``weight`` where they are needed.

    A gradient that is not has no elements. In half precision both are those of logits that are rounded to it, and so is
    the gradient of the logits: in float16, what is below 6e-8 of it is lost, before any scaling of the loss.
    """
    logits = hidden @ weight.T
    losses, lse, count = _row_losses(logits, targets, ignore_index)
    grad = _gradient(logits, lse, targets, count, ignore_index).to(logits.dtype)
    of_hidden = grad @ weight if with_hidden else hidden.new_empty(0)
    return losses.sum() / count, of_hidden, grad.T @ hidden if with_weight else weight.new_empty(0)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean cross-entropy of ``hidden @ weight.T``, whose logits are never all in memory.

    Args:
        hidden: ``(n, d)``, any floating dtype.
        weight: ``(classes, d)``, the dtype of ``hidden``.
        targets: ``(n,)``, int64, each in ``[0, classes)`` or equal to ``ignore_index``.
        ignore_index: a target that counts neither in the sum nor in the number of rows.

    Returns:
        A scalar in float32, or float64 for float64 ``hidden``; NaN where no row counts.
    """
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    return linear_cross_entropy_parts(hidden, weight, targets, ignore_index, *wanted)[0]


# ---- the kernels ----------------------------------------------------------------------------------------------------


# A tile is PIECES x THREADS x VECTOR elements of a row, and a thread has its vector of all pieces. Each thread has maxima
# and sums of its own, in powers of 2, so that threads exchange nothing until the end.
@triton.jit
def _log_sum_exp(
    row, classes, PIECES: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    piece, thread = tl.arange(0, PIECES)[:, None, None], tl.arange(0, THREADS)[None, :, None]
    place = piece * (THREADS * VECTOR) + thread * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    most = tl.full((THREADS,), float("-inf"), tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    for start in range(0, classes, PIECES * THREADS * VECTOR):
        at = start + place
        x = tl.load(row + at, mask=at < classes, other=float("-inf"), eviction_policy=POLICY).to(tl.float32) * LOG2_E
        larger = tl.maximum(most, tl.max(tl.max(x, 0), 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # of threads that have seen nothing finite
        total = total * tl.exp2(most - shift) + tl.sum(tl.sum(tl.exp2(x - shift[None, :, None]), 0), 1)
        most = larger
    largest = tl.max(most, 0)
    return (largest + tl.log2(tl.sum(total * tl.exp2(most - largest), 0))) * LN_2


@triton.jit
def _losses(
    logits, targets, losses, lse, logits_stride_0, classes, ignore_index,
    PIECES: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = logits + n * logits_stride_0
    target = tl.load(targets + n).to(tl.int32)
    found = _log_sum_exp(row, classes, PIECES, THREADS, VECTOR, "evict_first")
    valid = target != ignore_index
    picked = tl.load(row + target, mask=(target >= 0) & (target < classes), other=float("nan")).to(tl.float32)
    tl.store(lse + n, found)
    tl.store(losses + n, tl.where(valid, found - picked, 0.0))


@triton.jit
def _mean(losses, targets, loss, count, n, ignore_index, BLOCK: tl.constexpr):
    total, valid = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(losses + at, mask=at < n, other=0.0)
        valid += (tl.load(targets + at, mask=at < n, other=ignore_index) != ignore_index).to(tl.int32)
    rows = tl.sum(valid, 0).to(tl.float32)
    tl.store(count, rows)
    tl.store(loss, tl.sum(total, 0) / rows)


@triton.jit
def _cross_entropy_backward(
    grad, logits, targets, lse, count, out, logits_stride_0, classes, ignore_index, BLOCK: tl.constexpr
):
    across = tl.cdiv(classes, BLOCK)
    n = tl.program_id(0) // across
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    target, shift = tl.load(targets + n).to(tl.int32), tl.load(lse + n) * LOG2_E
    scale = tl.where(target == ignore_index, 0.0, tl.load(grad).to(tl.float32) / tl.load(count))
    x = tl.load(logits + n * logits_stride_0 + column, mask=column < classes)
    shares = tl.exp2(x.to(tl.float32) * LOG2_E - shift) - (column == target).to(tl.float32)
    tl.store(out + n * classes + column, shares * scale, mask=column < classes)


# Losses and gradients of a chunk of logits, the gradients in their place. A row is read a second time; few programs run at
# a time, each with many threads, so that it is in the cache.
@triton.jit
def _losses_and_gradients(
    logits, targets, losses, count, classes, ignore_index, GRADIENTS: tl.constexpr,
    PIECES: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = logits + n * classes
    target = tl.load(targets + n).to(tl.int32)
    valid = target != ignore_index
    picked = tl.load(row + target, mask=(target >= 0) & (target < classes), other=float("nan")).to(tl.float32)
    found = _log_sum_exp(row, classes, PIECES, THREADS, VECTOR, "evict_last" if GRADIENTS else "evict_first")
    tl.store(losses + n, tl.where(valid, found - picked, 0.0))
    if GRADIENTS:
        tl.debug_barrier()  # all has been read that is overwritten: picked, too
        scale = tl.where(valid, 1.0, 0.0) / tl.load(count)
        for start in range(0, classes, PIECES * THREADS * VECTOR):
            column = start + tl.arange(0, PIECES * THREADS * VECTOR)
            x = tl.load(row + column, mask=column < classes).to(tl.float32)
            shares = tl.exp2((x - found) * LOG2_E) - (column == target).to(tl.float32)
            tl.store(row + column, shares * scale, mask=column < classes)


# ---- how they are launched ------------------------------------------------------------------------------------------


def _by_rows(function: triton.JITFunction, pieces: int, warps: int):
    return opkit.triton_kernel(
        function,
        grid=lambda logits_size_0: logits_size_0,
        bind={"classes": "logits_size_1"},
        PIECES=pieces,
        THREADS=32 * warps,
        VECTOR=lambda logits: 4 if logits.dtype == "float32" else 8,
        num_warps=warps,
    )


LOSSES = _by_rows(_losses, pieces=2, warps=8)
LOSSES_AND_GRADIENTS = _by_rows(_losses_and_gradients, pieces=2, warps=16)
MEAN = opkit.triton_kernel(_mean, grid=1, n=lambda losses: losses.numel, BLOCK=4096, num_warps=16)
DEVICES = ("cpu", "cuda") if LOSSES.interpreted else ("cuda",)
"""Where Triton's kernels run: in the interpreter on CPU tensors, too."""


@cross_entropy.register_kernel(DEVICES, dtypes=LOW, name="two_launches")
def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits if logits.stride(-1) == 1 else logits.contiguous()
    targets = targets.contiguous()
    losses, lse = logits.new_empty(2, len(logits), dtype=torch.float32).unbind()
    loss, count = (logits.new_empty((), dtype=torch.float32) for _ in range(2))
    LOSSES(logits=rows, targets=targets, losses=losses, lse=lse, ignore_index=ignore_index)
    MEAN(losses=losses, targets=targets, loss=loss, count=count, ignore_index=ignore_index)
    return loss, lse, count


def _backward_example(rows: int, classes: int) -> dict[str, str | int]:
    scalars = {"grad": "fp32[]", "count": "fp32[]", "ignore_index": -100}
    return {**scalars, "logits": f"bf16[{rows}, {classes}]", "targets": f"i64[{rows}]", "lse": f"fp32[{rows}]"}


cross_entropy_backward.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _cross_entropy_backward,
        grid=lambda n, classes, BLOCK: n * triton.cdiv(classes, BLOCK),
        configs=[{"BLOCK": block, "num_warps": warps} for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8))],
        examples=[_backward_example(8192, 32000), _backward_example(8192, 128256)],
    ),
    dtypes=LOW,
)


def _rows_at_a_time(n: int, bytes_of_row: int) -> int:
    """A chunk: 512 MB of logits, or an eighth of all, so that few chunks are added up; whole tiles of the products."""
    rows = max(CHUNK_BYTES // bytes_of_row, triton.cdiv(n, 8), 1)
    return min(triton.cdiv(rows, 128) * 128, max(n, 1))


@linear_cross_entropy_parts.register_kernel(DEVICES, dtypes=LOW, name="by_chunks")
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, with_hidden: bool, with_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (n, _), classes, targets = hidden.shape, len(weight), targets.contiguous()
    losses = hidden.new_empty(n, dtype=torch.float32)
    count = (targets != ignore_index).sum().float()
    of_hidden = torch.empty_like(hidden if with_hidden else hidden.new_empty(0))
    of_weight = (torch.empty_like if n else torch.zeros_like)(weight if with_weight else weight.new_empty(0))
    step = _rows_at_a_time(n, classes * hidden.element_size())
    chunk = hidden.new_empty(step, classes)
    for part in (slice(start, start + step) for start in range(0, n, step)):
        logits = torch.mm(hidden[part], weight.T, out=chunk[: n - part.start])
        LOSSES_AND_GRADIENTS(
            logits=logits, targets=targets[part], losses=losses[part], count=count, ignore_index=ignore_index,
            GRADIENTS=with_hidden or with_weight,
        )  # fmt: skip
        if with_hidden:
            torch.mm(logits, weight, out=of_hidden[part])
        if with_weight:
            of_weight.addmm_(logits.T, hidden[part], beta=1 if part.start else 0)
    return losses.sum() / count, of_hidden, of_weight


# ---- gradients ------------------------------------------------------------------------------------------------------


def _save(ctx, inputs, output):
    logits, targets, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, targets, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    return cross_entropy_backward(grad, *ctx.saved_tensors, ctx.ignore_index), None, None


def _save_gradients(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _scale_gradients(ctx, grad, *_):
    pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    return (*[saved * grad.to(saved.dtype) if needed else None for saved, needed in pairs], *[None] * 4)


cross_entropy.register_autograd(_backward, setup_context=_save)
linear_cross_entropy_parts.register_autograd(_scale_gradients, setup_context=_save_gradients)


def main() -> None:
    """Both agree with torch's functions in float64, in the loss and in the gradients, with some rows ignored."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight = torch.randn(300, 64, device=device) / 8, torch.randn(1000, 64, device=device)
    targets = torch.randint(1000, (300,), device=device)
    targets[::7] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, targets)
    gradients = torch.autograd.grad(expected, exact)
    for loss in (linear_cross_entropy(*leaves, targets), cross_entropy(hidden @ weight.T, targets)[0]):
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(torch.autograd.grad(loss, leaves), gradients, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    main()
