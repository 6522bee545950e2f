"""Check that opkit runs on the installed torch release. This module does not import torch: callers pass its version."""

from __future__ import annotations

import re
import warnings

from opkit.errors import UnsupportedTorchError, UntestedTorchWarning

OLDEST = (2, 11)
"""The oldest torch release, as (major, minor), that opkit runs on."""

NEWEST_TESTED = (2, 14)
"""The newest torch release that this version of opkit was tested with."""


def release(version: str) -> tuple[int, int]:
    """Return the (major, minor) of a version string, whatever follows it.

    Raises:
        ValueError: ``version`` does not start with two numbers.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"{version!r} is not a torch version: it does not start with two numbers, as '2.13.0' does.")
    return int(match[1]), int(match[2])


def dotted(version: tuple[int, int]) -> str:
    """Return a (major, minor) as text.

    >>> dotted((2, 13))
    '2.13'
    """
    return f"{version[0]}.{version[1]}"


def status(version: str) -> str:
    """Return ``"tested"``, ``"newer than tested"`` or ``"too old"``.

    >>> [status(v) for v in ("2.10.1", "2.11.0", "2.14.1+cu130", "2.15.0.dev20261101")]
    ['too old', 'tested', 'tested', 'newer than tested']
    """
    parsed = release(version)
    if parsed < OLDEST:
        return "too old"
    return "tested" if parsed <= NEWEST_TESTED else "newer than tested"


_warned: set[str] = set()  # the versions that warn_if_untested() has warned of


def warn_if_untested(torch_version: str) -> None:
    """Warn, once per process and version, if torch is newer than any release opkit was tested with.

    ``opkit.custom_op`` calls it, and the warning names the line of that call. Where warnings are errors it raises once.

    Args:
        torch_version: ``torch.__version__``.

    Raises:
        UnsupportedTorchError: torch is older than :data:`OLDEST`.

    >>> warn_if_untested("2.13.0")
    """
    verdict = status(torch_version)
    if verdict == "too old":
        raise UnsupportedTorchError(
            f"opkit needs torch {dotted(OLDEST)} or newer, and torch {torch_version} is installed. "
            f"Upgrade it: pip install 'torch>={dotted(OLDEST)}'."
        )
    if verdict == "newer than tested" and torch_version not in _warned:
        _warned.add(torch_version)  # before the warning, which may be raised
        warnings.warn(
            f"torch {torch_version} is newer than {dotted(NEWEST_TESTED)}, the newest that this version of opkit was "
            "tested with. It will run; should anything misbehave, upgrade opkit or install the tested torch: "
            f"pip install 'torch=={dotted(NEWEST_TESTED)}.*'.",
            UntestedTorchWarning,
            stacklevel=3,  # the caller of opkit.custom_op
        )
