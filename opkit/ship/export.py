"""Export a model to a file that runs without a compiler (``opkit.export``)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from opkit.compiler import backend, pipeline, user_lowerings
from opkit.compiler.capture import conversion
from opkit.compiler.capture.conversion import Captured, Unsupported
from opkit.compiler.diagnostics import CompiledGraph, Stages
from opkit.compiler.lower.target import LoweringTarget
from opkit.compiler.run import library, plan_cache
from opkit.compiler.run.plan import ExecutionPlan, opaque_names
from opkit.compiler.run.torch_private import qualified_name
from opkit.errors import ArgumentError, CompileError, ToolchainError
from opkit.kernels.cc import isa as isas
from opkit.kernels.cc import toolchain
from opkit.kernels.cc.compilation import Request, Unit, build
from opkit.ship import archive, control_flow, freezing, operators, packing, processors, program_text, structure
from opkit.ship.entry import EntryGraph, entry_graph
from opkit.ship.packing import PackedWeights
from opkit.ship.program_text import NotWritable, ProgramText
from opkit.ship.weights import WeightWriter, storage_dtype

Programs = Mapping[str, ExportedProgram]


def export(
    model: nn.Module | ExportedProgram | Programs,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | os.PathLike[str],
    dynamic_shapes: Any = None,
    freeze: bool = True,
    isa: str | Sequence[str] = "native",
    storage: torch.dtype | str | None = None,
) -> Path:
    """Compile a model to a file, which :func:`opkit.load` runs without a compiler, Dynamo, or the model's code.

    The model is captured by ``torch.export.export`` for inference, in the mode that it is in: call ``model.eval()`` first.
    Weights are constants of the compiled program: what they alone decide is computed now, batch norm becomes part of the
    convolution or product before it, and on CPUs weights are packed as opkit's kernels read them. A CUDA model gets kernels for
    the GPU that it is on.

    Args:
        model: a module; or a program that ``torch.export.export`` returned, and then no ``args``; or several of these by name,
            which become entry points of one file and share equal weights.
        args, kwargs: example arguments of the module.
        path: the file, by convention ``.opk``. It appears whole or not at all.
        dynamic_shapes: which sizes may change, as in ``torch.export.export``.
        freeze: make weights constants. With False, they can be replaced by name in the loaded model, and nothing is folded.
        isa: the instruction sets of CPUs to compile for; "native" is this processor, others are "baseline", "avx2", "avx512",
            "neon". A loaded model uses the last of them that the processor has.
        storage: a dtype in which matrices of floats are stored: ``torch.bfloat16``, or ``torch.int8`` or
            ``torch.float8_e4m3fn`` with a scale for each row. They are converted back while they are loaded: the file is smaller;
            the memory and the kernels stay the same.

    Returns:
        The path.

    Raises:
        ArgumentError: an argument is none of those.
        CompileError: a part of the program cannot be compiled; the message says which.
        ToolchainError: there is no C compiler.
        OSError: the file cannot be written.

    Example:
        >>> import opkit, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).eval()
        >>> batch = torch.export.Dim("batch", max=64)
        >>> x = torch.randn(3, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = opkit.export(model, (x,), path=f"{folder}/model.opk", dynamic_shapes=({0: batch},))
        ...     loaded = opkit.load(path)
        >>> torch.allclose(loaded(x[:2]), model(x[:2]), atol=1e-6)
        True
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ArgumentError(f"opkit.export: path={str(path)!r} is in a folder that does not exist.")
    programs = _programs(model, args, kwargs, dynamic_shapes)
    writer, members = WeightWriter(storage_dtype(storage)), dict[str, bytes]()
    packed = PackedWeights(direct=writer.storage is not None)
    wanted = (isa,) if isinstance(isa, str) else tuple(isa)
    entries: dict[str, Any] = {}
    device: torch.device | None = None
    for name, program in programs.items():
        with torch.no_grad():
            entry = _Entry(name, entry_graph(program, _label(name), freeze), freeze, packed)
        device = device or entry.device
        if entry.device != device:
            raise ArgumentError(
                f"opkit.export: {_label(name)} is on {entry.device}, and another on {device}. Export one file for each."
            )
        entries[name] = entry.write(writer, members, wanted)
    assert device is not None
    manifest = {"made_for": processors.made_for(device), "entries": entries}
    archive.write(target, manifest, members, writer.weights)
    return target


def _label(name: str) -> str:
    return f"the entry {name!r}" if name else "the model"


def _programs(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any) -> Programs:
    if isinstance(model, nn.Module):
        if not isinstance(args, tuple):
            raise ArgumentError(f"opkit.export: args={args!r} is no tuple; write (x,) for one argument.")
        with torch.no_grad():
            return {
                "": torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)
            }
    if args or kwargs or dynamic_shapes is not None:
        raise ArgumentError(
            "opkit.export: an exported program has its arguments already; pass args= for a module only."
        )
    programs = {"": model} if isinstance(model, ExportedProgram) else model
    if not isinstance(programs, Mapping) or not programs:
        raise ArgumentError(
            f"opkit.export: model={type(model).__name__} is neither a module, nor what torch.export.export returns, nor a "
            "dictionary of these by name."
        )
    for name, program in programs.items():
        if not isinstance(name, str) or not isinstance(program, ExportedProgram):
            raise ArgumentError(
                f"opkit.export: the entry {name!r} is a {type(program).__name__}; pass what torch.export.export returns."
            )
    return programs


