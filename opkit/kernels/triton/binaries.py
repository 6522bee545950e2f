"""What a compiler made of one kernel for one architecture, with all that a launch of it must know."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

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
        """Everything but the image, as plain lists, numbers and strings."""
        fields = dataclasses.asdict(self)
        del fields["image"]
        params = [[param.kind, param.name, param.detail] for param in self.params]
        return fields | {"params": params, "maps": [dict(entry) for entry in self.maps], "cluster": list(self.cluster)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], image: bytes) -> Binary:
        """Return what ``to_json`` described, with its image.

        Raises:
            KeyError, TypeError, ValueError: it was not written by ``to_json``.
        """
        plain = {name: value for name, value in fields.items() if name not in _IN_A_LIST}
        params = tuple(Param(*entry) for entry in fields["params"])
        x, y, z = fields["cluster"]
        return cls(image=image, params=params, maps=tuple(fields["maps"]), cluster=(x, y, z), **plain)
