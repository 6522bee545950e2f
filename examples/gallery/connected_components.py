"""Connected components of binary images: each foreground pixel gets the label of its component, the background 0.

A component's label is 1 plus the row-major index of its first pixel, so labels need no second numbering, and equal masks have
equal labels. Neighbours share an edge, or with ``diagonal=True`` a corner. The reference passes least labels on until nothing
changes; the kernel joins runs of pixels that touch in a forest (He, Chao and Suzuki, 2008), in two passes::

    python examples/gallery/connected_components.py
"""

import torch
from hypothesis import strategies as st
from jaxtyping import Bool, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::connected_components")
def connected_components(mask: Bool[Tensor, "*batch h w"], diagonal: bool = False) -> Int64[Tensor, "*batch h w"]:
    """Return the label of each pixel; ``mask`` is true for the foreground."""
    h, w = mask.shape[-2:]
    if mask.numel() == 0:
        return mask.long()
    background = h * w
    index = torch.arange(background, device=mask.device).view(h, w)
    labels = torch.where(mask, index, background)
    while True:
        near = torch.nn.functional.pad(labels, (1, 1, 1, 1), value=background)
        least = torch.minimum(torch.minimum(near[..., 1:-1, :-2], near[..., 1:-1, 2:]), labels)
        rows = torch.nn.functional.pad(least if diagonal else labels, (0, 0, 1, 1), value=background)
        least = torch.minimum(torch.minimum(rows[..., :-2, :], rows[..., 2:, :]), least)
        spread = torch.where(mask, least, background)
        if torch.equal(spread, labels):
            return torch.where(mask, labels + 1, 0)
        labels = spread


connected_components.register_fake(
    lambda mask, diagonal=False: torch.empty(mask.shape, dtype=torch.int64, device=mask.device)
)

SOURCE = """
typedef struct { int64_t first, end, parent; } Run; /* pixels next to one another in a row */

static int64_t root(Run* runs, int64_t i) {
    while (runs[i].parent != i) i = runs[i].parent = runs[runs[i].parent].parent;
    return i;
}

static void join(Run* runs, int64_t i, int64_t j) {
    i = root(runs, i);
    j = root(runs, j);
    if (i < j) runs[j].parent = i; else runs[i].parent = j; /* the root is the first run */
}

static void image(const bool* mask, int64_t* out, int64_t h, int64_t w, bool diagonal, Run* runs) {
    int64_t count = 0, above = 0;
    for (int64_t y = 0; y < h; y++) {
        const int64_t begin = count;
        for (int64_t i = y * w; i < (y + 1) * w;) {
            while (i < (y + 1) * w && !mask[i]) i++;
            const int64_t first = i;
            while (i < (y + 1) * w && mask[i]) i++;
            if (i > first) runs[count] = (Run){first, i, count}, count++;
        }
        for (int64_t i = begin, j = above; i < count && j < begin;) {
            const int64_t end = runs[j].end + w;
            if (runs[j].first + w < runs[i].end + diagonal && runs[i].first < end + diagonal) join(runs, i, j);
            if (end < runs[i].end) j++; else i++;
        }
        above = begin;
    }
    memset(out, 0, h * w * sizeof(int64_t));
    for (int64_t i = 0; i < count; i++) {
        const int64_t label = 1 + runs[root(runs, i)].first;
        for (int64_t at = runs[i].first; at < runs[i].end; at++) out[at] = label;
    }
}

void connected_components(const bool* mask, bool diagonal, int64_t* out, int64_t batch, int64_t h, int64_t w) {
    #pragma omp parallel if (batch * h * w > 1 << 14)
    {
        Run* runs = (Run*)malloc((h * (w / 2 + 1) + 1) * sizeof(Run));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) image(mask + i * h * w, out + i * h * w, h, w, diagonal, runs);
        free(runs);
    }
}
"""
connected_components.register_kernel("cpu", opkit.c_kernel(SOURCE))

OPKIT_CHECKS = {"gallery::connected_components": {"args": (tensor("*batch h w", torch.bool), st.booleans())}}
SIZES = [(1, 512, 512), (16, 128, 128)]


def arguments(batch: int, h: int, w: int) -> tuple[Tensor, bool]:
    """Return blobs: smooth noise above its mean."""
    noise = torch.nn.functional.avg_pool2d(torch.randn(batch, h + 4, w + 4), 5, 1)
    return noise > 0, False


def alternative(mask: Tensor, diagonal: bool) -> Tensor:
    """``scipy.ndimage.label``, image by image; it numbers components from 1 on."""
    from scipy import ndimage

    structure = torch.ones(3, 3).numpy() if diagonal else None
    return torch.stack([torch.from_numpy(ndimage.label(each.numpy(), structure)[0]) for each in mask])


def main() -> None:
    """Label two rings that touch at a corner, and compare blobs with the reference."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert connected_components(mask).unique().tolist() == [0, 1, 11]
    assert connected_components(mask, diagonal=True).unique().tolist() == [0, 1]
    mask, diagonal = arguments(2, 40, 50)
    assert torch.equal(connected_components(mask, diagonal), connected_components.reference(mask, diagonal))


if __name__ == "__main__":
    main()
