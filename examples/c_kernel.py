"""A C kernel for an operator: compiled at its first call, and used by autograd and torch.compile like any other.

The reference goes over memory several times; the kernel reads and writes each row once::

    python examples/c_kernel.py
"""

import torch
from jaxtyping import Float
from torch import Tensor

import opkit


@opkit.custom_op("example::rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Root-mean-square layer normalisation (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


KERNEL = opkit.c_kernel(
    """
    void rms_norm(const T* x, const T* weight, double eps, T* out, int64_t batch, int64_t d) {
        for (int64_t i = 0; i < batch; i++, x += d, out += d) {
            opk_acc sum = 0;
            for (int64_t j = 0; j < d; j++) sum += (opk_acc)x[j] * (opk_acc)x[j];
            const opk_acc scale = 1 / sqrt((double)sum / d + eps);
            for (int64_t j = 0; j < d; j++) out[j] = (T)((opk_acc)x[j] * scale * (opk_acc)weight[j]);
        }
    }
    """,
    dtypes=[torch.float32, torch.float64, torch.bfloat16],
)


def main() -> None:
    """Compare the kernel with the reference: its results, its gradients, and a compiled model's."""
    rms_norm.register_kernel("cpu", KERNEL)
    x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(64)
    print(rms_norm.select(x, weight))
    assert rms_norm.select(x, weight).kernel == "rms_norm"

    result = rms_norm(x, weight)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    with opkit.use_kernel(rms_norm, "reference"):
        expected = rms_norm(x, weight)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradient, expected_gradient)

    compiled = torch.compile(lambda x: rms_norm(x + 1, weight) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x), rms_norm(x + 1, weight) * 2)


if __name__ == "__main__":
    main()