class _Entry:
    """One entry on its way into a file."""

    def __init__(self, name: str, graph: EntryGraph, freeze: bool, packed: PackedWeights) -> None:
        self.name, self.graph, self.packed = name, graph, packed
        self.device = conversion.device_of(graph.module)
        _prepare(graph.module, freeze, packed, self.device)

    def write(self, writer: WeightWriter, members: dict[str, bytes], wanted: Sequence[str]) -> dict[str, Any]:
        """Compile the entry, add what is compiled to the members of the file, and return what the manifest says of it."""
        variants = (
            [(isa, *_cpu_target(isa)) for isa in wanted]
            if self.device.type == "cpu"
            else [("", frozenset[str](), backend.gpu_target())]
        )
        listed: list[dict[str, Any]] = []
        for isa, features, target in variants:
            folder = "/".join(filter(None, (f"entries/{self.name}" if self.name else "entry", isa)))
            variant = _Variant(isa, features, target, self.device, self.packed, writer, members)
            listed.append(variant.write(self.graph.module, _label(self.name), folder))
        return {"variants": listed, **self._convention(writer)}

    def _convention(self, writer: WeightWriter) -> dict[str, Any]:
        graph = self.graph
        return {
            "state": {name: writer.add(t, name) for name, t in zip(graph.state, graph.tensors, strict=True)},
            "arguments": [[each.name, *([] if each.value is ... else [each.value])] for each in graph.arguments],
            "written": list(graph.written),
            "ranges": graph.ranges,
            "results": list(graph.results),
            "taken": structure.of_spec(graph.in_spec),
            "returned": structure.of_spec(graph.out_spec),
        }


def _prepare(module: fx.GraphModule, freeze: bool, packed: PackedWeights, device: torch.device) -> None:
    """Compute what constants decide, in a graph and in those that it calls."""
    if freeze:
        freezing.freeze(module)
    control_flow.prepare_bodies(module)
    for body in control_flow.bodies(module):
        _prepare(body, freeze, packed, device)
    if freeze and device.type == "cpu":
        packing.pack_weights(module, packed)
    freezing.copy_constant_results(module)


