"""Linear layer with weights of 4 bits: ``y = x W^T``, where ``W`` has two numbers in a byte and a scale for each group of
inputs.

``W[o, i] = (q[o, i] - 8) * scale[o, i // group]``, as GPTQ and AWQ have it (https://arxiv.org/abs/2210.17323); input ``2j``
is in the low half of byte ``j``. Generation with one token at a time is bound by reading weights: the kernel reads 4 bits of
each, and never writes the weights out in floats. For more than two rows of ``x`` the product itself takes the time, and the
reference's matrix product is better::

    python examples/gallery/int4_linear.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::int4_linear")
def int4_linear(
    x: Float[Tensor, "*batch 2*half"], packed: UInt8[Tensor, "outputs half"], scale: Float[Tensor, "outputs groups"]
) -> Float[Tensor, "*batch outputs"]:
    """Return the product; ``groups`` must divide ``half``."""
    half, groups = packed.shape[1], scale.shape[1]
    if groups < 1 or half % groups:
        raise ValueError(f"gallery::int4_linear: scale has {groups} groups, and a divisor of {half} bytes is expected.")
    numbers = torch.stack((packed & 15, packed >> 4), -1).view(packed.shape[0], groups, 2 * half // groups)
    weight = (numbers.to(scale.dtype) - 8) * scale.unsqueeze(-1)
    return x @ weight.view(packed.shape[0], 2 * half).t()


# Even and odd inputs are stored apart, so that a byte's two numbers meet two vectors; sums stay vectors until a row's end.
SOURCE = """
enum { WIDE = 32 };

static T dot(const T* even, const T* odd, const uint8_t* packed, const T* scale, int64_t groups, int64_t group) {
    T sums[WIDE] = {0}, y = 0;
    for (int64_t g = 0; g < groups; g++, even += group, odd += group, packed += group) {
        T part[WIDE] = {0};
        int64_t j = 0;
        for (; j + WIDE <= group; j += WIDE)
            for (int k = 0; k < WIDE; k++) {
                const int32_t both = packed[j + k];
                part[k] += even[j + k] * (T)((both & 15) - 8) + odd[j + k] * (T)((both >> 4) - 8);
            }
        for (; j < group; j++) part[0] += even[j] * (T)((packed[j] & 15) - 8) + odd[j] * (T)((packed[j] >> 4) - 8);
        for (int k = 0; k < WIDE; k++) sums[k] += part[k] * scale[g];
    }
    for (int k = 0; k < WIDE; k++) y += sums[k];
    return y;
}

void int4_linear(const T* x, const uint8_t* packed, const T* scale, T* y, int64_t batch, int64_t half, int64_t outputs,
                 int64_t groups) {
    if (groups < 1 || half % groups) {
        opk_fail("scale has %lld groups, and a divisor of %lld bytes is expected", (long long)groups, (long long)half);
        return;
    }
    T* apart = (T*)malloc((2 * batch * half + 1) * sizeof(T));
    for (int64_t i = 0; i < batch; i++)
        for (int64_t j = 0; j < half; j++)
            for (int64_t k = 0; k < 2; k++) apart[(2 * i + k) * half + j] = x[(i * half + j) * 2 + k];
    #pragma omp parallel for if (batch * outputs * half > 1 << 16)
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t i = 0; i < batch; i++) {
            const T* even = apart + 2 * i * half;
            y[i * outputs + o] = dot(even, even + half, packed + o * half, scale + o * groups, groups, half / groups);
        }
    free(apart);
}
"""
KERNEL = opkit.c_kernel(SOURCE, bind={"y": "out"})
int4_linear.register_kernel("cpu", KERNEL, when=lambda x: x.numel() <= 2 * x.shape[-1])


# A program has some outputs of one row of x, and reads some groups of each at once, in float32. A group has one scale.
@triton.jit
def _int4_linear(
    x, packed, scale, out, half, outputs, groups, GROUP: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr
):
    output, row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(0).to(tl.int64)
    which, byte = output[:, None, None], tl.arange(0, GROUP)[None, None, :]
    total = tl.zeros([OUTPUTS, GROUPS, GROUP], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)[None, :, None]
        at = group * GROUP + byte
        pairs = 2 * at[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
        even, odd = tl.split(tl.load(x + row * 2 * half + pairs, pairs < 2 * half, other=0.0).to(tl.float32))
        inside = (which < outputs) & (group < groups)
        both = tl.load(packed + which * half + at, inside, other=0).to(tl.int32)
        factor = tl.load(scale + which * groups + group, inside, other=0.0).to(tl.float32)
        total += (even * ((both & 15) - 8).to(tl.float32) + odd * ((both >> 4) - 8).to(tl.float32)) * factor
    tl.store(out + row * outputs + output, tl.sum(tl.sum(total, 2), 1), output < outputs)


def _fits(x, packed, scale):
    """Return whether the kernel takes the call: with more rows, the reference's product of matrices is faster."""
    half, groups = packed.shape[1], scale.shape[1]
    return x.numel() <= 8 * x.shape[-1] and groups > 0 and half % groups == 0 and (half // groups).bit_count() == 1


TRITON = opkit.triton_kernel(
    _int4_linear,
    grid=lambda batch, outputs, OUTPUTS: (batch, triton.cdiv(outputs, OUTPUTS)),
    GROUP=lambda half, groups: half // groups,
    OUTPUTS=16,
    GROUPS=lambda GROUP: max(256 // GROUP, 1),
    examples=[{"x": "bf16[1, 4096]", "packed": "u8[4096, 2048]", "scale": "bf16[4096, 32]"}],
)
int4_linear.register_kernel("cuda", TRITON, when=_fits, dtypes=[torch.float32, torch.bfloat16, torch.float16])

_FLOAT, _FILLS = (torch.float32, torch.float64), ("normal", "integers", "ones", "zeros", "small")
OPKIT_CHECKS = {
    "gallery::int4_linear": {
        "args": (
            tensor("*batch 2*half", _FLOAT, fills=_FILLS),
            tensor("outputs half", torch.uint8, differentiable=False),
            tensor("outputs 1", _FLOAT, fills=_FILLS),
        )
    }
}
SIZES = [(1, 4096, 4096), (2, 2048, 2048)]
GPU_SIZES = [(1, 8192, 8192), (8, 4096, 14336)]


def arguments(batch: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer with groups of 128 inputs."""
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    return torch.randn(batch, inputs), packed, torch.rand(outputs, inputs // 128)


def alternative(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """``torch.nn.functional.linear`` with the weights in float32, which take 8 times the memory.

    torch's private ``_weight_int4pack_mm_for_cpu`` is faster than the kernel in bfloat16, and 20 times slower in float32.
    """
    if packed not in _weights:
        _weights[packed] = (
            int4_linear.reference(torch.eye(x.shape[-1], device=x.device), packed, scale).t().contiguous()
        )
    return torch.nn.functional.linear(x, _weights[packed])


_weights = WeakTensorKeyDictionary()


def main() -> None:
    """Compare with the product of floats, and the gradient of inputs."""
    x, packed, scale = arguments(2, 256, 30)
    torch.testing.assert_close(int4_linear(x, packed, scale), alternative(x, packed, scale), rtol=1e-4, atol=1e-3)
    x.requires_grad_()
    results = int4_linear(x, packed, scale), alternative(x, packed, scale)
    ours, expected = (torch.autograd.grad(each.sum(), x)[0] for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


if __name__ == "__main__":
    main()
