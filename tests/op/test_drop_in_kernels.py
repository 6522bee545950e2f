"""Kernels and calls of ``opkit.custom_op``, held against ``torch.library.custom_op``."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::opkit.errors.RedefinitionWarning")


def overload(name: str) -> Any:
    return torch._library.utils.lookup_op(name)


# ---- devices and kernels -------------------------------------------------------------------------------------------


def test_a_kernel_takes_the_place_of_the_body(custom_op: Any, name: str) -> None:
    calls: list[str] = []

    @custom_op(name, mutates_args=())
    def shifted(x: Tensor, y: float) -> Tensor:
        return torch.from_numpy(x.numpy(force=True) + y)

    x = torch.ones(3)
    assert torch.equal(shifted(x, 2.0), x + 2)

    @shifted.register_kernel("cpu")
    def kernel(x, y):
        calls.append("cpu")
        return torch.from_numpy(x.numpy() + y)

    assert torch.equal(shifted(x, 2.0), x + 2)
    assert calls == ["cpu"]
    assert callable(kernel)


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("named", ["object", "name", "overload"])
def test_kernels_registered_through_torch_library(custom_op: Any, name: str, device: str | None, named: str) -> None:
    calls: list[str] = []

    @custom_op(name, mutates_args=(), device_types="cuda")
    def shifted(x: Tensor, y: float) -> Tensor:
        return torch.from_numpy(x.cpu().numpy() + y).to(x.device)

    op = {"object": shifted, "name": name, "overload": overload(name)}[named]

    @torch.library.register_kernel(op, device)
    def decorated(x, y):
        calls.append("decorated")
        return torch.from_numpy(x.numpy() + y)

    def called_directly(x, y):
        calls.append("called directly")
        return torch.from_numpy(x.numpy() + y)

    assert torch.equal(shifted(torch.ones(3), 2.0), torch.full((3,), 3.0))
    torch.library.register_kernel(op, device, called_directly)
    assert torch.equal(shifted(torch.ones(3), 2.0), torch.full((3,), 3.0))
    assert calls == ["decorated", "called directly"]


def test_kernels_for_several_devices_at_once(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=(), device_types=("cpu", "cuda"))
    def op(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.cpu().numpy())).to(x.device)

    x = torch.ones(3)
    assert torch.allclose(op(x), x.sin())


def test_a_device_without_a_kernel_is_an_error(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=(), device_types="cuda")
    def op(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(NotImplementedError, match=r"CPU|cpu"):
        op(torch.ones(3))
    with pytest.raises(NotImplementedError):
        overload(name)(torch.ones(3))


def test_an_operator_without_tensors_chooses_by_its_device(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={}, device_types="cpu")
    def ones(device: torch.device) -> Tensor:
        return torch.ones(3)

    assert torch.equal(ones(device="cpu"), torch.ones(3))
    assert torch.equal(ones("cpu"), torch.ones(3))
    with pytest.raises(RuntimeError, match=f"{ones._name} does not have a kernel registered for cuda"):
        ones("cuda")


def test_an_operator_without_tensors_needs_a_device_for_kernels(custom_op: Any, name: str) -> None:
    def nothing() -> Tensor:
        return torch.ones(3)

    message = "Functions without tensor inputs are required to have a `device: torch.device` argument"
    with pytest.raises(ValueError, match=message):
        custom_op(name, nothing, mutates_args={}, device_types="cpu")
    op = custom_op(f"{name}_any", nothing, mutates_args={})
    with pytest.raises(ValueError, match=message):
        op.register_kernel("cpu")(nothing)
    assert torch.equal(op(), torch.ones(3))


def test_a_kernel_added_to_an_operator_without_tensors(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={})
    def zeros(device: torch.device) -> Tensor:
        raise NotImplementedError("no device is served yet")

    @zeros.register_kernel("cpu")
    def kernel(device: torch.device) -> Tensor:
        return torch.zeros(3, device=device)

    assert torch.equal(zeros(device="cpu"), torch.zeros(3))


def test_enabling_and_disabling_kernels(custom_op: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "torch._library.custom_ops")
    x = torch.ones(1)

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    with op.set_kernel_enabled("gpu", enabled=False):
        assert op(x).item() == 2
    assert "no kernel was registered for this device type" in caplog.messages[0]
    op.register_kernel("cpu")(lambda x: x + 2)
    assert op(x).item() == 3
    caplog.clear()
    with op.set_kernel_enabled("cpu", enabled=True):
        assert op(x).item() == 3
    assert "already enabled" in caplog.messages[0]
    caplog.clear()
    with op.set_kernel_enabled("cpu", enabled=False):
        assert op(x).item() == 2
        with op.set_kernel_enabled("cpu", enabled=False):
            assert op(x).item() == 2
        assert "already disabled" in caplog.messages[0]
        assert op(x).item() == 2
    assert op(x).item() == 3


def test_a_disabled_kernel_is_enabled_again_after_an_error(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    op.register_kernel("cpu")(lambda x: x + 2)

    def fails() -> None:
        with op.set_kernel_enabled("cpu", enabled=False):
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fails()
    assert op(torch.zeros(1)).item() == 2


def test_wrong_calls(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: float) -> Tensor:
        return x * y

    for args in ((torch.ones(2),), (torch.ones(2), 1.0, 2.0), (torch.ones(2), "word"), (None, 1.0)):
        with pytest.raises((RuntimeError, TypeError)):
            op(*args)
    with pytest.raises((RuntimeError, TypeError)):
        op(torch.ones(2), 1.0, z=1)


def test_one_element_with_a_stride_of_zero(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    x = torch.ones(1).as_strided((1,), (0,))
    assert torch.allclose(op(x), x.sin())