@dataclasses.dataclass
class _Variant:
    """The programs of an entry for one instruction set: its own, and those of the graphs that it calls.

    Attributes:
        isa, features: the instruction set, and the features that code for it may use.
        target: what the compiler compiles for.
        device: the device.
        packed, writer, members: what the file gets.
    """

    isa: str
    features: frozenset[str]
    target: LoweringTarget
    device: torch.device
    packed: PackedWeights
    writer: WeightWriter
    members: dict[str, bytes]

    def write(self, module: fx.GraphModule, label: str, folder: str, is_body: bool = False) -> dict[str, Any]:
        """Compile a graph, add what is compiled to the members of the file, and return what the manifest says of it."""
        captured, compiled = self._compile(module, label, is_body)
        bodies = {
            text: self._body(body, f"{label}'s graph {text.removeprefix('module ')}", f"{folder}/graph{number}")
            for number, (text, body) in enumerate(captured.bodies.items())
        }
        assert compiled.plan is not None
        called = operators.add_operators(compiled.plan, captured, module.graph, self.isa, folder, self.members)
        plan = operators.add_functions(compiled.plan, folder, self.members)
        inner = [body["variants"][0] for body in bodies.values()]
        program, why = self._program(captured, plan, next(filter(None, (each["needs_python"] for each in inner)), ""))
        kernels = self._kernels(module, compiled, program, label, folder)
        content = self._plan(captured, dataclasses.replace(plan, name=label), kernels)
        self.members[f"{folder}/plan.json"] = json.dumps(content).encode()
        if program:
            constants = [content["constants"][name] for name in program.constants]
            binaries = [[each["name"], each["threads"], each["shared"]] for each in kernels]
            described = {**program.description, "constants": constants, "kernels": binaries}
            self.members[f"{folder}/program.json"] = json.dumps(described).encode()
        features = self.features.union(*(each["features"] for each in inner))
        if plan.functions:  # they were compiled for this processor
            features |= processors.features()
        return {
            "folder": folder, "isa": self.isa, "features": sorted(features), "operators": called, "needs_python": why,
            "graphs": bodies,
        }  # fmt: skip

    def _body(self, module: fx.GraphModule, label: str, folder: str) -> dict[str, Any]:
        """Compile a graph that another calls; it is described as an entry without state is."""
        arguments = [[node.name] for node in control_flow.inputs(module)]
        variant = self.write(module, label, folder, True)
        return {"variants": [variant], "state": {}, "arguments": arguments, "written": [], "ranges": {}}

    def _compile(self, module: fx.GraphModule, label: str, is_body: bool) -> tuple[Captured, CompiledGraph]:
        try:
            captured = conversion.capture(module, label, is_body=is_body)
            if captured.uncompiled:
                raise CompileError(f"opkit.export: {label} has a graph that only torch runs: {captured.uncompiled[0]}.")
            if captured.device != self.device:
                raise CompileError(
                    f"opkit.export: {label} is on {captured.device}, and the model on {self.device}. Create its tensors there."
                )
            writes = next((name for each in captured.opaques.values() if (name := qualified_name(each))), "")
            if writes:  # the argument of a higher-order operator
                raise CompileError(
                    f"opkit.export: {label} calls {writes}, which writes to its arguments, and no file holds such "
                    "calls yet. Let it return a new tensor."
                )
            lowered = user_lowerings.operators(captured.targets)
            return captured, pipeline.compile_graph(captured, self.target, Stages(), lowered, True, False)
        except Unsupported as error:
            raise CompileError(f"opkit.export: {label} cannot be compiled: {error}.") from error

    @staticmethod
    def _program(captured: Captured, plan: ExecutionPlan, why: str) -> tuple[ProgramText | None, str]:
        """Return the program that runs a plan without Python, or why there is none: ``why`` is that of a graph that it calls."""
        try:
            if plan.device != "cpu":
                toolchain.find("c")  # only the program needs it
            return (None, why) if why else (program_text.write(plan, captured), "")
        except (NotWritable, ToolchainError) as error:
            return None, str(error)

    def _kernels(
        self, module: fx.GraphModule, compiled: CompiledGraph, program: ProgramText | None, label: str, folder: str
    ) -> list[dict[str, Any]]:
        """Compile the kernels, add them to the members, and return what describes them."""
        assert compiled.plan is not None
        is_cpu = self.device.type == "cpu"
        texts = [*(compiled.texts if is_cpu and compiled.plan.segments else ()), *([program.text] if program else ())]
        if texts:
            texts += operators.code_of_calls(module.graph) if is_cpu and program else []
            units = tuple(Unit(f"graph{number}.c", text, "c") for number, text in enumerate(texts))
            request = Request(f"opkit.export: {label}", units, library.flags(), isa=self.isa or "baseline")
            self.members[f"{folder}/kernels.so"] = build(request).read_bytes()
        if is_cpu:
            return []
        from opkit.compiler.run.gpu_kernels import GpuKernelsBuild  # graphs for CPUs do not need it

        binaries = GpuKernelsBuild(compiled.plan.kernels, compiled.texts[0], self.device).binaries()
        for number, binary in enumerate(binaries):
            self.members[f"{folder}/kernel{number}"] = binary.image
        return [binary.to_json() for binary in binaries]

    def _plan(self, captured: Captured, plan: ExecutionPlan, kernels: Any) -> dict[str, Any]:
        constants = captured.constants.items()
        return {
            "plan": plan_cache.encode(plan),
            "constants": {name: self.writer.add(tensor, name, self.packed.depth(tensor)) for name, tensor in constants},
            "opaques": opaque_names({t: value for t, value in captured.opaques.items() if t not in captured.bodies}),
            "computed": captured.computed,
            "resolved": sorted(captured.resolved),
            "kernels": kernels,
        }


def _cpu_target(isa: str) -> tuple[frozenset[str], LoweringTarget]:
    """Return the features that code for an instruction set may use, and the target of lowering."""
    if isa == "native":
        return processors.features(), LoweringTarget.of(frozenset(isas.cpu_features()), isas.last_cache())
    needed = isas.needed_features(isa)
    return needed, LoweringTarget.of(needed, isas.last_cache())
