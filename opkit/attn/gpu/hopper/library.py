"""The kernels for sm_90a in CUDA C++, in the folder ``cuda``: compiled by nvcc at the first call, then found in the build cache.

They are built as those of :func:`opkit.cuda_kernel` are, and called by address: they take more than an operator's arguments
(counters, and the numbers that the Gluon kernels take), and a first call from the cache has no time to bind any.

Under segments they read the numbers of segments, the list of tiles that each tile visits, and the span that each row sees:
:func:`lists_of` computes these.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu import plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.tile_lists import spans_of_call
from opkit.attn.masks import program
from opkit.errors import CompileError, KernelError, NoCompilerWarning, ToolchainError
from opkit.kernels.cc import toolchain
from opkit.kernels.cc.compilation import Request, Unit, build

Launcher = Callable[[Any, int], None]
SOURCES = Path(__file__).parent / "cuda"
_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a",)
_HOPPER = ("hopper_cuda", "hopper")
_INSTEAD = {"forward": _HOPPER, "backward": _HOPPER, "decode": ("split_cuda", "split")}
"""By the source, the kernel of the operator's that it is, and the one that calls get without it."""
_INSTEAD_OF_FLOAT8 = ("hopper_cuda", "triton")
_LISTED_STEPS = "#define STEPS_LISTED true\n"
_IN_ORDER = "#define SUMS_ORDERED true\n"
_DEFINED = {
    "forward_of_lists": _LISTED_STEPS,
    "backward_of_lists": _LISTED_STEPS,
    "backward_in_order": _IN_ORDER,
    "backward_of_lists_in_order": _LISTED_STEPS + _IN_ORDER,
}
"""The definitions with which a source is compiled under a longer name than its own."""
_FLOAT8 = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
_TYPES = {
    torch.bfloat16: "#include <cuda_bf16.h>\nusing T = __nv_bfloat16;\n",
    torch.float16: "#include <cuda_fp16.h>\nusing T = __half;\n",
    **{
        dtype: f"#include <cuda_fp16.h>\nusing T = __half;\n#define FLOAT8 sm90::{name}\n"
        for dtype, name in _FLOAT8.items()
    },
}
"""The definitions of a source's element type; in float8 are queries and keys, values become float16."""
_refused: set[tuple[str, torch.dtype]] = set()  # what this machine's nvcc could not compile
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
    """Return whether this machine has nvcc."""
    try:
        toolchain.find("cuda")
    except ToolchainError:
        return False
    return True


def there(name: str, dtype: torch.dtype) -> bool:
    """Return whether this machine has an nvcc that has not refused ``name`` for a dtype."""
    return (name, dtype) not in _refused and compiler_there()


def launcher_or_none(name: str, dtype: torch.dtype) -> Launcher | None:
    """Return the :func:`launcher`; None, and one warning, where nvcc refuses the source: calls get another kernel then."""
    if (name, dtype) in _refused:
        return None
    try:
        return launcher(name, dtype)
    except CompileError as error:
        _refused.add((name, dtype))
        file, (kernel, instead) = f"{source_of(name)}.cu", _names(name, dtype)
        warnings.warn(
            f"opkit::attention: nvcc could not compile {file}, so that calls get kernel {instead!r} in place of {kernel!r}: "
            f"{str(error).splitlines()[0]} It needs CUDA 12.5 or newer, with its headers; OPKIT_NVCC names another nvcc.",
            NoCompilerWarning,
            stacklevel=2,
        )
        return None


def _names(name: str, dtype: torch.dtype) -> tuple[str, str]:
    """Return the kernel that a source is, and the one that calls get without it."""
    return _INSTEAD_OF_FLOAT8 if dtype in _FLOAT8 else _INSTEAD[source_of(name)]


def source_of(name: str) -> str:
    """Return the source that a name begins with, without its ending.

    >>> source_of("backward_of_lists")
    'backward'
    """
    return name.split("_")[0]


def request(name: str, dtype: torch.dtype) -> Request:
    """Return what nvcc is asked for: a source for elements of a dtype, in the way that ``name`` says."""
    file = f"{source_of(name)}.cu"
    source = (SOURCES / file).read_text(encoding="utf-8")
    text = f'{_TYPES[dtype]}{_DEFINED.get(name, "")}#line 1 "{file}"\n{source}'
    unit = Unit(f"{file} for {dtype}", text, "cuda")
    return Request(f"hopper_{name}", (unit,), flags=_FLAGS, include_dirs=(SOURCES,))


@functools.cache
def launcher(name: str, dtype: torch.dtype) -> Launcher:
    """Return the function that launches the kernels of a source, compiled in the way that ``name`` says.

    It takes a call, a structure of ctypes, and a stream.

    Raises:
        ToolchainError: there is no nvcc.
        CompileError: nvcc refused the source.
        KernelError: a launch failed, which is raised by the function.
    """
    function = ctypes.CDLL(os.fspath(build(request(name, dtype))))[f"hopper_{source_of(name)}"]
    function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]

    def launch(call: ctypes.Structure, stream: int) -> None:
        error = function(ctypes.addressof(call), stream)
        if error:
            raise KernelError(
                f"opkit::attention: the kernel hopper_{name} was not launched: CUDA's error {error}. Force "
                f"kernel={_names(name, dtype)[1]!r} to go on without it."
            )

    return launch


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
    which = shape.mask, shape.slots, call.q.shape[2], call.k.shape[2], by_keys
    spans = spans_of_call(call, own, seen, _SPAN_ROWS, which)
    read = [of_queries, of_keys, *found, *spans]
    if in_order:
        read.append(tile_lists.visits_of_call(found, call, shape, blocks))
    of_lists = found.tiles.stride(0), found.counts.stride(0)
    of_spans = (x.shape[1] if x.shape[0] > 1 else 0 for x in spans)
    pointers = dict(zip(_LIST_POINTERS, (each.data_ptr() for each in read), strict=False))  # null but for those
    return Lists(**pointers, **dict(zip(_LIST_STRIDES, (*strides, *of_lists, *of_spans), strict=True))), read
