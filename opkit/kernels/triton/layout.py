"""List the parameters of a compiled kernel: the order and form in which Triton passes those of a function.

The facts are those of Triton's launchers (``backends/nvidia/driver.py``, ``backends/amd/driver.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opkit.errors import KernelError
from opkit.kernels.triton.binaries import Param
from opkit.kernels.triton.offsets import AXES

_KINDS = {"u1": "i1", "f32": "fp32"}
_DESCRIPTOR = re.compile(r"tensordesc<([^\[>]*)\[([^\]]*)\]")

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
            found += _descriptor(name, kind, descriptors if maps else None)
            descriptors += 1
        elif kind != "constexpr":
            found.append(Param("ptr" if kind.startswith("*") else _KINDS.get(kind, kind), name))
    found += [Param(kind, "", axis) for kind in ("offset", "total") for axis in range(len(AXES)) if shifted]
    return (*found, Param("scratch"), Param("profile_scratch"))


def _descriptor(name: str, kind: str, place: int | None) -> Iterator[Param]:
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
    match = _DESCRIPTOR.match(kind)
    if match is None:
        raise KernelError(f"the descriptor {name} has the type {kind!r}; expected such as 'tensordesc<bf16[128, 64]>'.")
    return match[2].count(",") + 1


def _flags() -> tuple[str, ...]:
    """Triton 3.7 added the second."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rounds = "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__
    return ("padding_nan", "round_tf32") if rounds else ("padding_nan",)


def maps(names: Sequence[str], described: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return what each descriptor's ``CUtensorMap`` is encoded with.

    ``block`` is in elements, outermost dimension first; ``elem_type`` and ``swizzle`` are numbers of the driver's enums.

    Raises:
        KernelError: a descriptor is of a form that has no rules here.
    """
    return tuple(_map(name, entry) for name, entry in zip(names, described, strict=True))


def _map(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
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
