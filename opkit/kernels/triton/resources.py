"""Read what a compiled kernel takes of the hardware from its machine code; no GPU and no tool of the vendor's is needed.

A cubin's ``.nv.info`` sections are lists of attributes (cuobjdump names them EIATTR); an hsaco has a note in msgpack,
as https://llvm.org/docs/AMDGPUUsage.html#code-object-metadata describes it.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opkit.errors import KernelError
from opkit.kernels.libraries import elf
from opkit.kernels.triton.binaries import Binary

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


def of(binary: Binary) -> Resources:
    """Return what a kernel takes.

    Raises:
        KernelError: the machine code is not as its compilers write it.
    """
    registers, static, spills = _read(binary, _READERS)
    return Resources(registers, static + binary.shared, spills, binary.threads, binary.target)


def parameter_sizes(binary: Binary) -> list[int]:
    """Return the sizes in bytes of what a kernel takes, in order.

    Raises:
        KernelError: the machine code is not as its compilers write it.
    """
    return _read(binary, _SIZES)


def _read(binary: Binary, readers: Mapping[str, Callable[[dict[str, elf.Section], str], Any]]) -> Any:
    try:
        return readers[binary.form](elf.sections(binary.image) or {}, binary.name)
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise KernelError(f"{binary.name}: its {binary.form} for {binary.target} cannot be read: {error!r}.") from error


# ---- cubin -----------------------------------------------------------------------------------------------------------


def _cubin(sections: dict[str, elf.Section], name: str) -> tuple[int, int, int]:
    """Registers, static shared memory, local memory. Functions that are not inlined have entries of their own."""
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
    kernel = _kernel(sections, name)
    return kernel[".vgpr_count"], kernel[".group_segment_fixed_size"], kernel[".private_segment_fixed_size"]


def _hsaco_sizes(sections: dict[str, elf.Section], name: str) -> list[int]:
    arguments = _kernel(sections, name).get(".args", [])
    return [argument[".size"] for argument in arguments if not argument[".value_kind"].startswith("hidden")]


def _kernel(sections: dict[str, elf.Section], name: str) -> dict[str, Any]:
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
