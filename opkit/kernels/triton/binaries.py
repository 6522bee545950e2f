"""A compiled kernel: its machine code, the parameters that it takes and in which order, and what it takes of the hardware."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from opkit.errors import KernelError
from opkit.kernels.libraries import elf
from opkit.kernels.triton.sources import AXES

_BITS = re.compile(r"\d+$")
_BYTES = {
    "ptr": 8,
    "map": 128,
    "padding_nan": 1,
    "round_tf32": 1,
    "offset": 4,
    "total": 4,
    "scratch": 8,
    "profile_scratch": 8,
}
_IN_A_LIST = ("params", "maps", "cluster")


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of the compiled function: its kind, the Triton parameter that it comes from, a detail.

    ==================================  ============================================================================
    kind                                what is passed
    ==================================  ============================================================================
    "ptr"                               the address of a tensor, or of a descriptor's tensor
    "i1" "i8" .. "i64", "u8" .. "u64"   a number of that many bits; "i1" is a byte, 0 or 1
    "fp16" "bf16" "fp32" "fp64"         a number
    "map"                               a ``CUtensorMap`` of 128 bytes; detail is its place in ``Binary.maps``
    "size32" "size64"                   the size of a descriptor's tensor along the dimension ``detail``
    "stride32" "stride64"               its stride there, in elements
    "padding_nan" "round_tf32"          a byte, 0 or 1: how a descriptor pads, and whether it rounds to TF32
    "offset" "total"                    int32: where the piece starts, and the whole grid's size, along axis ``detail``
    "scratch" "profile_scratch"         the address of memory for the launch, or null; the name is ""
    ==================================  ============================================================================
    """

    kind: str
    name: str = ""
    detail: int = 0

    @property
    def size(self) -> int:
        """Bytes.

        >>> Param("i1", "causal").size, Param("size32", "x_desc", 0).size, Param("map", "x_desc").size
        (1, 4, 128)
        """
        bits = _BITS.search(self.kind)
        return _BYTES[self.kind] if self.kind in _BYTES else max(1, int(bits[0]) // 8 if bits else 0)


@dataclasses.dataclass(frozen=True)
class Binary:
    """One compiled kernel. Sizes are bytes; ``threads`` is of one block, ``cluster`` in blocks.

    A program of Triton's is one cluster: the grid that is launched has ``cluster[0]`` times as many blocks along x.
    ``scratch`` and ``profile_scratch`` are for one block. ``shared`` is the dynamic shared memory.
    """

    image: bytes
    form: str
    name: str
    threads: int
    shared: int
    cluster: tuple[int, int, int]
    cooperative: bool
    pdl: bool
    scratch: int
    scratch_align: int
    profile_scratch: int
    profile_scratch_align: int
    params: tuple[Param, ...]
    maps: tuple[Mapping[str, Any], ...]
    target: str

    def to_json(self) -> dict[str, Any]:
        """Return everything but the image, as plain lists, numbers and strings."""
        fields = dataclasses.asdict(self)
        del fields["image"]
        params = [[param.kind, param.name, param.detail] for param in self.params]
        return fields | {"params": params, "maps": [dict(entry) for entry in self.maps], "cluster": list(self.cluster)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], image: bytes) -> Binary:
        """Return the binary that ``to_json`` described, with its image.

        Raises:
            KeyError, TypeError, ValueError: it was not written by ``to_json``.
        """
        plain = {name: value for name, value in fields.items() if name not in _IN_A_LIST}
        params = tuple(Param(*entry) for entry in fields["params"])
        x, y, z = fields["cluster"]
        return cls(image=image, params=params, maps=tuple(fields["maps"]), cluster=(x, y, z), **plain)


# ---- parameters, as Triton passes those of a function ----------------------------------------------------------------


_KINDS = {"u1": "i1", "f32": "fp32"}
_DESCRIPTOR_TYPE = re.compile(r"tensordesc<([^\[>]*)\[([^\]]*)\]")

# Triton numbers the element types of a CUtensorMap otherwise than the driver's CUtensorMapDataType does.
_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}


def params(signature: Mapping[str, str], maps: Sequence[Any], shifted: bool) -> tuple[Param, ...]:
    """Return what the compiled kernel takes, in order.

    Raises:
        KernelError: a parameter is of a type that cannot be passed.
    """
    found: list[Param] = []
    descriptors = 0
    for name, kind in signature.items():
        if kind.startswith("tensordesc"):
            found += _descriptor_params(name, kind, descriptors if maps else None)
            descriptors += 1
        elif kind != "constexpr":
            found.append(Param("ptr" if kind.startswith("*") else _KINDS.get(kind, kind), name))
    found += [Param(kind, "", axis) for kind in ("offset", "total") for axis in range(len(AXES)) if shifted]
    return (*found, Param("scratch"), Param("profile_scratch"))


