"""The example of a deep model: it asserts that policies change no gradient."""

import runpy
from pathlib import Path

import torch


def test_deep_model(capsys):
    torch._dynamo.reset()
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "deep_model.py"))["main"]()
    assert "12 layers" in capsys.readouterr().out
