"""Let the processes of one job choose alike: the first that needs a choice makes it, and the others read it.

Choices go through the key-value store of torch.distributed's default process group, as XLA's GPU compiler shares autotuning
results through that of its distributed runtime. Nodes need no common disk, and since nothing is collective, a process that never
runs a kernel is not waited for.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

from opkit import config

_SECONDS_BETWEEN_LOOKS = 0.01


def share(topic: str, decide: Callable[[], str], waiting: Callable[[], None]) -> str:
    """Return what the first process of this job decided about a topic; in the first, and where there is no job, decide.

    Others wait for it as long as for a compiler (``OPKIT_BUILD_TIMEOUT``). If it fails or takes longer, each decides for itself.

    Args:
        topic: the question, with everything that its answer depends on.
        decide: returns the answer, which is not empty.
        waiting: called again and again while another process decides.
    """
    store = _store()
    if store is None:
        return decide()
    claim, answer = _keys(topic)
    if store.add(claim, 1) == 1:
        decided = ""
        try:
            decided = decide()
        finally:
            store.set(answer, decided)
        return decided
    end = time.monotonic() + config.get().build_timeout
    while not store.check([answer]):  # rather than get(), which lets no other thread use the store while it waits
        if time.monotonic() > end:
            return decide()
        waiting()
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return store.get(answer).decode() or decide()


def published(topic: str) -> str:
    """Return what a process of this job decided about a topic; "" where none has yet, or there is no job."""
    store = _store()
    answer = _keys(topic)[1]
    return store.get(answer).decode() if store is not None and store.check([answer]) else ""


def _keys(topic: str) -> tuple[str, str]:
    digest = hashlib.sha256(topic.encode()).hexdigest()
    return f"opkit/tuning/{digest}/claim", f"opkit/tuning/{digest}/answer"


def _store() -> Any:
    """Return the store of this process's job; None where it has no other processes. torch is not imported."""
    distributed, data = sys.modules.get("torch.distributed"), sys.modules.get("torch.utils.data")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if data is not None and data.get_worker_info() is not None:  # a fork of a rank, whose connection it must not use
        return None
    if distributed.get_world_size() == 1 or distributed.get_backend() == "fake":
        return None
    return distributed.distributed_c10d._get_default_store()
