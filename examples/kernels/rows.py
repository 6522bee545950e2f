"""What kernels over rows share: how large a tile of rows a program takes, and sums over all rows without atomics.

A gradient of a weight is a sum over rows. Each program adds up its own rows and stores one partial sum; a second, small
kernel adds those, always in the same order, so that the result is the same in every run::

    python examples/kernels/rows.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit

LOW = [torch.float32, torch.bfloat16, torch.float16]
"""The dtypes of the kernels, which compute in float32."""
LANES, MOST_THREADS = (32 if torch.version.hip is None else 64), 1024
"""Threads of a warp, and of a program."""


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def tiles(shares: tuple[int, ...], largest: int = 32768, **constants: int) -> list[dict[str, int]]:
    """Configs for tiles of 1024 elements and more, of which a thread has one of ``shares``."""
    sizes = [1024 << power for power in range(6)]
    pairs = [(tile, tile // share) for tile in sizes if tile <= largest for share in shares]
    fit = [(tile, threads // LANES) for tile, threads in pairs if LANES <= threads <= MOST_THREADS]
    return [{"TILE": tile, "num_warps": warps, **constants} for tile, warps in fit]


TILES = tiles((16, 32, 8))
"""For kernels in which a program has one tile."""
PERSISTENT = [
    *tiles((16, 8), largest=8192, STAGES=2),
    *tiles((16,), largest=8192, STAGES=3),
    *({"TILE": 16384, "num_warps": 512 // LANES, "STAGES": stages} for stages in (1, 2)),
]
"""For kernels in which a program goes from tile to tile."""


def fitting(configs: list[dict[str, int]], d: int, *least: int) -> list[dict[str, int]]:
    """The configs whose tile is a row, or as many short rows as make it one of the sizes in ``least``."""
    wanted = {max(triton.next_power_of_2(d), size) for size in least}
    return [config for config in configs if config["TILE"] in wanted]


def chunked(tiles: tuple[tuple[int, int], ...] = ((4096, 16), (8192, 16), (2048, 8))) -> list[dict[str, int]]:
    """Configs for kernels that read a row twice: tiles of so many elements, of which a thread has so many."""
    sizes = [(tile, tile // share // LANES, 16 << power) for tile, share in tiles for power in range(10)]
    return [{"BLOCK": b, "ROWS": tile // b, "num_warps": warps} for tile, warps, b in sizes if b <= tile]


CHUNKED = chunked()


def cut(configs: list[dict[str, int]], d: int) -> list[dict[str, int]]:
    """The configs that take several whole rows, or one row in pieces."""
    whole = max(triton.next_power_of_2(d), 16)
    return [c for c in configs if c["BLOCK"] == whole or (c["BLOCK"] < whole and c["ROWS"] == 1)]


def programs(x: Tensor) -> int:
    """How many programs share the rows of a gradient: two for each multiprocessor, which fit on it together."""
    if x.device.type != "cuda":
        return 8
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count


def partial_sums(terms: Tensor, programs: int) -> Tensor:
    """Sums over rows: the ``p``-th is of rows ``p``, ``p + programs``, ``p + 2 * programs`` and so on."""
    rows = terms.flatten(0, -2) if terms.dim() > 1 else terms.unsqueeze(0)
    filled = F.pad(rows, (0, 0, 0, -rows.shape[0] % programs))
    return filled.unflatten(0, (-1, programs)).sum(0)


@opkit.custom_op("kernels::column_sums")
def column_sums(partial: Float[Tensor, "*batch n d"], dtype: torch.dtype) -> Float[Tensor, "*batch d"]:
    """Sum over the last but one dimension, in an order that depends on the sizes alone.

    Args:
        partial: ``(*batch, n, d)``, partial sums; added in its own dtype.
        dtype: of the result.

    Returns:
        ``(*batch, d)`` in ``dtype``.
    """
    return partial.sum(-2).to(dtype)


# Where a program has one row, the grid has as many programs as there are rows. A row's length is compiled in, so that
# nothing is masked where it is that of the tile.
@triton.jit
def within(row, column, batch, d: tl.constexpr, ROWS: tl.constexpr):
    """Which elements of a tile are elements of the matrix."""
    return (column < d)[None, :] if ROWS == 1 else (row < batch)[:, None] & (column < d)[None, :]


@triton.jit
def _column_sums(partial, out, n, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    matrix = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, n, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < n)[:, None] & (columns < d)[None, :]
        total += tl.load(partial + (matrix * n + rows)[:, None] * d + columns[None, :], mask=inside, other=0.0)
    tl.store(out + matrix * d + columns, tl.sum(total, 0), mask=columns < d)


# 128 rows of 32 columns: every warp reads 128 bytes of a row at a time, and d = 4096 gives each multiprocessor a program.
column_sums.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _column_sums,
        grid=lambda batch, d, COLUMNS: (triton.cdiv(d, COLUMNS), batch),
        ROWS=128,
        COLUMNS=32,
        num_warps=256 // LANES,
        examples=[{"partial": f"fp32[264, {d}]", "dtype": "bf16"} for d in (1024, 4096, 8192)],
    ),
    dtypes=[torch.float32],
)


def main() -> None:
    """Add up partial sums of rows; they are those of the rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    terms = torch.randn(1000, 64, device=device)
    total = column_sums(partial_sums(terms, 8), torch.float32)
    torch.testing.assert_close(total, terms.sum(0), rtol=1e-4, atol=1e-4)
    assert torch.equal(total, column_sums(partial_sums(terms, 8), torch.float32))


if __name__ == "__main__":
    main()
