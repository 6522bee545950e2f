"""Linear layer with weights of 8 bits and activations in floats: ``y = x W^T``, with a scale for each row of ``W``.

``W[o, i] = weight[o, i] * scale[o]``, as weights are quantised alone (LLM.int8(), https://arxiv.org/abs/2208.07339, without its
outliers). Generation with one token at a time is bound by reading weights: the kernel reads a byte of each, and converts it in
registers. For more than two rows of ``x`` the product itself takes the time, and the reference's matrix product is better. A
gradient reaches ``x`` and the scales::

    python examples/gallery/int8_linear.py
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::int8_linear")
def int8_linear(
    x: Float[Tensor, "*batch inputs"], weight: Int8[Tensor, "outputs inputs"], scale: Float[Tensor, "outputs"]
) -> Float[Tensor, "*batch outputs"]:
    """Return the product."""
    return x @ weight.to(scale.dtype).t() * scale


SOURCE = """
enum { WIDE = 128 };

static T dot(const T* x, const int8_t* weight, int64_t inputs) {
    T sums[WIDE] = {0}, y = 0;
    int64_t j = 0;
    for (; j + WIDE <= inputs; j += WIDE)
        for (int k = 0; k < WIDE; k++) sums[k] += x[j + k] * (T)weight[j + k];
    for (; j < inputs; j++) y += x[j] * (T)weight[j];
    for (int k = 0; k < WIDE; k++) y += sums[k];
    return y;
}

void int8_linear(const T* x, const int8_t* weight, const T* scale, T* y, int64_t batch, int64_t inputs, int64_t outputs) {
    #pragma omp parallel for if (batch * outputs * inputs > 1 << 16)
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t i = 0; i < batch; i++) y[i * outputs + o] = dot(x + i * inputs, weight + o * inputs, inputs) * scale[o];
}
"""
KERNEL = opkit.c_kernel(SOURCE, bind={"y": "out"})
int8_linear.register_kernel("cpu", KERNEL, when=lambda x: x.numel() <= 2 * x.shape[-1])

_FLOAT, _FILLS = (torch.float32, torch.float64), ("normal", "integers", "ones", "zeros", "small")
OPKIT_CHECKS = {
    "gallery::int8_linear": {
        "args": (
            tensor("*batch inputs", _FLOAT, fills=_FILLS),
            tensor("outputs inputs", torch.int8, differentiable=False),
            tensor("outputs", _FLOAT, fills=_FILLS),
        )
    }
}
SIZES = [(1, 4096, 4096), (2, 2048, 2048)]


def arguments(batch: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return activations, and weights between -127 and 127."""
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return torch.randn(batch, inputs), weight, torch.rand(outputs) / 127


def alternative(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """``torch.nn.functional.linear`` with the weights in float32, which take 4 times the memory.

    torch's dynamically quantised ``nn.Linear`` takes 0.5 to 0.8 of the kernel's time, and rounds ``x`` to 8 bits, for an error of
    2 % of the result. In bfloat16, torch's private ``_weight_int8pack_mm`` takes 0.6 to 1.2 of it.
    """
    if weight not in _weights:
        _weights[weight] = weight * scale.unsqueeze(-1)
    return torch.nn.functional.linear(x, _weights[weight])


_weights = WeakTensorKeyDictionary()


def main() -> None:
    """Compare with the product of floats, and the gradient of inputs."""
    x, weight, scale = arguments(2, 300, 30)
    torch.testing.assert_close(int8_linear(x, weight, scale), alternative(x, weight, scale), rtol=1e-4, atol=1e-4)
    x.requires_grad_()
    results = int8_linear(x, weight, scale), alternative(x, weight, scale)
    ours, expected = (torch.autograd.grad(each.sum(), x)[0] for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
