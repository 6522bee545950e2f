"""Read the parameters, dialect and place of a Triton function from its file, without importing Triton.

This saves the first call of a process most of its time: with the kernel in the cache, 36 ms (portable attention) and 40 ms
(the forward for Hopper), and 419 and 1159 ms where Triton and the modules of kernels are imported (``benchmarks/first_call.py``
without a GPU, torch 2.14, two cores that others used too; of the processor's own time 18 and 20 ms, and 248 and 460).

Only what is certain is read: decorators that are Triton's or Gluon's ``jit`` alone, parameters without
annotations or with those of constants, defaults and ``do_not_specialize`` of literals and of names that stand for such.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opkit.kernels.triton import statements

_JIT = {
    ("triton", "jit"): False,
    ("triton.runtime.jit", "jit"): False,
    ("triton.experimental.gluon", "jit"): True,
}
"""Where a decorator may come from, and whether it is Gluon's."""

_CONSTEXPR = frozenset(
    (module, "constexpr")
    for module in ("triton.language", "triton.language.core", "triton.experimental.gluon.language")
)
_PLAIN = (
    ast.Tuple, ast.List, ast.Starred, ast.Constant, ast.UnaryOp, ast.USub, ast.BinOp, ast.Add, ast.GeneratorExp,
    ast.ListComp, ast.comprehension, ast.JoinedStr, ast.FormattedValue, ast.Name, ast.expr_context,
)  # fmt: skip
_CALLED: Mapping[str, Any] = {"range": range, "tuple": tuple, "list": list}
_MARKS = ("do_not_specialize", "do_not_specialize_on_alignment")
_ARGUMENTS = frozenset({*_MARKS, "debug", "noinline", "version"})


@dataclasses.dataclass(frozen=True)
class HeaderParameter:
    """One parameter as it is written; ``annotation`` is what Python makes of it, or ""."""

    name: str
    constexpr: bool
    annotation: str
    default: Any
    specialised: bool
    aligned: bool


@dataclasses.dataclass(frozen=True)
class Header:
    """A Triton function without its body. ``line`` is that of its first decorator."""

    parameters: tuple[HeaderParameter, ...]
    gluon: bool
    file: str
    line: int


class _Unclear(Exception):
    """Something whose value the file alone does not say."""


@functools.cache
def read(module: str, name: str) -> Header | None:
    """Return the header of a function; None where it has to be imported to be known.

    >>> found = read("opkit.attn.gpu.device.tile_lists", "tile_lists")
    >>> found.gluon, found.parameters[0].name, Path(found.file).name
    (False, 'tiles', 'tile_lists.py')
    """
    try:
        return _header(_file(module), name)
    except (_Unclear, OSError, UnicodeDecodeError):
        return None


@functools.cache
def _file(module: str) -> _File:
    path = statements.file_of(module)
    if path is None:
        raise _Unclear
    return _File(module, path)


class _File:
    """The text of a module, and what its names stand for."""

    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path
        self.text = path.read_text(encoding="utf-8") + "\n"
        self.annotations: dict[str, str] = {}
        self.imported = {each.bound: each for each in statements.imports(self.text, module, nested=False)}

    def origin(self, node: ast.expr) -> tuple[str, str]:
        """Module and name of what a dotted name stands for, if it was imported."""
        if isinstance(node, ast.Name) and node.id in self.imported:
            found = self.imported[node.id]
            return found.module, found.name
        if isinstance(node, ast.Attribute):
            module, name = self.origin(node.value)
            return f"{module}.{name}" if name else module, node.attr
        raise _Unclear

    def annotation(self, node: ast.expr) -> str:
        """Return the annotation of a constant as Python has it: its text, or the name of the class."""
        written = _dotted(node)
        if written not in self.annotations:
            if self.origin(node) not in _CONSTEXPR:
                raise _Unclear
            future = self.imported.get("annotations")
            self.annotations[written] = written if future and future.module == "__future__" else "constexpr"
        return self.annotations[written]

    def value(self, node: ast.expr) -> Any:
        """Return what an expression of literals, and of names that stand for such, comes to."""
        nodes = [node] if isinstance(node, ast.Constant) else list(ast.walk(node))
        if not all(map(_is_plain, nodes)):
            raise _Unclear
        named = [each for each in nodes if isinstance(each, ast.Name)]
        names = (
            {each.id for each in named} - {each.id for each in named if isinstance(each.ctx, ast.Store)} - {*_CALLED}
        )
        scope = {"__builtins__": {}, **_CALLED, **{name: self.named(name) for name in names}}
        try:
            return eval(compile(ast.Expression(node), str(self.path), "eval"), scope)
        except Exception as error:
            raise _Unclear from error

    def named(self, name: str) -> Any:
        """Return what a name at the top of the module stands for."""
        assigned = statements.assigned(self.text, name)
        if assigned is not None:
            return self.value(assigned)
        found = self.imported.get(name)
        if found is None or not found.name or found.module == self.module:
            raise _Unclear
        return _file(found.module).named(found.name)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _Unclear


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _CALLED
    return isinstance(node, _PLAIN)


def _header(file: _File, name: str) -> Header:
    found = statements.definition(file.text, name)
    if found is None or len(found.node.decorator_list) != 1:
        raise _Unclear
    decorator = found.node.decorator_list[0]
    gluon = _JIT.get(file.origin(decorator.func if isinstance(decorator, ast.Call) else decorator))
    if gluon is None:
        raise _Unclear
    arguments = _arguments(file, decorator) if isinstance(decorator, ast.Call) else {}
    parameters = _parameters(file, found.node.args, arguments)
    return Header(parameters, gluon, str(file.path), found.above + decorator.lineno)


def _arguments(file: _File, decorator: ast.Call) -> dict[str, Any]:
    """Return the keyword arguments of a decorator."""
    if decorator.args or any(keyword.arg not in _ARGUMENTS for keyword in decorator.keywords):
        raise _Unclear
    return {str(keyword.arg): file.value(keyword.value) for keyword in decorator.keywords}


def _parameters(file: _File, listed: ast.arguments, arguments: Mapping[str, Any]) -> tuple[HeaderParameter, ...]:
    if listed.posonlyargs or listed.kwonlyargs or listed.vararg or listed.kwarg:
        raise _Unclear
    marks = [frozenset(arguments.get(name) or ()) for name in _MARKS]
    if any(isinstance(arguments.get(name), str) for name in _MARKS):
        raise _Unclear
    without = len(listed.args) - len(listed.defaults)
    found: list[HeaderParameter] = []
    for i, each in enumerate(listed.args):
        annotation = "" if each.annotation is None else file.annotation(each.annotation)
        default = inspect.Parameter.empty if i < without else file.value(listed.defaults[i - without])
        specialised, aligned = (i not in marked and each.arg not in marked for marked in marks)
        found.append(HeaderParameter(each.arg, bool(annotation), annotation, default, specialised, aligned))
    return tuple(found)
