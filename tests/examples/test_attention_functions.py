"""The examples of attention with functions: each agrees with its formula in float64, and so do its gradients."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "attention_functions.py"))


@pytest.mark.parametrize("name", EXAMPLE["EXAMPLES"])
def test_agrees_with_the_formula(name):
    found = EXAMPLE["errors"](name)
    assert found["result"] < 2e-6
    assert found["gradients"] < 2e-5
