"""Exact Euclidean distance transform: for each pixel, the squared distance to the nearest background pixel.

Losses on boundaries of segmentations, skeletons and watersheds need it. First comes the distance ``g`` within each column,
then ``min_i (x - i)^2 + g[y, i]^2`` along each row. The reference takes all pairs of a row; the kernel builds the lower
envelope of the parabolas, in linear time (Meijster, Roerdink and Hesselink, 2000)::

    python examples/gallery/distance_transform.py
"""

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::distance_transform")
def distance_transform(mask: Bool[Tensor, "*batch h w"]) -> Int64[Tensor, "*batch h w"]:
    """Return squared distances; 0 where ``mask`` is false, and ``(h + w) ** 2`` in an image without a false pixel."""
    h, w = mask.shape[-2:]
    if mask.numel() == 0:
        return mask.long()
    rows, columns = (torch.arange(size, device=mask.device) for size in (h, w))
    above = torch.where(mask, -h - w, rows.unsqueeze(1)).cummax(-2).values
    below = torch.where(mask, 2 * h + w, rows.unsqueeze(1)).flip(-2).cummin(-2).values.flip(-2)
    near = torch.minimum(rows.unsqueeze(1) - above, below - rows.unsqueeze(1)).clamp(max=h + w).square()
    return (near.unsqueeze(-2) + (columns.unsqueeze(1) - columns).square()).amin(-1).contiguous()


SOURCE = """
static int64_t at(const int64_t* near, int64_t x, int64_t i) { return (x - i) * (x - i) + near[i]; }

/* near: squared distances within columns; site[k] is the nearest column from begin[k] to begin[k + 1] - 1. */
static void row(const int64_t* near, int64_t* out, int64_t* site, int64_t* begin, int64_t w) {
    int64_t k = 0;
    site[0] = begin[0] = 0;
    for (int64_t u = 1; u < w; u++) {
        while (k >= 0 && at(near, begin[k], site[k]) > at(near, begin[k], u)) k--;
        if (k < 0) {
            site[k = 0] = u;
            continue;
        }
        const int64_t i = site[k], first = 1 + (u * u - i * i + near[u] - near[i]) / (2 * (u - i));
        if (first < w) k++, site[k] = u, begin[k] = first;
    }
    for (int64_t x = w - 1; x >= 0; x--) {
        out[x] = at(near, x, site[k]);
        if (x == begin[k]) k--;
    }
}

void distance_transform(const bool* mask, int64_t* out, int64_t batch, int64_t h, int64_t w) {
    const int64_t far = h + w;
    #pragma omp parallel if (batch * h * w > 1 << 14)
    {
        int64_t* near = (int64_t*)malloc(((h + 2) * w + 1) * sizeof(int64_t));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) {
            const bool* image = mask + i * h * w;
            for (int64_t y = 0; y < h; y++)
                for (int64_t x = 0; x < w; x++) {
                    const int64_t before = y > 0 ? near[(y - 1) * w + x] + 1 : far;
                    near[y * w + x] = !image[y * w + x] ? 0 : before < far ? before : far;
                }
            for (int64_t y = h - 2; y >= 0; y--)
                for (int64_t x = 0; x < w; x++) {
                    const int64_t after = near[(y + 1) * w + x] + 1;
                    near[y * w + x] = near[y * w + x] < after ? near[y * w + x] : after;
                }
            for (int64_t j = 0; j < h * w; j++) near[j] *= near[j];
            for (int64_t y = 0; y < h && w > 0; y++)
                row(near + y * w, out + (i * h + y) * w, near + h * w, near + (h + 1) * w, w);
        }
        free(near);
    }
}
"""
distance_transform.register_kernel("cpu", opkit.c_kernel(SOURCE))

OPKIT_CHECKS = {"gallery::distance_transform": {"args": (tensor("*batch h w", torch.bool),)}}
SIZES = [(1, 256, 256), (16, 96, 96)]


def arguments(batch: int, h: int, w: int) -> tuple[Tensor]:
    """Return masks with large foregrounds: smooth noise above a low level."""
    noise = torch.nn.functional.avg_pool2d(torch.randn(batch, h + 12, w + 12), 13, 1)
    return (noise > -0.08,)


def alternative(mask: Tensor) -> Tensor:
    """``scipy.ndimage.distance_transform_edt``, image by image."""
    from scipy import ndimage

    found = [torch.from_numpy(ndimage.distance_transform_edt(each.numpy())) for each in mask]
    return torch.stack(found).square().round().long()


def main() -> None:
    """Measure the distances in a square and from a single point, and compare with the reference."""
    mask = torch.ones(5, 5, dtype=torch.bool)
    assert (distance_transform(mask) == 100).all()
    mask[2, 0] = False
    assert distance_transform(mask)[0].tolist() == [4, 5, 8, 13, 20]
    (mask,) = arguments(3, 31, 40)
    assert torch.equal(distance_transform(mask), distance_transform.reference(mask))


if __name__ == "__main__":
    main()
