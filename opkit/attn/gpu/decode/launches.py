"""Launches of the decoding kernel, of the kernel that merges splits, and the search for the fastest division of calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.gpu import functions, plans, search
from opkit.attn.gpu.decode import plan
from opkit.attn.gpu.decode.plan import CHANGES, Change, DecodeBlocks, DecodeShape, Device, parts, power
from opkit.attn.gpu.search import Tiles, TileSearch
from opkit.kernels.triton.named import Named
from opkit.kernels.tuning.configs import Config
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch, PreparedSeries, ScratchTensor

_DECODE = Named("opkit.attn.gpu.decode.device.decode", "decode")
_MERGE = Named("opkit.attn.gpu.decode.device.merge", "merge")
_DECODED = ("q", "k", "v", "out", "lse", "sinks", "partial", "table", "lengths", "starts", "k_scale", "v_scale")
OF_PROGRAMS = (*plans.TENSORS[1:], *functions.TENSORS)  #: tensors; ``plans.TENSORS[0]`` are lengths
_UNUSED = {
    **dict.fromkeys(OF_PROGRAMS),
    **{f"{name}_stride_{dim}": None for name in OF_PROGRAMS for dim in range(4)},
    **{f"n{i}": None for i in range(plans.NUMBERS)},
    **{f"m{i}": None for i in range(functions.NUMBERS)},
}
"""What the kernel takes for programs of masks and biases, where there are none."""
_MERGED = ("partial", "out", "lse", "sinks", "lengths", "starts")
_MERGE_CONSTANTS = ("GROUP", "DV", "DV_WIDE", "DV_REST", "ROWS", "BATCH", "SINKS", "PDL")
KERNEL = "decode"
SOURCES = (
    "device/tile.py",
    "decode/device/rows.py",
    "decode/device/decode.py",
    "decode/device/merge.py",
    "decode/plan.py",
)
Divide = Callable[..., DecodeBlocks]
Results = Mapping[str, Callable[[], Tensor]]
# Relative to what the rules say, since these give other numbers to calls of one class.
_CONFIGS = tuple(
    Config({"BLOCK_TIMES": each.block, "STAGES_MORE": each.stages, "WARPS_TIMES": each.warps}) for each in CHANGES
)


class DecodeLaunches(NamedTuple):
    """The launches of calls of some shapes.

    Attributes:
        decode: of the kernel in :mod:`opkit.attn.gpu.decode.device.decode`.
        merge: of that in :mod:`opkit.attn.gpu.decode.device.merge`; None where there is one split.
        partial: elements of what is merged.
    """

    decode: PreparedLaunch
    merge: PreparedLaunch | None
    partial: int

    def series(self, names: Sequence[str], results: Results) -> PreparedSeries:
        """Return the launches by one call, which allocates.

        Args:
            names: q, k, v and what else of ``_DECODED`` and ``OF_PROGRAMS`` each call has.
            results: what makes out and lse.
        """
        others = {} if "sinks" in names else {"sinks": "lse"}
        if self.merge is None:
            return PreparedSeries([self.decode], names, results, {}, others | {"partial": "lse"})
        rooms = {"partial": ScratchTensor((self.partial,), torch.float32)}
        return PreparedSeries([self.decode, self.merge], names, results, rooms, others)


def launches_of(
    blocks: DecodeBlocks, constants: dict[str, Any], slots: int, kv_heads: int, height: int, numbers: dict[str, Any]
) -> DecodeLaunches:
    """Return the launches of a division.

    Args:
        blocks: the division.
        constants: of :func:`constants_of`, and the others that ``decode`` has.
        slots: of tiles, for each head of keys.
        kv_heads: heads of keys of a sequence.
        height: the most rows that a tile has.
        numbers: the other values that ``decode`` takes.
    """
    tiles = slots * kv_heads
    shared = {"slots": slots, "splits": blocks.splits, "kv_heads": kv_heads}
    shared |= {"keys": numbers["keys"]} if "keys" in numbers else {}
    kernel = _kernel(blocks.warps, blocks.stages, tuple(constants.items()))
    names = (*_DECODED, *OF_PROGRAMS) if _has_programs(constants) else _DECODED
    numbers = {**numbers, **shared, "programs": tiles * blocks.splits}
    if blocks.splits == 1:
        return DecodeLaunches(PreparedLaunch(kernel, names, numbers), None, 0)
    width = constants["DV_WIDE"] + constants["DV_REST"] + 2
    merge = merged(constants, {**shared, "height": height})
    return DecodeLaunches(PreparedLaunch(kernel, names, numbers), merge, tiles * blocks.splits * blocks.rows * width)


def _has_programs(constants: Mapping[str, Any]) -> bool:
    return bool(constants["MASK"] or constants["BIAS"])


def merged(constants: dict[str, Any], numbers: dict[str, int]) -> PreparedLaunch:
    """Return the launch that merges splits; its tensors are partial results, out, lse, sinks, and of pages lengths and starts.

    Args:
        constants: of :func:`constants_of`, and the others that ``merge`` has.
        numbers: slots, splits, kv_heads, the rows of a tile as ``height``, and of pages the most keys.
    """
    named = tuple((n, constants[n]) for n in _MERGE_CONSTANTS)
    kernel = _merging(power(numbers["splits"]), constants["PAGE"] > 0, named)
    programs = numbers["slots"] * numbers["kv_heads"] * numbers["height"]
    return PreparedLaunch(kernel, _MERGED, {**numbers, "programs": programs})


def constants_of(
    blocks: DecodeBlocks, group: int, sizes: tuple[int, int], compute: torch.dtype, gpu: Device
) -> dict[str, Any]:
    """Return the constants that follow from a division, ``group`` query heads to one of keys, and the sizes of heads."""
    (wide, rest), (wide_v, rest_v) = parts(sizes[0]), parts(sizes[1])
    return {
        "GROUP": group, "D": sizes[0], "D_WIDE": wide, "D_REST": rest, "DV": sizes[1], "DV_WIDE": wide_v,
        "DV_REST": rest_v, "ROWS": blocks.rows, "BLOCK": blocks.block, "SPLIT": blocks.splits > 1,
        "PDL": gpu.overlaps, "COMPUTE": torch.float32 if gpu.interprets else compute,
        "PRECISION": gpu.precision if compute == torch.float32 else "tf32",
    }  # fmt: skip


@functools.cache
def _kernel(warps: int, stages: int, constants: tuple[tuple[str, Any], ...]) -> TritonKernel:
    named = dict(constants)
    paged = named["PAGE"] > 0
    strides, unused = _strides(("q", "k", "v", "out", "lse"), paged)
    sizes = {"batch": "lengths_size_0", "queries": "q_size_0", "pages": "k_size_0", "table_b": "table_stride_0"}
    if not paged:
        sizes, unused = {"batch": "q_size_0", "queries": "q_size_2", "keys": "k_size_2"}, {"pages": 0, "table_b": 0}
    for x in ("k", "v"):
        scaled = named[f"{x.upper()}_SCALED"]
        names = {f"{x}s_{d}": f"{x}_scale_stride_{n}" for n, d in enumerate("bth")}
        sizes |= names if scaled else {}
        unused |= {} if scaled else dict.fromkeys(names, 0)
    bind = {**strides, **sizes}
    unused |= {} if _has_programs(named) else _UNUSED
    return triton_kernel(
        _DECODE, grid=_programs, bind=bind, num_warps=warps, STAGES=stages, **named, **unused, **_early(named["PDL"])
    )


@functools.cache
def _merging(most: int, paged: bool, constants: tuple[tuple[str, Any], ...]) -> TritonKernel:
    strides, unused = _strides(("out", "lse"), paged)
    sizes = {"batch": "lengths_size_0", "queries": "out_size_0"}
    if not paged:
        sizes, unused = {"batch": "out_size_0", "queries": "out_size_2"}, {"keys": 0}
    named = dict(constants)
    warps = max(1, min(4, most * named["DV_WIDE"] // 4096))
    bind = {**strides, **sizes}
    return triton_kernel(
        _MERGE,
        grid=_programs,
        bind=bind,
        num_warps=warps,
        MOST=most,
        PAGED=paged,
        **named,
        **unused,
        **_early(named["PDL"]),
    )


def _early(overlaps: bool) -> dict[str, Any]:
    """Return the option by which a kernel may start before the one before it has ended; it waits where it must."""
    return {"launch_pdl": True} if overlaps else {}


def _programs(programs: int) -> int:
    return programs


def _strides(tensors: tuple[str, ...], paged: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what the kernels' strides are those of, and those that are none: queries of all sequences have no batch."""
    bound: dict[str, str] = {}
    for x in tensors:
        dims = "bht" if not paged else "bth" if x in "kv" else "th"
        bound |= {f"{x}_{d}": f"{x}_stride_{n}" for n, d in enumerate(dims)}
    return bound, {f"{x}_b": 0 for x in tensors if paged and x not in "kv"}


