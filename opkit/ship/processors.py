"""This module says which machines a saved model runs on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from opkit.compiler.run.plan_cache import own_version
from opkit.kernels.cc import isa as isas
from opkit.op.triton.variants import machine_of

_INSTRUCTIONS = re.compile(
    r"(avx|amx|fma|f16c|bmi|sse|ssse|movbe|abm|lzcnt|popcnt|adx|gfni|aes|vaes|pclmul|vpclmul|sha_|asimd|neon|sve|fp|dotprod|bf16|i8mm)"
)


def features() -> frozenset[str]:
    """Return the features of this processor that compiled code may use."""
    return frozenset(name for name in isas.cpu_features() if _INSTRUCTIONS.match(name))


def made_for(device: torch.device) -> dict[str, Any]:
    """Return what a file says of the machine and the versions that it was made by."""
    found = {"torch": torch.__version__, "opkit": own_version(), "machine": isas.machine(), "device": device.type}
    if device.type == "cpu":
        return found
    machine = machine_of(device.type)
    assert machine is not None
    return {**found, "architecture": machine.target(device.index or 0)}


def mismatch(made: Mapping[str, Any], device: torch.device) -> str:
    """Return why a file does not run here, or ""."""
    release = torch.__version__.split("+")[0].rsplit(".", 1)[0]
    if str(made["torch"]).split("+")[0].rsplit(".", 1)[0] != release:
        return f"it was made by torch {made['torch']}, and this is torch {torch.__version__}"
    if made["opkit"] != own_version():
        return f"it was made by opkit {made['opkit']}, and this is opkit {own_version()}"
    if made["machine"] != isas.machine():
        return f"it was made for {made['machine']}, and this machine is {isas.machine()}"
    if device.type != made["device"]:
        return f"it was made for the device {made['device']}, not for {device.type}"
    if device.type == "cpu":
        return ""
    machine = machine_of(device.type) if torch.cuda.is_available() else None
    if machine is None:
        return f"it was made for a GPU ({made['architecture']}), and there is none"
    architecture = machine.target(device.index or 0)
    same = architecture == made["architecture"]
    return "" if same else f"it was made for {made['architecture']}, and the GPU is {architecture}"
