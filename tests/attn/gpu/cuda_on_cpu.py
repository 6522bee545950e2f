"""The kernels for sm_90a in CUDA C++ on a processor: compiled by its compiler, with CUDA and PTX as ``hopper_on_cpu`` has them.

Numbers are those that the kernels compute, and the order of events is random: what waits for too little, or frees a buffer too
early, is found. Nothing is said of the compiler nvcc, nor of speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import torch

sys.path.insert(0, str(Path(__file__).parent))
from hopper_calls import BF16, shaped

from opkit.attn.gpu import tile_lists
from opkit.attn.gpu.hopper import calls, library
from opkit.attn.masks import program
from opkit.errors import KernelError
from opkit.kernels.cc import toolchain

MACHINE = Path(__file__).parent / "hopper_on_cpu"
NONE = ("", "")
"""No defect."""


def build(
    name: str, dtype: torch.dtype, folder: Path, defect: tuple[str, str] = NONE, unused: str = "", defined: str = ""
) -> Path:
    """The library of ``name``.cu, ``defined`` so, for this processor; with the first text of ``defect`` replaced by the second.

    ``unused`` is a pattern of what is left out of that file: kernels that nobody calls, for which a compiler takes long. The
    processes that share ``folder`` build a library once.
    """
    place = folder / f"{name}_{dtype}_{hashlib.sha256(defined.encode()).hexdigest()[:8]}".replace("torch.", "")
    place.mkdir(exist_ok=True)
    built = place / "built.so"
    with filelock.FileLock(place / "lock"):
        if not built.exists():
            text = library.request(name, dtype, defined).units[0].text
            compile_at(place, re.sub(unused, "", text) if unused else text, defect).rename(built)
    return built


def compile_at(place: Path, text: str, defect: tuple[str, str]) -> Path:
    """A library of ``text``, compiled in a folder of its own."""
    texts = {file.name: file.read_text() for file in (*library.SOURCES.glob("*.cuh"), *MACHINE.iterdir())}
    for file, each in texts.items():  # the machine's sm90.cuh in place of the other
        (place / file).write_text(each.replace(*defect) if defect[0] else each)
    source, made = place / "source.cpp", place / "made.so"
    source.write_text(text)
    flags = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-fPIC", "-shared"]
    command = [*toolchain.find("c++").command, *flags, f"-I{place}", "-o", made, source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


class Described(ctypes.Structure):
    """A tensor for TMA, as ``hopper_on_cpu/cuda.h`` says."""

    _fields_ = (
        ("place", ctypes.c_int64), ("element", ctypes.c_int64), ("sizes", ctypes.c_int64 * 5), ("box", ctypes.c_int * 5),
    )  # fmt: skip


class KernelsOnCpu:
    """What :class:`opkit.attn.gpu.hopper.library.Kernels` is, on the machine."""

    def __init__(self, built: Path, seed: list[int]) -> None:
        self.library, self.seed, self.numbers = ctypes.CDLL(str(built)), seed, self

    def __getitem__(self, kernel: str) -> tuple[int, ...]:
        count = ctypes.c_int.in_dll(self.library, f"{kernel}_count").value
        return tuple((ctypes.c_int * count).in_dll(self.library, f"{kernel}_numbers"))

    def launching(self, steps, maps, problem, device):
        described = (Described * len(maps))(*(
            Described(place, size, (ctypes.c_int64 * 5)(*sizes), (ctypes.c_int * 5)(*box)) for place, _, size, sizes, box in maps
        ))  # fmt: skip

        def launch(call: ctypes.Structure, stream: int) -> None:
            assert self["problem"] == (ctypes.sizeof(problem),)
            for step in steps:
                grid = (ctypes.c_uint * 3)(*step.grid)
                error = self.library[step.kernel](ctypes.byref(call), described, len(maps), grid, self.seed[0])
                if error:
                    raise KernelError(f"{step.kernel}: error {error}")

        return launch


@contextlib.contextmanager
def on_cpu(
    monkeypatch, folder: Path, defect: tuple[str, str] = NONE, processors: int = 2, unused: str = ""
) -> Iterator[list[int]]:
    """Launches of such kernels go to the machine, with so few multiprocessors that each has several tiles.

    Gives a list whose one number is the seed of the next launches' order of events.
    """
    if not any(defect[0] in file.read_text() for file in library.SOURCES.glob("*.cuh")):
        raise ValueError(f"no source has what the defect is in: {defect[0]!r}")
    seed = [0]

    @functools.cache
    def kernels(name: str, dtype: torch.dtype, defined: str = "") -> KernelsOnCpu:
        return KernelsOnCpu(build(name, dtype, folder, defect, unused, defined), seed)

    monkeypatch.setattr(library, "kernels", kernels)
    monkeypatch.setattr(calls, "processors", lambda device: processors)
    yield seed


def filled(batch, heads, queries, keys, head=64, columns=64, dtype=BF16, out_is_bshd=False):
    generator = torch.Generator().manual_seed(0)
    made = shaped(heads, queries, keys, head, columns, dtype, "cpu", batch)
    made = [x.transpose(1, 2).contiguous().transpose(1, 2) if out_is_bshd else x for x in made]
    return [x.normal_(generator=generator) for x in made]


def survives(seed, run, check):
    """Whether no order of events shows a defect."""
    for order in range(20):
        seed[0] = order
        try:
            check(run())
        except (AssertionError, KernelError):
            return False
    return True


def lists_in_torch(call, shape, blocks, by_keys, bits=None):
    """What :func:`opkit.attn.gpu.tile_lists.lists_of` builds on a GPU."""
    seen = program.visible(call.mask, call.mask_tensors, program.Grid(call.q.shape[2], call.k.shape[2], call.q.device))
    rows, keys = (blocks.keys, blocks.rows) if by_keys else (blocks.rows, blocks.keys)
    seen = seen.mT if by_keys else seen
    batch, heads, own, others = *seen.shape[:2], -(-seen.shape[2] // rows), -(-seen.shape[3] // keys)
    tiles, counts = torch.full((batch, heads, own, others), -1), torch.zeros(batch, heads, own, 2)
    for b, h, n in itertools.product(range(batch), range(heads), range(own)):
        found = seen[b, h, n * rows : (n + 1) * rows].split(keys, 1)
        complete = [x.shape[1] == keys and (x.shape[0] == rows or not by_keys) for x in found]
        whole = [m for m, x in enumerate(found) if x.all() and complete[m]]
        partly = [m for m, x in enumerate(found) if x.any() and m not in whole]
        tiles[b, h, n, : len(whole)] = torch.tensor(whole)
        tiles[b, h, n, others - len(partly) :] = torch.tensor(partly[::-1])
        counts[b, h, n] = torch.tensor([len(whole), len(whole) + len(partly)])
    return tile_lists.TileLists(*(x.int().expand(*call.q.shape[:2], -1, -1) for x in (tiles, counts)))


def bits_in_torch(call, shape, blocks, by_keys, every):
    """What :func:`opkit.attn.gpu.tile_lists.bits_of` finds on a GPU; unless ``every``, each third tile has no bits."""
    seen = program.visible(call.mask, call.mask_tensors, program.Grid.of(call))
    sizes, tile = seen.shape[2:], blocks[:2]
    assert sizes == (call.q.shape[2], call.k.shape[2])
    counts = [-(-size // of) for size, of in zip(sizes, tile, strict=True)]
    down, across = (count * of - size for size, of, count in zip(sizes, tile, counts, strict=True))
    padded = torch.nn.functional.pad(seen, (0, across))
    some, all_of = (
        torch.nn.functional.pad(padded, (0, 0, 0, down)),
        torch.nn.functional.pad(padded, (0, 0, 0, down), value=1),
    )
    tiles, every_query = (
        x.unflatten(3, (counts[1], -1)).unflatten(2, (counts[0], -1)).transpose(3, 4) for x in (some, all_of)
    )
    some, whole = tiles.flatten(-2).any(-1), every_query.flatten(-2).all(-1)
    places = torch.where(whole, -3, torch.where(some, -1, -2)).int()
    partly = some & ~whole
    packed = (tiles.mT if by_keys else tiles)[partly].unflatten(-1, (-1, 32)).long()
    packed = (packed << torch.tensor([8 * (n % 8 // 2) + 2 * (n // 8) + n % 2 for n in range(32)])).sum(-1)
    numbers = torch.arange(len(packed)).int()
    places[partly] = numbers if every else torch.where(numbers % 3 == 2, -1, numbers)
    if not every:
        packed[2::3] = -1
    strides = [stride if size > 1 else 0 for stride, size in zip(places.stride(), places.shape, strict=True)][:2]
    spread = places.as_strided(places.shape, (*strides, *places.stride()[2:]))
    return tile_lists.MaskBits(some, spread, packed.where(packed < 1 << 31, packed - (1 << 32)).int())


def visits_in_torch(lists, *of_call):
    """What :func:`opkit.attn.gpu.tile_lists.visits_of_call` finds on a GPU; else -1."""
    (whole, total), turns = lists.counts.unsqueeze(-2).unbind(-1), turns_of(*lists)
    place = torch.arange(turns.shape[3])
    numbers = torch.stack([2 * lists.tiles + (place >= turns.shape[3] - total + whole), turns], -1)
    behind = numbers[..., :1].masked_fill(turns[..., None] < 0, torch.iinfo(torch.int32).max)
    numbers = numbers.where(turns[..., None] >= 0, -1).gather(3, behind.argsort(3).expand_as(numbers))
    heads = 1 if lists.tiles.stride(1) == 0 else None
    return numbers[:, :heads].int().contiguous().expand_as(numbers)


def turns_of(tiles, counts):
    """Of each tile in a list how many later lists have it too, (batch, heads, own, others) as ``tiles``; -1 for no tile."""
    place, (whole, total) = torch.arange(tiles.shape[3]), counts.unsqueeze(-2).unbind(-1)
    there = (place < whole) | (place >= tiles.shape[3] - total + whole)
    tiles = torch.where(there, tiles, 0).long()
    live = torch.zeros(tiles.shape, dtype=torch.int32).scatter_add_(3, tiles, there.int())
    assert live.max() <= 1
    later = live.flip(2).cumsum(2).flip(2) - live
    return torch.where(there, later.gather(3, tiles), -1).int()
