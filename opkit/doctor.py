"""``opkit doctor``: examine the versions, tools and folders that opkit uses, and say how to install what is missing."""

from __future__ import annotations

import dataclasses
import getpass
import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from opkit import compat, config, errors
from opkit.kernels.cc import toolchain

Status = Literal["ok", "note", "missing"]

_TRITON_MACHINES = ("x86_64", "aarch64")

REQUIREMENTS: dict[str, str] = {
    "torch": ">=2.11",
    "numpy": ">=1.26",
    "cffi": ">=1.17",
    "hypothesis": ">=6.100",
    "jaxtyping": ">=0.3",
    "rich": ">=13.8",
    "typer": ">=0.15",
    "platformdirs": ">=4.2",
    "filelock": ">=3.13",
    "triton": ">=3.6",
}
"""The runtime dependencies in pyproject.toml, by name."""

OPTIONAL: dict[str, tuple[str, str]] = {
    "jax": ("jax", "opkit.to_jax"),
    "matplotlib": ("plot", "the plot of opkit demo"),
}
"""The packages of extras in pyproject.toml, by name: the extra, and what it is for."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: the heading that it is printed under.
        name: the thing examined.
        value: its version, path or state.
        status: ``"ok"``; ``"note"`` where something optional is absent; ``"missing"`` where opkit cannot do its work.
        fix: the command that installs or repairs it, if there is one.
    """

    section: str
    name: str
    value: str
    status: Status = "ok"
    fix: str | None = None


def triton_supported(system: str, machine: str) -> bool:
    """Return whether Triton has releases for this platform.

    >>> triton_supported("Linux", "x86_64"), triton_supported("Darwin", "arm64")
    (True, False)
    """
    return system == "Linux" and machine in _TRITON_MACHINES


def _pip(requirement: str) -> str:
    return f"{sys.executable} -m pip install '{requirement}'"


