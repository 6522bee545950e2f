"""The compiled core, against what the operating system says of the same processor."""

import platform
import runpy
from pathlib import Path

import pytest

from opkit import _core

CPUINFO = Path("/proc/cpuinfo")

# Names that /proc/cpuinfo spells differently from opkit.
_LINUX_NAMES = {"neon": "asimd", "fp16": "asimdhp", "dotprod": "asimddp"}


def linux_flags() -> set[str]:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":")[1].split()}


@pytest.mark.skipif(not CPUINFO.exists(), reason="there is no /proc/cpuinfo here to compare with")
def test_features_agree_with_linux():
    flags = linux_flags()
    features = _core.cpu_features()
    assert {name for name, usable in features.items() if usable} == {
        name for name in features if _LINUX_NAMES.get(name, name) in flags
    }


def test_every_name_that_kernels_are_chosen_by_is_there():
    expected = {
        "x86_64": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "amx_tile"},
        "aarch64": {"neon", "bf16", "sve"},
    }.get(platform.machine())
    if expected is None:
        pytest.skip(f"no features are listed for {platform.machine()}")
    features = _core.cpu_features()
    assert expected <= features.keys()
    assert all(type(usable) is bool for usable in features.values())


def test_a_source_tree_says_that_it_must_be_installed():
    with pytest.raises(ImportError, match=r"Run `pip install \.` in it"):
        runpy.run_path(Path(__file__).parents[1] / "opkit" / "_core.py")
