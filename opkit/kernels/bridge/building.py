"""Build the bridge to one torch, as an entry of the build cache, and look it up there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from opkit import config
from opkit.errors import CacheError, ToolchainError
from opkit.kernels.cc import compilation
from opkit.kernels.cc.compilation import Request, Unit
from opkit.kernels.store import cache

_SOURCE = Path(__file__).with_name("bridge.cpp")
_INCLUDE = Path(__file__).parents[1] / "include"
# not the compiler's own C++ runtime, which may be another than torch's, or static: two in one process crash
_FLAGS = ("-std=c++20", "-O2", "-w", "-nodefaultlibs", "-Wl,--no-as-needed")
_LIBRARIES = ("torch_cpu", "c10", "c", "gcc")


@dataclasses.dataclass(frozen=True)
class TorchPaths:
    """One torch: which it is, and where its headers and libraries are."""

    version: str
    git_version: str
    include_dir: Path
    library_dir: Path
    cxx11_abi: bool = True

    @property
    def missing(self) -> str:
        """What a build needs and this torch lacks; "" where it is complete. Some distributions leave out the headers."""
        needed = (self.include_dir / "torch" / "library.h", self.library_dir / "libtorch_cpu.so")
        return "".join(f"torch {self.version} has no {path}. " for path in needed if not path.is_file()).strip()


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the bridge to one torch is ready, and where it is ``absent``, why it cannot be built, if it cannot."""

    state: Literal["built", "absent", "off"]
    reason: str = ""


def request_for(paths: TorchPaths) -> Request:
    """Return the request for the bridge to this torch."""
    # the comment makes the torch part of the cache's key, and stands at the end so that lines keep their numbers
    identity = json.dumps([paths.version, paths.git_version])
    return Request(
        label=f"bridge to torch {paths.version}",
        units=(Unit(_SOURCE.name, f"{_SOURCE.read_text(encoding='utf-8')}\n// {identity}\n", "c++"),),
        flags=(*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(paths.cxx11_abi)}", f"-isystem{paths.include_dir}"),
        include_dirs=(_INCLUDE,),
        library_dirs=(paths.library_dir,),
        libraries=_LIBRARIES,
        isa="baseline",
    )


def cached(paths: TorchPaths) -> Path | None:
    """Return the library if the cache has it and ``OPKIT_BRIDGE`` is on; never build it."""
    if not config.get().bridge:
        return None
    try:
        return compilation.find(request_for(paths))
    except ToolchainError:  # the compiler is part of the key
        return None


def status(paths: TorchPaths) -> Status:
    """Return the state of the bridge to this torch."""
    if not config.get().bridge:
        return Status("off", "OPKIT_BRIDGE=0")
    try:
        found = compilation.find(request_for(paths))
    except ToolchainError as error:
        return Status("absent", str(error))
    return Status("absent", paths.missing) if found is None else Status("built")


def build(paths: TorchPaths) -> Path:
    """Return the library; compile it now unless the cache has it.

    Raises:
        ToolchainError: there is no C++ compiler, or there are no headers.
        CompileError: the compiler refused the source, or did not finish in time.
        CacheError: the cache cannot be written to.
    """
    if paths.missing:
        raise ToolchainError(f"The bridge cannot be built: {paths.missing}")
    path = compilation.build(request_for(paths))
    if not path.is_relative_to(cache.root()):
        raise CacheError(f"The bridge was built, but cannot be stored in the build cache {cache.root()}.")
    return path
