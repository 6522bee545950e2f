"""Read and write tuning results on disk: ``<cache_dir>/triton_tuning/`` has one JSON file for each kernel of each operator.

Files appear by one rename, under a lock. One that is damaged counts as empty and is written again. A package has such
files too, in ``_opkit/tuning/``; they are read, never written. A result is used only if it was measured for the same
kernel, by its hash, with the same Triton, and every configuration that the kernel has now was tried then; so no file can
make a kernel run with a configuration that its author did not write. A package's results hold for every Triton, as the binaries
in it do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from opkit import config
from opkit.errors import ArgumentError
from opkit.kernels import aot_loading, cache_files
from opkit.kernels.aot_package import FOLDER as PACKAGED
from opkit.kernels.triton import environment
from opkit.kernels.tuning import record_format
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity, Record, Tried, TuningEntry, distance

_FOLDER, _IN_PACKAGE, _LOCKS = "triton_tuning", "tuning", "locks"
_SHIPPED = "opkit-build.json"
_LONGEST_NAME = 120


@dataclasses.dataclass(frozen=True)
class RejectedResult:
    """Why a recorded result was not used; ``damaged``: because the whole file cannot be read."""

    file: Path
    reason: str
    damaged: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A configuration and its measurements; or neither, and the results that were rejected."""

    config: Config | None = None
    entry: TuningEntry | None = None
    refusals: tuple[RejectedResult, ...] = ()


def root() -> Path:
    """Return the folder of results."""
    return Path(os.path.abspath(config.get().cache_dir)) / _FOLDER


