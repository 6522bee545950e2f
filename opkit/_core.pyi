"""The compiled core (``cpp_ext/``). It holds no torch code, so one build serves every torch release."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import Buffer

def cpu_features() -> dict[str, bool]:
    """Which instruction sets this processor has and its operating system lets a program use, by name."""

def x86_vendor() -> str:
    """What CPUID says, as "GenuineIntel"; empty on other processors."""

class Registration:
    """A kernel's place in torch's dispatcher."""

    def remove(self) -> None:
        """Take the kernel out of the dispatcher again."""

class KernelLibrary:
    """A compiled kernel in its shared library."""

    def __init__(self, path: str) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def operator_name(self) -> str: ...
    @property
    def instance_count(self) -> int: ...
    def register(self, op: str, key: str, with_layout: bool) -> Registration: ...
    def add_program(self, words: list[int]) -> None: ...
    def forget_programs(self) -> None: ...

def runtime_address() -> int:
    """The address of the functions that every kernel is given (opk_runtime in opkit.h)."""

# How Triton kernels are launched (cpp_ext/launch).

_Tensor = tuple[int, int, int, tuple[int, ...], tuple[int, ...], bool]
"""Address, dtype (torch's number), device index (-1: the CPU), sizes, strides."""

class Driver:
    """The GPU's driver: ``kind`` "cuda" (libcuda.so.1) or "hip" (libamdhip64.so).

    Raises:
        RuntimeError: the library cannot be opened, or lacks a function, which is named.
    """

    def __init__(self, path: str, kind: str) -> None: ...

class Binary:
    """One compiled kernel; its function is loaded once for each device, at its first launch there.

    ``image`` is a cubin or a code object, ``name`` its function, ``shared`` bytes of dynamic shared memory; ``scratch`` and
    ``profile_scratch`` are bytes for each program (and each block of a cluster), their alignments powers of two. Where ``shared``
    is more than 48 KiB and ``prefer_shared`` is set, the GPU is asked for shared memory rather than L1 cache.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        driver: Driver,
        image: bytes,
        name: str,
        *,
        threads: int,
        shared: int,
        cluster: tuple[int, int, int] = (1, 1, 1),
        cooperative: bool = False,
        pdl: bool = False,
        prefer_shared: bool = True,
        scratch: int = 0,
        scratch_align: int = 1,
        profile_scratch: int = 0,
        profile_scratch_align: int = 1,
    ) -> None: ...
    def function(self, device: int) -> int:
        """The address of the function on a device.

        Raises:
            RuntimeError: the driver does not load the kernel.
        """

    def attributes(self, device: int) -> dict[str, int]:
        """``registers`` and ``local_bytes`` of a thread, ``shared_bytes`` (static and dynamic), ``max_threads`` of a block.

        Raises:
            RuntimeError: the driver does not load the kernel.
        """

class ProblemLaunch:
    """Launches of kernels of sm_90, one after another, each with a structure in memory and tensor descriptors made from it.

    ``steps`` are kernels and their grids. ``maps`` are, of each descriptor, where in the structure of so many ``bytes`` a
    tensor's address and its strides by batch, head and row are (four numbers of 64 bits), a CUtensorMapDataType, the size of an
    element in bytes, and the sizes and the box, in elements: of columns, rows, boxes of 128 bytes in a row, heads and batches.

    Raises:
        ValueError: there is no step, or a map lies outside of the structure.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Binary, tuple[int, int, int]]],
        maps: Sequence[tuple[int, int, int, Sequence[int], Sequence[int]]],
        bytes: int,
        device: int,
    ) -> None: ...
    def __call__(self, problem: int, stream: int) -> None:
        """Launch, with the structure at an address, on a stream.

        Raises:
            RuntimeError: the driver refuses; what it says.
        """

