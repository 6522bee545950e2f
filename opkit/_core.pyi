"""The compiled core (``cpp_ext/``). It holds no torch code, so one build serves every torch release."""

from typing_extensions import Buffer

def cpu_features() -> dict[str, bool]:
    """Which instruction sets this processor has and its operating system lets a program use, by name."""

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

def bf16_to_f32(isa: str | None, src: Buffer, dst: Buffer) -> None:
    """Widen; every value is exact."""

def f32_to_bf16(isa: str | None, src: Buffer, dst: Buffer) -> None:
    """Round to nearest, ties to even; NaN becomes 0x7FC0."""

def pack_b_bf16(isa: str | None, b: Buffer, packed: Buffer, n: int, k: int, ldb: int | None = None) -> None:
    """Write b[k][n] as pairs [(k + 1) / 2][n][2], padded with zeros."""

def gemm_block_bf16(
    isa: str | None,
    a: Buffer,
    b: Buffer,
    c: Buffer,
    m: int,
    n: int,
    k: int,
    lda: int | None = None,
    ldc: int | None = None,
) -> None:
    """c[m, n] += a[m, k] b[k, n], where ``pack_b_bf16`` wrote b."""

def gemm_block_f32(
    isa: str | None,
    a: Buffer,
    b: Buffer,
    c: Buffer,
    m: int,
    n: int,
    k: int,
    lda: int | None = None,
    ldb: int | None = None,
    ldc: int | None = None,
) -> None:
    """c[m, n] += a[m, k] b[k, n]."""
