"""The example of a C kernel does what it says."""

import runpy
from pathlib import Path

import opkit


def test_the_example_runs():
    program = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "c_kernel.py"))
    try:
        program["main"]()
    finally:
        opkit.remove("example::rms_norm")
