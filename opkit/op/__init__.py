"""Operators: definition, schema, derived and registered rules, kernel selection, dispatch, registry. See README.md."""

from collections.abc import Callable
from typing import Any

observers: list[Callable[[Any], None]] = []
"""Functions that are called with each operator once it is registered."""
