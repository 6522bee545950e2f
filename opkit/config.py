"""Settings, read once from the environment.

======================  =======  ====================================================================================
variable                default  meaning
======================  =======  ====================================================================================
``OPKIT_CHECK``         ``1``    check shapes and dtypes against annotations before a kernel runs
``OPKIT_VERIFY``        ``1``    verify mutation, aliasing and kernel outputs the first time each guard set is seen; ``all``: of
                                 kernels too that were registered as trusted
``OPKIT_CACHE_DIR``     (user)   where results that outlive the process are stored (compiled kernels, kernel timings)
``OPKIT_CC``            (found)  the C compiler; gcc or clang
``OPKIT_CXX``           (found)  the C++ compiler
``OPKIT_NVCC``          (found)  nvcc, a CUDA compiler
``OPKIT_CUDA_COMPILER`` (found)  the CUDA compiler: nvrtc, which comes with torch, or nvcc
``OPKIT_ISA``           (host)   the widest instruction set to build for and run: baseline, avx2, avx512, avx512_bf16, amx, neon
``OPKIT_BUILD_TIMEOUT`` ``300``  seconds after which a compiler is stopped
``OPKIT_BRIDGE``        ``1``    use the bridge, if ``opkit bridge`` built it: calls of C kernels skip Python's autograd rules
``OPKIT_TUNE``          ``on``   time the configurations of a Triton kernel at its first call with shapes of a new size; ``all``:
                                 also where its package has results for other shapes
``OPKIT_STRICT``        ``0``    the compiler raises where it fails, rather than running the graph in eager mode
``OPKIT_LOG``           (none)   what the compiler logs, with commas between: fusion, recompiles, output_code
======================  =======  ====================================================================================

``OPKIT_BATCH_INVARIANT`` (``0``): attention's results do not depend on what else is in the batch; see opkit.batch_invariant.
``OPKIT_KEEP_MASKS`` (``1``): attention caches what it computes from a mask's tensors; see docs/attention.md.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path

from opkit.errors import ConfigError

_SWITCHES = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of this process; see the module's table."""

    check: bool = True
    verify: bool = True
    verify_all: bool = False
    cache_dir: Path = Path()
    cc: str | None = None
    cxx: str | None = None
    nvcc: str | None = None
    cuda_compiler: str | None = None
    isa: str | None = None
    build_timeout: float = 300.0
    bridge: bool = True
    tune: bool = True
    tune_all: bool = False
    strict: bool = False
    log: frozenset[str] = frozenset()
    batch_invariant: bool = False
    keep_masks: bool = True


def _switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(name)
    if text is None:
        return default
    if text.lower() not in _SWITCHES:
        raise ConfigError(f"{name}={text!r} is not a switch. Set it to 0 or 1, or unset it.")
    return _SWITCHES[text.lower()]


def _one_of(environment: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    text = environment.get(name) or None
    if text is not None and text not in choices:
        raise ConfigError(f"{name}={text!r} is not known. Set it to one of {', '.join(choices)}, or unset it.")
    return text


def _some_of(environment: Mapping[str, str], name: str, choices: tuple[str, ...]) -> frozenset[str]:
    words = frozenset(filter(None, (word.strip() for word in environment.get(name, "").split(","))))
    unknown = sorted(words.difference(choices))
    if unknown:
        raise ConfigError(f"{name}: {unknown[0]!r} is not known. Name some of {', '.join(choices)}, or unset it.")
    return words


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={text!r} is not a time. Set it to a number of seconds, or unset it.")
    return seconds


def _cache_dir(environment: Mapping[str, str]) -> Path:
    if "OPKIT_CACHE_DIR" in environment:
        return Path(environment["OPKIT_CACHE_DIR"])
    import platformdirs  # imported only where the default is needed

    return Path(platformdirs.user_cache_dir("opkit"))


def read(environment: Mapping[str, str]) -> Settings:
    """Build a :class:`Settings` from ``environment``.

    Raises:
        ConfigError: a variable holds a value that cannot be used.

    >>> read({"OPKIT_CHECK": "0", "OPKIT_CACHE_DIR": "/tmp/opkit"}).check
    False
    """
    return Settings(
        check=_switch(environment, "OPKIT_CHECK", True),
        verify=environment.get("OPKIT_VERIFY") == "all" or _switch(environment, "OPKIT_VERIFY", True),
        verify_all=environment.get("OPKIT_VERIFY") == "all",
        cache_dir=_cache_dir(environment),
        cc=environment.get("OPKIT_CC") or None,
        cxx=environment.get("OPKIT_CXX") or None,
        nvcc=environment.get("OPKIT_NVCC") or None,
        cuda_compiler=_one_of(environment, "OPKIT_CUDA_COMPILER", ("nvrtc", "nvcc")),
        isa=_one_of(environment, "OPKIT_ISA", ("baseline", "avx2", "avx512", "avx512_bf16", "amx", "neon")),
        build_timeout=_seconds(environment, "OPKIT_BUILD_TIMEOUT", 300.0),
        bridge=_switch(environment, "OPKIT_BRIDGE", True),
        tune=environment.get("OPKIT_TUNE") == "all" or _switch(environment, "OPKIT_TUNE", True),
        tune_all=environment.get("OPKIT_TUNE") == "all",
        strict=_switch(environment, "OPKIT_STRICT", False),
        log=_some_of(environment, "OPKIT_LOG", ("fusion", "recompiles", "output_code")),
        batch_invariant=_switch(environment, "OPKIT_BATCH_INVARIANT", False),
        keep_masks=_switch(environment, "OPKIT_KEEP_MASKS", True),
    )


@functools.cache
def get() -> Settings:
    """Return the settings of this process, read from the environment on the first call."""
    return read(os.environ)
