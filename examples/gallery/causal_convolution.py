"""Causal depthwise convolution with a SiLU, as before the scan in Mamba: ``y = silu(bias + sum_s weight[s] * x[t - k + 1 +
s])``.

Each channel has a filter of a few taps, and ``x`` has its channels last, as the linear layer before it leaves them (Gu and
Dao, https://arxiv.org/abs/2312.00752). torch's ``conv1d`` wants time last, and goes over memory again for the activation; the
kernel does all in one pass. The gradient is derived from the reference::

    python examples/gallery/causal_convolution.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::causal_convolution")
def causal_convolution(
    x: Float[Tensor, "batch time d"], weight: Float[Tensor, "taps d"], bias: Float[Tensor, "d"]
) -> Float[Tensor, "batch time d"]:
    """Return the activations; the last tap is that of the element itself, and zeros come before the first element."""
    taps, time = weight.shape[0], x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, taps, 0))[:, 1:]
    y = bias.expand(x.shape)
    for s in range(taps):
        y = y + weight[s] * padded[:, s : s + time]
    return (y * torch.sigmoid(y)).contiguous()


SOURCE = """
enum { PART = 128 };

#if T_is_float32
static inline float exponential(float x) { /* a polynomial without a call, so that the loop over channels is vectorised */
    const float scaled = x * 1.44269504f, power = scaled < -126 ? -126 : scaled > 127 ? 127 : scaled;
    const float whole = floorf(power + 0.5f), part = power - whole;
    const float y = 1 + part * (0.69314718f + part * (0.24022651f + part * (0.05550411f + part * (0.009618129f +
                    part * (0.0013333558f + part * 0.00015403530f)))));
    union { int32_t bits; float value; } scale = {((int32_t)whole + 127) << 23};
    return y * scale.value;
}
#else
static inline double exponential(double x) { return exp(x); }
#endif

void causal_convolution(const T* x, const T* weight, const T* bias, T* out, int64_t batch, int64_t time, int64_t d,
                        int64_t taps) {
    #pragma omp parallel for collapse(2) if (batch * time * d > 1 << 15)
    for (int64_t i = 0; i < batch; i++)
        for (int64_t t = 0; t < time; t++)
            for (int64_t first = 0; first < d; first += PART) {
                const int64_t count = d - first < PART ? d - first : PART, at = (i * time + t) * d + first;
                T y[PART];
                for (int64_t j = 0; j < count; j++) y[j] = bias[first + j];
                for (int64_t s = t < taps - 1 ? taps - 1 - t : 0; s < taps; s++) {
                    const T *tap = weight + s * d + first, *source = x + at + (s - taps + 1) * d;
                    for (int64_t j = 0; j < count; j++) y[j] += tap[j] * source[j];
                }
                for (int64_t j = 0; j < count; j++) out[at + j] = y[j] / (1 + exponential(-y[j]));
            }
}
"""
KERNEL = opkit.c_kernel(SOURCE, flags=["-fno-trapping-math"])  # else GCC vectorises no floorf
causal_convolution.register_kernel("cpu", KERNEL)


# A program has a tile of times and channels, and computes in float32. Rows that tiles share come from the cache.
@triton.jit
def _causal_convolution(
    x, weight, bias, out, time, d, taps: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    t = tl.program_id(1) * TIMES + tl.arange(0, TIMES)[:, None]
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    first, inside = tl.program_id(0).to(tl.int64) * time * d, column < d
    y = tl.zeros([TIMES, CHANNELS], tl.float32) + tl.load(bias + column, inside, other=0.0).to(tl.float32)
    for s in tl.static_range(taps):
        source = t - (taps - 1) + s
        value = tl.load(x + first + source * d + column, inside & (source >= 0) & (t < time), other=0.0)
        y += value.to(tl.float32) * tl.load(weight + s * d + column, inside, other=0.0).to(tl.float32)
    tl.store(out + first + t * d + column, y * tl.sigmoid(y), inside & (t < time))


TRITON = opkit.triton_kernel(
    _causal_convolution,
    grid=lambda batch, time, d, TIMES, CHANNELS: (batch, triton.cdiv(time, TIMES), triton.cdiv(d, CHANNELS)),
    TIMES=16,
    CHANNELS=128,
    examples=[{"x": "bf16[8, 4096, 5120]", "weight": "bf16[4, 5120]", "bias": "bf16[5120]"}],
)
causal_convolution.register_kernel("cuda", TRITON, dtypes=[torch.float32, torch.bfloat16, torch.float16])

_DTYPES, _NUMBERS = (torch.float32, torch.float64), ("normal", "integers", "ones", "zeros")
OPKIT_CHECKS = {
    "gallery::causal_convolution": {
        "args": tuple(tensor(shape, _DTYPES, fills=_NUMBERS) for shape in ("batch time d", "3 d", "d"))
    }
}
SIZES = [(1, 1024, 1024), (4, 256, 512)]
GPU_SIZES = [(8, 4096, 5120), (1, 2048, 2048)]


def arguments(batch: int, time: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer with 4 taps."""
    return torch.randn(batch, time, d), torch.randn(4, d), torch.randn(d)


@torch.compile
def alternative(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The sum over taps and the activation, compiled by Inductor."""
    padded = torch.nn.functional.pad(x, (0, 0, weight.shape[0] - 1, 0))
    y = bias + sum(weight[s] * padded[:, s : s + x.shape[1]] for s in range(weight.shape[0]))
    return torch.nn.functional.silu(y)


def main() -> None:
    """Compare with conv1d, gradients too."""
    x, weight, bias = (each.requires_grad_() for each in arguments(2, 10, 300))
    filters = weight.t().unsqueeze(1)
    expected = torch.nn.functional.conv1d(torch.nn.functional.pad(x.mT, (3, 0)), filters, bias, groups=300).mT
    results = causal_convolution(x, weight, bias), torch.nn.functional.silu(expected)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    ours, expected = (torch.autograd.grad(each.square().sum(), (x, weight, bias)) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
