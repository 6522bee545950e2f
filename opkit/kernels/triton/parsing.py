"""Let one thread at a time have Triton parse its functions.

In Python 3.11, ``ast.parse`` counts its depth in a place that all threads share, and fails ("AST constructor recursion
depth mismatch", python/cpython#106905) when the collector lets another thread parse halfway. Triton parses while it
hashes a function and while it generates its code; both hold the interpreter's lock, so that waiting costs nothing.
"""

from __future__ import annotations

import threading
from typing import Any

ALONE = threading.RLock()


def cache_key(function: Any) -> str:
    """Triton's own identity of a function: its text, what it calls, and its constants."""
    with ALONE:
        return str(function.cache_key)
