"""Load models that :func:`opkit.export` wrote (``opkit.load``)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit.compiler.ir.graph import OpaqueValue
from opkit.compiler.ir.program import Extern
from opkit.compiler.run import cuda_graphs, library, plan_cache
from opkit.compiler.run.library import LoadedSegments
from opkit.compiler.run.plan import ExecutionPlan, GraphConstants, named
from opkit.compiler.run.runner import Runner
from opkit.compiler.run.torch_operators import CONTROL_FLOW
from opkit.errors import ArgumentError, ModelFileError
from opkit.kernels.triton.binaries import Binary
from opkit.runtime import structure
from opkit.ship import operators, processors
from opkit.ship.archive import Archive
from opkit.ship.checks import InputChecks
from opkit.ship.products import FUNCTIONS
from opkit.ship.weights import WeightReader


def load(path: str | os.PathLike[str], *, device: torch.device | str | None = None, verify: bool = True) -> LoadedModel:
    """Load a model that :func:`opkit.export` wrote, and return a function that runs it.

    No compiler runs, nothing is traced, and the model's own code is not needed. A file contains machine code: load files of
    people whom you would run a program of.

    Args:
        path: the file.
        device: the GPU that a model for GPUs runs on; by default the current one.
        verify: compute the sha256 of the weights, which reads all of them. Everything else is always verified. With False,
            weights are read when they are used.

    Returns:
        A :class:`LoadedModel`. Call it as the module, or ``model.entries[name]`` for an entry of a file with several.

    Raises:
        ModelFileError: the file is damaged, or made for another machine, GPU, torch or opkit; the message says for which.
        OSError: it cannot be read.

    Example:
        >>> import opkit, tempfile, torch
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = opkit.export(model, (torch.ones(3, 4),), path=f"{folder}/model.opk")
        ...     loaded = opkit.load(path)
        >>> loaded(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    with Archive(Path(path)) as archive, _refusing(archive):
        made = archive.manifest["made_for"]
        on = torch.device(device or made["device"])
        if on.type == "cuda" and on.index is None:
            on = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        why = processors.mismatch(made, on)
        if why:
            raise ModelFileError(
                f"opkit.load: {path} does not run here: {why}. Export the model here, or for this machine."
            )
        reader = WeightReader(archive.weights(verify), on)
        entries = {
            name: _entry(archive, name, content, reader, on) for name, content in archive.manifest["entries"].items()
        }
        return LoadedModel(entries)


@contextlib.contextmanager
def _refusing(archive: Archive) -> Iterator[None]:
    """Turn errors of reading a file's content into a ModelFileError."""
    try:
        yield
    except (ModelFileError, OSError, MemoryError):
        raise
    except Exception as error:
        raise archive.damaged(f"{type(error).__name__}: {error}") from error


class LoadedModel:
    """A loaded model: call it with the arguments of the module that was exported.

    Attributes:
        entries: its entry points by name; one without a name for a file of one module.

    Raises:
        ArgumentError: at a call: an argument's shape, dtype, device or value is not as it was exported, or there are several
            entries.
    """

    def __init__(self, entries: Mapping[str, LoadedEntry]) -> None:
        self.entries = dict(entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with the arguments of the module that was exported.

        Raises:
            ArgumentError: an argument is not as it was exported, or there are several entries.
        """
        if len(self.entries) != 1:
            raise ArgumentError(
                f"The model has the entries {', '.join(map(repr, self.entries))}: call model.entries[name](...)."
            )
        return next(iter(self.entries.values()))(*args, **kwargs)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the weights that are no constants of the program, by name: all with ``freeze=False``.

        Weights of two entries that have one name and differ have the entry's name before it.
        """
        found: dict[str, torch.Tensor] = {}
        for entry in self.entries.values():
            for name, tensor in entry.state.items():
                same = found.setdefault(name, tensor) is tensor
                found |= {} if same else {f"{entry.name}.{name}": tensor}
        return found

    def load_state_dict(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace weights by name; others stay.

        Raises:
            ArgumentError: there is no weight of that name that can be replaced, or it has another shape. Nothing is changed.
        """
        known = self.state_dict()
        for name, tensor in weights.items():
            if name not in known:
                raise ArgumentError(
                    f"{name!r} cannot be replaced: the file has {', '.join(map(repr, known)) or 'constants only'}. Export the "
                    "model with freeze=False."
                )
            if tensor.shape != known[name].shape:
                raise ArgumentError(
                    f"{name!r} is of the shape {tuple(tensor.shape)}, and the model was exported with {tuple(known[name].shape)}."
                )
        with torch.no_grad():
            for name, tensor in weights.items():
                known[name].copy_(tensor)


class LoadedEntry:
    """A function of a loaded model.

    Attributes:
        state: the weights that it takes at each call, by name.
    """

    def __init__(
        self,
        name: str,
        convention: Mapping[str, Any],
        run: Any,
        plan: ExecutionPlan,
        reader: WeightReader,
        called: operators.FileOperators,
    ) -> None:
        self.name, self._called = name, called
        self.state = {key: reader.state(record) for key, record in convention["state"].items()}
        self._taken, self._returned = convention["taken"], convention["returned"]
        self._results = convention["results"]
        self._tensors = [*self.state.values()]
        self._run, self._checks = run, InputChecks(plan, convention, len(self._tensors))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Raises:
            ArgumentError: an argument is not as it was exported.
        """
        leaves = structure.flatten(self._taken, (args, kwargs), "the arguments")
        with torch.no_grad(), _without_autocast():
            outputs = self._run([*self._tensors, *self._checks.checked([*leaves])])
        results = (outputs[each] if isinstance(each, int) else each[0] for each in self._results)
        return structure.unflatten(self._returned, results)


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast: the program has the dtypes that it was exported with."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    stack = contextlib.ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


_MAX_DEPTH = 16  # of graphs in graphs
_CONTROL_FLOW = {f"opaque.{name}": function for name, function in CONTROL_FLOW.items()}
"""The functions of control flow operators, by their names in plans."""

# ---- reading ---------------------------------------------------------------------------------------------------------


def _entry(archive: Archive, name: str, convention: Any, reader: WeightReader, device: torch.device) -> LoadedEntry:
    runner, called = _runner(archive, convention, reader, device)
    run = cuda_graphs.recorded(runner, None, "inference")
    return LoadedEntry(name, convention, run, runner.plan, reader, called)


def _runner(
    archive: Archive, convention: Any, reader: WeightReader, device: torch.device, depth: int = 0
) -> tuple[Runner, operators.FileOperators]:
    """Return what runs an entry, or a graph that a control flow operator calls, and the operators that it calls."""
    if depth > _MAX_DEPTH:
        raise archive.damaged("graphs call graphs without end")
    variant = _variant(archive, convention["variants"])
    folder = variant["folder"]
    called = operators.FileOperators()
    for operator in variant["operators"]:
        called.add(archive, operator)
    content = json.loads(archive.read(f"{folder}/plan.json"))
    plan = plan_cache.decode(content["plan"])
    if not isinstance(plan, ExecutionPlan):
        raise archive.damaged(f"{folder}/plan.json holds no plan")
    plan = called.with_layouts(operators.with_functions(archive, plan))
    if device.type != "cpu":
        plan = dataclasses.replace(plan, device=str(device))
    tensors = {key: reader.tensor(record) for key, record in content["constants"].items()}
    opaques = {text: _on_device(named(text), device) for text in content["opaques"]}
    for text, graph in variant["graphs"].items():
        opaques[text], inner = _runner(archive, graph, reader, device, depth + 1)
        called.registrations.extend(inner.registrations)
    for step in plan.steps:
        if isinstance(step, Extern) and step.target in _CONTROL_FLOW and not opaques.keys() >= {*_graphs(step.args)}:
            raise archive.damaged(f"{folder} lacks a graph that {step.target} calls")
    functions = {**FUNCTIONS, **_CONTROL_FLOW, **called.functions}
    constants = GraphConstants(tensors, functions, opaques, content["computed"], frozenset(content["resolved"]))
    return Runner(plan, constants, _kernels(archive, folder, plan, content["kernels"], device)), called


def _graphs(arguments: Any) -> Iterator[str]:
    """Yield the names of the graphs among the arguments of a control flow operator."""
    for each in arguments:
        if isinstance(each, OpaqueValue):
            yield each.text
        elif isinstance(each, list | tuple):
            yield from _graphs(each)


def _on_device(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) and value.type == device.type else value


def _variant(archive: Archive, variants: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last variant that this processor can run."""
    usable = processors.features()
    for variant in reversed(variants):
        if usable.issuperset(variant["features"]):
            return variant
    made = "; ".join(f"{v['isa']}, which needs {' '.join(sorted({*v['features']} - usable))}" for v in variants)
    raise ModelFileError(
        f"opkit.load: {archive.path} does not run on this processor: it was made for {made}. Export it with isa=, such as "
        "isa=('baseline', 'avx2', 'avx512')."
    )


def _library(archive: Archive, image: bytes, plan: ExecutionPlan) -> LoadedSegments:
    try:
        return library.from_bytes(image, plan.segments)
    except OSError as error:
        raise ModelFileError(
            f"opkit.load: the kernels of {archive.path} cannot be loaded: {error}. The folder of temporary files must allow "
            "libraries; the variable TMPDIR names another one."
        ) from error


def _kernels(
    archive: Archive, folder: str, plan: ExecutionPlan, described: Sequence[Any], device: torch.device
) -> LoadedSegments:
    if device.type == "cpu":
        return _library(archive, archive.read(f"{folder}/kernels.so"), plan) if plan.segments else LoadedSegments()
    from opkit.compiler.run.gpu_kernels import loaded  # graphs for CPUs do not need it

    binaries = [
        Binary.from_json(fields, archive.read(f"{folder}/kernel{number}")) for number, fields in enumerate(described)
    ]
    return LoadedSegments(kernels=[loaded(each, device) for each in binaries])
