"""The build cache: find, list, check and write its entries, and build elsewhere where it cannot be written.

``<cache_dir>/native/<key[:2]>/<key>/`` holds one file and ``entry.json``, which describes it. A file is trusted only if it and
the folders above it, up to ``native``, belong to this user, nobody else may write to them, and the file's sha256 is the one
noted. Entries appear by one rename, so they are whole or absent.

A process that cannot write to the cache (a full disk, a read-only one) builds into a temporary folder of its own, laid
out like the cache and removed when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opkit import config
from opkit.errors import BuildCacheWarning, CacheError
from opkit.kernels import cache_files

ENTRY = "entry.json"
FILES = ("kernel.so", "kernel", "kernel.cubin")
TEMPORARY, FAILED = "tmp", "failed"

_LEFTOVER = r"[0-9a-f]{8}(-\S+|[0-9a-f]{8})"  # a folder that was built in; sources of a build that failed
_KEY = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"key": str, "label": str, "file": str, "sha256": str, "size": int, "created": (int, float)}


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """One built file.

    Attributes:
        key: the key that it is stored under.
        label: its name for people.
        size: of the file, in bytes.
        created: when it was built, in seconds since 1970.
        path: the file.
        compiler: the compiler's version, as it prints it.
        flags: the compiler's command.
    """

    key: str
    label: str
    size: int
    created: float
    path: Path
    compiler: str
    flags: tuple[str, ...]


def root() -> Path:
    """Return the folder of the build cache."""
    return Path(os.path.abspath(config.get().cache_dir)) / "native"


def entry_folder(place: Path, key: str) -> Path:
    """Return the folder of one entry, whether there is one or not."""
    return place / key[:2] / key


# ---- trust -----------------------------------------------------------------------------------------------------------


def examine(directory: Path) -> tuple[dict[str, Any], str | None]:
    """Return the content of ``entry.json``, and the reason why the entry cannot be used, or None."""
    try:
        for place in (directory.parent.parent, directory.parent):
            cache_files.check_private(place, os.stat(place))
        cache_files.check_private(directory, os.lstat(directory), stat.S_ISDIR)
        noted = _noted(directory)
        content = cache_files.read_private(directory / noted["file"])
    except (OSError, ValueError) as error:
        return {}, _reason(error)
    return noted, damage(noted, content)


def damage(noted: dict[str, Any], content: bytes) -> str | None:
    """Return why a file is not the one that was built, or None."""
    if len(content) != noted["size"]:
        return f"{noted['file']} has {len(content)} bytes; {noted['size']} were built"
    if hashlib.sha256(content).hexdigest() != noted["sha256"]:
        return f"{noted['file']} is not what was built: its sha256 differs"
    return None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _noted(directory: Path) -> dict[str, Any]:
    return parsed(cache_files.read_private(directory / ENTRY), directory.name)


def parsed(text: bytes, key: str) -> dict[str, Any]:
    """Return the content of the ``entry.json`` of a key; a ValueError says why it is none."""
    try:
        noted = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{ENTRY} cannot be read as JSON") from None
    wrong = not isinstance(noted, dict) or any(not isinstance(noted.get(name), kind) for name, kind in _FIELDS.items())
    if wrong or noted["file"] not in FILES:
        raise ValueError(f"{ENTRY} does not describe a built file")
    if noted["key"] != key:
        raise ValueError(f"{ENTRY} is that of another entry")
    return noted


def find(place: Path, key: str) -> tuple[Path | None, str | None]:
    """Return the file of an entry that can be used, or the reason why it cannot be; None for both if there is no entry."""
    directory = entry_folder(place, key)
    if not os.path.lexists(directory):
        return None, None
    noted, problem = examine(directory)
    return (directory / noted["file"], None) if problem is None else (None, problem)


# ---- list, verify, clear ---------------------------------------------------------------------------------------------


def _folders(place: Path) -> Iterator[Path]:
    """Yield the folders of entries, damaged ones too."""
    for above in _listed(place, r"[0-9a-f]{2}"):
        yield from _listed(above, _KEY.pattern)


def _listed(directory: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder whose names match; none if the folder cannot be read or is a symbolic link."""
    try:
        inside = [] if directory.is_symlink() else directory.iterdir()
        return sorted(path for path in inside if re.fullmatch(pattern, path.name))
    except OSError:
        return []


