"""Models for GPUs, exported and loaded; the numbers of another device and architecture are those of the file."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opkit
from opkit.errors import ModelFileError
from opkit.ship import processors

pytestmark = pytest.mark.gpu

Dim = torch.export.Dim


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.up, self.ln = nn.Linear(16, 64), nn.LayerNorm(64)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        y = F.relu(self.norm(self.first(x))).mean((2, 3))
        return self.ln(F.gelu(self.up(y))), torch.arange(3, device=x.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_on_a_gpu(tmp_path, dtype):
    model = Block().eval().cuda().to(dtype)
    x = torch.randn(4, 8, 12, 12, device="cuda", dtype=dtype)
    shapes = ({0: Dim("batch", max=64)},)
    path = opkit.export(model, (x,), path=tmp_path / "model.opk", dynamic_shapes=shapes)
    loaded = opkit.load(path)
    for batch in (4, 3, 4, 4, 4):  # the later ones replay a recording where sizes allow it
        y = torch.randn(batch, 8, 12, 12, device="cuda", dtype=dtype)
        torch.testing.assert_close(loaded(y), model(y), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("storage", ["bfloat16", "int8", "float8_e4m3fn"])
def test_narrow_storage_on_a_gpu(tmp_path, storage):
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).eval().cuda(), torch.randn(3, 64).cuda()
    loaded = opkit.load(opkit.export(model, (x,), path=tmp_path / "model.opk", storage=storage))
    torch.testing.assert_close(loaded(x), model(x), atol=0.1, rtol=0.1)


def test_calls_are_recorded(tmp_path):
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
    model, x = nn.Sequential(*layers).eval().cuda(), torch.randn(8, 32, device="cuda")
    loaded = opkit.load(opkit.export(model, (x,), path=tmp_path / "model.opk"))
    for _ in range(5):
        y = torch.randn_like(x)
        torch.testing.assert_close(loaded(y), model(y), atol=1e-4, rtol=1e-4)


def test_files_for_another_gpu(tmp_path, monkeypatch):
    path = opkit.export(nn.Tanh(), (torch.ones(2, device="cuda"),), path=tmp_path / "model.opk")
    with pytest.raises(ModelFileError, match="made for the device cuda, not for cpu"):
        opkit.load(path, device="cpu")
    made_for = processors.made_for
    monkeypatch.setattr(processors, "made_for", lambda device: made_for(device) | {"architecture": "sm_75"})
    path = opkit.export(nn.Tanh(), (torch.ones(2, device="cuda"),), path=tmp_path / "model.opk")
    with pytest.raises(ModelFileError, match="made for sm_75, and the GPU is sm_90"):
        opkit.load(path)
