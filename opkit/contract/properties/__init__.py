"""All properties of the contract, in groups; a group has one module or several.

Each module has a table ``PROPERTIES``. A row says only what differs from the defaults of its group, which stand above the
group's first table. Adding a property touches one module and its test.
"""

from opkit.contract.prop import Property
from opkit.contract.properties import (
    behaviour,
    behaviour_parallel,
    behaviour_state,
    compiled,
    compiled_unbacked,
    fake,
    gradients,
    gradients_higher,
    gradients_limits,
    layout,
    memory,
    numbers,
    schema,
    schema_calls,
    sharding,
    transforms,
    transforms_modes,
)

PROPERTIES: tuple[Property, ...] = (
    *schema.PROPERTIES,
    *schema_calls.PROPERTIES,
    *memory.PROPERTIES,
    *numbers.PROPERTIES,
    *layout.PROPERTIES,
    *fake.PROPERTIES,
    *gradients.PROPERTIES,
    *gradients_limits.PROPERTIES,
    *gradients_higher.PROPERTIES,
    *transforms.PROPERTIES,
    *transforms_modes.PROPERTIES,
    *sharding.PROPERTIES,
    *compiled.PROPERTIES,
    *compiled_unbacked.PROPERTIES,
    *behaviour.PROPERTIES,
    *behaviour_state.PROPERTIES,
    *behaviour_parallel.PROPERTIES,
)
"""All properties, in the order of the documentation."""
