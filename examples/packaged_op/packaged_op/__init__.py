"""Two operators with kernels in C and Triton, which `opkit build packaged_op` compiles ahead of time."""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from packaged_op.on_gpu import silu_mul_kernel

DTYPES = [torch.float32, torch.bfloat16]


@opkit.custom_op("packaged_op::rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Root-mean-square layer normalisation (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


rms_norm.register_kernel(
    "cpu",
    opkit.c_kernel(
        """
        void rms_norm(const T* x, const T* weight, double eps, T* out, int64_t batch, int64_t d) {
            for (int64_t i = 0; i < batch; i++, x += d, out += d) {
                float sum = 0;
                for (int64_t j = 0; j < d; j++) sum += (float)x[j] * (float)x[j];
                const float scale = 1 / sqrtf(sum / d + (float)eps);
                for (int64_t j = 0; j < d; j++) out[j] = (T)((float)x[j] * scale * (float)weight[j]);
            }
        }
        """,
        dtypes=DTYPES,
        flags=["-ffast-math"],
    ),
)


@opkit.custom_op("packaged_op::silu_mul")
def silu_mul(gate: Float[Tensor, "*batch d"], up: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """SiLU of one half of a projection times the other (Shazeer, 2020)."""
    return torch.nn.functional.silu(gate) * up


silu_mul.register_kernel("cpu", opkit.c_kernel(Path(__file__).with_name("silu_mul.c"), dtypes=DTYPES))
silu_mul.register_kernel("cuda", silu_mul_kernel)
