"""One step of AdamW that writes to the parameter and to both of its moments in place.

``p -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * p)``, where ``m`` and ``v`` are running means of the
gradient and its square (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101). The operator returns nothing: its schema
declares the three tensors that it writes to, which opkit finds by tracing the reference, and its rules follow from that:
compiled programs keep the order of writes. In torch's own operators the step passes over memory about a dozen times; the
kernel reads four tensors and writes three, once::

    python examples/gallery/adamw_step.py
"""

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor

Elements = Float[Tensor, "*shape"]


@opkit.custom_op("gallery::adamw_step")
def adamw_step(
    param: Elements,
    grad: Elements,
    mean: Elements,
    square: Elements,
    step: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 1e-2,
) -> None:
    """Update ``param``, ``mean`` and ``square``; the first ``step`` is 1."""
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
    param.mul_(1 - lr * decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step))


SOURCE = """
void adamw_step(T* restrict param, const T* restrict grad, T* restrict mean, T* restrict square, int64_t step, double lr,
                double beta1, double beta2, double eps, double decay, int64_t param_numel) {
    const T keep = 1 - lr * decay, first = 1 - beta1, second = beta2, third = 1 - beta2, small = eps;
    const T size = lr / (1 - pow(beta1, step)), root = 1 / sqrt(1 - pow(beta2, step));
    #pragma omp parallel for simd if (parallel: param_numel > 1 << 15)
    for (int64_t i = 0; i < param_numel; i++) {
        const T g = grad[i], m = mean[i] + first * (g - mean[i]), v = second * square[i] + third * g * g;
        mean[i] = m;
        square[i] = v;
        const T r = sizeof(T) == sizeof(float) ? sqrtf(v) : sqrt(v);
        param[i] = keep * param[i] - size * m / (r * root + small);
    }
}
"""
adamw_step.register_kernel("cpu", opkit.c_kernel(SOURCE))


# Differences from 1 are computed in float64, on the CPU: in float32 that of 0.999 has an error of 5e-5 of itself.
@triton.jit
def _adamw_step(
    param, grad, mean, square, keep, first, second, third, size, root, eps, param_numel, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < param_numel
    g, m = tl.load(grad + at, inside).to(tl.float32), tl.load(mean + at, inside).to(tl.float32)
    m += first * (g - m)
    v = second * tl.load(square + at, inside).to(tl.float32) + third * g * g
    p = keep * tl.load(param + at, inside).to(tl.float32) - size * m / (tl.sqrt_rn(v) * root + eps)
    tl.store(mean + at, m, inside)
    tl.store(square + at, v, inside)
    tl.store(param + at, p, inside)


TRITON = opkit.triton_kernel(
    _adamw_step,
    grid=lambda param_numel, BLOCK: triton.cdiv(param_numel, BLOCK),
    keep=lambda lr, decay: 1 - lr * decay,
    first=lambda beta1: 1 - beta1,
    second=lambda beta2: beta2,
    third=lambda beta2: 1 - beta2,
    size=lambda lr, beta1, step: lr / (1 - beta1**step),
    root=lambda beta2, step: (1 - beta2**step) ** -0.5,
    BLOCK=1024,
    examples=[{**dict.fromkeys(("param", "grad", "mean", "square"), "fp32[4096, 4096]"), "step": 10}],
)
adamw_step.register_kernel("cuda", TRITON, dtypes=[torch.float32, torch.bfloat16, torch.float16])

_DTYPES, _FILLS = (torch.float32, torch.float64), ("normal", "integers", "ones", "zeros", "positive")
_SAME = tensor("*shape", _DTYPES, fills=_FILLS)
OPKIT_CHECKS = {
    "gallery::adamw_step": {
        "args": (_SAME, _SAME, _SAME, tensor("*shape", _DTYPES, low=0, high=9, fills=_FILLS), st.integers(1, 9))
    }
}
SIZES = [(4_000_000,), (4096,)]
GPU_SIZES = [(64_000_000,), (1_000_000,)]


def arguments(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return a parameter, its gradient and its moments at the tenth step."""
    return torch.randn(n), torch.randn(n), 0.1 * torch.randn(n), torch.rand(n), 10


def alternative(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: int) -> None:
    """``torch.optim.adamw.adamw`` with ``fused=True``, which ``torch.optim.AdamW(fused=True)`` calls at each step."""
    from torch.optim.adamw import adamw

    before = torch.tensor(step - 1.0, device=param.device)
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
    flags = {"amsgrad": False, "maximize": False, "fused": True}
    adamw([param], [grad], [mean], [square], [], [before], **numbers, **flags)


def main() -> None:
    """Compare three steps with those of ``torch.optim.AdamW``."""
    param = torch.randn(5, 7).requires_grad_()
    ours, mean, square = param.detach().clone(), torch.zeros(5, 7), torch.zeros(5, 7)
    optimizer = torch.optim.AdamW([param], fused=True)
    for step in range(1, 4):
        param.grad = torch.randn(5, 7)
        optimizer.step()
        adamw_step(ours, param.grad, mean, square, step)
    torch.testing.assert_close(ours, param.detach())
    torch.testing.assert_close((mean, square), tuple(optimizer.state[param][k] for k in ("exp_avg", "exp_avg_sq")))


if __name__ == "__main__":
    main()
