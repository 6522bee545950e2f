"""Levenshtein distance of pairs of sequences: the least number of insertions, deletions and substitutions.

``D[i, j] = min(D[i-1, j] + 1, D[i, j-1] + 1, D[i-1, j-1] + (a[i] != b[j]))``, by Wagner and Fischer (1974). Word error rates
are computed from it. The reference goes through ``a`` in a loop; within a row, insertions are a cumulative minimum. The
kernel stores three antidiagonals, and takes a pair for each thread at a time::

    python examples/gallery/edit_distance.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::edit_distance")
def edit_distance(
    a: Int64[Tensor, "*batch n"],
    b: Int64[Tensor, "*batch m"],
    a_len: Int64[Tensor, "*batch"],
    b_len: Int64[Tensor, "*batch"],
) -> Int64[Tensor, "*batch"]:
    """Return the distance of the first ``a_len`` elements of each ``a`` to the first ``b_len`` of ``b``.

    Lengths below 0 count as 0, and those beyond a sequence as its length.
    """
    n, m = a.shape[-1], b.shape[-1]
    at = torch.arange(m + 1, device=a.device)
    row = at.expand(*a.shape[:-1], m + 1)
    rows = [row]
    for i in range(n):
        replaced = row[..., :-1] + (b != a[..., i : i + 1])
        best = torch.cat((row[..., :1] + 1, torch.minimum(row[..., 1:] + 1, replaced)), -1)
        row = at + (best - at).cummin(-1).values
        rows.append(row)
    last = a_len.clamp(0, n) * (m + 1) + b_len.clamp(0, m)
    return torch.stack(rows, -2).flatten(-2).gather(-1, last.unsqueeze(-1)).squeeze(-1)


edit_distance.register_fake(lambda a, b, a_len, b_len: torch.empty_like(a_len, memory_format=torch.contiguous_format))

# By antidiagonals, whose elements do not depend on one another: the loop over i is vectorised.
SOURCE = """
static int64_t distance(const int64_t* a, int64_t n, const int64_t* b, int64_t m, int64_t* reversed, int32_t* rows) {
    for (int64_t j = 0; j < m; j++) reversed[j] = b[m - 1 - j];
    int32_t *before = rows, *last = rows + n + 1, *next = rows + 2 * (n + 1);
    for (int64_t k = 0; k <= n + m; k++) { /* next[i] is D[i, k - i] */
        const int64_t* match = reversed + m - k; /* match[i] is b[k - i - 1] */
        const int64_t begin = k > m ? k - m : 1, end = k <= n ? k : n + 1;
        if (k <= m) next[0] = k;
        if (k <= n) next[k] = k;
        for (int64_t i = begin; i < end; i++) {
            const int32_t replaced = before[i - 1] + (a[i - 1] != match[i]);
            const int32_t gap = (last[i - 1] < last[i] ? last[i - 1] : last[i]) + 1;
            next[i] = replaced < gap ? replaced : gap;
        }
        int32_t* oldest = before;
        before = last, last = next, next = oldest;
    }
    return last[n];
}

static int64_t clamped(int64_t length, int64_t size) { return length < 0 ? 0 : length < size ? length : size; }

void edit_distance(const int64_t* a, const int64_t* b, const int64_t* a_len, const int64_t* b_len, int64_t* out,
                   int64_t batch, int64_t n, int64_t m) {
    #pragma omp parallel if (batch * n * m > 1 << 16)
    {
        int32_t* rows = (int32_t*)malloc(3 * (n + 1) * sizeof(int32_t));
        int64_t* reversed = (int64_t*)malloc((m + 1) * sizeof(int64_t));
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < batch; i++)
            out[i] = distance(a + i * n, clamped(a_len[i], n), b + i * m, clamped(b_len[i], m), reversed, rows);
        free(rows);
        free(reversed);
    }
}
"""
edit_distance.register_kernel("cpu", opkit.c_kernel(SOURCE))


# A program has a pair of sequences, whose last antidiagonal is in registers, by the element of a.
@triton.jit
def _edit_distance(a, b, a_len, b_len, out, n, m, BLOCK: tl.constexpr):
    i, pair = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64)
    rows = tl.minimum(tl.maximum(tl.load(a_len + pair), 0), n).to(tl.int32)
    columns = tl.minimum(tl.maximum(tl.load(b_len + pair), 0), m).to(tl.int32)
    symbol = tl.load(a + pair * n + i - 1, (i > 0) & (i <= n), other=0)
    last, corner = i, i
    for k in range(rows + columns + 1):
        up = tl.gather(last, tl.maximum(i - 1, 0), 0)
        other = tl.load(b + pair * m + k - i - 1, (k > i) & (k - i <= m), other=0)
        now = tl.minimum(tl.minimum(up, last) + 1, corner + (symbol != other).to(tl.int32))
        last, corner = tl.where((i == 0) | (k == i), k, now), up  # which is the next diagonal's corner
    tl.store(out + pair, tl.sum(tl.where(i == rows, last, 0), 0))


TRITON = opkit.triton_kernel(
    _edit_distance,
    grid=lambda batch: batch,
    BLOCK=lambda n: triton.next_power_of_2(n + 1),
    num_warps=lambda BLOCK: min(max(BLOCK // 64, 1), 16),
    examples=[{"a": "i64[256, 1000]", "b": "i64[256, 1000]", "a_len": "i64[256]", "b_len": "i64[256]"}],
)
edit_distance.register_kernel("cuda", TRITON, when=lambda a: a.shape[-1] < 4096)

_SYMBOLS, _LENGTHS = {"low": 0, "high": 3}, {"low": -1, "high": 9}
OPKIT_CHECKS = {
    "gallery::edit_distance": {
        "args": (
            tensor("*batch n", torch.int64, **_SYMBOLS),
            tensor("*batch m", torch.int64, **_SYMBOLS),
            tensor("*batch", torch.int64, **_LENGTHS),
            tensor("*batch", torch.int64, **_LENGTHS),
        )
    }
}
SIZES = [(64, 100), (8, 500)]
GPU_SIZES = [(256, 1000), (4096, 200)]


def arguments(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sequences of words of a small vocabulary, up to ``length`` long."""
    a, b = torch.randint(0, 30, (2, batch, length))
    a_len, b_len = torch.randint(length // 2, length + 1, (2, batch))
    return a, b, a_len, b_len


def alternative(a: Tensor, b: Tensor, a_len: Tensor, b_len: Tensor) -> Tensor:
    """The reference: a loop over one sequence, with a cumulative minimum along the other."""
    return edit_distance.reference(a, b, a_len, b_len)


def main() -> None:
    """Compare two words, and many sequences with the reference."""
    words = [torch.tensor([[ord(c) for c in word]]) for word in ("kitten", "sitting")]
    assert edit_distance(*words, torch.tensor([6]), torch.tensor([7])).tolist() == [3]
    pairs = arguments(5, 30)
    assert torch.equal(edit_distance(*pairs), alternative(*pairs))


if __name__ == "__main__":
    main()