def _entry(directory: Path, noted: dict[str, Any]) -> CacheEntry:
    """Return an entry; of a damaged one perhaps only the key is known."""
    compiler, command = noted.get("compiler"), noted.get("flags")
    return CacheEntry(
        key=directory.name,
        label=noted.get("label", "?"),
        size=noted.get("size", 0),
        created=float(noted.get("created", 0)),
        path=directory / noted.get("file", ""),
        compiler=str(compiler.get("version", "?")) if isinstance(compiler, dict) else "?",
        flags=tuple(map(str, command)) if isinstance(command, list) else (),
    )


def entries() -> list[CacheEntry]:
    """Return the entries of the cache, by label. Their files are not checked: see :func:`verify`."""
    found = []
    for directory in _folders(root()):
        with contextlib.suppress(OSError, ValueError):
            found.append(_entry(directory, _noted(directory)))
    return sorted(found, key=lambda entry: (entry.label, entry.created, entry.key))


def verify() -> list[tuple[CacheEntry, str]]:
    """Return the entries that cannot be used, each with the reason."""
    examined = [(directory, *examine(directory)) for directory in _folders(root())]
    return [(_entry(directory, noted), problem) for directory, noted, problem in examined if problem is not None]


def clear() -> int:
    """Remove every entry, lock and leftover of a build, and nothing else; returns how many entries there were.

    Raises:
        CacheError: something could not be removed.
    """
    place = root()
    folders = list(_folders(place))
    try:
        for directory in folders:
            remove(directory)
        for leftover in (*_listed(place / TEMPORARY, _LEFTOVER), *_listed(place / FAILED, _LEFTOVER)):
            remove_tree(leftover)
        for above in _listed(place, r"[0-9a-f]{2}"):
            for lock in _listed(above, rf"{_KEY.pattern}\.lock"):
                lock.unlink(missing_ok=True)
        for empty in (*_listed(place, rf"[0-9a-f]{{2}}|{TEMPORARY}|{FAILED}"), place):
            with contextlib.suppress(OSError):
                empty.rmdir()
    except OSError as error:
        raise CacheError(f"The build cache {place} cannot be cleared: {error}") from error
    return len(folders)


def remove(directory: Path) -> None:
    """Remove an entry: what a build puts there, and the folder if nothing else is in it."""
    if directory.is_symlink() or not directory.is_dir():
        directory.unlink(missing_ok=True)
        return
    for name in (ENTRY, *FILES):
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove_tree(directory: Path) -> None:
    """Remove a temporary folder with all files that compilers left in it."""
    if directory.is_symlink() or not directory.is_dir():
        directory.unlink(missing_ok=True)
        return
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def sweep(place: Path, older_than: float) -> None:
    """Remove the temporary folders of builds that were killed: those untouched for ``older_than`` seconds."""
    for directory in _listed(place / TEMPORARY, _LEFTOVER):
        with contextlib.suppress(OSError):
            if time.time() - directory.lstat().st_mtime > older_than:
                remove_tree(directory)


_HOUR = 3600.0
_MAX_FAILED = 20

_instead: dict[Path, Path] = {}  # the temporary folders that stand in for caches, by the cache
_swept: set[Path] = set()
_changing = threading.Lock()


# ---- places ----------------------------------------------------------------------------------------------------------


def place() -> Path:
    """Return the folder to build in now: the cache, or its substitute."""
    main = root()
    return _instead.get(main, main)


def places() -> list[Path]:
    """Return the folders to look for built files in: the cache, and its substitute if it has one."""
    main = root()
    return [main, _instead[main]] if main in _instead else [main]


