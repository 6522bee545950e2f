"""Non-maximum suppression of boxes: of boxes that overlap, the one with the best score stays.

Boxes are visited in the order of falling scores (equal ones in their own order); each that is still there removes all later
ones whose intersection over union with it exceeds the threshold (as in R-CNN, https://arxiv.org/abs/1311.2524). torchvision's
``nms`` returns indices, whose number depends on the data; here the result is a mask, so that images can be batched, and the
operator compiled without a graph break: ``keep.nonzero()`` gives the indices::

    python examples/gallery/nms.py
"""

import torch
from hypothesis import strategies as st
from jaxtyping import Bool, Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::nms")
def nms(
    boxes: Float[Tensor, "*batch n 4"], scores: Float[Tensor, "*batch n"], threshold: float = 0.5
) -> Bool[Tensor, "*batch n"]:
    """Return which boxes stay; a box is ``(x1, y1, x2, y2)``."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    low, high = boxes.gather(-2, order.unsqueeze(-1).expand(boxes.shape)).split(2, -1)
    area = (high - low).prod(-1)
    size = torch.minimum(high.unsqueeze(-2), high.unsqueeze(-3)) - torch.maximum(low.unsqueeze(-2), low.unsqueeze(-3))
    shared = size.clamp(min=0).prod(-1)
    over = (shared / (area.unsqueeze(-1) + area.unsqueeze(-2) - shared) > threshold).triu(1)
    keep = torch.ones_like(scores, dtype=torch.bool)
    for i in range(scores.shape[-1]):
        keep = keep & ~(over[..., i, :] & keep[..., i : i + 1])
    return torch.zeros_like(keep).scatter(-1, order, keep).contiguous()


nms.register_fake(
    lambda boxes, scores, threshold=0.5: torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
)

# The sorted boxes are stored by coordinate, so that one box is compared with many at a time.
SOURCE = """
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

static void one_image(const T* boxes, const T* scores, bool* out, int64_t n, T threshold) {
    std::vector<int64_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [=](int64_t i, int64_t j) {
        return scores[i] > scores[j] || (std::isnan(scores[i]) && !std::isnan(scores[j]));  // as torch sorts
    });
    std::vector<T> coordinates(5 * n);
    std::vector<char> removed(n);
    T *x1 = coordinates.data(), *y1 = x1 + n, *x2 = y1 + n, *y2 = x2 + n, *area = y2 + n;
    for (int64_t i = 0; i < n; i++) {
        const T* box = boxes + 4 * order[i];
        x1[i] = box[0], y1[i] = box[1], x2[i] = box[2], y2[i] = box[3];
        area[i] = (x2[i] - x1[i]) * (y2[i] - y1[i]);
    }
    char* gone = removed.data();
    for (int64_t i = 0; i < n; i++) {
        out[order[i]] = !gone[i];
        if (gone[i]) continue;
        const T left = x1[i], top = y1[i], right = x2[i], bottom = y2[i], own = area[i];
        for (int64_t j = i + 1; j < n; j++) {
            const T width = std::min(right, x2[j]) - std::max(left, x1[j]);
            const T height = std::min(bottom, y2[j]) - std::max(top, y1[j]);
            const T shared = (width < 0 ? 0 : width) * (height < 0 ? 0 : height);
            gone[j] |= shared / (own + area[j] - shared) > threshold;
        }
    }
}

extern "C" void nms(const T* boxes, const T* scores, double threshold, bool* out, int64_t batch, int64_t n) {
    #pragma omp parallel for if (batch > 1)
    for (int64_t i = 0; i < batch; i++) one_image(boxes + i * n * 4, scores + i * n, out + i * n, n, (T)threshold);
}
"""
nms.register_kernel("cpu", opkit.cpp_kernel(SOURCE, flags=["-ffp-contract=off"]))

_DTYPES = (torch.float32, torch.float64)
OPKIT_CHECKS = {
    "gallery::nms": {
        "args": (tensor("*batch n 4", _DTYPES), tensor("*batch n", _DTYPES), st.sampled_from([0.3, 0.5, 0.7]))
    }
}
SIZES = [(1000,), (5000,)]


def arguments(n: int) -> tuple[Tensor, Tensor, float]:
    """Return boxes of a detector for one image of 640 by 640 pixels."""
    corner, size = 600 * torch.rand(n, 2), 8 + 120 * torch.rand(n, 2)
    return torch.cat((corner, corner + size), 1), torch.rand(n), 0.5


def alternative(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """``torchvision.ops.nms``."""
    from torchvision.ops import nms as torchvision_nms

    return torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, torchvision_nms(boxes, scores, threshold), True)


def main() -> None:
    """Compare with the reference, one image and three at once."""
    several = [torch.stack(each) for each in zip(*(arguments(200)[:2] for _ in range(3)), strict=True)]
    keep = nms(*several, 0.3)
    assert torch.equal(keep, nms.reference(*several, 0.3))
    assert torch.equal(keep[1], nms(several[0][1], several[1][1], 0.3))
    assert 0 < keep.sum() < keep.numel()


if __name__ == "__main__":
    main()
