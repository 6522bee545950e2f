"""Products of groups of rows, each with a matrix of its own: the experts of a mixture.

The rows of ``x`` lie sorted by group, and those of group ``e`` are ``offsets[e] .. offsets[e + 1]``, as moe_permute.py
returns them (MegaBlocks, https://arxiv.org/abs/2211.15841). With few rows a group, reading the matrices takes the time: the
kernel reads a block of a matrix once for four rows, and visits all groups in one call::

    python examples/gallery/grouped_product.py
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


def members(offsets: Tensor, rows: int) -> Tensor:
    """Return whether a group has a row, (count, rows, 1)."""
    row = torch.arange(rows, device=offsets.device)
    return ((offsets[:-1, None] <= row) & (row < offsets[1:, None])).unsqueeze(-1)


@opkit.custom_op("gallery::grouped_product")
def grouped_product(
    x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "count inputs outputs"], offsets: Int64[Tensor, "count+1"]
) -> Float[Tensor, "rows outputs"]:
    """Return the products; rows in no group give zeros, and those in several groups the sum."""
    return torch.where(members(offsets, x.shape[0]), x @ weight, 0).sum(0)


# A tile is four rows of 128 columns, whose sums stay in registers; threads divide the columns, so that no two write to a row's.
SOURCE = """
enum { ROWS = 4, WIDE = 128 };

static inline __attribute__((always_inline)) void tile(const T* x, const T* weight, T* out, int64_t inputs, int64_t outputs,
                                                       int rows, int64_t width) {
    T sums[ROWS][WIDE] = {{0}};
    for (int64_t k = 0; k < inputs; k++)
        for (int r = 0; r < rows; r++)
            for (int64_t j = 0; j < width; j++) sums[r][j] += x[r * inputs + k] * weight[k * outputs + j];
    for (int r = 0; r < rows; r++)
        for (int64_t j = 0; j < width; j++) out[r * outputs + j] += sums[r][j];
}

void grouped_product(const T* x, const T* weight, const int64_t* offsets, T* out, int64_t rows, int64_t count, int64_t inputs,
                     int64_t outputs) {
    memset(out, 0, rows * outputs * sizeof(T));
    #pragma omp parallel for if (rows * inputs * outputs > 1 << 16)
    for (int64_t j = 0; j < outputs; j += WIDE)
        for (int64_t e = 0; e < count; e++) {
            const int64_t last = offsets[e + 1] < rows ? offsets[e + 1] : rows, width = outputs - j;
            const T* from = weight + e * inputs * outputs + j;
            for (int64_t i = offsets[e] > 0 ? offsets[e] : 0, step; i < last; i += step) {
                const T* row = x + i * inputs;
                T* to = out + i * outputs + j;
                step = width >= WIDE && last - i >= ROWS ? ROWS : 1;
                if (step > 1) tile(row, from, to, inputs, outputs, ROWS, WIDE);
                else if (width >= WIDE) tile(row, from, to, inputs, outputs, 1, WIDE);
                else tile(row, from, to, inputs, outputs, 1, width);
            }
        }
}
"""
grouped_product.register_kernel("cpu", opkit.c_kernel(SOURCE))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """Return the gradients; that of the rows is a grouped product, too."""
    x, weight, offsets = ctx.saved_tensors
    rows = torch.where(members(offsets, x.shape[0]), x, 0)
    return grouped_product(grad, weight.mT, offsets), rows.mT @ grad, None


grouped_product.register_autograd(_backward, setup_context=_setup)

_FLOAT, _FILLS = (torch.float32, torch.float64), ("normal", "integers", "ones", "zeros", "small")
OPKIT_CHECKS = {
    "gallery::grouped_product": {
        "args": (
            tensor("rows inputs", _FLOAT, fills=_FILLS, largest=65),
            tensor("count inputs outputs", _FLOAT, fills=_FILLS, largest=129),
            tensor("count+1", torch.int64, low=-1, high="rows+1"),
        )
    }
}
SIZES = [(64, 256, 512, 512), (8, 512, 1024, 1024)]


def arguments(count: int, rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of random groups."""
    sizes = torch.randint(count, (rows,)).bincount(minlength=count)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return torch.randn(rows, inputs), torch.randn(count, inputs, outputs) / inputs**0.5, offsets


def alternative(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``torch.nn.functional.grouped_mm``, whose strides must be multiples of 16 bytes."""
    return torch.nn.functional.grouped_mm(x, weight, offs=offsets[1:].int())


def main() -> None:
    """Compare with a product for each group, gradients too."""
    x, weight, offsets = arguments(5, 30, 20, 150)
    inputs = x.requires_grad_(), weight.requires_grad_()
    groups = zip(x.tensor_split(offsets[1:-1]), weight, strict=True)
    results = grouped_product(*inputs, offsets), torch.cat([rows @ matrix for rows, matrix in groups])
    torch.testing.assert_close(*results)
    ours, expected = (torch.autograd.grad(each.square().sum(), inputs) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
