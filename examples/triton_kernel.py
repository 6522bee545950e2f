"""A Triton kernel for an operator: declared by the names of its parameters, and tested where there is no GPU.

Triton's interpreter computes its numbers on the CPU, and Triton's compiler makes code for four architectures; on a GPU the
kernel runs too::

    python examples/triton_kernel.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import compile_for, interpret

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "gfx942"]


@opkit.custom_op("example::triton_rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Root-mean-square layer normalisation (Zhang and Sennrich, 2019)."""
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@triton.jit
def _rms_norm(x, weight, out, x_stride_m2, d, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride_m2 + at, at < d, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / d + eps)
    tl.store(out + row * d + at, value * scale * tl.load(weight + at, at < d).to(tl.float32), at < d)


rms_norm.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _rms_norm,
        grid=lambda batch: batch,
        BLOCK=lambda d: triton.next_power_of_2(d),
        num_warps=lambda BLOCK: min(max(BLOCK // 512, 1), 16),
        examples=[{"x": "bf16[8192, 4096]", "weight": "bf16[4096]"}],
    ),
)


def check(run, device: str) -> None:
    """Compare the kernel with the reference, rows that lie apart among others; ``run`` is how it is called."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x = torch.randn(6, 50, dtype=dtype, device=device)
        for view in (x, x[:, :37]):
            weight = torch.randn(view.shape[-1], dtype=dtype, device=device)
            expected = rms_norm.reference(view, weight)
            torch.testing.assert_close(run(view, weight), expected, rtol=tolerance, atol=tolerance)


def main() -> None:
    """Interpret the kernel, compile it for each architecture, and run it where there is a GPU."""
    check(interpret(rms_norm), "cpu")

    report = compile_for(rms_norm, ARCHITECTURES)
    report.raise_for_failures()
    assert [row.target for row in report.rows] == ARCHITECTURES
    assert all(row.registers > 0 and row.spills == 0 for row in report.rows)
    print(report)

    if torch.cuda.is_available():
        check(rms_norm, "cuda")
        print(rms_norm.select(torch.ones(2, 8, device="cuda"), torch.ones(8, device="cuda")))


if __name__ == "__main__":
    main()
