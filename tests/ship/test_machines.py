"""Saved models run on the machines that they were made for."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import opkit
from opkit.errors import ArgumentError, ModelFileError
from opkit.ship import processors


def test_instruction_sets(tmp_path, monkeypatch):
    x = torch.randn(3, 4)
    model = nn.Tanh()
    path = opkit.export(model, (x,), path=tmp_path / "model.opk", isa=("baseline", "avx2", "avx512"))
    torch.testing.assert_close(opkit.load(path)(x), model(x))
    monkeypatch.setattr(processors, "features", frozenset)
    torch.testing.assert_close(opkit.load(path)(x), model(x))
    path = opkit.export(model, (x,), path=tmp_path / "model.opk", isa="avx2")
    with pytest.raises(ModelFileError, match="made for avx2, which needs abm avx2"):
        opkit.load(path)
    with pytest.raises(ArgumentError, match="isa='avx3'"):
        opkit.export(model, (x,), path=path, isa="avx3")


@pytest.mark.parametrize("storage", [None, "int8"])
def test_instruction_sets_share_weights(tmp_path, storage):
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval(), torch.randn(3, 256)
    one, three = (
        opkit.export(model, (x,), path=tmp_path / "model.opk", isa=isa, storage=storage).stat().st_size
        for isa in ("baseline", ("baseline", "avx2", "avx512"))
    )
    assert three < 1.5 * one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "1.2.3"}, "made by torch 1.2.3"),
        ({"opkit": "9.9"}, "made by opkit 9.9"),
        ({"machine": "riscv64"}, "made for riscv64"),
        ({"device": "cuda"}, "made for the device cuda"),
    ],
)
def test_files_for_others(tmp_path, monkeypatch, change, message):
    made_for = processors.made_for
    monkeypatch.setattr(processors, "made_for", lambda device: made_for(device) | change)
    path = opkit.export(nn.Tanh(), (torch.ones(2),), path=tmp_path / "model.opk")
    with pytest.raises(ModelFileError, match=message):
        opkit.load(path, device="cpu")


def test_a_process_without_a_compiler(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)).eval(), torch.randn(3, 4)
    path = opkit.export(model, (x,), path=tmp_path / "model.opk")
    torch.save((x, model(x).detach()), tmp_path / "call.pt")
    script = f"""
        import sys, torch, opkit
        x, expected = torch.load({str(tmp_path / "call.pt")!r})
        result = opkit.load({str(path)!r})(x)
        print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules])
        torch.testing.assert_close(result, expected)
    """
    paths, cache = os.pathsep.join(sys.path), str(tmp_path / "cache")
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": "", "OPKIT_CC": "/no/compiler", "OPKIT_CACHE_DIR": cache}
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
    assert not (tmp_path / "cache").exists()
