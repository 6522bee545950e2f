"""Distinguish errors that concern one configuration, which is then skipped, from those of the kernel."""

from __future__ import annotations


class Unfit(Exception):
    """A measurement raises it for a configuration that cannot be used for this call."""


NO_MEMORY = "out of memory"  #: how the reason begins where there was too little memory for a measurement
_SKIPPED = {
    "OutOfResources": "out of resources",
    "ResourceError": "out of resources",
    "OutOfMemoryError": NO_MEMORY,
    "MemoryError": NO_MEMORY,
    "PTXASError": "ptxas refused it",
    "Unfit": "unfit",
    "CompileTimeAssertionFailure": "a static_assert of the kernel failed",
}
"""Exceptions that concern only one configuration, by class name: neither torch nor Triton is imported here."""

_SKIPPED_TEXTS = {
    "OUT_OF_MEMORY": NO_MEMORY,
    "hipErrorOutOfMemory": NO_MEMORY,
    "LAUNCH_OUT_OF_RESOURCES": "out of resources",
    "hipErrorLaunchOutOfResources": "out of resources",
}
"""The same for errors of a driver, by their names."""

_LONGEST_REASON = 300


def skip_reason(error: BaseException) -> str:
    """Return the reason to skip a configuration that failed with this error; "" where the error concerns more than it.

    >>> skip_reason(MemoryError("64 GiB")), skip_reason(ValueError("no"))
    ('out of memory: 64 GiB', '')
    """
    seen: BaseException | None = error
    while seen is not None:
        names = [_SKIPPED[kind.__name__] for kind in type(seen).__mro__ if kind.__name__ in _SKIPPED]
        texts = [what for text, what in _SKIPPED_TEXTS.items() if isinstance(seen, RuntimeError) and text in str(seen)]
        for what in (*names, *texts):
            return f"{what}: {' '.join(str(seen).split())[:_LONGEST_REASON]}"
        seen = seen.__cause__
    return ""
