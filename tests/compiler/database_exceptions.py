"""Operators of the OpInfo database that opkit's backend does not compile as eager has them, each with the reason."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {}
"""By name. An operator that is listed and passes is reported, so that the list stays true."""
