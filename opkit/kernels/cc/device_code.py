"""Architectures of NVIDIA's GPUs, as compilers of CUDA C++ name them: "sm_90" is code for devices, "compute_90" is PTX."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_NAME = re.compile(r"(sm|compute)_?(\d+)([af]?)")


class Image(NamedTuple):
    """Device code for one architecture: of compute capability 9.0, ``capability`` is 90.

    ``reach`` is where it runs, in addition to devices of exactly that capability: ``LATER_MINOR`` versions of its major one,
    ``ALL_LATER`` devices, or ``NO_OTHER``.
    """

    capability: int
    reach: int

    def runs_on(self, capability: int) -> bool:
        """Return whether a device of a compute capability runs it; ``image_for`` of ``opkit_cuda.h`` decides the same.

        >>> image("sm_80").runs_on(86), image("sm_80").runs_on(90), image("sm_90a").runs_on(90), image("sm_100a").runs_on(103)
        (True, False, True, False)
        """
        if self.reach == NO_OTHER or capability < self.capability:
            return capability == self.capability
        return self.reach == ALL_LATER or capability // 10 == self.capability // 10


LATER_MINOR, ALL_LATER, NO_OTHER = range(3)  # numbers of opk_cuda_image


def image(name: str) -> Image:
    """Return what is compiled for an architecture.

    >>> image("compute_90"), image("sm_100a"), image("sm_100f")
    (Image(capability=90, reach=1), Image(capability=100, reach=2), Image(capability=100, reach=0))
    """
    found = _NAME.fullmatch(name)
    assert found is not None, name
    reach = {"a": NO_OTHER, "f": LATER_MINOR}.get(found[3], ALL_LATER if found[1] == "compute" else LATER_MINOR)
    return Image(int(found[2]), reach)


def flags(names: Iterable[str]) -> tuple[str, ...]:
    """Return the compiler's flags for code for some GPUs, and PTX for those that are newer than all of them.

    Architectures of other makers are left out; "sm_90a" and the like have no PTX that another GPU takes.

    >>> flags(["sm80", "sm_90a", "gfx942"])
    ('-gencode=arch=compute_80,code=sm_80', '-gencode=arch=compute_90a,code=sm_90a', '-gencode=arch=compute_80,code=compute_80')
    """
    found = {match[2] + match[3]: match for match in map(_NAME.fullmatch, names) if match is not None}
    newest = max((int(match[2]) for match in found.values() if not match[3]), default=None)
    ptx = () if newest is None else (f"-gencode=arch=compute_{newest},code=compute_{newest}",)
    return (*(f"-gencode=arch=compute_{name},code=sm_{name}" for name in found), *ptx)
