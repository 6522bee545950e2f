"""The contract, property by property. Each module has a group; adding a property touches one file and its test."""

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

PROPERTIES: tuple[Property, ...] = tuple(
    prop
    for group in (schema, memory, numbers, layout, fake, gradients, transforms, compiled, behaviour)
    for prop in group.PROPERTIES
)
"""All properties, in the order of the documentation."""
