"""What is asked of compilers, and the commands that do it."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from opkit.kernels.cc.toolchain import Compiler


@dataclasses.dataclass(frozen=True)
class Unit:
    """One translation unit. ``language`` is "c", "c++" or "cuda"; ``name`` is its file name in compiler messages."""

    name: str
    text: str
    language: str


@dataclasses.dataclass(frozen=True)
class Request:
    """A library or program to build.

    Attributes:
        label: its name in messages: "demo::rms_norm". It does not change the result.
        units: the translation units.
        flags: arguments of the compiler. Paths in them must be absolute.
        include_dirs: folders to search for headers; a changed header that is included causes a rebuild.
        library_dirs: folders to search for libraries, now and when the result is loaded.
        libraries: names ("openblas"), file names ("libopenblas.so.0") or paths.
        isa: "native", or a named instruction set.
        kind: "shared" (a library), "executable", or "cubin" (device code of one unit in CUDA C++, for one architecture).
        debug: add debugging information, and the address and undefined-behaviour sanitizers.
    """

    label: str
    units: tuple[Unit, ...]
    flags: tuple[str, ...] = ()
    include_dirs: tuple[str | os.PathLike[str], ...] = ()
    library_dirs: tuple[str | os.PathLike[str], ...] = ()
    libraries: tuple[str, ...] = ()
    isa: str = "native"
    kind: Literal["shared", "executable", "cubin"] = "shared"
    debug: bool = False


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """The commands of a build, which run in the folder of its sources: ``device`` and ``units`` in parallel, then ``link``.

    ``device`` are NVRTC's, which have ended before ``units`` begin. A single unit is compiled and linked by one command.
    Sources are files' names, their names in messages, and their texts.
    """

    compilers: tuple[Compiler, ...]
    units: tuple[tuple[str, ...], ...]
    link: tuple[str, ...] | None
    file: str
    sources: tuple[tuple[str, str, str], ...]
    device: tuple[tuple[str, ...], ...] = ()

    @property
    def compiler(self) -> Compiler:
        """The compiler that links."""
        return self.compilers[0]

    @property
    def stages(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Commands that run at once, one after the other."""
        link = () if self.link is None else ((self.link,),)
        return tuple(stage for stage in (self.device, self.units, *link) if stage)