def divided(
    tile_search: TileSearch | None,
    divide: Divide,
    make: Callable[[DecodeBlocks], DecodeLaunches],
    names: Sequence[str],
    results: Results,
) -> Callable[..., tuple[Tensor, ...]]:
    """Return what makes the launches of calls of some shapes, by the rules or by that change of them which a search finds.

    Args:
        tile_search: which change of the rules is the fastest; None where they are not changed.
        divide: the rules for these calls, of a change.
        make: the launches of a division.
        names, results: as :meth:`DecodeLaunches.series` has them.
    """
    if tile_search is None:
        return make(divide()).series(names, results)
    tiles: Tiles[DecodeBlocks, PreparedSeries] = Tiles(tile_search, functools.partial(_divided, divide))
    empty = {name: functools.partial(_emptied, new) for name, new in results.items()}

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        _, series = tiles.chosen or tiles.choose(
            lambda blocks: make(blocks).series(names, results),
            lambda blocks: make(blocks).series(names, empty).time(*tensors),
        )
        return series(*tensors)

    return run


def _emptied(new: Callable[[], Tensor]) -> Tensor:
    made = new()
    search.emptied(made)
    return made


def explained(tile_search: TileSearch | None, divide: Divide) -> str:
    """Return how calls are divided, and why."""
    tiles: Tiles[DecodeBlocks, DecodeLaunches] = Tiles(tile_search, functools.partial(_divided, divide))
    return tiles.explained(KERNEL, "by rule")


def _divided(divide: Divide, config: Config | None) -> DecodeBlocks:
    return divide() if config is None else divide(change_of(config))


def change_of(config: Config) -> Change:
    """Return the change that a configuration stands for.

    >>> change_of(Config({"BLOCK_TIMES": 2, "STAGES_MORE": 0, "WARPS_TIMES": 1}))
    Change(block=2, stages=0, warps=1)
    """
    said = config.constexprs
    return Change(said["BLOCK_TIMES"], said["STAGES_MORE"], said["WARPS_TIMES"])


def tile_search_of(shape: DecodeShape, gpu: Device, device: torch.device, compute: torch.dtype) -> TileSearch | None:
    """Return which change of the rules is the fastest for calls of a shape; None on GPUs that the rules were made on."""
    machine = search.machine_for(device)
    if machine is None:
        return None
    name = search.class_of(search.name_of(compute), plan.class_of(shape, plan.blocks_of(shape, gpu)))
    return search.tile_search(KERNEL, SOURCES, _CONFIGS, device, machine, name)
