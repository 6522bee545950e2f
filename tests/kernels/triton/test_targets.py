"""Architectures by the names that people and devices give them."""

import pytest
from triton.backends.compiler import GPUTarget

from opkit.errors import ArgumentError
from opkit.kernels.triton import targets


@pytest.mark.parametrize(
    ("name", "target", "canonical"),
    [
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
    ],
)
def test_names(name, target, canonical):
    assert targets.parse(name) == target
    assert targets.canonical(name) == targets.name_of(target) == canonical
    assert targets.parse(canonical) == target


@pytest.mark.parametrize("name", ["", "sm_70", "sm_9", "sm_90b", "volta", "gfx", "gfx9", "cuda", "sm_1000", "sm_90 "])
def test_other_names_are_refused_with_examples(name):
    with pytest.raises(ArgumentError, match=r"no architecture .* sm_80, sm_90, sm_100, sm_120, gfx942"):
        targets.parse(name)


def test_devices():
    assert [targets.of_device(*version) for version in ((8, 0), (9, 0), (12, 1))] == ["sm_80", "sm_90", "sm_121"]
    assert targets.of_architecture("gfx90a:sramecc+:xnack-") == "gfx90a"
