"""Gated linear recurrence along time: ``h[t] = a[t] * h[t - 1] + b[t]``, from ``h = 0``.

It is the core of linear recurrent networks (RG-LRU in Griffin, https://arxiv.org/abs/2402.19427; minGRU). In torch it is a
loop over time, or ``log2(time)`` passes over all of memory (Hillis and Steele, 1986); the kernel makes one pass. The gradient
is the recurrence again, backwards in time, so it has derivatives of every order::

    python examples/gallery/linear_scan.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor

Sequence = Float[Tensor, "batch time d"]


@opkit.custom_op("gallery::linear_scan")
def linear_scan(a: Sequence, b: Sequence) -> Sequence:
    """Return all ``h``; ``a`` and ``b`` have one dtype."""
    h, rows = b.new_zeros(b[:, :0].sum(1).shape), []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        rows.append(h)
    return torch.stack(rows, 1) if rows else torch.zeros_like(b, memory_format=torch.contiguous_format)


linear_scan.register_fake(lambda a, b: torch.empty(b.shape, dtype=b.dtype, device=b.device))


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _gradient(ctx, grad):
    a, h = ctx.saved_tensors
    following = torch.cat(
        (a[:, 1:], torch.zeros_like(a[:, :1])), 1
    )  # a[t + 1] carries the gradient of h[t + 1] to h[t]
    grad_b = linear_scan(following.flip(1), grad.flip(1)).flip(1)
    return grad_b * torch.cat((torch.zeros_like(h[:, :1]), h[:, :-1]), 1), grad_b


linear_scan.register_autograd(_gradient, setup_context=_save)

# A part of 256 features stays in the first-level cache from one step to the next. Without fused multiply-add, which would not
# be faster here, results are the reference's bit by bit.
SOURCE = """
enum { PART = 256 };

void linear_scan(const T* a, const T* b, T* out, int64_t batch, int64_t time, int64_t d) {
    const int64_t parts = (d + PART - 1) / PART;
    #pragma omp parallel for collapse(2) if (batch * time * d > 1 << 15)
    for (int64_t i = 0; i < batch; i++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = part * PART, count = d - first < PART ? d - first : PART;
            T h[PART] = {0};
            for (int64_t t = 0; t < time; t++) {
                const int64_t at = (i * time + t) * d + first;
                for (int64_t j = 0; j < count; j++) out[at + j] = h[j] = a[at + j] * h[j] + b[at + j];
            }
        }
}
"""
linear_scan.register_kernel("cpu", opkit.c_kernel(SOURCE, flags=["-ffp-contract=off"]))


# A program goes through time with BLOCK features of one sequence, and computes in float32. Elements of later steps are fetched
# meanwhile, which needs at least 4 bytes for each of the 32 threads.
@triton.jit
def _linear_scan(a, b, out, time, d, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = tl.program_id(0).to(tl.int64) * time * d + column, column < d
    h = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(time, num_stages=12):
        h = tl.load(a + at, inside, other=0.0).to(tl.float32) * h + tl.load(b + at, inside, other=0.0).to(tl.float32)
        tl.store(out + at, h, inside)
        at += d


TRITON = opkit.triton_kernel(
    _linear_scan,
    grid=lambda batch, d, BLOCK: (batch, triton.cdiv(d, BLOCK)),
    BLOCK=lambda a: 32 if a.dtype == "float32" else 64,
    num_warps=1,
    examples=[{"a": "bf16[8, 4096, 2560]", "b": "bf16[8, 4096, 2560]"}],
)
linear_scan.register_kernel("cuda", TRITON, dtypes=[torch.float32, torch.bfloat16, torch.float16])

_SPEC = tensor("batch time d", (torch.float32, torch.float64))
OPKIT_CHECKS = {"gallery::linear_scan": {"args": (_SPEC, _SPEC)}}
SIZES = [(1, 1024, 1024), (8, 256, 512)]
GPU_SIZES = [(8, 2048, 2560), (1, 4096, 2560)]


def arguments(batch: int, time: int, d: int) -> tuple[Tensor, Tensor]:
    """Return gates between 0 and 1, and inputs."""
    return torch.rand(batch, time, d), torch.randn(batch, time, d)


@torch.compile
def alternative(a: Tensor, b: Tensor) -> Tensor:
    """The scan in ``log2(time)`` passes, compiled by Inductor."""
    step = 1
    while step < a.shape[1]:
        b = torch.cat((b[:, :step], b[:, step:] + a[:, step:] * b[:, :-step]), 1)
        a = torch.cat((a[:, :step], a[:, step:] * a[:, :-step]), 1)
        step *= 2
    return b


def main() -> None:
    """Compare with the loop over time, gradients too."""
    a, b = (each.requires_grad_() for each in arguments(2, 50, 300))
    results = [linear_scan(a, b), linear_scan.reference(a, b)]
    torch.testing.assert_close(*results)
    for ours, expected in zip(*(torch.autograd.grad(each.square().sum(), (a, b)) for each in results), strict=True):
        torch.testing.assert_close(ours, expected)


if __name__ == "__main__":
    main()
