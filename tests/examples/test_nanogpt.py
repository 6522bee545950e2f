"""examples/nanogpt.py: it asserts that losses agree with eager mode's."""

import dataclasses

import nanogpt
import pytest
import torch


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("float32", "float16"))]
)
def test_losses(dtype, capsys, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setitem(nanogpt.SIZES, "tiny", dataclasses.replace(nanogpt.SIZES["tiny"], layers=1))
    losses, rows = nanogpt.main([f"--dtype={dtype}", "--backends=eager,opkit", "--threads=1", "--steps=24"])
    assert [*losses] == ["eager", "opkit"]
    assert rows[1].error < (1e-5 if dtype == "float32" else 2e-2)
    printed = capsys.readouterr().out
    assert f"| 0 | {losses['eager'][0]:.4f} | {losses['opkit'][0]:.4f} |" in printed


@pytest.mark.exhaustive
def test_losses_of_inductor():
    torch._dynamo.reset()
    losses, _ = nanogpt.main(["--threads=1", "--steps=24"])
    assert [*losses] == ["eager", "inductor", "opkit"]


def test_when_a_loss_is_reached():
    losses = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert nanogpt.reached(losses, 3.0, 0.0) == 5
    assert nanogpt.reached(losses, 2.0, 0.0) == 6
    assert nanogpt.reached(losses, 1.9, 0.1) == 6
    assert nanogpt.reached(losses, 1.0, 0.1) is None
