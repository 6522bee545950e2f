"""Find, check and load kernels that were compiled ahead of time, in the Python package of their operators.

A kernel that is there, unchanged and from the same source, is loaded without a compiler. A kernel's source is identified
independently of where the package is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from opkit.errors import BuildCacheWarning, PackageError
from opkit.kernels.aot_package import CUDA, FOLDER, MANIFEST, Library, Manifest, TritonBinary, read
from opkit.kernels.binding import Bound
from opkit.kernels.cc import build_plan, device_code
from opkit.kernels.cc import isa as isas
from opkit.kernels.cc.native import NativeKernel
from opkit.kernels.cc.request import Request
from opkit.kernels.triton import specialisation, targets
from opkit.kernels.triton.binaries import Binary
from opkit.kernels.triton.compiling import CompileRequest
from opkit.kernels.triton.specialisation import CallClass

if TYPE_CHECKING:
    from opkit import _core


_FORMAT = 1  # of an identity: change it when the meaning of its parts changes
_SEARCH_FLAG = re.compile(r"(-I|-L|-isystem|-Wl,-rpath[,=])?(/.*)")


# ---- location --------------------------------------------------------------------------------------------------------


def root(module: str) -> Path | None:
    """Return the folder of a module's top-level package, or of a module outside packages; None if it has none."""
    listed = _above(module)
    return listed[-1] if listed else None


def places(module: str, name: str) -> list[Path]:
    """Return the folders called ``name`` next to a module and in the packages that contain it, the nearest first.

    A module outside packages may be next to others, so its folder has its name too.
    """
    alone = "." not in real_name(module) and not _is_package(module)
    return [folder / (f"{name}_{real_name(module)}" if alone else name) for folder in _above(module)]


def _above(module: str) -> list[Path]:
    """Return the folders of the packages that contain a module, the nearest first."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return []
    folder = Path(os.path.abspath(file)).parent
    depth = real_name(module).count(".") + _is_package(module)
    return [folder, *folder.parents][: max(1, depth)]


def _is_package(module: str) -> bool:
    return hasattr(sys.modules.get(module), "__path__")


def real_name(module: str) -> str:
    """Return the name by which a module can be imported, also of the one that was started as ``__main__``."""
    if module != "__main__":
        return module
    main = sys.modules[module]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or module).stem


# ---- identity --------------------------------------------------------------------------------------------------------


def identity(native: NativeKernel, bound: Bound, folder: Path) -> str:
    """Return a hash of the author's source and options, independent of the location of the package ``folder``.

    Neither the compiler nor the instruction set is part of it.
    """
    parts = (
        _FORMAT,
        native.language,
        native.name,
        _portable(native.text, folder),
        [(variable, list(types)) for variable, types in native.variables.items()],
        sorted(native.bind.items()),
        [_nameless(_portable(flag, folder)) for flag in native.flags],
        [_nameless(_portable(library, folder)) for library in native.libraries],
        [_within(path, folder) for path in (*native.sources, *native.include_dirs)],
        dataclasses.asdict(bound.facts),
    )
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()


def source_files(native: NativeKernel, request: Request, folder: Path) -> dict[str, str]:
    """Return the sha256 of the package's own headers and further sources of a kernel, by their path in ``folder``."""
    sources = ((str(path), sha256_of(path)) for path in native.sources)
    found = {_within(path, folder): content for path, content in (*sources, *build_plan.headers(request))}
    return {path: content for path, content in sorted(found.items()) if path}


def _portable(text: str, folder: Path) -> str:
    return text.replace(f"{folder}{os.sep}", "").replace(str(folder), ".")


def _nameless(flag: str) -> str:
    """Return a flag without the folder that it names, which differs between machines."""
    found = _SEARCH_FLAG.fullmatch(flag)
    return flag if found is None else f"{found[1] or ''}{Path(found[2]).name}"


def _within(path: str | os.PathLike[str], folder: Path) -> str:
    """Return the path in the folder; "" if it is outside."""
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else ""


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- libraries -------------------------------------------------------------------------------------------------------


_warned: set[tuple[Path, str]] = set()
_loaded: dict[Path, Binary] = {}
_loading = threading.Lock()


def load(
    module: str, native: NativeKernel, bound: Bound, name: str, capabilities: Collection[int] = ()
) -> _core.KernelLibrary | None:
    """Load the library that was built ahead of time for a kernel of a module's operator; None if it must be compiled.

    If there is one that cannot be used, a warning gives the reason. ``capabilities`` are those of this machine's GPUs, for a
    kernel on them: 90 for 9.0. It must have code for one of them.
    """
    for folder in places(module, FOLDER):
        try:
            manifest = read(folder)
            libraries = () if manifest is None else manifest.libraries
            built = [
                each
                for each in libraries
                if (each.operator, each.kernel, each.isa == CUDA) == (bound.facts.operator, name, native.cuda)
            ]
            if manifest is not None and built:
                _check_origin(manifest, built[0], native, bound, root(module) or folder.parent)
                return _opened(_chosen(manifest, built, capabilities))
        except PackageError as error:
            _warn(folder, module, str(error))
            return None
    return None