class Entry:
    """How calls of one kind are launched.

    ``grid`` counts programs (clusters); a grid larger than ``chunk`` is launched in pieces of at most that. ``params``
    are those of the compiled function in order, each (kind, source, detail):

    ==================================  ==================================================================================
    ptr                                 the address of a tensor; null for None
    i1 i8 i16 i32 i64 u1 .. u64         a number or bool, as so many bits
    fp16 bf16 fp32 fp64                 a number, rounded to nearest
    const                               ``detail`` itself, for a parameter of up to 8 bytes
    size32 size64 stride32 stride64     of a tensor, in elements; ``detail`` is the dimension, from the end if negative;
                                        0 for None
    map                                 ``source`` counts ``maps``
    scratch profile_scratch             memory that lives as long as the launch
    offset offset64                     where the piece begins on the axis ``detail``
    total total64                       the size of the whole grid on the axis ``detail``
    ==================================  ==================================================================================

    Each of ``maps`` is {"source", "swizzle", "elem_size", "elem_type", "block"} and perhaps {"padding_nan", "tf32",
    "fp4_padded"}: a tensor descriptor, encoded once and given another address while sizes and strides stay the same.
    ``elem_type`` and ``swizzle`` are CUtensorMapDataType and CUtensorMapSwizzle of cuda.h. The tensors ``zero`` are set to zero
    before each launch.

    Raises:
        ValueError: the parts do not fit each other, or the grid is larger than a GPU takes.
    """

    def __init__(
        self,
        binary: Binary,
        grid: tuple[int, int, int],
        params: Sequence[tuple[str, int, int]],
        *,
        maps: Sequence[dict[str, Any]] = ...,
        zero: Sequence[int] = ...,
        chunk: tuple[int, int, int] | None = None,
    ) -> None: ...
    def again(self, grid: tuple[int, int, int], constants: Sequence[tuple[int, int]]) -> Entry:
        """The same with another grid, and other details of parameters of the kind "const", each after its number.

        Raises:
            ValueError: these do not fit, or the entry has maps or pieces.
        """

class Call:
    """A call for which a launcher has no entry yet. Once the launcher was answered, everything raises a RuntimeError."""

    @property
    def values(self) -> list[_Tensor | int | float | bool | str | tuple[int, ...] | None]:
        """One for each source."""
    @property
    def device(self) -> int:
        """The device's index; -1: the CPU."""
    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
    def launch(self, entry: Entry) -> None:
        """Launch on this call's values and stream, without remembering the entry.

        Raises:
            RuntimeError: with the driver's message.
            ValueError: the entry asks a source for what it has not.
        """
    def time(self, entry: Entry, *, warmup_ms: float = 5, run_ms: float = 20, written: Sequence[int] = ...) -> float:
        """The median milliseconds of a launch, with cold caches; setting ``zero`` to zero is not counted.

        The memory of the tensors ``written`` is as before afterwards; another stream must not write to it meanwhile.

        Raises:
            RuntimeError: with the driver's message; or the stream is being captured.
            ValueError: the entry asks a source for what it has not.
        """

class Repeated:
    """Calls like one that was made, of tensors at other addresses; see ``Launcher.repeat``."""

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch: the addresses of the tensors that are there, in the order of the kernel's sources, and a stream's handle.

        Raises:
            ValueError: there are more or fewer addresses than tensors.
            RuntimeError: the launch failed; it says why.
        """

class Series:
    """Repeated calls one after another, by one call, which allocates their results and memory that is theirs alone meanwhile.

    Torch allocates both for each launch, on its current stream; neither is filled.

    Args:
        steps: each a call, and where its tensors lie: numbers of addresses; those that follow are of results, then of pieces
            of memory.
        addresses: how many a launch is given.
        results: sizes, strides and torch's number of the dtype of each.
        memory: bytes of each piece, which begins at a multiple of 128 bytes.
        device: the index of the GPU that has the results and the memory; -1 is the processor.

    Raises:
        ValueError: a step has not as many places as its call has tensors, or one that is not there.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Repeated, Sequence[int]]],
        *,
        addresses: int,
        results: Sequence[tuple[Sequence[int], Sequence[int], int]],
        memory: Sequence[int],
        device: int,
    ) -> None: ...
    def __call__(self, addresses: Sequence[int], stream: int) -> list[Any]:
        """Launch, given addresses and a stream's handle. The results come as handles of tensors, the caller's to take over.

        Raises:
            ValueError: there are not as many addresses as was said.
            MemoryError: torch has no memory; nothing was launched.
            RuntimeError: a launch failed, and those after it were not made.
        """

class Launcher:
    """What runs a kernel's calls: it has a table of entries, and calls ``miss`` for a call that none of them serves.

    ``miss`` gives the entry, which then serves all calls of this kind, or None where it has done the work itself. What of a
    source's value makes a kind is said by its role, one for each source; the device's index always does:

    =============  =======================================================================================================
    tensor         dtype, whether the address is divisible by 16, whether it is None
    tensor_any     dtype, whether it is None
    info           dtype, whether the address is divisible by 16, whether it is None, sizes and strides
    int            whether it is 1, whether it is divisible by 16, whether it fits in int32
    int_noalign    whether it is 1, whether it fits in int32
    int_width      whether it fits in int32
    exact          the value of an int, bool or dtype
    float          nothing
    float_exact    the bits of the value
    bool           nothing
    text           the bytes
    ints           all values
    =============  =======================================================================================================

    Whether an optional scalar (source SCALAR_POINTER) is None always makes a kind.

    Raises:
        ValueError: a role is none.
    """

    def __init__(
        self, operator: str, kernel: str, roles: Sequence[str], miss: Callable[[Call], Entry | None], *, cuda: bool
    ) -> None: ...
    def repeat(self, call: Callable[[], object]) -> Repeated | None:
        """Make a call; then calls like the last one that it made of this launcher.

        None: it made none, or one whose values cannot be kept (text, lists, optional numbers). The function must be called
        with tensors of the same sizes, strides, dtypes and device, which nothing checks.
        """
    def clear(self) -> None:
        """Forget all entries; so does the 4,097th one."""
    @property
    def entries(self) -> int:
        """How many there are."""

