"""Architectures by the names that people and devices give them."""

import re

from triton.backends.compiler import GPUTarget

from opkit.errors import ArgumentError
from opkit.kernels.triton import targets


def test_names():
    for name, target, canonical in (
        ("sm_80", GPUTarget("cuda", 80, 32), "sm_80"),
        ("sm_90", GPUTarget("cuda", 90, 32), "sm_90"),
        ("sm_90a", GPUTarget("cuda", 90, 32), "sm_90"),
        ("sm_100f", GPUTarget("cuda", 100, 32), "sm_100"),
        ("sm120", GPUTarget("cuda", 120, 32), "sm_120"),
        ("gfx90a", GPUTarget("hip", "gfx90a", 64), "gfx90a"),
        ("gfx942", GPUTarget("hip", "gfx942", 64), "gfx942"),
        ("gfx942:sramecc+:xnack-", GPUTarget("hip", "gfx942", 64), "gfx942"),
        ("gfx1100", GPUTarget("hip", "gfx1100", 32), "gfx1100"),
        ("gfx1201", GPUTarget("hip", "gfx1201", 32), "gfx1201"),
    ):
        assert targets.parse(name) == target, name
        assert targets.canonical(name) == targets.name_of(target) == canonical, name
        assert targets.parse(canonical) == target, name


def test_other_names_are_refused_with_examples():
    for name in ("", "sm_70", "sm_9", "sm_90b", "volta", "gfx", "gfx9", "cuda", "sm_1000", "sm_90 "):
        said = None
        try:
            targets.parse(name)
        except ArgumentError as error:
            said = str(error)
        assert re.search(r"no architecture .* sm_80, sm_90, sm_100, sm_120, gfx942", str(said)), name


def test_devices():
    assert [targets.of_device(*version) for version in ((8, 0), (9, 0), (12, 1))] == ["sm_80", "sm_90", "sm_121"]
    assert targets.of_architecture("gfx90a:sramecc+:xnack-") == "gfx90a"