def _chosen(manifest: Manifest, built: Sequence[Library], capabilities: Collection[int]) -> Path:
    """Return the checked file for the widest instruction set that this machine has (``OPKIT_ISA`` narrows it).

    Raises:
        PackageError: it cannot be used.
    """
    usable = [CUDA, *isas.usable_isas()]
    fitting = [library for library in built if library.isa in usable]
    if not fitting:
        there = ", ".join(library.isa for library in built)
        raise PackageError(f"{_label(built[0])} was built for {there}, and what can be used here is {usable[-1]}")
    widest = max(fitting, key=lambda library: usable.index(library.isa))
    images = list(map(device_code.image, widest.architectures))
    if images and capabilities and not any(image.runs_on(each) for image in images for each in capabilities):
        gpus = ", ".join(f"sm_{each}" for each in sorted(set(capabilities)))
        raise PackageError(f"{_label(widest)} was built for {', '.join(widest.architectures)}, and this GPU is {gpus}")
    _checked_content(manifest.folder, widest)
    return manifest.folder / widest.file


def _check_origin(manifest: Manifest, library: Library, native: NativeKernel, bound: Bound, package: Path) -> None:
    if manifest.machine != isas.machine():
        raise PackageError(f"{manifest.folder} was built for {manifest.machine}, and this is {isas.machine()}")
    if manifest.abi != build_plan.abi_version():
        raise PackageError(
            f"{manifest.folder} was built for version {manifest.abi} of opkit's kernel interface, and this opkit has "
            f"version {build_plan.abi_version()}"
        )
    edited = [path for path, content in library.files.items() if _differs(package / path, content)]
    if library.source != identity(native, bound, package) or edited:
        what = edited[0] if edited else "its source or its operator's signature"
        raise PackageError(f"{_label(library)} was edited since it was built: {what} differs")


def _differs(path: Path, content: str) -> bool:
    """Return whether a file exists with other content; packages need not contain their headers."""
    try:
        return sha256_of(path) != content
    except OSError:
        return False


def _checked_content(folder: Path, built: Library | TritonBinary) -> bytes:
    """Return the content of a file of a package, once it is checked that it is what was built."""
    path = folder / built.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PackageError(f"{_label(built)}: {path}: {error.strerror}") from error
    if len(content) != built.size or hashlib.sha256(content).hexdigest() != built.sha256:
        raise PackageError(f"{_label(built)}: {path} is not what was built: its sha256 differs")
    return content


def _label(built: Library | TritonBinary) -> str:
    return f"{built.operator}, kernel {built.kernel!r},"


def _opened(path: Path) -> _core.KernelLibrary:
    from opkit import _core  # compiled: absent when opkit runs from a source tree that was not installed

    try:
        return _core.KernelLibrary(str(path))
    except RuntimeError as error:
        raise PackageError(f"{path} cannot be loaded: {error}") from error


def _warn(folder: Path, module: str, reason: str, about: str = "") -> None:
    """Warn why something is compiled now, once for each ``about``, or else for each reason."""
    with _loading:
        if (folder, about or reason) in _warned:
            return
        _warned.add((folder, about or reason))
    package = real_name(module).rpartition(".")[0] or real_name(module)
    warnings.warn(
        f"{reason}. It is compiled now, if there is a compiler. Run `opkit build {package}` again, or install the package "
        "again.",
        BuildCacheWarning,
        stacklevel=4,
    )


# ---- binaries of Triton kernels --------------------------------------------------------------------------------------


class WantedBinary(NamedTuple):
    """A kernel of an operator of ``module``, for a call on a device whose blocks have ``shared`` bytes of memory."""

    module: str
    operator: str
    kernel: str
    shared: int


def find_binary(wanted: WantedBinary, request: CompileRequest) -> Binary | None:
    """Return the binary that was built for calls like this; None where it is to be compiled. It is one object for each file.

    If the package has the kernel, but no binary that this call can use, a warning gives the reason, once for each kernel.
    """
    for folder in places(wanted.module, FOLDER):
        try:
            manifest = read(folder)
            binaries = () if manifest is None else manifest.binaries
            listed = [each for each in binaries if (each.operator, each.kernel) == (wanted.operator, wanted.kernel)]
            if listed:
                return _opened_binary(folder, _chosen_binary(listed, wanted, specialisation.form_of(request)))
        except PackageError as error:
            _warn(folder, wanted.module, str(error), f"{wanted.operator} {wanted.kernel}")
            return None
    return None


def _chosen_binary(listed: Sequence[TritonBinary], wanted: WantedBinary, form: CallClass) -> TritonBinary:
    """Return the binary that was compiled with the most facts of such a call."""
    usable = [
        each for each in listed if specialisation.serves(each.form, form) and each.launch["shared"] <= wanted.shared
    ]
    if not usable:
        raise PackageError(f"{wanted.operator}, kernel {wanted.kernel!r}, {_missing(listed, form)}")
    return max(usable, key=lambda each: specialisation.specificity(each.form, form))


def _missing(listed: Sequence[TritonBinary], form: CallClass) -> str:
    """Return why none of a kernel's binaries serves a call."""
    same = [each for each in listed if each.form.source == form.source]
    if not same:
        return "was edited since it was built: the source of its Triton function differs"
    built_for = sorted({each.form.target for each in same})
    if not any(targets.runs(target, form.target) for target in built_for):
        return f"was built for {', '.join(built_for)}, and this GPU is {form.target}"
    return f"was not built for a call like this one ({form}), which an entry of its examples= would cover"


def _opened_binary(folder: Path, chosen: TritonBinary) -> Binary:
    path = folder / chosen.file
    with _loading:
        if path not in _loaded:
            image = _checked_content(folder, chosen)
            try:
                _loaded[path] = Binary.from_json(chosen.launch, image)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"{folder / MANIFEST} does not say how it is launched: {error}"
                raise PackageError(f"{_label(chosen)}: {reason}") from error
        return _loaded[path]
