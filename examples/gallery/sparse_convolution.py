"""Sparse convolution: features at the occupied voxels of a grid, each a sum over the occupied ones among its neighbours.

``out[i] = sum_k features[neighbors[i, k]] @ weight[k]``, where -1 stands for no neighbour (submanifold convolutions, Graham
et al., https://arxiv.org/abs/1711.10275). Of 27 neighbours in a point cloud a third exists. In torch it is a gather, a matrix
product and a scattered addition for each of the 27; the kernel adds up each voxel's rows in the cache. The gradient is
derived::

    python examples/gallery/sparse_convolution.py
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::sparse_convolution")
def sparse_convolution(
    features: Float[Tensor, "n inputs"],
    neighbors: Int64[Tensor, "m places"],
    weight: Float[Tensor, "places inputs outputs"],
) -> Float[Tensor, "m outputs"]:
    """Return the features of ``m`` voxels; ``neighbors`` has the rows of ``features`` at each place around them."""
    places, inputs, outputs = weight.shape
    padded = torch.nn.functional.pad(features, (0, 0, 1, 0))  # row 0 is that of no neighbour
    rows = padded.index_select(0, neighbors.flatten() + 1)
    return rows.view(neighbors.shape[0], places * inputs) @ weight.reshape(places * inputs, outputs)


SOURCE = """
void sparse_convolution(const T* features, const int64_t* neighbors, const T* weight, T* out, int64_t n, int64_t inputs,
                        int64_t m, int64_t places, int64_t outputs) {
    for (int64_t i = 0; i < m * places; i++)
        if (neighbors[i] < -1 || neighbors[i] >= n) {
            opk_fail("there is a neighbour %lld, and -1 to %lld are expected", (long long)neighbors[i], (long long)n - 1);
            return;
        }
    #pragma omp parallel for if (m * inputs * outputs > 1 << 14)
    for (int64_t i = 0; i < m; i++) {
        T* restrict sum = out + i * outputs;
        memset(sum, 0, outputs * sizeof(T));
        for (int64_t k = 0; k < places; k++) {
            if (neighbors[i * places + k] < 0) continue;
            const T *row = features + neighbors[i * places + k] * inputs, *w = weight + k * inputs * outputs;
            int64_t c = 0;
            for (; c + 4 <= inputs; c += 4, w += 4 * outputs)
                for (int64_t j = 0; j < outputs; j++)
                    sum[j] += row[c] * w[j] + row[c + 1] * w[outputs + j] + row[c + 2] * w[2 * outputs + j]
                              + row[c + 3] * w[3 * outputs + j];
            for (; c < inputs; c++, w += outputs)
                for (int64_t j = 0; j < outputs; j++) sum[j] += row[c] * w[j];
        }
    }
}
"""
sparse_convolution.register_kernel("cpu", opkit.c_kernel(SOURCE))

_DTYPES = (torch.float32, torch.float64)
OPKIT_CHECKS = {
    "gallery::sparse_convolution": {
        "args": (
            tensor("n inputs", _DTYPES),
            tensor("m places", torch.int64, low=-1, high="n-1"),
            tensor("places inputs outputs", _DTYPES),
        )
    }
}
SIZES = [(20_000, 16, 16), (10_000, 32, 32)]


def arguments(m: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return voxels of which a third of the neighbours exists, near in memory."""
    near = torch.arange(m).unsqueeze(1) + torch.randint(-500, 500, (m, 27))
    neighbors = torch.where(torch.rand(m, 27) < 1 / 3, near.clamp(0, m - 1), -1)
    return torch.randn(m, inputs), neighbors, torch.randn(27, inputs, outputs)


def alternative(features: Tensor, neighbors: Tensor, weight: Tensor) -> Tensor:
    """A gather, a product and an ``index_add`` for each place, with its pairs alone."""
    out = features.new_zeros(len(neighbors), weight.shape[2])
    for k in range(weight.shape[0]):
        (at,) = (neighbors[:, k] >= 0).nonzero(as_tuple=True)
        out.index_add_(0, at, features[neighbors[at, k]] @ weight[k])
    return out


def main() -> None:
    """Compare with products by place, gradients too."""
    features, neighbors, weight = arguments(40, 6, 5)
    inputs = features.requires_grad_(), weight.requires_grad_()
    results = [f(features, neighbors, weight) for f in (sparse_convolution, alternative)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    ours, expected = (torch.autograd.grad(each.sum(), inputs) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
