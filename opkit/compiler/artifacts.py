"""Carry opkit's cache entries in the bytes of ``torch.compiler.save_cache_artifacts``; ``load_cache_artifacts`` writes them.

torch knows the type of these artifacts once ``opkit.compiler`` is imported, which it does itself when it looks up the backend. An
artifact's key is the place of an entry in the cache's folder, and its content is the entry as bytes. It is written only if it is
whole, by the checksum that every entry has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from pathlib import Path

from opkit import config
from opkit.compiler.run import torch_private as private
from opkit.errors import BuildCacheWarning
from opkit.kernels import build_cache, cache_files

_TYPE = "opkit"
_PLACE = re.compile(r"(native|triton|triton/named|graphs)/([0-9a-f]{2})/(\2[0-9a-f]{62})(\.json)?")


@private.register_artifact_type
class CacheEntryArtifact(private.CacheArtifact):
    """An entry of one of opkit's caches: a plan, a library, or a Triton kernel."""

    @staticmethod
    def type() -> str:
        """Return the name by which torch finds this class."""
        return _TYPE

    def populate_cache(self) -> None:
        """Write the entry to the cache; one that is damaged, or cannot be written, is left out with a warning."""
        try:
            _write(self.key, self.content)
        except Exception as error:
            warnings.warn(
                f"torch.compiler.load_cache_artifacts: the entry {self.key[:100]!r} of opkit's caches is left out: {error}. "
                "What it should hold is compiled again.",
                BuildCacheWarning,
                stacklevel=2,
            )


def _write(place: str, content: bytes) -> None:
    """Write an entry that another process recorded.

    Raises:
        Exception: it is no whole entry, or cannot be written.
    """
    match = _PLACE.fullmatch(place)
    if match is None or (match[1] == "graphs") != (match[4] is not None):
        raise ValueError("that is no place of an entry")
    if match[1] == "native":
        _unpack(match[3], content)
        return
    _check(match[1], content)
    path = Path(os.path.abspath(config.get().cache_dir)) / place
    cache_files.make_private_folder(path.parent, above=match[1].count("/"))
    cache_files.write_atomically(path, content)


def _check(kind: str, content: bytes) -> None:
    # imported here, since importing opkit.compiler should take no time
    from opkit.compiler.run import plan_cache
    from opkit.kernels.triton import stored

    if kind == "graphs":
        plan_cache.checked(content)
    elif kind == "triton":
        stored.checked(content)
    elif not re.fullmatch(rb"[0-9a-f]{64}", content):
        raise ValueError("it is not the key of a binary")


def _record(entry: Path) -> None:
    """Give torch an entry that this process uses."""
    place = next((at for at in ("/".join(entry.parts[-n:]) for n in (3, 4)) if _PLACE.fullmatch(at)), None)
    if place is None:
        return
    with contextlib.suppress(OSError, ValueError):  # it was removed, or replaced, in the meantime
        content = _pack(entry) if place.startswith("native/") else cache_files.read_private(entry)
        private.record_artifact(_TYPE, place, content)


def _pack(directory: Path) -> bytes:
    """Return an entry of the build cache as bytes: its description, a line break, and its file."""
    noted, problem = build_cache.examine(directory)
    if problem is not None:
        raise ValueError(problem)
    return json.dumps(noted).encode() + b"\n" + cache_files.read_private(directory / noted["file"])


def _unpack(key: str, packed: bytes) -> None:
    """Write the entry that ``_pack`` returned, unless there is one that can be used."""
    description, _, content = packed.partition(b"\n")
    noted = build_cache.parsed(description, key)
    problem = build_cache.damage(noted, content)
    if problem is not None:
        raise ValueError(problem)
    where = build_cache.place()
    with build_cache.lock(where, key, lambda: None):
        if build_cache.find(where, key)[0] is not None:
            return
        with build_cache.workspace(where, key) as folder:
            built = folder / noted["file"]
            built.write_bytes(content)
            build_cache.store(where, key, built, noted)


cache_files.observers.append(_record)
for _used in [*cache_files.used]:
    _record(_used)
