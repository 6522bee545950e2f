"""The processes that measure: one for each architecture and backend, with caches of its own and a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from opkit.bench import results
from opkit.bench.architecture import PIP_COMMAND, Architecture
from opkit.bench.measurement import Request
from opkit.bench.results import Record

_CACHES = ("OPKIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_MAX_OUTPUT = 2000
_OUT_OF_MEMORY = "out of memory"  # in the errors of torch's allocator, and of CUDA


@dataclasses.dataclass(frozen=True)
class Job:
    """An architecture, and what to measure of it."""

    architecture: Architecture
    request: Request

    @property
    def key(self) -> results.Key:
        """The key of its record."""
        return results.key_of(dataclasses.asdict(self.request))


def missing(jobs: Iterable[Job], records: Iterable[Record], retry: bool = False) -> list[Job]:
    """Return the jobs without a record. Models that were skipped are tried again; with ``retry``, also those that failed."""
    again = {"skipped", *(("failed", "wrong") if retry else ())}
    done = {results.key_of(each) for each in records if each["status"] not in again}
    return [job for job in jobs if job.key not in done]


def run(
    jobs: Sequence[Job], path: Path, timeout: float, finished: Callable[[Job, Record], None], at_once: int = 1
) -> None:
    """Run jobs, several at once, and add a record of each to the file; ``finished`` is called with it.

    What ran out of memory next to others is run again, alone. SIGTERM ends this process with those that it started.
    """
    with tempfile.NamedTemporaryFile(prefix="opkit-bench-") as lock:
        try:
            asyncio.run(_run_all(jobs, path, timeout, finished, at_once, lock.name))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)


async def _run_all(
    jobs: Sequence[Job],
    path: Path,
    timeout: float,
    finished: Callable[[Job, Record], None],
    at_once: int,
    lock: str,
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    slots = asyncio.Semaphore(at_once)
    again: list[Job] = []

    async def run_one(job: Job, alone: bool) -> None:
        async with slots:
            record = await _record(job, timeout, lock)
        if not alone and _OUT_OF_MEMORY in record.get("error", ""):
            again.append(job)
            return
        results.append(path, record)
        finished(job, record)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(run_one(job, at_once == 1))
    for job in again:
        await run_one(job, True)


async def _record(job: Job, timeout: float, lock: str) -> Record:
    """Measure in a process of its own, and return its record; if the process ended early, the record says how."""
    base = {**dataclasses.asdict(job.request), "family": job.architecture.family}
    absent = job.architecture.missing_packages()
    if absent:
        return {**base, "status": "skipped", "error": f"needs {', '.join(absent)}: {PIP_COMMAND}"}
    with tempfile.TemporaryDirectory(prefix="opkit-bench-") as name:
        folder = Path(name)
        request, result, output = folder / "request.json", folder / "result.json", folder / "output.txt"
        request.write_text(json.dumps(dataclasses.asdict(job.request)), encoding="utf-8")
        ended = await _run([str(request), str(result), lock], folder, output, timeout)
        measured = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        if measured and ("stage" not in measured or "error" in measured):  # it is whole
            return {**base, **measured}
        tail = output.read_text(encoding="utf-8", errors="replace")[-_MAX_OUTPUT:]
        return {**base, **measured, "status": "failed", "error": ended, "output": tail}


async def _run(arguments: Collection[str], folder: Path, output: Path, timeout: float) -> str:
    """Run the program of measurements, and return how it ended; it and what it started end with the time limit."""
    caches = {name: str(folder / name.lower()) for name in _CACHES}
    for cache in caches.values():
        os.mkdir(cache, mode=0o700)
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "opkit.bench.measurement", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **caches},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout):
                status = await process.wait()
        except TimeoutError:
            return f"it took more than {timeout:g} seconds"
        finally:  # also when this process is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    reason = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
    return f"the process ended with {reason}"