def file_of(operator: str, kernel: str) -> Path:
    """Return the file of one kernel, whether there is one or not."""
    digest = hashlib.sha256(f"{operator}\0{kernel}".encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", ".", f"{operator}.{kernel}", flags=re.ASCII)
    return root() / f"{name[:_LONGEST_NAME]}.{digest}.json"


def packaged(module: str) -> tuple[Path, ...]:
    """Return the folders in which a module's package may have results, the nearest first."""
    return tuple(folder / _IN_PACKAGE for folder in aot_loading.places(module, PACKAGED))


def triton_version() -> str:
    """Return the major and minor version of the installed Triton, which is not imported; "none" where there is none."""
    found = environment.installed_triton()
    return "none" if found is None else ".".join(found[0].split(".")[:2])


# ---- finding ---------------------------------------------------------------------------------------------------------


def lookup(
    identity: Identity, configs: Sequence[Config], device: str, bucket: str, folders: Iterable[Path] = ()
) -> Lookup:
    """Return the fastest of ``configs`` by what was measured, in the cache or else in the folders of packages."""
    refusals: list[RejectedResult] = []
    for file, entries in _entries(identity, _files(identity, folders), refusals):
        for entry in entries:
            if (entry.device, entry.bucket) != (device, bucket):
                continue
            found = _answer(identity, configs, entry, _in_cache(file))
            if isinstance(found, Config):
                return Lookup(found, entry)
            refusals.append(RejectedResult(file, found))
    return Lookup(refusals=tuple(refusals))


def nearest(
    identity: Identity, configs: Sequence[Config], device: str, bucket: str, folders: Iterable[Path] = ()
) -> Lookup:
    """Return the same from the most similar bucket that the device has a result for."""
    return next(_similar(identity, device, bucket, configs, _files(identity, folders), float("inf")), Lookup())


def packaged_for_similar(
    identity: Identity, device: str, bucket: str, configs: Sequence[Config], folders: Iterable[Path]
) -> Iterator[Lookup]:
    """Yield what the folders of packages have for buckets of the same dtypes, the most similar first."""
    return _similar(identity, device, bucket, configs, _listed(folders), record_format.OTHER_DTYPES)


def _similar(
    identity: Identity, device: str, bucket: str, configs: Sequence[Config], files: Iterable[Path], limit: float
) -> Iterator[Lookup]:
    """Yield the answers for buckets less than ``limit`` away, the most similar first."""
    similar = [
        (away, file, entry)
        for file, entries in _entries(identity, files, [])
        for entry in entries
        if entry.device == device and (away := distance(entry.bucket, bucket)) < limit
    ]
    for _, file, entry in sorted(similar, key=lambda each: each[0]):
        found = _answer(identity, configs, entry, _in_cache(file))
        if isinstance(found, Config):
            yield Lookup(found, entry)


def _files(identity: Identity, folders: Iterable[Path]) -> Iterator[Path]:
    yield file_of(identity.operator, identity.kernel)
    yield from _listed(folders)


def _in_cache(file: Path) -> bool:
    return file.parent == root()


def _entries(
    identity: Identity, files: Iterable[Path], refusals: list[RejectedResult]
) -> Iterator[tuple[Path, Sequence[TuningEntry]]]:
    """Yield the entries of a kernel, file by file; a damaged file is noted in ``refusals``."""
    for file in files:
        found = _read(file)
        if isinstance(found, str):
            refusals.append(RejectedResult(file, found, damaged=True))
            continue
        for record in found:
            if (record.operator, record.kernel) == (identity.operator, identity.kernel):
                yield file, record.entries


def _listed(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        with contextlib.suppress(OSError):
            yield from sorted(path for path in folder.iterdir() if path.suffix == ".json")


def _answer(identity: Identity, configs: Sequence[Config], entry: TuningEntry, in_cache: bool) -> Config | str:
    """Return the fastest of ``configs``, or why the entry cannot be used."""
    if reason := stale(entry, identity.hash, in_cache):
        return reason
    by_key = {each.key: each for each in configs}
    found = record_format.fastest(entry, list(by_key))
    return found if isinstance(found, str) else by_key[found.key]


def stale(entry: TuningEntry, kernel_hash: str | None, in_cache: bool = True) -> str:
    """Return why an entry is out of date, or ""; without the hash only Triton's release is compared, for the cache's entries."""
    if kernel_hash is not None and entry.hash != kernel_hash:
        return "it was made for the kernel before it changed"
    if in_cache and entry.triton != triton_version():
        return f"it was made with Triton {entry.triton}, and this is {triton_version()}"
    return ""


# ---- reading ---------------------------------------------------------------------------------------------------------

_known: dict[Path, tuple[tuple[int, ...], list[Record] | str]] = {}  # with the stamp of what was read
_reading = threading.Lock()


def _read(file: Path) -> list[Record] | str:
    """Return the records of a file, none where there is no file; or the reason why it cannot be read."""
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    stamp = status.st_ino, status.st_size, status.st_mtime_ns
    with _reading:
        if file not in _known or _known[file][0] != stamp:
            _known[file] = stamp, _attempt(file)
        return _known[file][1]


def _attempt(file: Path) -> list[Record] | str:
    try:
        return record_format.parse(file.read_bytes())
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)


def listed() -> list[Record]:
    """Return every record in the cache; damaged files are passed over."""
    found = [_read(file) for file in _listed([root()])]
    return record_format.merge(record for records in found if not isinstance(records, str) for record in records)


# ---- writing ---------------------------------------------------------------------------------------------------------


def remember(identity: Identity, device: str, bucket: str, tried: Iterable[Tried]) -> TuningEntry:
    """Record the measurements made now.

    Raises:
        OSError: the cache cannot be written to.
    """
    entry = TuningEntry(
        device, bucket, identity.hash, triton_version(), record_format.now(), record_format.by_speed(tried)
    )
    _add(Record(identity.operator, identity.kernel, (entry,)))
    return entry


def _add(record: Record) -> None:
    file = file_of(record.operator, record.kernel)
    with lock(file.name, lambda: None):
        held = _read(file)
        existing = [] if isinstance(held, str) else held  # a damaged file is replaced
        _write(file, record_format.merge([*existing, record]))


def _write(file: Path, records: Iterable[Record], mode: int = 0o600) -> None:
    cache_files.write_atomically(file, record_format.render(records).encode(), mode)


@contextlib.contextmanager
def lock(name: str, tick: Callable[[], None]) -> Iterator[None]:
    """Let one thread of one process at a time measure what ``name`` names; see :func:`opkit.kernels.cache_files.lock`.

    Raises:
        OSError: the cache cannot be written to.
    """
    folder = root() / _LOCKS
    cache_files.make_private_folder(folder, above=1)
    with cache_files.lock(folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock", tick):
        yield


# ---- from machine to machine -----------------------------------------------------------------------------------------


def export_all(path: Path, operators: Collection[str] | None = None) -> int:
    """Write the results in the cache into one file, for :func:`import_from` or a package's ``_opkit/tuning/``.

    Args:
        path: the file.
        operators: the operators to export; all by default.

    Returns:
        The number of entries in it.

    Raises:
        ArgumentError: there are none, or the file cannot be written.
    """
    records = [record for record in listed() if operators is None or record.operator in operators]
    if not records:
        whose = "" if operators is None else f" of {', '.join(sorted(operators))}"
        raise ArgumentError(f"There are no tuning results{whose} in {root()}, so {path} was not written. Tune first.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, records, mode=0o644)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror or error}.") from error
    return sum(len(record.entries) for record in records)


def ship(folder: Path, identities: Collection[Identity]) -> int:
    """Write the cache's results for these kernels, as they are now, to a package's folder, in addition to its own.

    Returns:
        The number of entries written. Without any, nothing is written.

    Raises:
        OSError: the folder cannot be written to.
    """
    hashes = {(identity.operator, identity.kernel): identity.hash for identity in identities}
    records: list[Record] = []
    for record in listed():
        current = hashes.get((record.operator, record.kernel), "")
        if entries := tuple(entry for entry in record.entries if entry.hash == current):
            records.append(dataclasses.replace(record, entries=entries))
    if records:
        path = folder / _IN_PACKAGE / _SHIPPED
        path.parent.mkdir(parents=True, exist_ok=True)
        held = _read(path)
        _write(path, record_format.merge([*([] if isinstance(held, str) else held), *records]), mode=0o644)
    return sum(len(record.entries) for record in records)


def import_from(path: Path) -> int:
    """Import the results of a file into the cache; of two for one device and bucket the newer counts.

    Returns:
        The number of entries in the file.

    Raises:
        ArgumentError: the file cannot be read or is not one of tuning results; or the cache cannot be
            written to. Nothing is imported from a file that is at fault.
    """
    try:
        records = record_format.parse(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ArgumentError(f"{path} is no file of tuning results: {error}.") from error
    try:
        for record in records:
            _add(record)
    except OSError as error:
        raise ArgumentError(f"{root()} cannot be written to: {error.strerror or error}.") from error
    return sum(len(record.entries) for record in records)