def _descriptor_params(name: str, kind: str, place: int | None) -> Iterator[Param]:
    """Yield a map and its sizes, or, where the hardware has none, the tensor's address and sizes, which then come twice."""
    rank = _rank(name, kind)
    if place is not None:
        yield Param("map", name, place)
    else:
        yield Param("ptr", name)
        yield from _sizes(name, rank, "size64")
        yield from (Param(flag, name) for flag in _flags())
    yield from _sizes(name, rank, "size32")


def _sizes(name: str, rank: int, size: str) -> Iterator[Param]:
    yield from (Param(size, name, dimension) for dimension in range(rank))
    yield from (Param("stride64", name, dimension) for dimension in range(rank))


def _rank(name: str, kind: str) -> int:
    match = _DESCRIPTOR_TYPE.match(kind)
    if match is None:
        raise KernelError(f"the descriptor {name} has the type {kind!r}; expected such as 'tensordesc<bf16[128, 64]>'.")
    return match[2].count(",") + 1


def _flags() -> tuple[str, ...]:
    """Return the flags of a descriptor; Triton 3.7 added the second."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rounds = "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__
    return ("padding_nan", "round_tf32") if rounds else ("padding_nan",)


def maps(names: Sequence[str], described: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return what each descriptor's ``CUtensorMap`` is encoded with.

    ``block`` is in elements, outermost dimension first; ``elem_type`` and ``swizzle`` are numbers of the driver's enums.

    Raises:
        KernelError: a descriptor is of a form that has no rules here.
    """
    return tuple(_tensor_map(name, entry) for name, entry in zip(names, described, strict=True))


def _tensor_map(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if entry.get("is_im2col") or "elem_type" not in entry:
        raise KernelError(f"the descriptor {name} is no tiled CUtensorMap; opkit passes no other kind on.")
    number = int(entry["elem_type"])
    return {
        "name": name,
        "swizzle": int(entry["swizzle"]),
        "elem_size": int(entry["elem_size"]),
        "elem_type": _ELEMENT_TYPES.get(number, number),
        "block": [int(size) for size in entry["block_size"]],
        "fp4_padded": bool(entry["fp4_padded"]),
    }


# ---- resources -------------------------------------------------------------------------------------------------------


_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12  # of attributes; each names a symbol and a number
_PARAMETER = 0x17
_RESERVED = 1024
_SIZED = 4  # the form of an attribute that is followed by so many bytes; any other is two bytes itself
_PARAMETER_SIZE = 18  # bits before a parameter's size in its attribute
_METADATA = 32  # the note's type


@dataclasses.dataclass(frozen=True)
class Resources:
    """``registers`` of a thread (of AMD's, vector registers), ``shared`` bytes of a block, static and dynamic.

    ``spills`` is the local memory of a thread in bytes: what does not fit its registers, and arrays of its own.
    """

    registers: int
    shared: int
    spills: int
    threads: int
    target: str


def resources_of(binary: Binary) -> Resources:
    """Return the resources that a kernel takes.

    Raises:
        KernelError: the machine code is not as its compilers write it.
    """
    registers, static, spills = _read_code(binary, _READERS)
    return Resources(registers, static + binary.shared, spills, binary.threads, binary.target)


def parameter_sizes(binary: Binary) -> list[int]:
    """Return the sizes in bytes of a kernel's parameters, in order.

    Raises:
        KernelError: the machine code is not as its compilers write it.
    """
    return _read_code(binary, _SIZES)


def _read_code(binary: Binary, readers: Mapping[str, Callable[[dict[str, elf.Section], str], Any]]) -> Any:
    try:
        return readers[binary.form](elf.sections(binary.image) or {}, binary.name)
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise KernelError(f"{binary.name}: its {binary.form} for {binary.target} cannot be read: {error!r}.") from error


# ---- cubin -----------------------------------------------------------------------------------------------------------


def _cubin(sections: dict[str, elf.Section], name: str) -> tuple[int, int, int]:
    """Return registers, static shared memory, local memory. Functions that are not inlined have entries of their own."""
    found: dict[int, list[int]] = {_REGISTERS: [], _FRAME: [0], _STACK: [0]}
    for attribute, data in _attributes(sections[".nv.info"].data):
        if attribute in found and data:
            found[attribute].append(struct.unpack("<II", data)[1])
    return max(found[_REGISTERS]), _static(sections, name), max(found[_FRAME] + found[_STACK])


def _static(sections: dict[str, elf.Section], name: str) -> int:
    """Return the static shared memory. From sm_90 on the section begins with the system's own, which the limit leaves out."""
    shared = sections.get(f".nv.shared.{name}")
    reserved = _RESERVED if ".nv.shared.reserved.0" in sections else 0
    return max(0, shared.size - reserved) if shared else 0


def _cubin_sizes(sections: dict[str, elf.Section], name: str) -> list[int]:
    words = [
        struct.unpack("<IHHI", data)
        for attribute, data in _attributes(sections[f".nv.info.{name}"].data)
        if attribute == _PARAMETER
    ]
    return [flags >> _PARAMETER_SIZE for _, _, _, flags in sorted(words, key=lambda word: word[1])]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, place)
        size = value if form == _SIZED else 0
        yield attribute, data[place + 4 : place + 4 + size]
        place += 4 + size


