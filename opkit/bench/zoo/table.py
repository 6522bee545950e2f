"""The table of all architectures."""

from __future__ import annotations

from collections.abc import Collection

from opkit.bench.architecture import Architecture
from opkit.bench.zoo import decisions, diffusion, graphs, sequences, timm_models, transformer_models, vision
from opkit.errors import ArgumentError

_FAMILIES = (transformer_models, timm_models, diffusion, graphs, sequences, decisions, vision)


def architectures() -> dict[str, Architecture]:
    """Return every architecture by its name; nothing is imported for it."""
    return {each.name: each for family in _FAMILIES for each in family.ARCHITECTURES}


def chosen(
    names: Collection[str] = (), families: Collection[str] = (), sample: int | None = None
) -> list[Architecture]:
    """Return the architectures of these names, or of these families; of ``sample``, as many, at even distances in the table.

    Raises:
        ArgumentError: no architecture or family has that name.
    """
    every = architectures()
    found = [every[name] for name in _known(names, every, "architecture")] if names else list(every.values())
    if families:
        known = _known(families, {each.family: None for each in every.values()}, "family")
        found = [each for each in found if each.family in known]
    if sample is None or sample >= len(found):
        return found
    return [found[number * len(found) // sample] for number in range(sample)]


def _known(names: Collection[str], known: Collection[str], what: str) -> list[str]:
    for name in names:
        if name not in known:
            close = sorted(each for each in known if name.lower() in each.lower()) or sorted(known)
            raise ArgumentError(f"no {what} of the zoo is called {name!r}. There are: {', '.join(close[:12])}, ...")
    return list(dict.fromkeys(names))
