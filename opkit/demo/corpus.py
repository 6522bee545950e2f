"""The text: Python's own standard library, which every machine that runs this has, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from opkit.errors import DemoError

LIMIT = 4_000_000  #: bytes; a run sees less than this once
_GENERATED = "_sysconfigdata"  #: written by the machine that built Python, so left out


def read(folder: Path | None = None, limit: int = LIMIT) -> Tensor:
    """The first ``limit`` bytes of the ``.py`` files of ``folder``, in the order of their names.

    Args:
        folder: where to look; the standard library of the running Python where it is left out.
        limit: the most bytes to return.

    Returns:
        ``(bytes,)``, uint8.

    Raises:
        DemoError: there are no sources there.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith(_GENERATED)]
    text = b"".join(path.read_bytes() for path in files)[:limit]
    if not text:
        raise DemoError(
            f"opkit demo: no .py files in {folder}, where the standard library of this Python should be. "
            "It may be zipped or stored as bytecode alone: run the demo with a Python that has its sources."
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, *, steps: int, batch: int, length: int, seed: int) -> Tensor:
    """Windows of ``text`` drawn uniformly, the same for the same seed on every machine.

    Returns:
        ``(steps, batch, length)``, int64.

    Raises:
        DemoError: ``text`` is shorter than one window.
    """
    if len(text) < length:
        raise DemoError(f"opkit demo: {len(text)} bytes of text are too few for windows of {length}.")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (steps, batch, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
