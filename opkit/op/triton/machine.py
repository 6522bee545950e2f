"""The GPUs that Triton kernels are launched on: their driver, and what each device is."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from opkit import _core


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where kernels run.

    Attributes:
        device: the device type that torch has for it.
        driver: opens the driver's library, once.
        target: the architecture of the device of a number, such as "sm_90".
        model: its name, such as "NVIDIA H200".
        shared: the most shared memory that a block may have there, in bytes.
    """

    device: str
    driver: Callable[[], _core.Driver]
    target: Callable[[int], str]
    model: Callable[[int], str]
    shared: Callable[[int], int]


@functools.cache
def _driver() -> _core.Driver:
    from opkit import _core

    return _core.Driver("libcuda.so.1", "cuda") if torch.version.hip is None else _core.Driver("libamdhip64.so", "hip")


@functools.cache
def _target(device: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _model(device: int) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def _shared(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


MACHINES = {"cuda": Machine("cuda", _driver, _target, _model, _shared)}


def machine_of(device: str | None) -> Machine | None:
    """Return what runs Triton kernels on a device type; None where nothing does."""
    return None if device is None else MACHINES.get(device)
