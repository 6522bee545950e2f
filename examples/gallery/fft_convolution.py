"""Causal convolution with filters as long as the sequence, by FFT: ``y[t] = sum_s filter[s] * x[t - s]``.

Long convolutions replace attention in Hyena (https://arxiv.org/abs/2302.10866) and state-space models. By the convolution
theorem they take ``n log n`` steps in place of ``n ** 2``. There is no kernel: torch's FFTs are as good as they get, and
opkit's part is the rest: a schema with named sizes, gradients, and the check::

    python examples/gallery/fft_convolution.py
"""

import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::fft_convolution")
def fft_convolution(x: Float[Tensor, "*batch d n"], filters: Float[Tensor, "d k"]) -> Float[Tensor, "*batch d n"]:
    """Return the first ``n`` elements of the convolution of each channel with its filter."""
    n, k = x.shape[-1], filters.shape[-1]
    if n == 0 or k == 0:
        return x * filters.new_zeros(())
    size = n + k  # no element wraps around
    return torch.fft.irfft(torch.fft.rfft(x, size) * torch.fft.rfft(filters, size), size)[..., :n].contiguous()


_DTYPES, _NUMBERS = (torch.float32, torch.float64), ("normal", "integers", "ones", "zeros")
OPKIT_CHECKS = {
    "gallery::fft_convolution": {
        "args": (tensor("*batch d n", _DTYPES, fills=_NUMBERS), tensor("d k", _DTYPES, fills=_NUMBERS))
    }
}
SIZES = [(1, 64, 2048), (4, 32, 1024)]


def arguments(batch: int, d: int, n: int) -> tuple[Tensor, Tensor]:
    """Return sequences, and filters of their length that fade away."""
    return torch.randn(batch, d, n), torch.randn(d, n) * torch.exp(-torch.arange(n) / 200)


def alternative(x: Tensor, filters: Tensor) -> Tensor:
    """``conv1d`` with a group for each channel."""
    padded = torch.nn.functional.pad(x, (filters.shape[-1] - 1, 0))
    return torch.nn.functional.conv1d(padded, filters.flip(-1).unsqueeze(1), groups=x.shape[-2])


def main() -> None:
    """Compare with conv1d, gradients too."""
    x, filters = (each.requires_grad_() for each in arguments(2, 3, 50))
    results = fft_convolution(x, filters), alternative(x, filters)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    ours, expected = (torch.autograd.grad(each.square().sum(), (x, filters)) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
