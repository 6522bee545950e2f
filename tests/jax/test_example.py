"""examples/jax_function.py asserts its results."""

import runpy
from pathlib import Path


def test_jax_function(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "jax_function.py"))["main"]()
    assert "the loss after 20 steps" in capsys.readouterr().out
