"""The choice among configs in calls through the launcher: what is timed, and when. The driver is a fake."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import opkit
from opkit.errors import KernelError
from opkit.kernels.tuning import records, tuning


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def increment(x, n):
    pass


def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def upwards(x: Tensor) -> None:
    x += 1


def by_blocks(n, BLOCK):
    return triton.cdiv(n, BLOCK)


@pytest.fixture
def timed(monkeypatch):
    """Milliseconds by BLOCK in place of measurements; notes what was measured."""
    from opkit.op.triton import launcher_table as module

    measured = []

    class Timed(module.Launching):
        def miss(self, call):
            return super().miss(_Timed(call, measured))

    class _Timed:
        def __init__(self, call, measured):
            self.call, self.measured = call, measured

        def __getattr__(self, name):
            return getattr(self.call, name)

        def time(self, entry, written=()):
            self.measured.append(tuple(written))
            return 1 / len(self.measured)

    monkeypatch.setattr("opkit.op.triton.function.Launching", Timed)
    return measured


CONFIGS = [{"BLOCK": 32, "num_warps": 1}, triton.Config({"BLOCK": 64}, num_warps=2), {"BLOCK": 128, "num_warps": 4}]


def tuned(**options):
    return opkit.triton_kernel(add, grid=by_blocks, n=lambda out: out.numel, configs=CONFIGS, **options)


def test_the_fastest_config_is_found_once_for_a_bucket(device, timed):
    op = device.define(plus, tuned())
    for size in (1000, 1010, 1024, 2000):
        x = torch.randn(size)
        torch.testing.assert_close(op(x, x), x + x)
    assert len(timed) == 6
    assert device.grids == ["8,1,1", "8,1,1", "8,1,1", "16,1,1"]
    assert {request.options["num_warps"] for request in device.requests} == {1, 2, 4}


def test_configs_that_are_pruned_are_not_timed(device, timed):
    op = device.define(plus, tuned(prune=lambda configs, x: [c for c in configs if c["BLOCK"] <= x.numel // 10]))
    op(torch.ones(700), torch.ones(700))
    assert len(timed) == 2
    assert device.grids == ["11,1,1"]


def test_nothing_is_timed_while_a_graph_is_captured(device, timed):
    op = device.define(plus, tuned())
    x = torch.ones(100)
    device.fake.library.fake_capture(1)
    with pytest.warns(opkit.errors.TuningWarning, match=r"was not tuned .* while a CUDA graph is captured"):
        torch.testing.assert_close(op(x, x), x + x)
    op(x, x)
    assert not timed
    device.fake.library.fake_capture(0)
    op(x, x)  # which may know better
    assert len(timed) == 3


def test_other_shapes_than_a_package_was_tuned_for_are_not_timed(device, timed, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "packaged", lambda module: (tmp_path,))
    op = device.define(plus, tuned())
    x, longer = torch.randn(1000), torch.randn(5000)
    op(x, x)
    records.export_all(tmp_path / "opkit-build.json", [op.name])
    records.file_of(op.name, "add").unlink()
    tuning.forget()
    torch.testing.assert_close(op(longer, longer), longer + longer)
    torch.testing.assert_close(op(x, x), x + x)
    assert len(timed) == 3
    assert device.grids == ["8,1,1", "40,1,1", "8,1,1"]


def test_what_the_operator_writes_to_is_named_to_the_timer(device, timed):
    kernel = opkit.triton_kernel(increment, grid=1, bind={"n": "x_numel"}, configs=[{"num_warps": 1}, {"num_warps": 2}])
    op = device.define(upwards, kernel, mutates_args=("x",))
    x = torch.zeros(10)
    op(x)
    assert timed == [(0,), (0,)]
    assert x.tolist() == [1.0] * 10


def test_a_config_that_fails_says_so(device, timed):
    def broken(n, BLOCK):
        return n // (BLOCK - 32)

    op = device.define(plus, opkit.triton_kernel(add, grid=broken, n=lambda out: out.numel, configs=CONFIGS))
    with pytest.raises((RuntimeError, KernelError), match="ZeroDivisionError"):
        op(torch.ones(100), torch.ones(100))
