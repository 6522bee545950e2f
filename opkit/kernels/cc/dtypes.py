"""Map element types between torch, ``opkit.h``, C, C++ and CUDA, and C types to element types."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Dtype:
    """One element type. ``accumulator`` is "" where it is the type itself.

    ``c`` is "" where the C of some compiler lacks it: such kernels are compiled as C++, with classes that compute in
    float. gcc 12 has ``_Float16`` in C, but loops over the class ran up to 4 times as fast there, being vectorised.
    """

    name: str
    number: int
    kind: str
    c: str
    cpp: str
    cuda: str
    accumulator: str


def _same(name: str, number: int, kind: str, c: str, accumulator: str) -> Dtype:
    return Dtype(name, number, kind, c, c, c, accumulator)


_TABLE = (
    _same("uint8", 0, "int", "uint8_t", "int64_t"),
    _same("int8", 1, "int", "int8_t", "int64_t"),
    _same("int16", 2, "int", "int16_t", "int64_t"),
    _same("int32", 3, "int", "int32_t", "int64_t"),
    _same("int64", 4, "int", "int64_t", "int64_t"),
    Dtype("float16", 5, "float", "", "opk_half", "__half", "float"),
    _same("float32", 6, "float", "float", "float"),
    _same("float64", 7, "float", "double", "double"),
    Dtype("complex64", 9, "complex", "float _Complex", "__complex__ float", "cuFloatComplex", ""),
    Dtype("complex128", 10, "complex", "double _Complex", "__complex__ double", "cuDoubleComplex", ""),
    Dtype("bool", 11, "bool", "_Bool", "bool", "bool", "int64_t"),
    Dtype("bfloat16", 15, "float", "", "opk_bf16", "__nv_bfloat16", "float"),
    _same("uint16", 27, "int", "uint16_t", "int64_t"),
    _same("uint32", 28, "int", "uint32_t", "int64_t"),
    _same("uint64", 29, "int", "uint64_t", "uint64_t"),
)

DTYPES: dict[str, Dtype] = {dtype.name: dtype for dtype in _TABLE}
"""Every element type, by its name in torch."""


@dataclasses.dataclass(frozen=True)
class CType:
    """A C type: the dtype of the elements that a pointer to it points to, and the size of an integer."""

    kind: str
    dtype: str | None
    bits: int = 0
    signed: bool = True

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The range in which an int64_t is converted without change; None where every value fits."""
        if self.kind != "int" or (self.signed and self.bits == 64):
            return None, None
        if not self.signed:
            return 0, 2**self.bits - 1 if self.bits < 64 else None
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1


def _integers() -> dict[str, CType]:
    words = {"short": 16, "int": 32, "long": 64, "long long": 64, "signed char": 8}
    signed = {name: CType("int", f"int{bits}", bits) for name, bits in words.items()}
    words = {"char": 8, "short": 16, "int": 32, "long": 64, "long long": 64}
    unsigned = {f"unsigned {name}": CType("int", f"uint{bits}", bits, False) for name, bits in words.items()}
    fixed = {f"int{bits}_t": CType("int", f"int{bits}", bits) for bits in (8, 16, 32, 64)}
    ufixed = {f"uint{bits}_t": CType("int", f"uint{bits}", bits, False) for bits in (8, 16, 32, 64)}
    named = {name: CType("int", "int64", 64) for name in ("ssize_t", "ptrdiff_t", "intptr_t")}
    unamed = {name: CType("int", "uint64", 64, False) for name in ("size_t", "uintptr_t")}
    return {**signed, **unsigned, **fixed, **ufixed, **named, **unamed}


def _elements() -> dict[str, CType]:
    spellings = {
        "float16": ("_Float16", "opk_half", "__half", "half", "__fp16"),
        "bfloat16": ("__bf16", "opk_bf16", "__nv_bfloat16", "nv_bfloat16"),
        "float32": ("float",),
        "float64": ("double",),
        "complex64": ("float _Complex", "cuFloatComplex", "std::complex<float>"),
        "complex128": ("double _Complex", "cuDoubleComplex", "std::complex<double>"),
        "bool": ("_Bool", "bool"),
    }
    return {text: CType(DTYPES[name].kind, name) for name, texts in spellings.items() for text in texts}


C_TYPES: dict[str, CType] = {
    **_integers(),
    **_elements(),
    "char": CType("char", None),
    "long double": CType("float", None),
    "void": CType("void", None),
}
"""The C types by the spelling that :mod:`opkit.kernels.cc.declaration` gives them."""
