"""In which turn tiles of keys add to the gradient of a block of queries, in Triton: the last keys first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("own", "others"))
def tile_turns(tiles, counts, theirs, their_counts, turns, own, others, SOME: tl.constexpr):
    """Of each tile in the list of tile ``program_id(0)`` how many of the tiles in its list are greater than ``program_id(0)``.

    ``tiles`` and ``counts`` are as :func:`opkit.attn.gpu.device.tile_lists.tile_lists` writes them, ``theirs`` and
    ``their_counts`` the lists the other way round; ``turns`` is as ``tiles``, and written where there is a tile.
    ``program_id(1)`` is batch * heads + head. All are contiguous.
    """
    mine = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * own + mine
    theirs += tl.program_id(1).to(tl.int64) * others * own
    their_counts += tl.program_id(1).to(tl.int64) * others * 2
    whole, total = tl.load(counts + 2 * row), tl.load(counts + 2 * row + 1)
    for start in range(0, others, SOME):
        place = start + tl.arange(0, SOME)
        there = (place < whole) | ((place >= others - total + whole) & (place < others))
        tile = tl.load(tiles + row * others + place, mask=there, other=0)
        their_whole = tl.load(their_counts + 2 * tile, mask=there, other=0)
        their_total = tl.load(their_counts + 2 * tile + 1, mask=there, other=0)
        found = tl.zeros([SOME], tl.int32)
        for first in range(0, tl.max(their_total, 0), SOME):
            step = (first + tl.arange(0, SOME))[None, :]
            index = tl.where(step < their_whole[:, None], step, own - 1 - step + their_whole[:, None])
            seen = step < their_total[:, None]
            each = tl.load(theirs + tile[:, None] * own + index, mask=seen, other=0)
            found += tl.sum((seen & (each > mine)).to(tl.int32), 1)
        tl.store(turns + row * others + place, found, mask=there)