def launch_kernel(description: Mapping[str, Any], launcher: Launcher) -> KernelLibrary:
    """The kernel whose calls a launcher runs, ready to be registered.

    A process can have 1,024 of these at a time. One that is collected, its registrations too, makes room for another; what
    ``miss`` refers to lives as long as the process, so that it should refer to the library's owner weakly.

    ``description``: "operator", "kernel", "schema", "cuda"; "arguments", each {"name", "kind" (of
    ``opkit.kernels.facts.KINDS``), "optional", "written", "shape": None or {"before", "variadic", "after"}};
    "outputs", each {"name", "alias"}; "size_names"; "sources", each (end of the name of an ``opk_source``, argument, detail,
    dtype, constant).
    A tensor is a TENSOR or PACKED_TENSOR, an optional scalar a SCALAR_POINTER.

    Raises:
        ValueError: the description and the launcher do not fit each other.
        RuntimeError: there are 1,024.
    """

# Attention with few queries (cpp_ext/attention). Kernels are those within the environment's OPKIT_ISA.

class DecodeAttention:
    """Attention of few queries to many keys, of tensors of some shapes.

    The fields, all needed, are OPKIT_DECODE_SHAPE of cpp_ext/attention/decode_call.hpp; ``programs``, of a mask and a bias, are
    as ``opkit.attn.cpu_programs.of_few`` returns them. A call gives the addresses, 0 for none.

    Raises:
        TypeError: a field is missing.
        ValueError: of a call: a length, a start of queries or a page that is needed is out of range, or a head size is greater
            than 1024.
    """

    def __init__(self, *, programs: dict[str, Any] | None = None, **fields: int | float | bool) -> None: ...
    def __call__(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        sinks: int = 0,
        table: int = 0,
        lengths: int = 0,
        starts: int = 0,
        k_scale: int = 0,
        v_scale: int = 0,
        mask_tensors: Sequence[int] = (),
        bias_tensors: Sequence[int] = (),
    ) -> None: ...

# The kernels of cpp_ext/isa, by instruction set (ISA): None is the widest that runs here, within the environment's OPKIT_ISA.
# Matrices are contiguous buffers of any rank, stored by rows that lie ld* elements apart; bf16 values travel as uint16.
# cpp_ext/isa/table.hpp says what holds of the results.

def isas() -> list[str]:
    """The instruction sets whose kernels run here, the widest last."""

def isas_built() -> list[str]:
    """The instruction sets whose kernels are in this build, the widest last."""

def isa_obstacles() -> dict[str, str]:
    """Why each of the other instruction sets of this architecture does not run here."""

def isa_table(isa: str | None = None) -> dict[str, str]:
    """The variant chosen for every kernel within ``isa``, or within OPKIT_ISA."""

def f32_to_bf16(isa: str | None, src: Buffer, dst: Buffer) -> None:
    """Round to nearest, ties to even; NaN becomes 0x7FC0."""

def pack_b_bf16(isa: str | None, b: Buffer, packed: Buffer, n: int, k: int, ldb: int | None = None) -> None:
    """Write b[k][n] as pairs [(k + 1) / 2][n][2], padded with zeros."""

# Attention (cpp_ext/attention): what calls of the same shapes have in common. A call gives the tensors' addresses.

_Strides3 = tuple[int, ...]
"""The strides of a tensor's first three dimensions, in elements; the last dimension is dense."""

class _Attention:
    """``isa`` of None is what ``OPKIT_ISA`` allows at each call.

    Sizes: batch, heads, heads of keys, queries, keys, elements of a key, of a value. Tensors have the dtype "float32", "bfloat16"
    or "float16", but for ``lse``, ``sinks`` and ``delta``, which are dense float32. Of the tensors of a mask and of biases
    the strides are those of every dimension.

    Raises:
        ValueError: a program is none, or a dtype has no kernel; of a call: the tensors of the mask or biases are not as many
            as were declared.
    """

    def __init__(
        self,
        isa: str | None,
        dtype: str,
        sizes: tuple[int, ...],
        strides: Sequence[_Strides3],
        mask: Sequence[int],
        mask_tensors: Sequence[Sequence[int]],
        bias: Sequence[int],
        bias_tensors: Sequence[tuple[Sequence[int], str]],
        scale: float,
        softcap: float,
        mask_functions: Sequence[_Function] = (),
        bias_functions: Sequence[_Function] = (),
    ) -> None: ...

