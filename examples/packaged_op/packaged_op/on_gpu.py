"""The kernel of ``silu_mul`` on GPUs, in Triton."""

import triton
import triton.language as tl

import opkit


@triton.jit
def _silu_mul(gate, up, out, gate_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, at < gate_numel).to(tl.float32)
    y = tl.load(up + at, at < gate_numel).to(tl.float32)
    tl.store(out + at, x * tl.sigmoid(x) * y, at < gate_numel)


silu_mul_kernel = opkit.triton_kernel(
    _silu_mul,
    grid=lambda gate_numel, BLOCK: triton.cdiv(gate_numel, BLOCK),
    BLOCK=1024,
    examples=[{"gate": f"{dtype}[4096, 1024]", "up": f"{dtype}[4096, 1024]"} for dtype in ("bf16", "fp16", "fp32")],
)
