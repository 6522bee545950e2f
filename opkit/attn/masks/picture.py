"""Pictures of masks for notebooks: a row for each query, a column for each key, dark where the query sees the key."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

import torch
from torch import Tensor

from opkit import page
from opkit.attn.masks.logit_index import LogitIndex

_DEFAULT = 32  # queries and keys of a mask whose tensors do not say how many there are
_CELLS, _SAMPLES = 64, 512  # of a side: more queries or keys are sampled, and the samples of a cell averaged
_PIXELS = 256

# Where the fields of masks say how many queries and keys there are.
_QUERIES: dict[str, Callable[[Any], int]] = {
    "tensor": lambda t: t.shape[-2] if t.dim() > 1 else 1,
    "q_ids": lambda t: t.shape[-1],
    "cu_seqlens_q": lambda t: int(t[-1]),
    "block_mask": lambda mask: mask.seq_lengths[0],
}
_KEYS: dict[str, Callable[[Any], int]] = {
    "tensor": lambda t: t.shape[-1],
    "kv_ids": lambda t: t.shape[-1],
    "cu_seqlens_k": lambda t: int(t[-1]),
    "block_mask": lambda mask: mask.seq_lengths[1],
    "q_ids": _QUERIES["q_ids"],
    "cu_seqlens_q": _QUERIES["cu_seqlens_q"],
    "lengths": lambda t: max(_DEFAULT, 2 * int(t.max())),  # so that keys beyond the longest are in the picture
}


def sizes_of(mask: Any) -> tuple[int, int]:
    """Return the numbers of queries and keys that a mask's tensors have, or 32 if they do not say; a size of 1 says nothing."""
    fields = list(_fields(mask))
    queries, keys = (
        next((n for field in table for name, value in fields if name == field and (n := table[field](value)) > 1), None)
        for table in (_QUERIES, _KEYS)
    )
    return queries or keys or _DEFAULT, keys or queries or _DEFAULT


def _fields(mask: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a mask's fields, and of those of the masks in it."""
    for field in dataclasses.fields(mask) if dataclasses.is_dataclass(mask) else ():
        value = getattr(mask, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Tensor) or field.name == "block_mask":
                yield field.name, each
            else:
                yield from _fields(each)


def picture(mask: Any, sizes: tuple[int, int] | None = None) -> str | None:
    """Return a picture of the first batch and head as HTML; None if there is no pair, or the mask cannot be evaluated.

    Args:
        mask: a mask, whose ``at`` is called with a grid of indices.
        sizes: the numbers of queries and keys; by default those of :func:`sizes_of`.
    """
    try:
        queries, keys = sizes or sizes_of(mask)
        if not queries or not keys:
            return None
        device = next((value.device for _, value in _fields(mask) if isinstance(value, Tensor)), torch.device("cpu"))
        rows, columns = (_samples(n).to(device) for n in (queries, keys))
        zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
        seen = _visible(mask, LogitIndex(zero, zero, rows[:, None], columns[None], keys - queries))
        seen = seen.expand(len(rows), len(columns)).float().cpu()
    except Exception:  # a function of the user's can raise anything; the notebook shows the text
        return None
    cells = torch.nn.functional.adaptive_avg_pool2d(seen[None, None], (min(queries, _CELLS), min(keys, _CELLS)))[0, 0]
    sampled = max(queries, keys) > _CELLS
    share = f"{'about ' if max(queries, keys) > _SAMPLES else ''}{seen.mean():.0%}"
    caption = f"{queries:,} queries (rows), {keys:,} keys (columns): {share} of the pairs are visible"
    caption += "; a cell's shade is the share of its pairs" if sampled else ""
    name = escape(" ".join(repr(mask).split())[:200])
    return page.fragment(f"<figure>{_svg(cells, caption)}<figcaption>{name}<br>{caption}</figcaption></figure>")


def _samples(count: int) -> Tensor:
    return torch.linspace(0, count - 1, min(count, _SAMPLES), dtype=torch.float64).round().long()


def _visible(mask: Any, index: LogitIndex) -> Tensor:
    if getattr(mask, "additive", False):  # a floating tensor, whose minus infinities hide
        return index.of_all(mask.tensor) > float("-inf")
    return mask.at(index)


def _svg(cells: Tensor, caption: str) -> str:
    """Return the cells as rectangles: one for neighbours of a row that are equal."""
    high, wide = cells.shape
    parts = [
        f'<svg role="img" aria-label="{escape(caption)}" viewBox="0 0 {wide} {high}" width="{_PIXELS}" '
        f'height="{max(16, min(_PIXELS, _PIXELS * high // wide))}" preserveAspectRatio="none" shape-rendering="crispEdges" '
        'style="border: 1px solid currentColor; max-width: 100%" fill="currentColor">'
    ]
    for y, row in enumerate(cells.tolist()):
        x = 0
        for value, run in itertools.groupby(round(each, 2) for each in row):
            width = len(list(run))
            if value:
                parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="1" fill-opacity="{value:g}"/>')
            x += width
    return "".join([*parts, "</svg>"])
