"""Choose the config that a kernel runs with, by ``opkit.kernels.tuning.tuning``."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opkit.kernels.tuning import records, tuning
from opkit.kernels.tuning.configs import Config, prune
from opkit.kernels.tuning.observation import Choice
from opkit.kernels.tuning.record_format import Identity, bucket_of
from opkit.op.trace.contract_hash import contract_hash
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.evaluation import TensorInfo
from opkit.op.triton.machine import Machine


class Chooser:
    """Chooses among the configs of a bound kernel. ``module`` defines its operator, and may bring results along."""

    def __init__(self, bound: BoundKernel, machine: Machine, module: str) -> None:
        self.bound = bound
        self.machine = machine
        self.module = module

    @functools.cached_property
    def identity(self) -> Identity:
        """The kernel as its results are recorded."""
        hashed = contract_hash(self.bound.kernel.launch_parts())
        return Identity(self.bound.facts.operator, self.bound.name, hashed)

    @functools.cached_property
    def folders(self) -> tuple[Path, ...]:
        """Where the operator's package may have results."""
        return records.packaged(self.module)

    def choose(
        self, named: Mapping[str, Any], device: int, measure: Callable[[Config], float], capturing: bool
    ) -> Choice:
        """Return the config for a call with these values."""
        configs = self.candidates(named)
        model = self.machine.model(device)
        return tuning.decide(self.identity, configs, model, self.bucket(named), measure, capturing, self.folders)

    def candidates(self, named: Mapping[str, Any]) -> list[Config]:
        """Return the configs that the author's ``prune`` leaves for a call."""
        return prune(self.bound.kernel.configs, self.bound.kernel.prune, named)

    def recorded(self, named: Mapping[str, Any], device: int) -> Config | None:
        """Return the config that was found to be the fastest for such a call, if that is known."""
        model, configs = self.machine.model(device), self.candidates(named)
        return records.lookup(self.identity, configs, model, self.bucket(named), self.folders).config

    def bucket(self, named: Mapping[str, Any]) -> str:
        """The bucket of a call: by its named sizes, or the tensors' where none have names, and integers that formulas read."""
        count = len(self.bound.facts.arguments)
        by_number = {s.argument: s for s in reversed(self.bound.sources) if s.kind == "tensor" and s.argument < count}
        tensors = sorted(by_number.values(), key=self.bound.sources.index)
        infos = {s.name: named[s.name] for s in tensors if isinstance(named[s.name], TensorInfo)}
        counted = zip(self.bound.sources, self.bound.roles, strict=True)
        integers = {s.name: named[s.name] for s, role in counted if s.kind == "int" and role == "exact"}
        sizes = {name: value for name, value in integers.items() if type(value) is int}
        if not self.bound.facts.sizes:
            sizes |= {f"{name}_{d}": size for name, info in infos.items() for d, size in enumerate(info.shape)}
        return bucket_of(sizes, [info.dtype for info in infos.values()])
