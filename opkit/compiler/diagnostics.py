"""This module reports what the compiler does: the record of a graph, loggers, failures, and scripts that reproduce them.

``OPKIT_LOG`` sends the loggers' topics to the terminal.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from opkit import config
from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.conversion import Captured, Unsupported, UnsupportedDevice
from opkit.compiler.ir.graph import Node
from opkit.compiler.ir.kernel import KernelLaunch, Schedule, TritonKernel, batches
from opkit.compiler.ir.program import Program
from opkit.compiler.run.plan import ExecutionPlan
from opkit.errors import CompileError, NoCompilerWarning


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph in each form of the compiler; if it runs in eager mode, the forms are None and ``reason`` says why.

    ``texts`` are the C, or the module of its ``kernels`` in Triton. A block that a model repeats is a graph that is called
    ``count`` times.
    """

    name: str
    reason: str = ""
    captured: Captured | None = None
    program: Program | None = None
    schedule: Schedule | None = None
    plan: ExecutionPlan | None = None
    texts: tuple[str, ...] = ()
    kernels: tuple[TritonKernel, ...] = ()
    count: int = 1


class Stages:
    """The stage that a graph is in, for the error message if it fails there."""

    def __init__(self) -> None:
        self.now = ""

    def run(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.now = name
        return function(*arguments)


# ---- loggers ---------------------------------------------------------------------------------------------------------

_NAMES = {
    "fusion": "opkit.compiler.fusion",
    "output_code": "opkit.compiler.output_code",
    "recompiles": private.RECOMPILES_LOGGER,  # Dynamo compiles again, and knows why
}

log = logging.getLogger("opkit.compiler")
fusion_log = logging.getLogger(_NAMES["fusion"])
output_code_log = logging.getLogger(_NAMES["output_code"])


@functools.cache
def set_up_logs() -> None:
    """Send the topics that the settings name to the terminal, once."""
    if "recompiles" in config.get().log:
        private.log_recompiles()
    for topic in sorted(config.get().log):
        logger = logging.getLogger(_NAMES[topic])
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[opkit:{topic}] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False


def log_fusion(name: str, scheduled: Schedule) -> None:
    """Log the kernels of a graph, and why steps and kernels are apart."""
    if fusion_log.isEnabledFor(logging.DEBUG):
        kernels = [
            f"  {s.kernel.name}: {'; '.join(s.kernel.origins)}" for s in scheduled.steps if isinstance(s, KernelLaunch)
        ]
        refusals = [f"  not fused: {refusal}" for refusal in scheduled.refusals]
        batched = [f"  side by side: {batch}" for batch in batch_texts(scheduled)]
        apart = [f"  apart: {reason}" for reason in scheduled.apart]
        fusion_log.debug("%s: %d kernels\n%s", name, len(kernels), "\n".join([*kernels, *refusals, *batched, *apart]))


def batch_texts(schedule: Schedule) -> tuple[str, ...]:
    """Return the batches of several launches: their kernels by name, each with its number of launches."""
    names = [Counter(launch.kernel.name for launch in batch) for batch in batches(schedule.steps) if len(batch) > 1]
    return tuple(", ".join(name if n == 1 else f"{name} ({n} times)" for name, n in each.items()) for each in names)


# ---- failures --------------------------------------------------------------------------------------------------------

_HEAD = '''"""A graph that opkit's compiler failed on, in the stage "{stage}": {error}

Run this file to reproduce the failure. The inputs are random; their sizes, strides and dtypes are those of the graph.
"""

import torch
from torch import device, inf, nan

from opkit.compiler.backend import opkit_backend


def tensor_of(shape, strides, dtype, on):
    """Random values; integers small enough to be indices."""
    length = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
    values = torch.randn(length) if dtype.is_floating_point or dtype.is_complex else torch.randint(0, 2, (length,))
    return values.to(dtype).to(on).as_strided(shape, strides)


class Graph(torch.nn.Module):
'''

_TAIL = """

graph = Graph()
{constants}inputs = [
{inputs}]
torch.compile(graph, backend=opkit_backend, options={{"strict": True}})(*inputs)
"""


@functools.cache
def warn_no_compiler(reason: str) -> None:
    """Warn, once for each reason, that graphs run in eager mode because there is no C compiler."""
    warnings.warn(f"torch.compile(backend='opkit') runs in eager mode: {reason}", NoCompilerWarning, stacklevel=2)


def report_unsupported(name: str, error: Unsupported) -> None:
    """Log why a graph runs in eager mode; if the reason is its device, warn once for all graphs there."""
    if isinstance(error, UnsupportedDevice):
        warn_no_compiler(f"all graphs on {error.device}, for which opkit has no compiler")
    else:
        log.warning("%s runs in eager mode: %s.", name, error)


def report_failure(module: fx.GraphModule, name: str, stage: str, error: Exception, strict: bool) -> None:
    """Log the failure of a stage, with a script that reproduces it.

    Raises:
        CompileError: ``strict`` holds.
    """
    path = _write_reproduction(module, stage, error)
    node = _node_of(error)
    where = "" if node is None else f" at the node {node.name} ({node.target}, {node.origin or 'of no known line'})"
    again = "" if path is None else f" {path} reproduces the failure."
    message = (
        f"opkit's compiler failed on {name} in the stage {stage!r}{where}: {type(error).__name__}: {error}.{again}"
    )
    if strict:
        raise CompileError(message) from error
    log.warning("%s The graph runs in eager mode.", message, exc_info=error)


def _node_of(error: Exception) -> Node | None:
    """Return the node that was being compiled: the innermost local variable ``node`` of the traceback's frames."""
    nodes = [frame.f_locals.get("node") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((node for node in reversed(nodes) if isinstance(node, Node)), None)


def _write_reproduction(module: fx.GraphModule, stage: str, error: BaseException) -> Path | None:
    """Write the script to the cache folder and return its path, or None if that fails."""
    try:
        content = _reproduction_text(module, stage, error)
        folder = Path(os.path.abspath(config.get().cache_dir)) / "failed-graphs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.py"
        path.write_text(content, encoding="utf-8")
    except Exception:  # a failure here must not hide the one that is reported
        return None
    return path


def _reproduction_text(module: fx.GraphModule, stage: str, error: BaseException) -> str:
    method = module.code.strip("\n").replace("\n", "\n    ")
    message = (
        str(error).splitlines()[0].replace('"""', "'''").replace("\\", "/") if str(error) else type(error).__name__
    )
    examples = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    inputs = "".join(f"    {_input_text(value)},\n" for value in examples)
    return (
        _HEAD.format(stage=stage, error=message)
        + f"    {method}\n"
        + _TAIL.format(constants=_constants(module), inputs=inputs)
    )


def _constants(module: fx.GraphModule) -> str:
    names = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    constants = {name: getattr(module, name, None) for name in names}
    return "".join(
        f"graph.{name} = {_input_text(value)}\n" for name, value in constants.items() if isinstance(value, torch.Tensor)
    )


def _input_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape, strides = (tuple(map(private.example_of, of)) for of in (value.shape, value.stride()))
        return f"tensor_of({shape}, {strides}, {value.dtype}, {str(value.device)!r})"
    return str(private.example_of(value)) if isinstance(value, int | torch.SymInt) else repr(value)
