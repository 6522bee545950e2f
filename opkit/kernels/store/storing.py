"""Write entries of the build cache: locks, private folders to build in, and a temporary cache if the cache is read-only.

A process that cannot write to the cache (a full disk, a read-only one) builds into a temporary folder of its own, laid
out like the cache and removed when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opkit import config
from opkit.errors import BuildCacheWarning, CacheError
from opkit.kernels.store import cache, files

_HOUR = 3600.0
_MAX_FAILED = 20

_instead: dict[Path, Path] = {}  # the temporary folders that stand in for caches, by the cache
_swept: set[Path] = set()
_changing = threading.Lock()


# ---- places ----------------------------------------------------------------------------------------------------------


def place() -> Path:
    """Return where to build now: the cache, or what stands in for it."""
    main = cache.root()
    return _instead.get(main, main)


def places() -> list[Path]:
    """Return where to look for what is built: the cache, and what stands in for it if anything does."""
    main = cache.root()
    return [main, _instead[main]] if main in _instead else [main]


def give_up(failed: Path, error: OSError) -> None:
    """Build elsewhere from now on, as ``failed`` cannot be written to.

    Raises:
        CacheError: what stood in for the cache has failed too, or there is nothing that could.
    """
    main = cache.root()
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
    """Let one thread of one process at a time build a key; see :func:`opkit.kernels.store.files.lock`."""
    above = cache.folder(place, key).parent
    files.make_private_folder(above, above=1)
    with files.lock(above / f"{key}.lock", tick):
        yield


@contextlib.contextmanager
def workspace(place: Path, key: str) -> Iterator[Path]:
    """An empty folder on the cache's file system, removed at the end if it is still there."""
    above = place / cache.TEMPORARY
    files.make_private_folder(above)
    if place not in _swept:
        _swept.add(place)
        cache.sweep(place, max(_HOUR, 2 * config.get().build_timeout))
    folder = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-{os.getpid()}-", dir=above))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find(place: Path, key: str) -> Path | None:
    """Return what is built already. The caller holds the lock: a damaged entry is removed, with a warning."""
    path, problem = cache.find(place, key)
    if problem is None:
        return path
    discard(place, key)
    warnings.warn(
        f"An entry of the build cache was damaged and is built again: {problem} ({cache.folder(place, key)}).",
        BuildCacheWarning,
        stacklevel=4,
    )
    return None


def discard(place: Path, key: str) -> None:
    """Take an entry out of the way by one rename, so that nobody sees half of it; then remove it."""
    above = place / cache.TEMPORARY
    files.make_private_folder(above)
    away = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-", dir=above))
    with contextlib.suppress(FileNotFoundError):
        os.rename(cache.folder(place, key), away / "entry")
    shutil.rmtree(away, ignore_errors=True)


def store(place: Path, key: str, built: Path, noted: dict[str, Any]) -> Path:
    """Put a built file under its key; where another process has put the same there meanwhile, that one stays."""
    folder = built.parent / "entry"
    folder.mkdir(mode=0o700)
    built.chmod(0o700)
    os.rename(built, folder / built.name)
    noted = {"key": key, "file": built.name, "created": time.time(), **noted}
    with open(
        os.open(folder / cache.ENTRY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
    ) as file:
        json.dump(noted, file, indent=1)
    return _move(folder, place, key)


def _move(folder: Path, place: Path, key: str) -> Path:
    target = cache.folder(place, key)
    for _ in range(3):
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        path, _ = cache.find(place, key)
        if path is not None:
            return path
        discard(place, key)
    raise OSError(errno.EIO, "what is written there cannot be read back", str(target))


def store_failed(place: Path, key: str, workspace: Path) -> None:
    """Store what a compiler refused, so that its command can be run again; the oldest of many are dropped."""
    failed = failed_folder(place, key)
    with contextlib.suppress(OSError):
        files.make_private_folder(failed.parent)
        cache.remove_tree(failed)
        os.rename(workspace, failed)
        by_age = sorted(failed.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in by_age[_MAX_FAILED:]:
            cache.remove_tree(old)


def failed_folder(place: Path, key: str) -> Path:
    """Return the folder of the sources of a build that failed."""
    return place / cache.FAILED / key[:16]
