"""Find an installed shared library where the loader and the linker would, and check what it exports.

No library is loaded here, unless its file cannot be read.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import difflib
import functools
import glob
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from opkit.errors import KernelError
from opkit.kernels.libraries import elf

_FILE_NAME = re.compile(r"lib.+\.(so|dylib)(\.[\d.]+)?\Z|.+\.(so|dylib)(\.[\d.]+)?\Z")
_PLAIN = re.compile(r"[\w.+-]+\Z")

_PACKAGES = {
    "arpack": "libarpack2",
    "blas": "libopenblas0",
    "blis": "libblis4",
    "cblas": "libopenblas0",
    "fftw3": "libfftw3-double3",
    "fftw3f": "libfftw3-single3",
    "fftw3l": "libfftw3-long3",
    "gsl": "libgsl-dev",
    "gslcblas": "libgslcblas0",
    "lapack": "liblapack3",
    "lapacke": "liblapacke",
    "m": "libc6",
    "mkl": "libmkl-rt (section non-free; the library is called mkl_rt)",
    "mkl_rt": "libmkl-rt (section non-free)",
    "mpfr": "libmpfr6",
    "openblas": "libopenblas0",
    "sleef": "libsleef3",
}
"""The Debian packages of well-known libraries."""


@dataclasses.dataclass(frozen=True)
class SharedLibrary:
    """``path`` is a file, or a name that only the loader resolves; ``folders`` are those that the loader does not search."""

    name: str
    path: str
    folders: tuple[Path, ...] = ()


def find(library: str | os.PathLike[str]) -> SharedLibrary:
    """Find the library of a name ("m"), of a file's name ("libopenblas.so.0") or at a path.

    Raises:
        KernelError: there is none, or it is for another machine; the message lists the folders that were searched.
    """
    name = os.fspath(library) if isinstance(library, (str, os.PathLike)) else ""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise KernelError(f'library={library!r}: give a name ("m"), a file name ("libopenblas.so.0") or a path.')
    if os.sep in name or isinstance(library, os.PathLike):
        return _at(name)
    return _named(name)


def _at(path: str) -> SharedLibrary:
    path = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(path):
        raise KernelError(f"library={path!r}: there is no such file.{_near_files(path)}")
    if elf.readable() and not elf.own(path):
        raise KernelError(f"library={path!r}: the file is not a shared library for this machine. Give the .so itself.")
    return SharedLibrary(path, path, _unknown_folders(path))


def _near_files(path: str) -> str:
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        return f" There is no folder {folder} either."
    near = difflib.get_close_matches(name, [each for each in os.listdir(folder) if ".so" in each], 3, 0.4)
    return f" The folder has {', '.join(near)}." if near else ""


def _named(name: str) -> SharedLibrary:
    for folder in _folders():
        for path in _files(folder, name):
            if not elf.readable() or elf.own(path):
                return SharedLibrary(name, path, _unknown_folders(path))
    known = ctypes.util.find_library(_bare(name)) if _PLAIN.match(name) else None
    if known is None or (_FILE_NAME.match(name) and known != name):
        raise _missing(name)
    return SharedLibrary(name, known)


def _bare(name: str) -> str:
    """Return the name as the linker's -l takes it.

    >>> _bare("libopenblas.so.0"), _bare("m")
    ('openblas', 'm')
    """
    return re.sub(r"\.(so|dylib)(\.[\d.]+)?\Z", "", name.removeprefix("lib")) if _FILE_NAME.match(name) else name


def _files(folder: str, name: str) -> Iterator[str]:
    """Yield the files of a folder that the name can mean: itself, or without a version, or the latest version first."""
    if _FILE_NAME.match(name):
        yield from (path for path in [os.path.join(folder, name)] if os.path.isfile(path))
        return
    for stem in dict.fromkeys((f"lib{name}", name if name.startswith("lib") else f"lib{name}")):
        base = os.path.join(folder, f"{stem}{'.dylib' if sys.platform == 'darwin' else '.so'}")
        versions = [
            path for path in glob.glob(f"{glob.escape(base)}.*") if re.fullmatch(r"[\d.]+", path[len(base) + 1 :])
        ]
        yield from (path for path in [base] if os.path.isfile(path))
        yield from sorted(versions, key=lambda path: _version(path[len(base) + 1 :]), reverse=True)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part)


# ---- folders ---------------------------------------------------------------------------------------------------------


def _folders() -> list[str]:
    """Return the folders to search: those that the user names, the loader's, and this Python's own."""
    named = [
        folder for name in ("LD_LIBRARY_PATH", "LIBRARY_PATH") for folder in os.environ.get(name, "").split(os.pathsep)
    ]
    listed = [*filter(None, named), *_standard_folders(), os.path.join(sys.prefix, "lib")]
    return [folder for folder in dict.fromkeys(map(os.path.abspath, listed)) if os.path.isdir(folder)]


@functools.cache
def _standard_folders() -> tuple[str, ...]:
    """Return the folders that the loader searches by default."""
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    own = [f"{root}/{triplet}" for root in ("/lib", "/usr/lib") if triplet]
    listed = [*_configured("/etc/ld.so.conf", 0), *own, "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    return tuple(dict.fromkeys(folder for folder in listed if os.path.isdir(folder)))


def _configured(pattern: str, depth: int) -> Iterator[str]:
    """Yield the folders that the loader's configuration names."""
    for path in sorted(glob.glob(pattern)) if depth < 8 else ():
        try:
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in (line.partition("#")[0].strip() for line in lines):
            if line.startswith("include"):
                for each in line.split()[1:]:
                    yield from _configured(os.path.join(os.path.dirname(path), each), depth + 1)
            elif line.startswith("/"):
                yield line


