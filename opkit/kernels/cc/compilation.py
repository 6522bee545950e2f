"""Compile C, C++ and CUDA to a shared library or a program, through the build cache.

path = build(Request("demo::double", (Unit("double.c", text, "c"),)))
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from opkit import config
from opkit.errors import CacheError, CompileError, OpkitError
from opkit.kernels import build_cache, cache_files
from opkit.kernels.cc import build_plan, processes, toolchain
from opkit.kernels.cc.build_plan import families, plan
from opkit.kernels.cc.processes import Outcome
from opkit.kernels.cc.progress import Progress, printable
from opkit.kernels.cc.request import BuildPlan
from opkit.kernels.cc.request import Request as Request
from opkit.kernels.cc.request import Unit as Unit

if TYPE_CHECKING:
    from concurrent.futures import Future

_T = TypeVar("_T")

_FULL = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system")
_DISK_FULL = 1 << 20  # bytes; a compiler that fails with less than this free failed because the disk is full
_TRIES = 3
_REFRESH = 0.1

_verified: dict[
    str, tuple[Path, tuple[int, ...]]
] = {}  # files that this process has checked, by key, with their stamps


def key(request: Request) -> str:
    """Return the sha256 of everything that decides the result: texts, flags, compilers, headers, and the processor if native.

    Raises:
        ToolchainError: a compiler that is needed was not found.
    """
    return build_plan.key(request, plan(request))


def find(request: Request) -> Path | None:
    """Return the built file if the cache has it; never build it.

    Raises:
        ToolchainError: the compiler, which is part of the key, was not found.
    """
    return _look_up(key(request))


def build(request: Request) -> Path:
    """Return the built file: a checked one from the cache, or, if it has none, a new one.

    Raises:
        ToolchainError: a compiler that is needed was not found.
        CompileError: the compiler refused the source or took too long. Its ``log`` is all that the compiler printed;
            its ``command``, with the sources left in place, prints it again.
        CacheError: nothing can be written, neither to the cache nor to a temporary folder.
    """
    job = _job(request, _cores())
    found = _look_up(job.key)
    if found is not None:
        return found
    progress = Progress(lambda: f"building {printable(request.label)} with {families(job.plan.compilers)}")
    try:
        return _make(dataclasses.replace(job, tick=progress.tick))
    finally:
        progress.finish()


def build_all(requests: Sequence[Request], jobs: int | None = None) -> list[Path | OpkitError]:
    """Build many, ``jobs`` at a time (by default one for each core); return each file, or its error, in order."""
    from concurrent.futures import ThreadPoolExecutor  # imported here: it is not needed to load what is built

    jobs = max(1, jobs or _cores())
    stop = threading.Event()
    wanted = [_attempt(lambda request=request: _job(request, 1, _stopper(stop))) for request in requests]
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="opkit-build")
    futures = {
        job.key: pool.submit(_attempt, lambda job=job: _look_up(job.key) or _make(job)) for job in _spread(wanted, jobs)
    }
    try:
        _await(list(futures.values()))
        return [futures[job.key].result() if isinstance(job, _Job) else job for job in wanted]
    finally:
        stop.set()  # only an interrupted build has something left to stop
        pool.shutdown(cancel_futures=True)


# ---- jobs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Job:
    """A request and the way to build it: ``jobs`` compilers at once; ``tick`` is called while they run."""

    request: Request
    plan: BuildPlan
    key: str
    jobs: int
    tick: Callable[[], None]


def _nothing() -> None:
    """The tick of a build without progress."""


def _job(request: Request, jobs: int, tick: Callable[[], None] = _nothing) -> _Job:
    steps = plan(request)
    return _Job(request, steps, build_plan.key(request, steps), jobs, tick)


def _spread(wanted: Sequence[_Job | OpkitError], jobs: int) -> list[_Job]:
    """Return the distinct jobs; if there are fewer than cores, each compiles several units at once."""
    unique = {job.key: job for job in wanted if isinstance(job, _Job)}
    each = max(1, jobs // max(1, len(unique)))
    return [dataclasses.replace(job, jobs=each) for job in unique.values()]


def _attempt(work: Callable[[], _T]) -> _T | OpkitError:
    try:
        return work()
    except OpkitError as error:
        return error


def _stopper(stop: threading.Event) -> Callable[[], None]:
    def tick() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    return tick


def _await(futures: list[Future[Path | OpkitError]]) -> None:
    """Wait for all, and show how many are ready."""
    from concurrent.futures import wait

    left = set(futures)
    progress = Progress(lambda: f"built {len(futures) - len(left)} of {len(futures)} kernels")
    while left:
        left = wait(left, timeout=_REFRESH).not_done
        progress.tick()
    progress.finish()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- cache -----------------------------------------------------------------------------------------------------------


def _look_up(identity: str) -> Path | None:
    """Return the file if this process has checked it and it is unchanged, or if the cache has it; check it then."""
    known = _verified.get(identity)
    if known is not None and _stamp(known[0]) == known[1]:
        return known[0]
    for place in build_cache.places():
        path, _ = build_cache.find(place, identity)
        if path is not None:
            return _remember(identity, path)
    return None


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_ctime_ns


def _remember(identity: str, path: Path) -> Path:
    stamp = _stamp(path)
    if stamp is not None:
        _verified[identity] = (path, stamp)
        cache_files.note_used(path.parent)
    return path


# ---- build -----------------------------------------------------------------------------------------------------------


def _make(job: _Job) -> Path:
    """Build in the cache, or in its fallback; retry if someone clears it meanwhile."""
    for attempt in range(2 * _TRIES):
        place = build_cache.place()
        try:
            return _remember(job.key, _make_in(place, job))
        except CacheError:
            raise
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or attempt >= _TRIES:
                build_cache.give_up(place, error)
    raise CacheError(f"{printable(job.request.label)}: built files vanish from {build_cache.place()} again and again.")


def _make_in(place: Path, job: _Job) -> Path:
    with build_cache.lock(place, job.key, job.tick):
        found = build_cache.find_locked(place, job.key)
        if found is not None:
            return found
        with build_cache.workspace(place, job.key) as folder:
            _compile(place, folder, job)
            file = folder / job.plan.file
            return build_cache.store(place, job.key, file, _metadata(job, file))


def _metadata(job: _Job, file: Path) -> dict[str, object]:
    content = file.read_bytes()
    compiler = job.plan.compiler
    return {
        "label": job.request.label,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "compiler": {"path": compiler.path, "version": toolchain.version(compiler)},
        "flags": job.plan.link or job.plan.units[0],
        "abi": build_plan.abi_version(),
    }


def _compile(place: Path, folder: Path, job: _Job) -> None:
    """Run the commands in ``folder``.

    Raises:
        CompileError: one failed.
        OSError: the disk is full, or the folder was removed.
    """
    for file, name, text in job.plan.sources:
        text = f"#line 1 {processes.quoted_file(name)}\n{text}\n"
        (folder / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    for commands in job.plan.stages:
        ended = processes.run(commands, folder, job.jobs, config.get().build_timeout, job.tick)
        wrong = next((outcome for outcome in ended if outcome.status != 0), None)
        if wrong is not None:
            raise _failure(place, folder, job, wrong)
    if folder.exists() and not (folder / job.plan.file).is_file():
        raise _failure(place, folder, job, Outcome(job.plan.link or job.plan.units[0], 0, ""))


def _failure(place: Path, folder: Path, job: _Job, wrong: Outcome) -> CompileError:
    """Return the exception for a command that failed.

    Raises:
        OSError: it failed because the folder cannot be written to.
    """
    space = os.statvfs(folder)  # FileNotFoundError where someone cleared the cache
    full = space.f_blocks > 0 and space.f_bavail * space.f_frsize < _DISK_FULL
    if full or _FULL.search(wrong.log):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    failed = build_cache.failed_folder(place, job.key)
    again = tuple(_outside(argument, failed) for argument in wrong.command)
    texts = [(unit.name, unit.text) for unit in job.request.units]
    message = processes.failure_message(job.request.label, wrong, again, folder, texts)
    build_cache.store_failed(place, job.key, folder)
    return processes.compile_error(message, wrong.log, again)


def _outside(argument: str, folder: Path) -> str:
    """Return an argument for a command that runs outside ``folder``: the names of files in it become whole paths."""
    return str(folder / argument) if re.fullmatch(r"unit\d+\.\w+|kernel(\.so|\.cubin)?", argument) else argument
