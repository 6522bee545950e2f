"""Installing and removing kernels; threads and memory."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import opkit
from opkit.errors import KernelError


def test_removing_and_switching_off(native, plus_one):
    x, count = torch.ones(2), lambda: native.calls(lambda: plus_one.call(x))[1]
    assert count() == 1
    plus_one.installed.enabled = False
    assert (count(), plus_one.installed.enabled) == (0, False)
    plus_one.installed.enabled = True
    assert count() == 1
    with pytest.raises(KernelError, match="AutogradCPU already"):
        native.install(plus_one.op, "plus_one")
    plus_one.installed.remove()
    plus_one.installed.remove()
    assert not plus_one.installed.enabled
    for key in ("AutogradCPU", "CPU"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(plus_one.op.name, key)
    assert count() == 0
    torch.testing.assert_close(plus_one.call(x.requires_grad_()).requires_grad, True)
    again = native.install(plus_one.op, "plus_one")
    assert native.calls(lambda: plus_one.call(x.detach()))[1] == 1
    again.remove()


def test_an_operator_limited_to_a_device(native, recwarn, capfd):
    op = opkit.custom_op("bridge_test::limited", mutates_args=(), device_types="cpu")(_limited)
    installed = native.install(op, "plus_one")
    assert native.calls(lambda: op._opoverload(torch.ones(2)))[1] == 1
    assert op._opoverload(torch.ones(1, 1, 2)).tolist() == [[[2.0, 2.0]]]
    installed.remove()
    y, calls = native.calls(lambda: op._opoverload(torch.ones(2)))
    assert (y.tolist(), calls, len(recwarn)) == ([2.0, 2.0], 0, 0)
    assert "Overriding" not in capfd.readouterr().err
    opkit.remove(op.name)


def _limited(x: Tensor) -> Tensor:
    return x + 1


def test_mistakes_are_named(native, plus_one):
    plus_one.installed.remove()
    for name, kernel, device, message in (
        ("bridge_test::none", "plus_one", "cpu", "there is no operator bridge_test::none"),
        ("bridge_test::plus_one", "plus_all", "cpu", "the kernel was made for plus_all_kernel"),
        ("bridge_test::plus_one", "plus_one", "mps", "only for cpu, cuda"),
        ("aten::view", "plus_all", "cuda", "aten::view"),
    ):
        with pytest.raises(KernelError, match=message):
            native.install(name, kernel, device)


@pytest.mark.parametrize("calls", [600, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_threads(native, plus_one, calls):
    failures = []

    def work(needs):
        for i in range(calls):
            x = torch.full((4,), float(i), requires_grad=needs and i % 50 == 0)
            y = plus_one.call(x)
            if y.tolist() != [i + 1.0] * 4 or y.requires_grad != x.requires_grad:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(needs,)) for needs in (False, True, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_leaks(native, plus_one, add_one_):
    x, refused, failing = torch.ones(1 << 14), torch.ones(1, 1, 1 << 14), torch.ones(1, 1, 1, 1)
    references, start = sys.getrefcount(x), 0
    for i in range(3_500):
        if i == 500:
            start = resident()
        plus_one.call(x)
        add_one_(x)
        if i % 20 == 0:
            plus_one.call(refused)
            with pytest.raises(RuntimeError):
                plus_one.call(failing)
    gc.collect()
    assert sys.getrefcount(x) == references
    assert x.untyped_storage()._use_count() <= 2 if hasattr(x.untyped_storage(), "_use_count") else True
    assert resident() - start < 100e6  # 3,000 outputs are 197 MB


@pytest.mark.gpu
def test_cuda_calls(native, library):
    ops = library("bridge_cuda")
    ops.define("like(Tensor x, Tensor[] others) -> Tensor")
    ran = []

    def python(keys, x, others):
        ran.append(x)
        return x.detach().clone()

    ops.impl("like", python, "Autograd", with_keyset=True)
    ops.impl("like", lambda x, others: x.clone(), "CompositeExplicitAutograd")
    native.install("bridge_cuda::like", "like", "cuda")
    x, here = torch.ones(3, device="cuda"), torch.ones(3)
    call = torch.ops.bridge_cuda.like
    y, calls = native.calls(lambda: call(x, [x, x]))
    assert (y.device, y.shape, calls) == (x.device, x.shape, 1)
    with torch.inference_mode():
        assert native.in_c(lambda: call(x, []))
    assert native.calls(lambda: call(x.clone().requires_grad_(), []))[1] == 0
    assert native.calls(lambda: call(x, [here]))[1] == 0
    assert native.calls(lambda: call(here, [here]))[1] == 0
    assert len(ran) == 3
    if torch.cuda.device_count() > 1:
        assert native.calls(lambda: call(x, [x.to("cuda:1")]))[1] == 0
        assert native.in_c(lambda: call(x.to("cuda:1"), [x.to("cuda:1")]))
