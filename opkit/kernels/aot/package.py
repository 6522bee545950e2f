"""Load and write kernels built ahead of time: libraries and a manifest in the folder of the operators' Python package.

``opkit build`` writes ``<package>/_opkit/manifest.json`` and, next to it, one library for each kernel and instruction set,
and the binaries of Triton kernels in ``triton/``. A kernel that is there, unchanged and from the same source, is loaded
without a compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opkit.errors import BuildCacheWarning, PackageError
from opkit.kernels.aot import portable
from opkit.kernels.binding.binding import Bound
from opkit.kernels.cc import build_key
from opkit.kernels.cc import isa as isas
from opkit.kernels.cc.native import NativeKernel
from opkit.kernels.store import files
from opkit.kernels.triton.shipping import FOLDER as BINARIES
from opkit.kernels.triton.shipping import TritonBinary

if TYPE_CHECKING:
    from opkit import _core

FOLDER, MANIFEST = "_opkit", "manifest.json"
CUDA = "cuda"
"""The ``isa`` of a kernel on the GPU."""

_FORMAT = 1
_FILE = re.compile(r"[\w.-]+\.so")


@dataclasses.dataclass(frozen=True)
class Library:
    """One library of a package.

    Attributes:
        operator: "demo::rms_norm".
        kernel: the kernel's name among those of its operator.
        isa: the instruction set that it was compiled for, or "cuda".
        file: its name in the folder of the manifest.
        sha256: of the file.
        size: of the file, in bytes.
        source: the hash of the compiled source (:func:`opkit.kernels.aot.portable.identity`).
        files: the sha256 of other compiled files of the Python package, by their path in it.
    """

    operator: str
    kernel: str
    isa: str
    file: str
    sha256: str
    size: int
    source: str
    files: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a folder; its libraries were built for the kernel interface ``abi`` and processors of ``machine``."""

    folder: Path
    abi: int
    machine: str
    libraries: tuple[Library, ...]
    binaries: tuple[TritonBinary, ...] = ()


def runtime_library() -> Path:
    """Return ``libopkit.so``, which a program without Python loads to run the kernels of a package.

    Raises:
        PackageError: this opkit's installation is incomplete.
    """
    found = importlib.util.find_spec("opkit._core")
    folder = Path(found.origin).parent if found is not None and found.origin else Path(__file__).parents[2]
    for name in ("libopkit.so", "libopkit.dylib"):
        if (folder / name).is_file():
            return folder / name
    raise PackageError(f"{folder} has no libopkit.so, which is compiled when opkit is installed. Install opkit again.")


# ---- reading ---------------------------------------------------------------------------------------------------------

_read: dict[Path, tuple[tuple[int, ...], Manifest | PackageError]] = {}  # by folder, with the file's stamp
_warned: set[tuple[Path, str]] = set()
_reading = threading.Lock()