def _unknown_folders(path: str) -> tuple[Path, ...]:
    """Return the folders of a file, and of the file that it links to, that the loader does not search."""
    known = {os.path.realpath(folder) for folder in _standard_folders()}
    own = os.path.dirname(path)
    if os.path.realpath(own) in known:
        return ()
    listed = dict.fromkeys((own, os.path.dirname(os.path.realpath(path))))
    return tuple(Path(folder) for folder in listed if os.path.realpath(folder) not in known)


def _missing(name: str) -> KernelError:
    bare = _bare(name)
    pattern = name if _FILE_NAME.match(name) else f"lib{name}.so and lib{name}.so.<version>"
    package = next((_PACKAGES[each] for each in (bare, bare.removeprefix("lib")) if each in _PACKAGES), None)
    advice = f"On Debian and Ubuntu it is in the package {package}." if package else "Install it, or give its path."
    return KernelError(
        f"library={name!r}: no such library is installed for this machine. {pattern} was searched for in "
        f"{', '.join(_folders())}, and in the loader's cache. {advice}"
    )


# ---- symbols ---------------------------------------------------------------------------------------------------------


def check_function(library: SharedLibrary, symbol: str) -> None:
    """Raise a KernelError unless the library has a function of that name; the message lists similar names."""
    symbols = elf.exported(library.path)
    if symbols is None:
        _check_loaded(library, symbol)
    elif symbols.get(symbol) == "variable":
        raise KernelError(f"library={library.name!r}: {symbol} is a variable of {library.path}, not a function.")
    elif symbol not in symbols:
        near = _near(symbol, symbols)
        hint = f" It has {', '.join(near)}." if near else ""
        raise KernelError(
            f"library={library.name!r}: {library.path} has no function {symbol!r}.{hint} Declare the function by the name "
            "that the library exports it under."
        )


def _check_loaded(library: SharedLibrary, symbol: str) -> None:
    try:
        loaded = ctypes.CDLL(library.path)
    except OSError as error:
        raise KernelError(f"library={library.name!r}: {library.path} cannot be loaded: {error}") from error
    if not hasattr(loaded, symbol):
        raise KernelError(f"library={library.name!r}: {library.path} has no function {symbol!r}.")


def _near(symbol: str, symbols: dict[str, str]) -> list[str]:
    """Return names that contain this one, such as one with a prefix or a suffix, then names with a similar spelling."""
    holding = sorted((name for name in symbols if symbol.lower() in name.lower()), key=len)
    return list(dict.fromkeys([*holding[:3], *difflib.get_close_matches(symbol, symbols, 3, 0.75)]))[:4]
