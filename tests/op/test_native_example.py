"""The example of a C kernel does what it says."""

import runpy
from pathlib import Path

import pytest
import torch

import opkit


@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.exhaustive)])
def test_the_example_runs(stance):
    program = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "c_kernel.py"))
    try:
        with torch.compiler.set_stance(stance):
            program["main"]()
    finally:
        opkit.remove("example::rms_norm")
