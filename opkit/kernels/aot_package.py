"""Read and write the manifest of a Python package whose kernels were compiled ahead of time.

``opkit build`` writes ``<package>/_opkit/manifest.json`` and, next to it, one library for each kernel and instruction set,
and the binaries of Triton kernels in ``triton/``. :mod:`opkit.kernels.aot_loading` loads them.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opkit.errors import PackageError
from opkit.kernels import cache_files
from opkit.kernels.cc import build_plan
from opkit.kernels.cc import isa as isas
from opkit.kernels.triton.specialisation import CallClass

if TYPE_CHECKING:
    pass


FOLDER, MANIFEST = "_opkit", "manifest.json"
CUDA = "cuda"
"""The ``isa`` of a kernel on the GPU."""

_FORMAT = 1
BINARIES = "triton"
_BINARY_FILE = re.compile(rf"{BINARIES}/[\w.-]+\.(cubin|hsaco)", re.ASCII)
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
        source: the hash of the compiled source (:func:`opkit.kernels.aot_loading.identity`).
        files: the sha256 of other compiled files of the Python package, by their path in it.
        architectures: what device code it has, as in "sm_90", and "compute_90" for PTX; empty where that is not known.
    """

    operator: str
    kernel: str
    isa: str
    file: str
    sha256: str
    size: int
    source: str
    files: Mapping[str, str]
    architectures: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the item of a manifest."""
        item = dataclasses.asdict(self)
        return item if self.architectures else {key: item[key] for key in item if key != "architectures"}


@dataclasses.dataclass(frozen=True)
class TritonBinary:
    """One binary of a package.

    Attributes:
        operator: "demo::rms_norm".
        kernel: the kernel's name among those of its operator.
        triton: the release of Triton that compiled it.
        form: what it is for.
        launch: all that a launch must know (:meth:`opkit.kernels.triton.binaries.Binary.to_json`).
        file: its path in the folder of the manifest; "" before it is put there.
        sha256: of the file.
        size: of the file, in bytes.
    """

    operator: str
    kernel: str
    triton: str
    form: CallClass
    launch: Mapping[str, Any]
    file: str = ""
    sha256: str = ""
    size: int = 0

    def placed(self, image: bytes) -> TritonBinary:
        """Return the same with the file that is to hold ``image``; equal images of a kernel have one file."""
        sha256 = hashlib.sha256(image).hexdigest()
        name = _file_name(self.operator, self.kernel, self.form.target, sha256)
        return dataclasses.replace(
            self, file=f"{BINARIES}/{name}.{self.launch['form']}", sha256=sha256, size=len(image)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the item of a manifest."""
        return {**dataclasses.asdict(self), "launch": dict(self.launch)}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> TritonBinary:
        """Return the binary that ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it did not write this.
        """
        form = CallClass(**{**item["form"], "divisible": tuple(item["form"]["divisible"])})
        binary = cls(**{**item, "form": form})
        if not _BINARY_FILE.fullmatch(binary.file):
            raise ValueError(f"{binary.file!r} is not the name of a binary")
        return binary


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

    >>> import opkit
    >>> opkit.runtime_library().stem
    'libopkit'
    """
    found = importlib.util.find_spec("opkit._core")
    folder = Path(found.origin).parent if found is not None and found.origin else Path(__file__).parents[1]
    for name in ("libopkit.so", "libopkit.dylib"):
        if (folder / name).is_file():
            return folder / name
    raise PackageError(f"{folder} has no libopkit.so, which is compiled when opkit is installed. Install opkit again.")


# ---- reading ---------------------------------------------------------------------------------------------------------

_read: dict[Path, tuple[tuple[int, ...], Manifest | PackageError]] = {}  # by folder, with the file's stamp
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
            binaries.append(binary.placed(image))
            (folder / BINARIES).mkdir(exist_ok=True)
            cache_files.write_atomically(folder / binaries[-1].file, image, 0o644)
        manifest = Manifest(folder, build_plan.abi_version(), isas.machine(), tuple(libraries), tuple(binaries))
        cache_files.write_atomically(folder / MANIFEST, _text(manifest).encode("ascii"), 0o644)
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
    file = f"{_file_name(library.operator, library.kernel, library.isa, sha256)}.so"
    cache_files.write_atomically(folder / file, content, 0o644)
    return dataclasses.replace(library, file=file, sha256=sha256, size=len(content))


def _file_name(operator: str, kernel: str, target: str, sha256: str) -> str:
    """Return the name of a built file, without its suffix."""
    parts = (*operator.split("::"), kernel, target, sha256[:8])
    return ".".join(re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in parts)


def _text(manifest: Manifest) -> str:
    noted = {
        "format": _FORMAT,
        "abi": manifest.abi,
        "machine": manifest.machine,
        "libraries": [library.to_json() for library in manifest.libraries],
        "triton": [binary.to_json() for binary in manifest.binaries],
    }
    return json.dumps(noted, indent=1) + "\n"
