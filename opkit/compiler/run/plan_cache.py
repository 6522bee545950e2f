"""A cache of plans on the disk, under a hash of everything that decides them, so that a second process need not lower or fuse.

``<cache_dir>/graphs/<key[:2]>/<key>.json`` holds a plan and the C of its segments, whose binary is in the build cache. An
entry appears by one rename; a damaged one is written again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit import config
from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.graph import ObjectCall, OpaqueValue, TypeName
from opkit.compiler.ir.index import Axis, Div, Index, Mod, Symbol, index
from opkit.compiler.ir.kernel import TritonKernel
from opkit.compiler.ir.program import Buffer, Extern, Formula, ScalarItem, Strided
from opkit.compiler.run.plan import ExecutionPlan, GpuLaunch, Segment
from opkit.compiler.run.wiring import GraphResult, Wiring
from opkit.kernels import cache_files
from opkit.op.trace.contract_hash import sources_hash

# ---- values as JSON: a value that JSON does not have is a list of its class's name and its fields ---------------------

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        Axis,
        Symbol,
        Div,
        Mod,
        Buffer,
        Callee,
        Extern,
        Formula,
        ScalarItem,
        OpaqueValue,
        ExecutionPlan,
        GpuLaunch,
        GraphResult,
        ObjectCall,
        Segment,
        Strided,
        TritonKernel,
        TypeName,
        Wiring,
    )
}
_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any) -> Any:
    """Return a value as JSON.

    Raises:
        TypeError: it cannot be stored, such as an index that is read from memory.
    """
    if isinstance(value, _PLAIN):
        return value
    name = type(value).__name__
    if isinstance(value, Index):
        if value.constant is not None:
            return ["number", value.constant]
        return ["Index", [[encode(list(monomial)), c] for monomial, c in value.terms.items()]]
    if name in _CLASSES:
        fields = value if isinstance(value, tuple) else vars(value).values()
        return [name, *map(encode, fields)]
    if isinstance(value, dict):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, list | tuple | frozenset):
        return [name, *map(encode, value)]
    raise TypeError(f"a {name} cannot be stored")


_MAKERS: dict[str, Callable[..., Any]] = {
    **_CLASSES,
    "complex": complex,
    "number": index,
    "list": lambda *of: list(of),
    "tuple": lambda *of: of,
    "frozenset": lambda *of: frozenset(of),
    "Index": lambda terms: Index({tuple(decode(monomial)): c for monomial, c in terms}),
}


def decode(value: Any) -> Any:
    """Return the value that :func:`encode` wrote."""
    if isinstance(value, dict):
        return {key: decode(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    name, *fields = value
    return _MAKERS[name](*(fields if name == "Index" else map(decode, fields)))


# ---- entries ---------------------------------------------------------------------------------------------------------


@functools.cache
def versions() -> str:
    """Return what decides how a graph is compiled, apart from the graph: torch's version, and the compiler's own sources."""
    return f"{torch.__version__} {own_version()} {sources_hash(Path(__file__).parents[1])}"


def own_version() -> str:
    """Return opkit's version, "0" if it runs from its source tree."""
    try:
        return importlib.metadata.version("opkit")
    except importlib.metadata.PackageNotFoundError:  # it runs from its source tree
        return "0"


def key(graph: str) -> str:
    """Return the key of a graph's plan; ``graph`` is a text of everything that decides it."""
    return hashlib.sha256(f"{versions()}\n{graph}".encode()).hexdigest()


def _path(identity: str) -> Path:
    return Path(os.path.abspath(config.get().cache_dir)) / "graphs" / identity[:2] / f"{identity}.json"


def read(identity: str) -> Any:
    """Return an entry's content, or None if there is none that can be trusted."""
    path = _path(identity)
    try:
        content = checked(cache_files.read_private(path))
    except (OSError, ValueError):
        return None
    cache_files.note_used(path)
    return content


def checked(entry: bytes) -> Any:
    """Return the content of an entry's file.

    Raises:
        ValueError: it is damaged.
    """
    checksum, content = entry.decode().split("\n", 1)
    if checksum != hashlib.sha256(content.encode()).hexdigest():
        raise ValueError("its sha256 differs")
    return json.loads(content)


def write(identity: str, content: Any) -> None:
    """Write an entry; if that fails, the next process tries again."""
    path = _path(identity)
    with contextlib.suppress(OSError):
        text = json.dumps(content).encode()
        cache_files.make_private_folder(path.parent)
        cache_files.write_atomically(path, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        cache_files.note_used(path)


def find(identity: str) -> tuple[ExecutionPlan, tuple[str, ...]] | None:
    """Return the plan of a graph and its C, or None if there is none that can be trusted."""
    return from_json(read(identity))


def from_json(entry: Any) -> tuple[ExecutionPlan, tuple[str, ...]] | None:
    """Return the plan and the C that :func:`to_json` wrote, or None if an entry is no such JSON."""
    try:
        plan, texts = decode(entry["plan"]), tuple(entry["texts"])
    except (ValueError, KeyError, TypeError):
        return None
    return (plan, texts) if isinstance(plan, ExecutionPlan) and all(isinstance(text, str) for text in texts) else None


def store(identity: str, plan: ExecutionPlan, texts: Sequence[str]) -> None:
    """Write a plan, unless it cannot be stored."""
    with contextlib.suppress(TypeError):
        write(identity, to_json(plan, texts))


def to_json(plan: ExecutionPlan, texts: Sequence[str]) -> dict[str, Any]:
    """Return a plan and its C as JSON.

    Raises:
        TypeError: the plan cannot be stored.
    """
    return {"plan": encode(plan), "texts": list(texts)}