# ---- hsaco -----------------------------------------------------------------------------------------------------------


def _hsaco(sections: dict[str, elf.Section], name: str) -> tuple[int, int, int]:
    kernel = _kernel_metadata(sections, name)
    return kernel[".vgpr_count"], kernel[".group_segment_fixed_size"], kernel[".private_segment_fixed_size"]


def _hsaco_sizes(sections: dict[str, elf.Section], name: str) -> list[int]:
    arguments = _kernel_metadata(sections, name).get(".args", [])
    return [argument[".size"] for argument in arguments if not argument[".value_kind"].startswith("hidden")]


def _kernel_metadata(sections: dict[str, elf.Section], name: str) -> dict[str, Any]:
    metadata, _ = _unpacked(_note(sections[".note"].data), 0)
    return {kernel[".name"]: kernel for kernel in metadata["amdhsa.kernels"]}[name]


def _note(data: bytes) -> bytes:
    place = 0
    while place < len(data):
        owner, size, kind = struct.unpack_from("<III", data, place)
        start = place + 12 + _padded(owner)
        if kind == _METADATA:
            return data[start : start + size]
        place = start + _padded(size)
    raise ValueError("no metadata")


def _padded(size: int) -> int:
    return (size + 3) // 4 * 4


# Of msgpack, https://github.com/msgpack/msgpack/blob/master/spec.md: by the first byte, what it is and its number's form.
_FORMS = {
    0xC4: ("bytes", ">B"),
    0xC5: ("bytes", ">H"),
    0xC6: ("bytes", ">I"),
    0xCA: ("number", ">f"),
    0xCB: ("number", ">d"),
    0xCC: ("number", ">B"),
    0xCD: ("number", ">H"),
    0xCE: ("number", ">I"),
    0xCF: ("number", ">Q"),
    0xD0: ("number", ">b"),
    0xD1: ("number", ">h"),
    0xD2: ("number", ">i"),
    0xD3: ("number", ">q"),
    0xD9: ("text", ">B"),
    0xDA: ("text", ">H"),
    0xDB: ("text", ">I"),
    0xDC: ("list", ">H"),
    0xDD: ("list", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}
_SHORT = ((0x80, 0x8F, "map"), (0x90, 0x9F, "list"), (0xA0, 0xBF, "text"))


def _unpacked(data: bytes, place: int) -> tuple[Any, int]:
    """Return the value that starts at a place, and where the next one does."""
    first = data[place]
    if first in _PLAIN:
        return _PLAIN[first], place + 1
    if first < 0x80 or first >= 0xE0:
        return first if first < 0x80 else first - 0x100, place + 1
    for low, high, kind in _SHORT:
        if low <= first <= high:
            return _long(data, place + 1, kind, first - low)
    kind, form = _FORMS[first]
    (number,) = struct.unpack_from(form, data, place + 1)
    return _long(data, place + 1 + struct.calcsize(form), kind, number)


def _long(data: bytes, place: int, kind: str, number: Any) -> tuple[Any, int]:
    if kind == "number":
        return number, place
    if kind in ("text", "bytes"):
        inner = data[place : place + number]
        return inner.decode() if kind == "text" else inner, place + number
    values, place = _series(data, place, number * (2 if kind == "map" else 1))
    return (dict(zip(values[::2], values[1::2], strict=True)) if kind == "map" else values), place


def _series(data: bytes, place: int, count: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    for _ in range(count):
        value, place = _unpacked(data, place)
        values.append(value)
    return values, place


_READERS = {"cubin": _cubin, "hsaco": _hsaco}
_SIZES = {"cubin": _cubin_sizes, "hsaco": _hsaco_sizes}
