"""Detect the instruction sets of this processor, and choose the one that a kernel is compiled for."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from opkit import config
from opkit.errors import ArgumentError, ConfigError

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}

WIDENING = {"x86_64": ("baseline", "avx2", "avx512"), "aarch64": ("baseline", "neon")}
"""The named instruction sets of each machine, narrowest first."""

_COMPILED_AS = {
    "avx512_bf16": "avx512",
    "amx": "avx512",
}  # values of ``OPKIT_ISA`` that only opkit's own kernels distinguish

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_NEEDS: dict[str, frozenset[str]] = {
    "avx2": _AVX2,
    "avx512": _AVX2 | {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"},
}

_FLAGS = {
    "x86_64": {
        "native": "-march=native",
        "baseline": "-march=x86-64",
        "avx2": "-march=x86-64-v3",
        "avx512": "-march=x86-64-v4",
    },
    "aarch64": {"native": "-mcpu=native", "baseline": "-march=armv8-a", "neon": "-march=armv8-a"},
}


_UNITS = {"K": 10, "M": 20, "G": 30}


def machine() -> str:
    """Return the processor's family: "x86_64", "aarch64", or the system's name of another one."""
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


def _from_linux(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return the flags of the first processor that Linux lists; nothing on another system."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return next((_flags(line) for line in lines if line.startswith(("flags", "Features"))), frozenset())
    except OSError:
        return frozenset()


def _flags(line: str) -> frozenset[str]:
    return frozenset(line.partition(":")[2].split())


def _from_core() -> dict[str, bool]:
    try:
        from opkit import _core  # compiled: absent when opkit runs from a source tree that was not installed
    except ImportError:
        return {}
    return _core.cpu_features()


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """Return the features that code compiled for "native" may use: processors with the same features can share it.

    Linux's list is longer than that of ``opkit._core``, and a compiler uses some features that only Linux names.
    """
    core = {name for name, usable in _from_core().items() if usable}
    return tuple(sorted(core | _from_linux()))


@functools.cache
def last_cache(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int | None:
    """Return the bytes of the largest cache of the first processor that Linux lists; None on another system."""
    texts = [path.read_text(encoding="utf-8").strip() for path in Path(folder).glob("index*/size")]
    return max((int(text[:-1]) << _UNITS[text[-1]] for text in texts if text[-1:] in _UNITS), default=None)


@functools.cache
def _usable(isa: str) -> bool:
    listed = _from_linux()
    if listed:
        return _NEEDS.get(isa, frozenset()) <= listed
    core = (
        _from_core()
    )  # it does not name every feature that is needed; every processor with the named ones has the rest
    named = _NEEDS.get(isa, frozenset()) & core.keys()
    return isa not in _NEEDS or (bool(named) and all(core[name] for name in named))


def host_isa() -> str:
    """Return the widest of the named instruction sets that this processor has, no wider than ``OPKIT_ISA``.

    Raises:
        ConfigError: ``OPKIT_ISA`` names an instruction set of another kind of processor.
    """
    order = WIDENING.get(machine(), ("baseline",))
    cap = config.get().isa or order[-1]
    cap = _COMPILED_AS.get(cap, cap)
    if cap not in order:
        raise ConfigError(f"OPKIT_ISA={cap!r} is not for {machine()}. Set it to {' or '.join(order)}, or unset it.")
    return next(isa for isa in reversed(order[: order.index(cap) + 1]) if _usable(isa))


def usable_isas() -> tuple[str, ...]:
    """Return the named instruction sets that this processor has, narrowest first, up to :func:`host_isa`."""
    order = WIDENING.get(machine(), ("baseline",))
    return order[: order.index(host_isa()) + 1]


def needed_features(isa: str) -> frozenset[str]:
    """Return the features that code for a named instruction set uses.

    Raises:
        ArgumentError: this kind of processor has no such instruction set.
    """
    known = WIDENING.get(machine(), ("baseline",))
    if isa not in known:
        raise ArgumentError(f"isa={isa!r} is not one of native, {', '.join(known)}.")
    return _NEEDS.get(isa, frozenset())


def effective(isa: str) -> str:
    """Resolve "native" to the name of the host's instruction set where ``OPKIT_ISA`` caps it; return others unchanged."""
    return host_isa() if isa == "native" and config.get().isa is not None else isa


def isa_flags(isa: str, family: str) -> tuple[str, ...]:
    """Return the compiler's flags for an instruction set; none for nvcc, whose kernels run on the GPU.

    Raises:
        ArgumentError: this kind of processor has no such instruction set.
    """
    known = _FLAGS.get(machine(), {"native": "-march=native", "baseline": ""})
    chosen = effective(isa)
    if chosen not in known:
        raise ArgumentError(
            f"isa={isa!r} is not one of {', '.join(known)}, which kernels on {machine()} can be built for."
        )
    flag = known[chosen]
    return (flag,) if flag and family != "nvcc" else ()
