"""Building the bridge, once for each torch, into ``<cache_dir>/bridge/<key>/``."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from opkit import config
from opkit.errors import CompileError, ToolchainError
from opkit.kernels.bridge.entry import Entry

_SOURCE = Path(__file__).with_name("bridge.cpp")
_HEADER = Path(__file__).parents[1] / "include" / "opkit.h"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
# not the compiler's own C++ runtime, which may be another than torch's, or static: two in one process crash
_LIBRARIES = ("-nodefaultlibs", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-lc", "-lgcc")
_COMPILERS = ("g++", "clang++", "c++")

ABI_VERSION = int(re.findall(r"#define OPK_ABI_VERSION (\d+)", _HEADER.read_text())[0])
"""What the bridge must say it was built for."""


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
    """How the bridge to one torch stands.

    Attributes:
        state: "built", "building", "failed", "absent" or "off".
        seconds: that the build took, where it is built.
        log: why it failed, or why it cannot be built.
    """

    state: str
    seconds: float | None = None
    log: str = ""


def entry(paths: TorchPaths) -> Entry:
    """Where the cache has, or would have, the bridge to this torch.

    Raises:
        ToolchainError: there is no C++ compiler.
    """
    compiler = _compiler()
    found = compiler.stat()
    parts = {
        "torch": [str(value) for value in dataclasses.astuple(paths)],
        "compiler": [str(compiler), found.st_size, found.st_mtime_ns],
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in (_SOURCE, _HEADER)],
        "flags": _FLAGS + _LIBRARIES,
    }
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return Entry(config.get().cache_dir / "bridge" / key)


def cached(paths: TorchPaths) -> Path | None:
    """The library if it was built before, is whole, and is wanted."""
    if not config.get().bridge:
        return None
    with contextlib.suppress(ToolchainError, OSError):
        return entry(paths).found()
    return None


def status(paths: TorchPaths) -> Status:
    """How the bridge to this torch stands."""
    if not config.get().bridge:
        return Status("off", log="OPKIT_BRIDGE=0")
    try:
        place = entry(paths)
    except ToolchainError as error:
        return Status("absent", log=str(error))
    if place.found() is not None:
        return Status("built", place.record()["seconds"])
    if place.locked():
        return Status("building")
    failure = place.failure()
    return Status("absent", log=paths.missing) if failure is None else Status("failed", log=failure)


def build(paths: TorchPaths) -> Path:
    """The library, compiled here and now unless the cache has it; says how long it took.

    Raises:
        ToolchainError: there is no C++ compiler, or there are no headers.
        CompileError: the compiler refused the source, or did not finish in time.
        CacheError: the cache cannot be written to.
    """
    place = entry(paths)
    place.make()
    with place.lock():
        found = place.found()
        return _build(paths, place) if found is None else found


def _build(paths: TorchPaths, place: Entry) -> Path:
    if paths.missing:
        raise ToolchainError(f"The bridge cannot be built: {paths.missing}")
    place.sweep()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        output = Path(folder) / "bridge.so"
        try:
            _compile(_SOURCE, output, paths)
        except CompileError as error:
            place.fail(str(error))
            raise
        seconds = round(time.perf_counter() - start, 2)
        library = place.keep(output, {"seconds": seconds, "torch": paths.version, "compiler": str(_compiler())})
    print(f"opkit: built the bridge to torch {paths.version} in {seconds:.1f} s", file=sys.stderr)
    return library


# ---- the compiler ---------------------------------------------------------------------------------------------------


def _compiler() -> Path:
    named = config.get().cxx
    names = (named,) if named else (os.environ.get("CXX", ""), *_COMPILERS)
    found = [path for path in map(shutil.which, filter(None, names)) if path]
    if found:
        return Path(found[0]).resolve()
    tried = ", ".join(filter(None, names))
    raise ToolchainError(f"There is no C++ compiler to build the bridge with (tried: {tried}). Set OPKIT_CXX to one.")


def _compile(source: Path, output: Path, paths: TorchPaths) -> None:
    command = [
        str(_compiler()), *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(paths.cxx11_abi)}",
        "-isystem", str(paths.include_dir), "-I", str(_HEADER.parent), str(source), "-o", str(output),
        "-L", str(paths.library_dir), *_LIBRARIES,
    ]  # fmt: skip
    log = output.with_suffix(".log")
    with log.open("wb") as file:
        code = _run(command, file)
    if code != 0 or not output.is_file():
        raise CompileError(f"The bridge to torch {paths.version} does not compile: {command}\n{_tail(log)}")


def _run(command: list[str], log: BinaryIO) -> int:
    limit = config.get().build_timeout
    # a session of its own, so that the compiler's own children can be stopped with it
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        _ = process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise CompileError(f"The bridge did not compile within {limit:g} s (OPKIT_BUILD_TIMEOUT): {command}") from None


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-20_000:]
