"""Sorting of tokens by expert, for a mixture of experts: which token goes to which row of which expert's batch.

After routing, each token has ``k`` experts. The rows of all experts, one after another, are ``x[order // k]``, and those of
expert ``e`` are ``offsets[e] .. offsets[e + 1]``, as grouped matrix products take them (MegaBlocks,
https://arxiv.org/abs/2211.15841). Pairs of one expert stay in the order of tokens. torch sorts; the kernel counts. A router
is in examples/kernels/router.py, and the products are in grouped_product.py::

    python examples/gallery/moe_permute.py
"""

import torch
from hypothesis import strategies as st
from jaxtyping import Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::moe_permute")
def moe_permute(
    experts: Int64[Tensor, "tokens k"], count: int
) -> tuple[Int64[Tensor, "tokens*k"], Int64[Tensor, "count+1"]]:
    """Return the numbers of pairs ``token * k + place``, by expert, and where each expert's pairs begin, and the end."""
    flat = experts.flatten()
    sizes = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


SOURCE = """
void moe_permute(const int64_t* experts, int64_t count, int64_t* out0, int64_t* out1, int64_t experts_numel) {
    memset(out1, 0, (count + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < experts_numel; i++) {
        if (experts[i] < 0 || experts[i] >= count) {
            opk_fail("there is an expert %lld, and 0 to %lld are expected", (long long)experts[i], (long long)count - 1);
            return;
        }
        out1[experts[i] + 1]++;
    }
    for (int64_t e = 0; e < count; e++) out1[e + 1] += out1[e];
    for (int64_t i = 0; i < experts_numel; i++) out0[out1[experts[i]]++] = i; /* each offset ends where the next begins */
    for (int64_t e = count; e > 0; e--) out1[e] = out1[e - 1];
    out1[0] = 0;
}
"""
moe_permute.register_kernel("cpu", opkit.c_kernel(SOURCE))

OPKIT_CHECKS = {"gallery::moe_permute": {"args": (tensor("tokens k", torch.int64, low=0, high=3), st.integers(4, 6))}}
SIZES = [(4096, 2, 8), (4096, 8, 256)]


def arguments(tokens: int, k: int, count: int) -> tuple[Tensor, int]:
    """Return ``k`` different experts for each token."""
    return torch.rand(tokens, count).topk(k).indices, count


def alternative(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A stable ``argsort`` and ``bincount``."""
    flat = experts.flatten()
    return flat.argsort(stable=True), torch.nn.functional.pad(flat.bincount(minlength=count).cumsum(0), (1, 0))


def main() -> None:
    """Multiply the tokens of each expert by its number, and put the rows back."""
    experts, count = arguments(50, 2, 4)
    order, offsets = moe_permute(experts, count)
    torch.testing.assert_close((order, offsets), alternative(experts, count))
    x = torch.randn(50, 3)
    rows = x[order // 2]
    for each in range(count):
        rows[offsets[each] : offsets[each + 1]] *= each
    result = torch.empty_like(rows).index_copy_(0, order, rows).view(50, 2, 3)
    torch.testing.assert_close(result, x.unsqueeze(1) * experts.unsqueeze(-1))


if __name__ == "__main__":
    main()
