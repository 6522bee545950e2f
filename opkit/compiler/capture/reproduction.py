"""This module writes a graph on which the compiler failed as a self-contained Python script that reproduces the failure."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import fx

from opkit import config
from opkit.compiler.capture import torch_private as private

_HEAD = '''"""A graph that opkit's compiler failed on, in the stage "{stage}": {error}

Run this file to reproduce the failure. The inputs are random; their sizes, strides and dtypes are those of the graph.
"""

import torch
from torch import device, inf, nan

from opkit.compiler.backend import opkit_backend


def tensor_of(shape, strides, dtype):
    """Random values; integers small enough to be indices."""
    length = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
    values = torch.randn(length) if dtype.is_floating_point or dtype.is_complex else torch.randint(0, 2, (length,))
    return values.to(dtype).as_strided(shape, strides)


class Graph(torch.nn.Module):
'''

_TAIL = """

graph = Graph()
{constants}inputs = [
{inputs}]
torch.compile(graph, backend=opkit_backend, options={{"strict": True}})(*inputs)
"""


def write(module: fx.GraphModule, stage: str, error: BaseException) -> Path | None:
    """Write the script to the cache folder and return its path, or None if that fails."""
    try:
        content = text(module, stage, error)
        folder = Path(os.path.abspath(config.get().cache_dir)) / "failed-graphs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.py"
        path.write_text(content, encoding="utf-8")
    except Exception:  # a failure here must not hide the one that is reported
        return None
    return path


def text(module: fx.GraphModule, stage: str, error: BaseException) -> str:
    """Return the script."""
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
        return f"tensor_of({shape}, {strides}, {value.dtype})"
    return str(private.example_of(value)) if isinstance(value, int | torch.SymInt) else repr(value)
