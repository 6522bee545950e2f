"""The kernels for sm_90a in CUDA C++, in the folder ``cuda``: compiled at the first call, then found in the build cache.

NVRTC, which comes with torch, or nvcc compiles a source to a cubin. opkit's extension loads it and launches its kernels, which
take a structure, the problem, and what TMA needs to know of tensors in it. So no compiler of the host and no toolkit is needed.

Under segments they read the numbers of segments, the list of tiles that each tile visits, and the span that each row sees:
:func:`lists_of` computes these.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu import plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.tile_lists import Within, spans_of_call
from opkit.attn.masks import program
from opkit.errors import CompileError, KernelError, NoCompilerWarning, ToolchainError
from opkit.kernels.cc import toolchain
from opkit.kernels.cc.compilation import Request, Unit, build
from opkit.op.triton.variants import driver_library

if TYPE_CHECKING:
    from opkit import _core

Launcher = Callable[[Any, int], None]
SOURCES = Path(__file__).parent / "cuda"
_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a",)
_INSTEAD = {
    "forward": ("hopper_cuda", "triton"),
    "backward": ("hopper_cuda", "hopper"),
    "decode": ("split_cuda", "split"),
}
"""By the source, the kernel of the operator's that it is, and the one that calls get without it."""
_FLOAT8 = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
_TYPES = {
    torch.bfloat16: "#define ELEMENT Bfloat16\n",
    torch.float16: "#define ELEMENT Half\n",
    **{dtype: f"#define ELEMENT Half\n#define FLOAT8 {name}\n" for dtype, name in _FLOAT8.items()},
}
"""The definitions of a source's element type; in float8 are queries and keys, values become float16."""
_refused: set[tuple[str, torch.dtype, str]] = set()  # what this machine's compiler could not compile
_LIST_POINTERS = ("of_queries", "of_keys", "blocks", "counts", "spans", "ranges", "visits")
_LIST_STRIDES = (
    "queries_batch", "queries_row", "keys_batch", "keys_row", "blocks_batch", "counts_batch", "spans_batch", "ranges_batch",
)  # fmt: skip
_SPAN_ROWS = 64  # that a range is of