def give_up(failed: Path, error: OSError) -> None:
    """Build in a substitute from now on, because ``failed`` cannot be written to.

    Raises:
        CacheError: the substitute has failed too, or none can be created.
    """
    main = root()
    with _changing:
        if failed == main and main in _instead:
            return  # another thread came first
        if failed != main:
            raise CacheError(f"Nothing can be built: {failed} stood in for {main}, and fails too: {error}") from error
        _instead[main] = _temporary(main, error)
    warnings.warn(
        f"The build cache {main} cannot be used ({error.strerror or error}). Kernels of this process are built into "
        f"{_instead[main]}, which is removed when it ends. Free space, repair the folder, or set OPKIT_CACHE_DIR.",
        BuildCacheWarning,
        stacklevel=3,
    )


def _temporary(main: Path, error: OSError) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="opkit-"))
    except OSError as second:
        raise CacheError(
            f"Neither the build cache {main} ({error}) nor a temporary folder ({second}) can be used."
        ) from second
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a child that was forked and shares the folder
        shutil.rmtree(folder, ignore_errors=True)


# ---- building in a place ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(place: Path, key: str, tick: Callable[[], None]) -> Iterator[None]:
    """Let one thread of one process at a time build a key; see :func:`opkit.kernels.cache_files.lock`."""
    above = entry_folder(place, key).parent
    cache_files.make_private_folder(above, above=1)
    with cache_files.lock(above / f"{key}.lock", tick):
        yield


@contextlib.contextmanager
def workspace(place: Path, key: str) -> Iterator[Path]:
    """Create an empty folder on the cache's file system, which is removed at the end if it is still there."""
    above = place / TEMPORARY
    cache_files.make_private_folder(above)
    if place not in _swept:
        _swept.add(place)
        sweep(place, max(_HOUR, 2 * config.get().build_timeout))
    folder = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-{os.getpid()}-", dir=above))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_locked(place: Path, key: str) -> Path | None:
    """Return the built file, if there is one. The caller holds the lock: a damaged entry is removed, with a warning."""
    path, problem = find(place, key)
    if problem is None:
        return path
    discard(place, key)
    warnings.warn(
        f"An entry of the build cache was damaged and is built again: {problem} ({entry_folder(place, key)}).",
        BuildCacheWarning,
        stacklevel=4,
    )
    return None


def discard(place: Path, key: str) -> None:
    """Move an entry away by one rename, so that nobody sees half of it; then remove it."""
    above = place / TEMPORARY
    cache_files.make_private_folder(above)
    away = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-", dir=above))
    with contextlib.suppress(FileNotFoundError):
        os.rename(entry_folder(place, key), away / "entry")
    shutil.rmtree(away, ignore_errors=True)


def store(place: Path, key: str, built: Path, noted: dict[str, Any]) -> Path:
    """Put a built file under its key; if another process stored the same meanwhile, its file stays."""
    folder = built.parent / "entry"
    folder.mkdir(mode=0o700)
    built.chmod(0o700)
    os.rename(built, folder / built.name)
    noted = {"key": key, "file": built.name, "created": time.time(), **noted}
    with open(os.open(folder / ENTRY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        json.dump(noted, file, indent=1)
    return _move(folder, place, key)


def _move(folder: Path, place: Path, key: str) -> Path:
    target = entry_folder(place, key)
    for _ in range(3):
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        path, _ = find(place, key)
        if path is not None:
            return path
        discard(place, key)
    raise OSError(errno.EIO, "what is written there cannot be read back", str(target))


def store_failed(place: Path, key: str, workspace: Path) -> None:
    """Store the sources that a compiler refused, so that its command can be run again; of many the oldest are removed."""
    failed = failed_folder(place, key)
    with contextlib.suppress(OSError):
        cache_files.make_private_folder(failed.parent)
        remove_tree(failed)
        os.rename(workspace, failed)
        by_age = sorted(failed.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in by_age[_MAX_FAILED:]:
            remove_tree(old)


def failed_folder(place: Path, key: str) -> Path:
    """Return the folder of the sources of a build that failed."""
    return place / FAILED / key[:16]
