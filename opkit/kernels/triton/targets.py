"""Architectures: from the names that people write, and that devices report, to the targets of Triton's backends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from opkit.errors import ArgumentError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

_CUDA = re.compile(r"sm_?([1-9]\d{1,2})[af]?")
_HIP = re.compile(r"(gfx(\d{1,2})[0-9a-f]{2})(:.*)?")
_OLDEST = 75  # Triton's oldest
_WIDE_WAVE = 9  # gfx9 and older run 64 threads a wave, gfx10 and newer 32
_SPECIFIC = 90  # from here on Triton compiles for "sm_90a" and the like, which run nowhere else
_EXAMPLES = "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950, gfx1100"


def parse(name: str) -> GPUTarget:
    """Return the target of Triton's that an architecture's name stands for; "sm_90a" is "sm_90", which Triton means by it.

    Raises:
        ArgumentError: no such architecture.

    >>> parse("sm_90a").arch, parse("gfx942:sramecc+").warp_size
    (90, 64)
    """
    from triton.backends.compiler import GPUTarget

    return GPUTarget(*_parts(name))


def _parts(name: str) -> tuple[str, int | str, int]:
    """Return the backend, the architecture as Triton has it, and the threads of a warp."""
    cuda, hip = _CUDA.fullmatch(name), _HIP.fullmatch(name)
    if cuda and int(cuda[1]) >= _OLDEST:
        return "cuda", int(cuda[1]), 32
    if hip:
        return "hip", hip[1], 64 if int(hip[2]) <= _WIDE_WAVE else 32
    raise ArgumentError(
        f"{name!r} is no architecture that kernels are compiled for. Write it as one of these: {_EXAMPLES}."
    )


def name_of(target: GPUTarget) -> str:
    """Return the name of a target; ``parse`` gives the target back.

    >>> name_of(parse("sm_90a"))
    'sm_90'
    """
    return _spelled(target.backend, target.arch)


def _spelled(backend: str, architecture: int | str) -> str:
    return f"sm_{architecture}" if backend == "cuda" else str(architecture)


def canonical(name: str) -> str:
    """Return one spelling of an architecture that may be spelled in many ways. Triton is not imported.

    Raises:
        ArgumentError: no such architecture.

    >>> canonical("sm90a"), canonical("gfx90a:xnack-")
    ('sm_90', 'gfx90a')
    """
    return _spelled(*_parts(name)[:2])


def runs(built: str, device: str) -> bool:
    """Return whether what was compiled for one architecture runs on another one's devices; both are canonical names.

    Up to 8.9, CUDA's binaries run on later devices of the same major version. From 9.0 on Triton uses what each
    architecture alone has.

    >>> runs("sm_80", "sm_86"), runs("sm_86", "sm_80"), runs("sm_90", "sm_90"), runs("sm_100", "sm_103")
    (True, False, True, False)
    """
    numbers = _CUDA.fullmatch(built), _CUDA.fullmatch(device)
    if built == device or numbers[0] is None or numbers[1] is None:
        return built == device
    old, new = int(numbers[0][1]), int(numbers[1][1])
    return old // 10 == new // 10 and old <= new < _SPECIFIC


def of_device(major: int, minor: int) -> str:
    """Return the architecture of a CUDA device, by its compute capability.

    >>> of_device(9, 0), of_device(10, 3)
    ('sm_90', 'sm_103')
    """
    return f"sm_{major}{minor}"


def of_architecture(name: str) -> str:
    """Return the architecture of a HIP device, by the name that the driver gives it (``gcnArchName``).

    >>> of_architecture("gfx942:sramecc+:xnack-")
    'gfx942'
    """
    return name.split(":")[0]
