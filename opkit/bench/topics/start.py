"""Processes that import opkit, compared with those that import torch alone."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

from opkit.bench.topics import Case, Setting, Ways


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the import of what defines operators."""
    del setting
    yield Case("import", lambda: _ways("import torch, opkit; opkit.custom_op", "import torch"))


def _ways(ours: str, theirs: str) -> Ways:
    run = functools.partial(subprocess.run, check=True)
    return {"opkit": functools.partial(run, [sys.executable, "-c", ours]),
            "torch": functools.partial(run, [sys.executable, "-c", theirs])}  # fmt: skip
