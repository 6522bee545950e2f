"""behaviour: ..."""

from __future__ import annotations

from opkit.contract.prop import Property

PROPERTIES: tuple[Property, ...] = ()
