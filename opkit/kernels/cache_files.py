"""Read, write and lock files in the cache directory, which only this user may write to.

A file appears whole or not at all, by one rename. It is trusted only if it belongs to this user, and if nobody else may write
to it or to the folders that contain it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opkit import config

_WAIT, _POLL = 0.2, 0.01

used: dict[Path, None] = {}
"""The entries of the caches that this process read or wrote, in order: files, and folders of the build cache."""

observers: list[Callable[[Path], None]] = []
"""Functions that are called with each entry that is read or written."""


def note_used(entry: Path) -> None:
    """Note that this process uses an entry, which is whole and was checked."""
    used[entry] = None
    for observer in observers:
        observer(entry)


def check_private(path: Path, status: os.stat_result, right_kind: Any = stat.S_ISDIR) -> None:
    """Check that nobody but this user may have written to a file or folder.

    Raises:
        ValueError: somebody may have; or it is no file or folder as it should be.
    """
    if not right_kind(status.st_mode):
        raise ValueError(f"{path.name} is not a file or folder as it was built")
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path.name} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{path.name} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o})")


def read_private(path: Path, folders: int = 0) -> bytes:
    """Return the bytes of a plain file of this user's; check as many of the folders that contain it too.

    The check and the reading are of one and the same file.

    Raises:
        OSError: it cannot be read.
        ValueError: others may have written to it.
    """
    for folder in reversed(path.parents[:folders]):
        check_private(folder, os.stat(folder))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        check_private(path, os.fstat(file.fileno()), stat.S_ISREG)
        return file.read()


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file that appears whole or not at all, and that by default only this user can read.

    Raises:
        OSError: it cannot be written.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:8]}-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def make_private_folder(folder: Path, above: int = 0) -> None:
    """Make a folder of the cache's, and the ``above`` ones that contain it: this user's, and closed to writing by others.

    Raises:
        OSError: one cannot be made, is no folder, or belongs to another user.
    """
    for each in (*reversed(folder.parents[:above]), folder):
        _make_folders(each)
        status = each.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "it belongs to another user", str(each))
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            each.chmod(0o700)


def _make_folders(folder: Path) -> None:
    """Make a folder that only this user may enter, and those that contain it if need be."""
    if not folder.parent.is_dir():
        _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        return
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


@contextlib.contextmanager
def lock(path: Path, tick: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one thread of one process at a time run the body; call ``tick`` now and then while it waits for another.

    The lock of a process that dies is free at once. Where the lock cannot be taken, because the file system has no locks or
    its holder was suspended, the body runs without it: at worst something is built or measured twice.

    Raises:
        OSError: the lock's file cannot be made.
    """
    import filelock  # imported here: most processes find all they need in the cache

    held = filelock.FileLock(path)
    deadline = time.monotonic() + 2 * config.get().build_timeout
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(NotImplementedError):
            while time.monotonic() < deadline:
                with contextlib.suppress(filelock.Timeout):
                    stack.enter_context(held.acquire(timeout=_WAIT, poll_interval=_POLL))
                    break
                tick()
        yield