def read(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None if it has none.

    Raises:
        PackageError: the manifest cannot be read.
    """
    try:
        status = os.stat(folder / MANIFEST)
    except OSError:
        return None
    stamp = status.st_ino, status.st_size, status.st_mtime_ns
    with _reading:
        if folder not in _read or _read[folder][0] != stamp:
            _read[folder] = stamp, _attempt(folder)
        found = _read[folder][1]
    if isinstance(found, PackageError):
        raise found
    return found


def _attempt(folder: Path) -> Manifest | PackageError:
    try:
        return _parsed(folder, json.loads((folder / MANIFEST).read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return PackageError(f"{folder / MANIFEST} cannot be read: {type(error).__name__}: {error}")


def _parsed(folder: Path, noted: Mapping[str, Any]) -> Manifest:
    if noted["format"] != _FORMAT:
        raise ValueError(f"its format is {noted['format']!r}, and this opkit reads {_FORMAT}")
    libraries = tuple(Library(**item) for item in noted["libraries"])
    binaries = tuple(TritonBinary.from_json(item) for item in noted.get("triton", ()))
    for library in libraries:
        if not _FILE.fullmatch(library.file):
            raise ValueError(f"{library.file!r} is not the name of a library")
    return Manifest(folder, int(noted["abi"]), str(noted["machine"]), libraries, binaries)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(module: str, native: NativeKernel, bound: Bound, name: str) -> _core.KernelLibrary | None:
    """Load the library that was built ahead of time for a kernel of a module's operator; None if it must be compiled.

    If there is one that cannot be used, a warning gives the reason.
    """
    for folder in portable.places(module, FOLDER):
        try:
            manifest = read(folder)
            built = [] if manifest is None else _of(manifest, bound.facts.operator, name, native)
            if manifest is not None and built:
                return _opened(chosen(manifest, built, native, bound, portable.root(module) or folder.parent))
        except PackageError as error:
            warn(folder, module, str(error))
            return None
    return None


def _of(manifest: Manifest, operator: str, kernel: str, native: NativeKernel) -> list[Library]:
    listed = (item for item in manifest.libraries if (item.operator, item.kernel) == (operator, kernel))
    return [item for item in listed if (item.isa == CUDA) == native.cuda]


def chosen(manifest: Manifest, built: Sequence[Library], native: NativeKernel, bound: Bound, package: Path) -> Path:
    """Return the checked file for the widest instruction set that this machine has (``OPKIT_ISA`` narrows it).

    Raises:
        PackageError: it cannot be used.
    """
    _check_origin(manifest, built[0], native, bound, package)
    usable = [CUDA, *_usable()]
    fitting = [library for library in built if library.isa in usable]
    if not fitting:
        there = ", ".join(library.isa for library in built)
        raise PackageError(f"{_label(built[0])} was built for {there}, and what can be used here is {usable[-1]}")
    widest = max(fitting, key=lambda library: usable.index(library.isa))
    _check_file(manifest.folder, widest)
    return manifest.folder / widest.file


def _usable() -> tuple[str, ...]:
    order = isas.WIDENING.get(isas.machine(), ("baseline",))
    return order[: order.index(isas.host_isa()) + 1]


def _check_origin(manifest: Manifest, library: Library, native: NativeKernel, bound: Bound, package: Path) -> None:
    if manifest.machine != isas.machine():
        raise PackageError(f"{manifest.folder} was built for {manifest.machine}, and this is {isas.machine()}")
    if manifest.abi != build_key.abi_version():
        raise PackageError(
            f"{manifest.folder} was built for version {manifest.abi} of opkit's kernel interface, and this opkit has "
            f"version {build_key.abi_version()}"
        )
    edited = [path for path, content in library.files.items() if _differs(package / path, content)]
    if library.source != portable.identity(native, bound, package) or edited:
        what = edited[0] if edited else "its source or its operator's signature"
        raise PackageError(f"{_label(library)} was edited since it was built: {what} differs")


def _differs(path: Path, content: str) -> bool:
    """Whether a file exists with other content; packages need not contain their headers."""
    try:
        return portable.sha256_of(path) != content
    except OSError:
        return False


def _check_file(folder: Path, library: Library) -> None:
    try:
        content = (folder / library.file).read_bytes()
    except OSError as error:
        raise PackageError(f"{_label(library)}: {folder / library.file}: {error.strerror}") from error
    if len(content) != library.size or hashlib.sha256(content).hexdigest() != library.sha256:
        raise PackageError(f"{_label(library)}: {folder / library.file} is not what was built: its sha256 differs")


def _label(library: Library) -> str:
    return f"{library.operator}, kernel {library.kernel!r},"


def _opened(path: Path) -> _core.KernelLibrary:
    from opkit import _core  # compiled: absent when opkit runs from a source tree that was not installed

    try:
        return _core.KernelLibrary(str(path))
    except RuntimeError as error:
        raise PackageError(f"{path} cannot be loaded: {error}") from error


def warn(folder: Path, module: str, reason: str, about: str = "") -> None:
    """Warn why something is compiled now, once for each ``about``, or else for each reason."""
    with _reading:
        if (folder, about or reason) in _warned:
            return
        _warned.add((folder, about or reason))
    package = portable.real_name(module).rpartition(".")[0] or portable.real_name(module)
    warnings.warn(
        f"{reason}. It is compiled now, if there is a compiler. Run `opkit build {package}` again, or install the package "
        "again.",
        BuildCacheWarning,
        stacklevel=4,
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    built: Iterable[tuple[Library, Path]],
    compiled: Iterable[tuple[TritonBinary, bytes]] = (),
) -> Manifest:
    """Write libraries, binaries of Triton kernels, and their manifest into a folder.

    ``built`` are libraries without file, sha256 and size, and the files to copy; ``compiled`` likewise, with the images.

    The manifest is replaced by one rename, after every new file was written and before the files that only the old
    manifest names are removed, so that the folder holds a complete package at any time, whatever fails.

    Raises:
        PackageError: the folder cannot be written to.
    """
    libraries: list[Library] = []
    binaries: list[TritonBinary] = []
    before = _names(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for library, path in built:
            libraries.append(_put(folder, library, path))
        for binary, image in compiled:
            binaries.append(_put_binary(folder, binary, image))
        manifest = Manifest(folder, build_key.abi_version(), isas.machine(), tuple(libraries), tuple(binaries))
        files.write_atomically(folder / MANIFEST, _text(manifest).encode("ascii"), 0o644)
    except OSError as error:
        _remove(folder, {each.file for each in (*libraries, *binaries)} - before)
        raise PackageError(f"The package's folder {folder} cannot be written: {error}") from error
    _remove(folder, before - {each.file for each in (*libraries, *binaries)})
    return manifest


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        (folder / BINARIES).rmdir()  # fails unless it is empty


def _names(folder: Path) -> set[str]:
    """Return the files that a folder's manifest names."""
    with contextlib.suppress(PackageError):
        manifest = read(folder)
        return set() if manifest is None else {each.file for each in (*manifest.libraries, *manifest.binaries)}
    return set()


def _put(folder: Path, library: Library, path: Path) -> Library:
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    parts = (*library.operator.split("::"), library.kernel, library.isa, sha256[:8])
    file = ".".join(re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in parts) + ".so"
    files.write_atomically(folder / file, content, 0o644)
    return dataclasses.replace(library, file=file, sha256=sha256, size=len(content))


def _put_binary(folder: Path, binary: TritonBinary, image: bytes) -> TritonBinary:
    placed = binary.placed(image)
    path = folder / placed.file
    path.parent.mkdir(exist_ok=True)
    files.write_atomically(path, image, 0o644)
    return placed


def _text(manifest: Manifest) -> str:
    noted = {
        "format": _FORMAT,
        "abi": manifest.abi,
        "machine": manifest.machine,
        "libraries": [dataclasses.asdict(library) for library in manifest.libraries],
        "triton": [binary.to_json() for binary in manifest.binaries],
    }
    return json.dumps(noted, indent=1) + "\n"