# For each tensor of a bias the address of its gradient, contiguous float64 zeros, or 0; the number of its elements; its strides
# by batch, head, query and key, if it is added; and whether other sequences, heads and keys read other elements.
_WantedBias = tuple[int, int, Sequence[int], bool, bool, bool]

# Code: its address, that of what tabulates distances for it, and the bytes for each distance. A function: its code, that of its
# derivative, its words, and of tensors the words of their addresses and their numbers.
_Code = tuple[int, int, int]
_Function = tuple[_Code, _Code, Sequence[int], Sequence[tuple[int, int]]]

class AttentionForward(_Attention):
    """Attention; ``strides`` are those of q, k, v and out."""

    def __call__(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        sinks: int = 0,
        mask_tensors: Sequence[int] = (),
        bias_tensors: Sequence[int] = (),
    ) -> None: ...
    def states(self, mask_tensors: Sequence[int]) -> bytes:
        """What is seen of each tile of 96 queries and 64 keys: 0 hidden, 1 full, 2 a part. By batch, head, queries and keys."""

class AttentionBackward(_Attention):
    """Its gradients; ``strides`` are those of q, k, v, out, gradient, to_q, to_k and to_v. ``of_lse`` may be 0."""

    def __call__(
        self,
        gradient: int,
        of_lse: int,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        to_q: int,
        to_k: int,
        to_v: int,
        delta: int,
        sinks: int = 0,
        mask_tensors: Sequence[int] = (),
        bias_tensors: Sequence[int] = (),
        wanted: Sequence[_WantedBias] = (),
    ) -> None: ...

class AttentionBiasBackward(_Attention):
    """The gradients of the tensors of biases; ``strides`` are those of q, k, v and gradient."""

    def __call__(
        self,
        gradient: int,
        delta: int,
        q: int,
        k: int,
        v: int,
        lse: int,
        mask_tensors: Sequence[int],
        bias_tensors: Sequence[int],
        sinks: int,
        wanted: Sequence[_WantedBias],
    ) -> None: ...

# Products and convolutions of float32 with packed weights (cpp_ext/product), by addresses; 0 for none. The activation is "none"
# or "relu".

def product_functions() -> tuple[int, int]:
    """The addresses of ``mm`` and ``bmm`` with the signatures of torch's shim, for the kernels within ``OPKIT_ISA``."""

def packed_floats(columns: int, depth: int) -> int:
    """How many numbers the packed weight of a product has."""

def pack(w: int, column_stride: int, depth_stride: int, columns: int, depth: int, packed: int) -> None:
    """Pack a weight of any strides."""

def packed_convolution_floats(
    out_channels: int, in_per_group: int, kernel_height: int, kernel_width: int, groups: int
) -> int:
    """How many numbers the packed weight of a convolution has."""

def pack_convolution(
    w: int, out_channels: int, in_per_group: int, kernel_height: int, kernel_width: int, groups: int, packed: int
) -> None:
    """Pack a contiguous weight."""

def packed_winograd_floats(out_channels: int, in_channels: int, tile: int) -> int:
    """How many numbers the packed weight of a convolution by Winograd's method has; ``tile`` is 2 or 4."""

def pack_winograd(w: int, out_channels: int, in_channels: int, tile: int, packed: int) -> None:
    """Pack a contiguous weight of 3 x 3 taps for Winograd's method."""

def winograd(x: int, w: int, y: int, sizes: Sequence[int], strides: Sequence[int], padding: Sequence[int]) -> bool:
    """Compute a convolution of 3 x 3 taps by Winograd's method, whose weight has these strides and is packed in each call.

    Images are channels-last, their sizes as in ``convolution``; the numbers of channels are multiples of 16. Returns False, and
    computes nothing, if a weight is not below 1e30.
    """

def linear(
    x: int, x_pitch: int, packed: int, bias: int, y: int, rows: int, columns: int, depth: int, activation: str
) -> None:
    """``activation(x @ w.T + bias)``, by the instruction set that ``OPKIT_ISA`` allows and torch's threads.

    Raises:
        ValueError: there is no such activation.
    """

def convolution(
    x: int,
    packed: int,
    bias: int,
    addend: int,
    y: int,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    tile: int,
    channels_last: bool,
) -> None:
    """``activation(convolution of x + bias + addend)``, likewise; by Winograd's method if ``tile`` is 2 or 4, not 0.

    Sizes: batch, channels, height and width of x, channels, height and width of y. All images have their channels next to each
    other, or none.
    """
