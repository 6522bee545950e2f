"""Plans on the disk: JSON, found by a hash of all that decides them, so that a second process need not lower or fuse.

``<cache_dir>/graphs/<key[:2]>/<key>.json`` holds a plan and the C of its segments, whose binary is in the build cache. An
entry appears by one rename; one that is damaged is made again.
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
from opkit.compiler.ir.callee import Callee
from opkit.compiler.ir.graph import Opaque, TypeName
from opkit.compiler.ir.index import Axis, Div, Index, Mod, Size, index
from opkit.compiler.ir.program import Buffer, Extern, Item, Strided
from opkit.compiler.run.autograd import Result, Wiring
from opkit.compiler.run.plan import Plan, Segment
from opkit.kernels.store import files

# ---- values as JSON: each that JSON has not is a list of its class's name and its fields ------------------------------

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        Axis,
        Size,
        Div,
        Mod,
        Buffer,
        Callee,
        Extern,
        Item,
        Opaque,
        Plan,
        Result,
        Segment,
        Strided,
        TypeName,
        Wiring,
    )
}
_PLAIN = (str, int, float, bool, type(None))


def encoded(value: Any) -> Any:
    """A value in terms of JSON.

    Raises:
        TypeError: it has none, such as an index that is read from memory.
    """
    if isinstance(value, _PLAIN):
        return value
    name = type(value).__name__
    if isinstance(value, Index):
        return ["number", value.constant] if value.constant is not None else _terms(value)
    if name in _CLASSES:
        fields = value if isinstance(value, tuple) else vars(value).values()
        return [name, *map(encoded, fields)]
    if isinstance(value, dict):
        return {key: encoded(each) for key, each in value.items()}
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, list | tuple | frozenset):
        return [name, *map(encoded, value)]
    raise TypeError(f"a {name} cannot be stored")


def _terms(value: Index) -> list[Any]:
    return ["Index", [[encoded(list(monomial)), c] for monomial, c in value.terms.items()]]


_MAKERS: dict[str, Callable[..., Any]] = {
    **_CLASSES,
    "complex": complex,
    "number": index,
    "list": lambda *of: list(of),
    "tuple": lambda *of: of,
    "frozenset": lambda *of: frozenset(of),
    "Index": lambda terms: Index({tuple(decoded(monomial)): c for monomial, c in terms}),
}


def decoded(value: Any) -> Any:
    """What :func:`encoded` was given."""
    if isinstance(value, dict):
        return {key: decoded(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    name, *fields = value
    return _MAKERS[name](*(fields if name == "Index" else map(decoded, fields)))


# ---- entries ---------------------------------------------------------------------------------------------------------


@functools.cache
def versions() -> str:
    """What decides how a graph is compiled, apart from the graph: torch, and the compiler's own sources."""
    digest = hashlib.sha256(f"{torch.__version__} {_own_version()}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _own_version() -> str:
    try:
        return importlib.metadata.version("opkit")
    except importlib.metadata.PackageNotFoundError:  # it runs from its source tree
        return "0"


def key(graph: str) -> str:
    """What a graph's plan is kept under; ``graph`` holds all that decides it."""
    return hashlib.sha256(f"{versions()}\n{graph}".encode()).hexdigest()


def _path(identity: str) -> Path:
    return Path(os.path.abspath(config.get().cache_dir)) / "graphs" / identity[:2] / f"{identity}.json"


def read(identity: str) -> Any:
    """An entry's content; None where there is none that can be trusted."""
    try:
        noted, content = files.read_private(_path(identity)).decode().split("\n", 1)
        if noted != hashlib.sha256(content.encode()).hexdigest():
            return None
        return json.loads(content)
    except (OSError, ValueError):
        return None


def write(identity: str, content: Any) -> None:
    """Keep an entry, in terms of JSON; where that cannot be done, the next process makes it again."""
    path = _path(identity)
    with contextlib.suppress(OSError):
        text = json.dumps(content).encode()
        files.make_private_folder(path.parent)
        files.write_atomically(path, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def find(identity: str) -> tuple[Plan, tuple[str, ...]] | None:
    """The plan of a graph and its C; None where there is none that can be trusted."""
    return opened(read(identity))


def opened(entry: Any) -> tuple[Plan, tuple[str, ...]] | None:
    """Return the plan and the C that :func:`described` was given; None where it is nothing of the kind."""
    try:
        plan, texts = decoded(entry["plan"]), tuple(entry["texts"])
    except (ValueError, KeyError, TypeError):
        return None
    return (plan, texts) if isinstance(plan, Plan) and all(isinstance(text, str) for text in texts) else None


def store(identity: str, plan: Plan, texts: Sequence[str]) -> None:
    """Keep a plan; one that has no form is left out."""
    with contextlib.suppress(TypeError):
        write(identity, described(plan, texts))


def described(plan: Plan, texts: Sequence[str]) -> dict[str, Any]:
    """Return a plan and its C in terms of JSON.

    Raises:
        TypeError: the plan has no form.
    """
    return {"plan": encoded(plan), "texts": list(texts)}
