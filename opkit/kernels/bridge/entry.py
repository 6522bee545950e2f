"""One bridge's folder in the cache: ``bridge.so`` with its ``record.json``, or ``failed.log``; and ``lock``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import filelock

from opkit.errors import CacheError

_WRITABLE_BY_OTHERS = 0o022


class Entry:
    """A folder that only its owner can write to, holding at most one library, which is read only when whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = folder / "bridge.so"
        self._failure = folder / "failed.log"
        self._lock = folder / "lock"

    def found(self) -> Path | None:
        """The library if it is whole and can have been written by nobody else."""
        try:
            safe = _safe(self.folder) and _safe(self.library)
            whole = safe and hashlib.sha256(self.library.read_bytes()).hexdigest() == self.record()["sha256"]
        except (OSError, ValueError, KeyError):
            return None
        return self.library if whole else None

    def record(self) -> dict[str, Any]:
        """What was noted of the build: sha256, seconds, torch, compiler."""
        return json.loads((self.folder / "record.json").read_text())

    def failure(self) -> str | None:
        """Why the last build failed; None where none did."""
        try:
            return self._failure.read_text(errors="replace")
        except OSError:
            return None

    def keep(self, built: Path, record: dict[str, Any]) -> Path:
        """Take over a library that was built, in one step; ``record`` gets its digest."""
        content = built.read_bytes()
        self._write(self.library, content)
        record = {"sha256": hashlib.sha256(content).hexdigest(), **record}
        self._write(self.folder / "record.json", json.dumps(record, indent=1).encode())
        self._failure.unlink(missing_ok=True)
        return self.library

    def fail(self, log: str) -> None:
        """Note why there is no library, so that not every process tries again."""
        self.make()
        self._write(self._failure, log.encode(errors="replace"))
        self.library.unlink(missing_ok=True)

    def make(self) -> None:
        """Make the folder, for its owner alone; what others could have written in it is not kept.

        Raises:
            CacheError: it cannot be made, or is another user's.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _safe(self.folder):
                self.folder.chmod(0o700)
                self.library.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(f"The folder of the bridge, {self.folder}, cannot be used: {error}") from error

    def sweep(self) -> None:
        """Remove what builds that were killed left behind; only for the holder of the lock."""
        for left in self.folder.glob("tmp*"):
            shutil.rmtree(left, ignore_errors=True)

    def lock(self) -> filelock.BaseFileLock:
        """What the one process that builds holds; the system releases it when that process dies."""
        return filelock.FileLock(self._lock)

    def locked(self) -> bool:
        """Whether some process is building."""
        if not self._lock.exists():
            return False
        try:
            with filelock.FileLock(self._lock, timeout=0):
                return False
        except (filelock.Timeout, OSError) as error:
            return isinstance(error, filelock.Timeout)

    def _write(self, path: Path, content: bytes) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.folder)  # readable and writable by its owner alone
        try:
            with os.fdopen(handle, "wb") as file:
                _ = file.write(content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _safe(path: Path) -> bool:
    found = path.stat()
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _WRITABLE_BY_OTHERS
