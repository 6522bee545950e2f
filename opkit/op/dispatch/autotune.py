"""Choose the fastest of several kernels for a bucket of shapes: time them once, and remember the result across processes.

Each operator has one JSON file in the cache directory, replaced by atomic rename under a file lock. An entry
is keyed by the kernels' hashes, the device, the dtypes and the sizes rounded up to powers of two, so an edited kernel or
another machine is timed again. A file that cannot be read is never trusted: the kernels are timed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from opkit import config
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.trace.contract_hash import contract_hash

_REPEATS = 5
_SECONDS = 0.01


def bucket(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the shapes, dtypes and flags of a call with every size rounded up to a power of two.

    >>> bucket([torch.zeros(3, 100), True], {})
    'float32[4x128] True'
    """
    return " ".join(_described(leaf) for leaf in pytree.tree_leaves((tuple(args), kwargs)))


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return str(leaf) if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__
    sizes = "x".join(str(1 << max(0, size - 1).bit_length()) for size in leaf.shape)
    return f"{str(leaf.dtype).removeprefix('torch.')}[{sizes}]"


def device_name(device: str) -> str:
    """Return the model of the processor or accelerator of a device type."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{device} {platform.machine()} {os.cpu_count()} threads={torch.get_num_threads()}"


def capturing() -> bool:
    """Return whether a CUDA graph is being captured, so that nothing may be timed; False in a forked process without CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def choose(
    operator: str, kernels: Sequence[RegisteredKernel], args: Sequence[Any], kwargs: dict[str, Any], device: str
) -> RegisteredKernel:
    """Return the fastest of ``kernels`` for this call, from the record or by timing them now."""
    if len(kernels) == 1 or capturing():
        return kernels[0]
    identity = contract_hash([(k.name, k.function) for k in kernels])[:16]
    key = f"{device_name(device)} | torch {torch.__version__} | {identity} | {bucket(args, kwargs)}"
    path = config.get().cache_dir / "autotune" / f"{operator.replace('::', '.')}.json"
    remembered = _read(path).get(key)
    by_name = {kernel.name: kernel for kernel in kernels}
    if remembered not in by_name:
        times: dict[str, float] = {}
        for kernel in kernels:
            function: Any = kernel.function
            runnable = function.prepare(args, kwargs) if kernel.native else function
            times[kernel.name] = measure(runnable, args, kwargs, device)
        remembered = min(times, key=times.__getitem__)
        _remember(path, key, remembered)
    return by_name[remembered]


def measure(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], device: str) -> float:
    """Return the median seconds of one call, on copies of the arguments, so that the caller's tensors are not written to."""
    copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (tuple(args), kwargs))
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def once(calls: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function(*copies[0], **copies[1])
        synchronize()
        return (time.perf_counter() - start) / calls

    with torch.no_grad():
        calls = max(1, int(_SECONDS / max(once(1), once(1), 1e-6)))
        return statistics.median(once(calls) for _ in range(_REPEATS))


def _read(path: Path) -> dict[str, str]:
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or damaged: timed again
        return {}
    if not isinstance(record, dict):
        return {}
    return {k: v for k, v in cast("dict[Any, Any]", record).items() if isinstance(k, str) and isinstance(v, str)}


def _remember(path: Path, key: str, name: str) -> None:
    import filelock  # imported here: only autotuned operators need it

    with contextlib.suppress(OSError):  # a read-only cache directory costs a timing in the next process, nothing else
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with filelock.FileLock(f"{path}.lock"), _replacing(path) as file:
            file.write_text(json.dumps({**_read(path), key: name}, indent=1, sort_keys=True), encoding="utf-8")


@contextlib.contextmanager
def _replacing(path: Path) -> Generator[Path]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