class Rows(ctypes.Structure):
    """A tensor as the kernels see it: its first element, and its strides by batch, head and row."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row")))


def rows_of(x: torch.Tensor, data: int = 0) -> Rows:
    """Return the strides of a tensor (batch, heads, sequence, head), and an address."""
    return Rows(data, *x.stride()[:3])


def compiler_there() -> bool:
    """Return whether this machine has a compiler of CUDA C++."""
    try:
        toolchain.find("cuda")
    except ToolchainError:
        return False
    return True


def there(name: str, dtype: torch.dtype, defined: Callable[[], str] = str) -> bool:
    """Return whether this machine has a compiler that has not refused ``name`` for a dtype, with what ``defined`` returns."""
    return compiler_there() and not (_refused and (name, dtype, defined()) in _refused)


def kernels_or_none(
    name: str, dtype: torch.dtype, defined: str = "", meanwhile: Callable[[], Any] | None = None
) -> Kernels | None:
    """Return the :func:`kernels`; None, and one warning, where the source is refused: calls get another kernel then.

    ``meanwhile`` is called while they are compiled, which another process does.
    """
    if (name, dtype, defined) in _refused:
        return None
    try:
        if meanwhile is None:
            return kernels(name, dtype, defined)
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(kernels, name, dtype, defined)
            meanwhile()
            return compiled.result()
    except CompileError as error:
        _refused.add((name, dtype, defined))
        file, (kernel, instead) = f"{name}.cu", _INSTEAD[name]
        warnings.warn(
            f"opkit::attention: {file} could not be compiled, so that calls get kernel {instead!r} in place of {kernel!r}: "
            f"{str(error).splitlines()[0]} It needs CUDA 12.5 or newer; OPKIT_CUDA_COMPILER chooses between NVRTC and nvcc.",
            NoCompilerWarning,
            stacklevel=2,
        )
        return None


def request(name: str, dtype: torch.dtype, defined: str = "") -> Request:
    """Return what a compiler is asked for: a source for elements of a dtype, in the way that ``name`` and definitions say."""
    file = f"{name}.cu"
    source = (SOURCES / file).read_text(encoding="utf-8")
    text = f'{_TYPES[dtype]}{defined}#line 1 "{file}"\n{source}'
    unit = Unit(f"{file} for {dtype}", text, "cuda")
    return Request(f"hopper_{name}", (unit,), flags=_FLAGS, include_dirs=(SOURCES,), kind="cubin")


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """A launch: of a kernel, with a grid. ``early``: it may begin before the one before it has ended, and waits by itself."""

    kernel: str
    grid: tuple[int, int, int]
    early: bool = False


Map = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
"""What TMA needs to know of a tensor, as ``opkit._core.ProblemLaunch`` takes it."""
_ELEMENT_TYPES = {torch.float16: 6, torch.bfloat16: 9, **dict.fromkeys(_FLOAT8, 0)}  # of CUtensorMapDataType in cuda.h
_BOX_BYTES = 128


def map_of(place: int, dtype: torch.dtype, sizes: Sequence[int], columns: int, rows: int, boxes: int) -> Map:
    """Return how TMA finds some rows of a head, in boxes of 128 bytes; what is not there are zeros.

    Where rows end within a box, but are longer than one, boxes are loaded one by one.

    Args:
        place: of the tensor's :class:`Rows` in the problem.
        dtype: of its elements.
        sizes: batches, heads, and rows of a head.
        columns: of a row.
        rows: of a box.
        boxes: next to one another that are loaded at once.
    """
    batch, heads, length = sizes
    width = _BOX_BYTES // dtype.itemsize
    if columns > width and columns % width:
        of_row, boxes_there, boxes = columns, 1, 1
    else:
        of_row, boxes_there = min(columns, width), max(columns // width, 1)
    of_tensor = (of_row, length, boxes_there, heads, batch)
    return place, _ELEMENT_TYPES[dtype], dtype.itemsize, of_tensor, (width, rows, boxes, 1, 1)


class Kernels:
    """The kernels of a compiled source, by name.

    Attributes:
        numbers: of each kernel threads of a block, bytes of dynamic shared memory, and what else its source gives; of "problem"
            the bytes of the structure that they take.
    """

    def __init__(self, name: str, dtype: torch.dtype, image: bytes) -> None:
        self.numbers = _numbers_in(image)
        self._name, self._dtype, self._image = name, dtype, image
        self._binaries: dict[tuple[str, bool], _core.Binary] = {}

    def launching(
        self, steps: Sequence[Step], maps: Sequence[Map], problem: type[ctypes.Structure], device: int
    ) -> Launcher:
        """Return a function that launches some kernels one after another; it takes a problem and a stream.

        Raises:
            KernelError: a launch failed, which is raised by the function.
        """
        from opkit import _core

        found = [(self._binary(step.kernel, step.early), step.grid) for step in steps]
        run, instead = (
            _core.ProblemLaunch(found, maps, ctypes.sizeof(problem), device),
            _INSTEAD[self._name][1],
        )

        def launch(call: ctypes.Structure, stream: int) -> None:
            try:
                run(ctypes.addressof(call), stream)
            except RuntimeError as error:
                raise KernelError(
                    f"opkit::attention: the kernels of hopper_{self._name} were not launched: {error}. Force "
                    f"kernel={instead!r} to go on without them."
                ) from error

        return launch

    def _binary(self, kernel: str, early: bool) -> _core.Binary:
        from opkit import _core

        threads, shared = self.numbers[kernel][:2]
        if (kernel, early) not in self._binaries:
            self._binaries[kernel, early] = _core.Binary(
                _driver(), self._image, kernel, threads=threads, shared=shared, pdl=early, prefer_shared=False
            )
        return self._binaries[kernel, early]


@functools.cache
def _driver() -> _core.Driver:
    from opkit import _core

    return _core.Driver(driver_library(), "cuda")


@functools.cache
def kernels(name: str, dtype: torch.dtype, defined: str = "") -> Kernels:
    """Return the kernels of a source, compiled in the way that ``name`` and definitions say.

    Raises:
        ToolchainError: there is neither NVRTC nor nvcc.
        CompileError: the compiler refused the source.
    """
    return Kernels(name, dtype, build(request(name, dtype, defined)).read_bytes())


_NUMBERS = "_numbers"  # ends the names of constants
_SYMBOLS = 2  # a section's type


def _numbers_in(image: bytes) -> Mapping[str, tuple[int, ...]]:
    """Return the constants of a compiled file that hold numbers of kernels, by kernel; the file is in ELF, of 64 bits."""
    (start,), (size, count) = struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<HH", image, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, size of an entry
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, start + size * number) for number in range(count)]
    found: dict[str, tuple[int, ...]] = {}
    for section in (each for each in sections if each[1] == _SYMBOLS):
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], section[9]):
            name, _, _, place, value, length = struct.unpack_from("<IBBHQQ", image, at)
            text = image[names + name : image.index(b"\0", names + name)].decode()
            if text.endswith(_NUMBERS) and place < count:
                found[text.removesuffix(_NUMBERS)] = struct.unpack_from(
                    f"<{length // 4}i", image, sections[place][4] + value
                )
    return found


class Lists(ctypes.Structure):
    """Numbers of segments, lists of the blocks that a tile visits, and spans that rows see; declared in ``cuda/tensors.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _LIST_POINTERS),
        *((name, ctypes.c_int64) for name in _LIST_STRIDES),
    )


