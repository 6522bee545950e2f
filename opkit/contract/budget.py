"""This module divides a budget of seconds among the properties that remain to be checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from opkit.contract.prop import Property
from opkit.contract.search import SearchResult

_COMPILES = "compile"
_COMPILER = "torch._inductor.compile_fx"
_IMPORTING = 3.0  # seconds, once in a process, before anything is compiled


class Budget:
    """The seconds that are left, and the expected seconds of a property's cases."""

    def __init__(self, seconds: float | None, max_examples: int) -> None:
        self._end = time.monotonic() + (float("inf") if seconds is None else seconds)
        self._max_examples = max_examples
        self._cases = 0
        self._excess = 0.0

    def left(self) -> float:
        """Return the seconds until the end."""
        return self._end - time.monotonic()

    def spent(self, prop: Property, result: SearchResult) -> None:
        """Record the time of a property's cases, to learn by how much this operator is slower than others."""
        cases = len(result.tried)
        self._cases += cases
        self._excess += cases * max(0.0, result.case_seconds - prop.cost)

    def case(self, prop: Property) -> float:
        """Return the expected seconds of one case: the property's cost, what this operator adds, and imports."""
        slow = self._excess / self._cases if self._cases else 0.0
        cold = _IMPORTING if prop.group == _COMPILES and _COMPILER not in sys.modules else 0.0
        return prop.cost + slow + cold

    def need(self, prop: Property) -> float:
        """Return the expected seconds of all cases of a property."""
        return self.case(prop) * max(prop.least, round(self._max_examples * prop.share))

    def share(self, rest: Sequence[Property]) -> float:
        """Return the seconds for the first of ``rest``: its part by need of what is left; 0 if no case would end in time."""
        left = self.left()
        possible = [prop for prop in rest if self.case(prop) <= left]
        if left == float("inf"):
            return left
        if rest[0] not in possible:
            return 0.0
        total = sum(map(self.need, possible)) or 1.0
        return left * max(self.need(rest[0]) / total, 1 / (2 * len(possible)))
