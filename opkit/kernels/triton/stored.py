"""Store compiled Triton kernels on disk: ``<cache_dir>/triton/<key[:2]>/<key>`` is one file, a line of JSON and the binary.

``<cache_dir>/triton/named/<key[:2]>/<key>`` holds the key of the binary for a request that was made without Triton
(:mod:`opkit.kernels.triton.named`).

Triton has a cache of its own, but asking it takes half a second in a new process, in which it hashes its whole compiler. Here
the compiler is known by its release, and by its library's size and time. A file is trusted as the build cache trusts one
(:mod:`opkit.kernels.build_cache`): only this user may have written to it, and its sha256 is the one noted. Where it cannot be
written, Triton's cache still has the kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from opkit import config
from opkit.errors import CacheError
from opkit.kernels import cache_files
from opkit.kernels.triton import environment
from opkit.kernels.triton.binaries import Binary

_VERSION = 2  # of the files
_NAMED = "named"
_KEY = re.compile(r"[0-9a-f]{64}")


def key(identity: str) -> str | None:
    """Return the key of a kernel, from the identity of its request; None while Triton compiles anyway, or is inspected."""
    from triton._C import libtriton

    if environment.watched():
        return None
    library = os.stat(str(libtriton.__file__))
    variables = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    variables.update(libtriton.get_cache_invalidating_env_vars())
    parts = [
        _VERSION,
        identity,
        library.st_size,
        library.st_mtime_ns,
        sorted(variables.items()),
        environment.defaults(),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def named_key(identity: str) -> str | None:
    """Return the key of a note for the identity of a request that was made without Triton; None as for :func:`key`."""
    compiler = environment.installed_triton()
    if compiler is None or environment.watched():
        return None
    parts = [_VERSION, identity, compiler, environment.releases(), environment.variables(), environment.defaults()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def find_named(name: str) -> Binary | None:
    """Return the binary that is noted under such a key; None if there is none that can be trusted."""
    path = _path(name, _NAMED)
    try:
        noted = cache_files.read_private(path, folders=3).decode()
    except (OSError, ValueError):
        return None
    found = find(noted) if _KEY.fullmatch(noted) else None
    if found is not None:
        cache_files.note_used(path)
    return found


def note(name: str, binary_key: str) -> None:
    """Store the key of a binary under such a key, if it can be written, and if it covers everything that Triton reads."""
    if not environment.knows_all():
        return
    path = _path(name, _NAMED)
    with contextlib.suppress(OSError):
        cache_files.make_private_folder(path.parent, above=1)
        cache_files.write_atomically(path, binary_key.encode())
        cache_files.note_used(path)


def find(name: str) -> Binary | None:
    """Return the binary that is stored under this key; None if there is none that can be trusted."""
    path = _path(name)
    try:
        binary = checked(cache_files.read_private(path, folders=2))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    cache_files.note_used(path)
    return binary


def checked(file: bytes) -> Binary:
    """Return the binary in a file.

    Raises:
        ValueError, KeyError, TypeError: it is damaged.
    """
    line, _, image = file.partition(b"\n")
    noted = json.loads(line)
    if noted["sha256"] != hashlib.sha256(image).hexdigest():
        raise ValueError("its sha256 differs")
    return Binary.from_json(noted["launch"], image)


def store(name: str, binary: Binary) -> None:
    """Store a binary under this key, if that can be done."""
    path = _path(name)
    noted = {"sha256": hashlib.sha256(binary.image).hexdigest(), "launch": binary.to_json()}
    with contextlib.suppress(OSError):
        cache_files.make_private_folder(path.parent)
        cache_files.write_atomically(path, json.dumps(noted).encode() + b"\n" + binary.image)
        cache_files.note_used(path)


def root() -> Path:
    """Return the folder of binaries."""
    return Path(os.path.abspath(config.get().cache_dir)) / "triton"


def binary_files() -> list[Path]:
    """Return the files of binaries, whether they can be trusted or not."""
    try:
        return sorted(path for path in root().glob("[0-9a-f][0-9a-f]/*") if _KEY.fullmatch(path.name))
    except OSError:
        return []


def clear() -> int:
    """Remove every binary, and nothing else; returns how many there were.

    Raises:
        CacheError: one could not be removed.
    """
    found = binary_files()
    try:
        for path in (*found, *_notes()):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"The Triton kernels in {root()} cannot be removed: {error}") from error
    return len(found)


def _notes() -> list[Path]:
    try:
        return [path for path in root().glob(f"{_NAMED}/[0-9a-f][0-9a-f]/*") if _KEY.fullmatch(path.name)]
    except OSError:
        return []


def _path(name: str, below: str = "") -> Path:
    return root() / below / name[:2] / name