def of_segments(shape: plans.MaskShape) -> bool:
    """Return whether a mask is segments, perhaps with a band: queries see keys of their own segment alone."""
    return len(shape.mask) == 1 and shape.mask[0][0] == program.SEGMENTS


def lists_of(
    call: AttentionCall | GradientCall, rows: int, keys: int, by_keys: bool, in_order: bool = False
) -> tuple[Lists, list[Tensor]]:
    """Return the lists of tiles of ``rows`` queries and ``keys`` keys, cached with the mask's tensors; and what is read there.

    What is read: numbers of segments, int32, (batch or 1, 1, queries, 1) and (batch or 1, 1, 1, keys), with a stride of 0 where
    a size is 1; of each tile of queries, or ``by_keys`` of keys, the tiles of the other kind that it visits, int32, (batch,
    heads, own, others), and their counts, (batch, heads, own, 2); :class:`~opkit.attn.gpu.tile_lists.Spans` of its
    rows; and where sums are made ``in_order``, :func:`opkit.attn.gpu.tile_lists.visits_of` them. These must live until the kernel
    is launched.
    """
    shape = plans.shape_of(tuple(call.mask), ())
    blocks = BlockSizes(rows, keys, 0, 0)
    found = tile_lists.lists_of(call, shape, blocks, by_keys)
    slots = plans.slots_of(shape, call.mask_tensors, [], (*call.q.shape[:3], call.k.shape[2]), of_biases=False)
    of_queries, of_keys = (slots[number] for number in shape.mask[0][1:])  # by batch, head, query and key
    strides = (of_queries.stride(0), of_queries.stride(2), of_keys.stride(0), of_keys.stride(3))
    numbers = of_queries[:, 0, :, 0], of_keys[:, 0, 0]
    own, seen = numbers[::-1] if by_keys else numbers
    lengths = call.mask_tensors[shape.lengths[0]] if shape.lengths else None
    band = (-shape.upper, -shape.lower) if by_keys else (shape.lower, shape.upper)
    which = shape, call.q.shape[2], call.k.shape[2], by_keys
    spans = spans_of_call(call, own, seen, _SPAN_ROWS, Within(*band, lengths, by_keys), which)
    read = [of_queries, of_keys, *found, *spans]
    if in_order:
        read.append(tile_lists.visits_of_call(found, call, shape, blocks))
    of_lists = found.tiles.stride(0), found.counts.stride(0)
    of_spans = (x.stride(0) // x.shape[2] if x.shape[0] > 1 else 0 for x in spans)
    pointers = dict(zip(_LIST_POINTERS, (each.data_ptr() for each in read), strict=False))  # null but for those
    return Lists(**pointers, **dict(zip(_LIST_STRIDES, (*strides, *of_lists, *of_spans), strict=True))), read
