"""The contract, property by property. Each module has a group; adding a property touches one file and its test."""

import dataclasses

from opkit.contract.prop import Property
from opkit.contract.properties import (
    behaviour,
    compiled,
    fake,
    gradients,
    layout,
    memory,
    numbers,
    schema,
    transforms,
)

_THREADED = {  # these need threads, which a forked process has not
    "compile",
    "behaviour.first",
    "behaviour.deterministic",
    "behaviour.threads",
    "behaviour.concurrent",
    "behaviour.streams",
    "behaviour.second_device",
}
_BACKWARD = {"gradients", "transforms"}


PROPERTIES: tuple[Property, ...] = tuple(
    dataclasses.replace(prop, forked=not {prop.group, prop.name} & _THREADED, backward=prop.group in _BACKWARD)
    for group in (schema, memory, numbers, layout, fake, gradients, transforms, compiled, behaviour)
    for prop in group.PROPERTIES
)
"""All properties, in the order of the documentation."""