def _platform() -> Iterator[Finding]:
    system, machine = platform.system(), platform.machine()
    supported = triton_supported(system, machine)
    detail = "supported" if supported else "untested; no Triton kernels"
    yield Finding("platform", "system", f"{system} {machine} ({detail})", "ok" if supported else "note")
    yield Finding("platform", "python", f"{platform.python_version()} at {sys.executable}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield Finding("platform", "free-threaded", "yes (untested)", "note")


def _version(name: str, specifier: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", name, "not installed", "missing", _pip(name + specifier))
    if name != "torch":
        return Finding("packages", name, version)
    verdict = compat.status(version)
    status: dict[str, Status] = {"tested": "ok", "newer than tested": "note", "too old": "missing"}
    tested = f"torch=={compat.dotted(compat.NEWEST_TESTED)}.*"
    return Finding(
        "packages", name, f"{version} ({verdict})", status[verdict], None if verdict == "tested" else _pip(tested)
    )


def _packages() -> Iterator[Finding]:
    import opkit

    yield Finding("packages", "opkit", f"{opkit.__version__} at {Path(opkit.__file__).parent}")
    for name, specifier in REQUIREMENTS.items():
        if name == "triton" and not triton_supported(platform.system(), platform.machine()):
            yield Finding("packages", name, "has no release for this platform", "note")
        else:
            yield _version(name, specifier)
    for name, (extra, purpose) in OPTIONAL.items():
        try:
            yield Finding("packages", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("packages", name, f"not installed; needed for {purpose}", "note", _pip(f"opkit[{extra}]"))


def _first_line(program: str) -> str | None:
    path = shutil.which(program)
    if path is None:
        return None
    run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    wanted = [line for line in lines if "release" in line] if program == "nvcc" else lines
    return f"{wanted[0].strip()} at {path}" if wanted else f"{path} (does not print a version)"


def _compilers() -> Iterator[Finding]:
    for language, name in (("c", "C"), ("c++", "C++"), ("cuda", "CUDA")):
        yield _compiler(language, name)
    for program in ("gcc", "g++", "clang", "clang++", "nvcc"):
        line = _first_line(program)
        if line is not None:
            yield Finding("compilers", program, line)
    yield _headers()


def _compiler(language: str, name: str) -> Finding:
    """Report the compiler for kernels in a language, or how to install one; few users need CUDA's."""
    try:
        found = toolchain.find(language)
    except errors.ToolchainError as error:
        status: Status = "note" if language == "cuda" else "missing"
        reason = str(error).partition("\n")[0]
        return Finding("compilers", name, reason, status, toolchain.install_command(language))
    program = found.arguments[-1] if found.family == "nvrtc" else found.path
    return Finding("compilers", name, f"{program}: {toolchain.version(found)}")


def _bridge() -> Iterator[Finding]:
    """Report the bridge by which calls of C kernels skip Python; everything works without it, so it is never missing."""
    from opkit.kernels import bridge
    from opkit.op.torch_private import torch_paths

    found = bridge.status(torch_paths())
    reason = f": {found.reason.splitlines()[0]}" if found.reason else ""
    ready = found.state != "absent"
    status: Status = "ok" if ready else "note"
    fix = None if ready else "opkit bridge    (C kernels run without it, slower)"
    yield Finding("compilers", "bridge to torch", f"{found.state}{reason}", status, fix)


def _headers() -> Finding:
    """Report Python's C headers, which torch.compile on a CPU, Triton's launchers and opkit's own build include."""
    path = Path(sysconfig.get_path("include")) / "Python.h"
    if path.exists():
        return Finding("compilers", "Python.h", str(path))
    fix = "apt-get install python3-dev    (or: dnf install python3-devel)" if platform.system() == "Linux" else None
    return Finding("compilers", "Python.h", f"{path} does not exist", "missing", fix)


def _cpu() -> Iterator[Finding]:
    try:
        from opkit import _core  # compiled: absent when opkit runs from a source tree that was not installed
    except ImportError as error:
        fix = f"{sys.executable} -m pip install .    (in opkit's source folder)"
        yield Finding("cpu", "opkit._core", f"cannot be imported: {error}", "missing", fix)
        return
    features = _core.cpu_features()
    has = [name for name, usable in features.items() if usable]
    lacks = [name for name, usable in features.items() if not usable]
    yield Finding("cpu", "has", " ".join(has) or "nothing that opkit looks for")
    yield Finding("cpu", "lacks", " ".join(lacks) or "nothing that opkit looks for")


def _threads() -> Iterator[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cpu", "cores", f"{usable} usable of {os.cpu_count()}")
    pinned = os.environ.get("OMP_NUM_THREADS")
    origin = f" (OMP_NUM_THREADS={pinned})" if pinned else ""
    yield Finding(
        "cpu", "threads", f"{torch.get_num_threads()} within an op{origin}, {torch.get_num_interop_threads()} between"
    )


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = (
            f"torch was built for {built} and finds no device" if built else "this torch is built without CUDA or ROCm"
        )
        yield Finding("gpus", "none", reason, "note")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        value = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        yield Finding("gpus", f"cuda:{index}", value)


def _caches() -> Iterator[Finding]:
    triton_home = os.environ.get("TRITON_HOME") or str(Path.home())
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    places = {
        "opkit": config.get().cache_dir,
        "inductor": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or Path(triton_home) / ".triton" / "cache"),
    }
    for name, path in places.items():
        yield _cache(name, path)


def _cache(name: str, path: Path) -> Finding:
    """Report a cache folder without creating it."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        fix = "set OPKIT_CACHE_DIR to a folder you may write to" if name == "opkit" else f"make {existing} writable"
        return Finding("caches", name, f"{path} (cannot be written: {existing})", "missing", fix)
    if existing != path:
        return Finding("caches", name, f"{path} (not made yet)")
    return Finding("caches", name, f"{path} (writable, mode {stat.S_IMODE(path.stat().st_mode):04o})")


_PROBES: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("platform", _platform),
    ("packages", _packages),
    ("compilers", _compilers),
    ("compilers", _bridge),
    ("cpu", _cpu),
    ("cpu", _threads),
    ("gpus", _gpus),
    ("caches", _caches),
)


def examine() -> list[Finding]:
    """Run all probes. One that fails becomes a finding, so that the rest is still reported.

    >>> {"packages", "compilers", "caches"} <= {finding.section for finding in examine()}
    True
    """
    findings: list[Finding] = []
    for section, probe in _PROBES:
        try:
            findings.extend(probe())
        except Exception as error:  # the report must come out whatever is broken
            findings.append(Finding(section, "error", f"{type(error).__name__}: {error}", "missing"))
    return findings
