"""Run-length encoding of rows: the value and the length of each run of equal elements.

Masks are stored so (COCO), and CTC's best path is the values of the runs, without blanks. ``torch.unique_consecutive`` takes
one row, and its result has a size that depends on the data; here results are as long as a row, zeros follow the last run, and
the number of runs is returned, so that rows are batched and nothing waits for a size::

    python examples/gallery/run_length.py
"""

import torch
from jaxtyping import Int64
from torch import Tensor

import opkit
from opkit.testing import tensor

Rows = Int64[Tensor, "*batch n"]


@opkit.custom_op("gallery::run_length")
def run_length(x: Rows) -> tuple[Rows, Rows, Int64[Tensor, "*batch"]]:
    """Return the values of the runs, their lengths, and how many there are in each row."""
    begins = torch.cat((torch.ones_like(x[..., :1], dtype=torch.bool), x[..., 1:] != x[..., :-1]), -1)
    begins = begins[..., : x.shape[-1]]
    run = begins.cumsum(-1) - 1
    values = torch.zeros_like(x).scatter(-1, run, x)
    lengths = torch.zeros_like(x).scatter_add(-1, run, torch.ones_like(x))
    return values.contiguous(), lengths.contiguous(), begins.sum(-1)


SOURCE = """
void run_length(const int64_t* x, int64_t* out0, int64_t* out1, int64_t* out2, int64_t batch, int64_t n) {
    #pragma omp parallel for if (batch * n > 1 << 15)
    for (int64_t i = 0; i < batch; i++) {
        const int64_t* row = x + i * n;
        int64_t runs = 0, *values = out0 + i * n, *lengths = out1 + i * n;
        for (int64_t first = 0, end; first < n; first = end, runs++) {
            for (end = first + 1; end < n && row[end] == row[first];) end++;
            values[runs] = row[first];
            lengths[runs] = end - first;
        }
        out2[i] = runs;
        memset(values + runs, 0, (n - runs) * sizeof(int64_t));
        memset(lengths + runs, 0, (n - runs) * sizeof(int64_t));
    }
}
"""
run_length.register_kernel("cpu", opkit.c_kernel(SOURCE))

OPKIT_CHECKS = {"gallery::run_length": {"args": (tensor("*batch n", torch.int64, low=0, high=2),)}}
SIZES = [(64, 4096), (1, 100_000)]


def arguments(batch: int, n: int) -> tuple[Tensor]:
    """Return rows of 0 and 1 with runs of 20 elements, about."""
    return ((torch.rand(batch, n) < 0.05).cumsum(-1) % 2,)


def alternative(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """``torch.unique_consecutive``, row by row."""
    return [torch.unique_consecutive(row, return_counts=True) for row in x]


def main() -> None:
    """Compare with torch, and decode a path of CTC: runs without blanks."""
    (x,) = arguments(1, 500)
    values, lengths, runs = run_length(x)
    torch.testing.assert_close((values[0, : runs[0]], lengths[0, : runs[0]]), alternative(x)[0])
    values, _, _ = run_length(torch.tensor([0, 3, 3, 0, 3, 5, 5, 0]))
    assert values[values > 0].tolist() == [3, 3, 5]


if __name__ == "__main__":
    main()
