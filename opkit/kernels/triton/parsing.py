"""Read Triton functions from the file of their module, without importing it or Triton.

This saves the first call of a process most of its time: with the kernel in the cache, 36 ms (portable attention) and 40 ms
(the forward for Hopper), and 419 and 1159 ms where Triton and the modules of kernels are imported (``benchmarks/first_call.py``
without a GPU, torch 2.14, two cores that others used too; of the processor's own time 18 and 20 ms, and 248 and 460).

``ast`` reads single statements. A file is not parsed as a whole, which would take 30 ms (portable attention) and 60 ms of the
first call: regular expressions find where a statement starts and ends. One at the top of a file ends where the next line is
not indented.
Only what is certain is read: decorators that are Triton's or Gluon's ``jit`` alone, parameters without annotations or with
those of constants, defaults and ``do_not_specialize`` of literals and of names that stand for such.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import io
import itertools
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ALONE = threading.RLock()
"""One thread at a time has Triton parse its functions.

In Python 3.11, ``ast.parse`` counts its depth in a place that all threads share, and fails ("AST constructor recursion depth
mismatch", python/cpython#106905) when the garbage collector lets another thread parse halfway. Triton parses while it hashes a
function and while it generates its code; both hold the interpreter's lock, so that waiting costs nothing.
"""


def cache_key(function: Any) -> str:
    """Return Triton's own identity of a function: its text, the functions that it calls, and its constants."""
    with ALONE:
        return str(function.cache_key)


# ---- single statements of a file -------------------------------------------------------------------------------------


_CONTINUES = re.compile(r"[^\n]*\n(?:(?:[ \t)\]}#][^\n]*)?\n)*")
_ENDS = re.compile(r"^(?:(?:async )?def [^\n]*|\)[^\n]*):[ \t]*(?:#[^\n]*)?\n", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]", re.MULTILINE)
_MAX_IMPORT_LINES = 200


class Imported(NamedTuple):
    """One name that an import statement binds: ``name`` of ``module``, or, where ``name`` is "", the module itself."""

    module: str
    name: str
    bound: str


@functools.cache
def file_of(module: str) -> Path | None:
    """Return the file of a module in Python, found without importing it; None where there is none.

    >>> file_of("opkit.errors").name, file_of("opkit.nothing")
    ('errors.py', None)
    """
    known = getattr(sys.modules.get(module), "__file__", None)
    if known is not None:
        return Path(known)
    last = module.rpartition(".")[2]
    for folder in _folders(module):
        for path in (folder / last / "__init__.py", folder / f"{last}.py"):
            if path.is_file():
                return path
    return None


def _folders(module: str) -> list[Path]:
    """Return where the file of a module may be."""
    above, _, last = module.rpartition(".")
    if above:
        package = file_of(above)
        return [package.parent] if package is not None and package.name == "__init__.py" else []
    try:
        found = importlib.util.find_spec(last)
    except (ImportError, ValueError):
        return []
    places = () if found is None else found.submodule_search_locations or ()
    return [Path(place).parent for place in places]


def imports(text: str, module: str, nested: bool = True) -> Iterator[Imported]:
    """Yield what the text of a module imports; without ``nested`` at its top alone.

    >>> list(imports("from a.b import (  # both\\n  c as d,\\n)\\nimport e.f\\n", "m"))
    [Imported(module='a.b', name='c', bound='d'), Imported(module='e.f', name='', bound='e')]
    """
    for match in _IMPORT.finditer(text):
        if match[0][0] in " \t" and not nested:
            continue
        for node in _import_statements(text, match.start()):
            if isinstance(node, ast.ImportFrom):
                source = _absolute("." * node.level + (node.module or ""), module)
                yield from (Imported(source, each.name, each.asname or each.name) for each in node.names)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    yield Imported(each.name, "", each.asname or each.name.partition(".")[0])


def _import_statements(text: str, start: int) -> list[ast.stmt]:
    """Return the statements of the logical line that starts there; none where the line only looks like an import."""
    lines = itertools.islice(io.StringIO(text[start:]), _MAX_IMPORT_LINES)
    statement = next(lines)
    continued = "(" in statement or statement.endswith("\\\n")
    while not (found := _parse(statement.lstrip())) and continued:
        line = next(lines, None)
        if line is None:
            break
        statement += line
    return found


def _absolute(name: str, module: str) -> str:
    if not name.startswith("."):
        return name
    path = file_of(module)
    package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
    return importlib.util.resolve_name(name, package)


class Definition(NamedTuple):
    """A function with its decorators, perhaps without its body; its own lines are counted from the one after ``above``."""

    node: ast.FunctionDef
    above: int


def definition(text: str, name: str) -> Definition | None:
    """Return the one function of this name at the top of a file; None unless there is exactly one.

    >>> found = definition("import a\\n\\n@jit\\ndef f(x, y=1):\\n    return x\\n", "f")
    >>> ast.unparse(found.node.decorator_list[0]), found.above + found.node.lineno
    ('jit', 4)
    """
    found = _starting(text, f"def {name}(")
    if len(found) != 1 or _starting(text, f"{name} ") or _starting(text, f"{name}:") or _starting(text, f"{name}="):
        return None
    start, whole = found[0], _statement(text, found[0])
    above = text.rfind("\n\n", 0, start) + 2 if "\n\n" in text[:start] else 0
    node = _parsed(text[above:start] + _without_body(whole)) or _parsed(text[above:start] + whole)
    return Definition(node, text.count("\n", 0, above)) if isinstance(node, ast.FunctionDef) else None


def _starting(text: str, words: str) -> list[int]:
    """Return where the lines start that begin with these words."""
    at = [-1] if text.startswith(words) else list[int]()
    while (found := text.find("\n" + words, at[-1] + 1 if at else 0)) >= 0:
        at.append(found)
    return [each + 1 for each in at]


def _statement(text: str, start: int) -> str:
    """Return the statement at the top of a file that starts there, and what is indented below it."""
    found = _CONTINUES.match(text, start)
    return text[start:] if found is None else found[0]


def _without_body(text: str) -> str:
    end = _ENDS.search(text)
    return "" if end is None else f"{text[: end.end()]}    pass\n"


def assigned(text: str, name: str) -> ast.expr | None:
    """Return the value of the one assignment to this name at the top of a file; None unless there is exactly one."""
    found = [each for ends in (" =", "=", ":", " :") for each in _starting(text, name + ends)]
    node = _parsed(_statement(text, found[0])) if len(found) == 1 else None
    return node.value if isinstance(node, ast.Assign) and len(node.targets) == 1 else None


def _parsed(text: str) -> ast.stmt | None:
    """Return the last statement of a text; None of what is no Python."""
    return next(reversed(_parse(text)), None)


def _parse(text: str) -> list[ast.stmt]:
    """Return the statements of a text; none of what is no Python."""
    try:
        with ALONE:
            return ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


# ---- headers of functions --------------------------------------------------------------------------------------------


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
def read_header(module: str, name: str) -> Header | None:
    """Return the header of a function; None where it has to be imported to be known.

    >>> found = read_header("opkit.attn.gpu.device.tile_lists", "tile_lists")
    >>> found.gluon, found.parameters[0].name, Path(found.file).name
    (False, 'tiles', 'tile_lists.py')
    """
    try:
        return _header(_file_of(module), name)
    except (_Unclear, OSError, UnicodeDecodeError):
        return None


@functools.cache
def _file_of(module: str) -> _File:
    path = file_of(module)
    if path is None:
        raise _Unclear
    return _File(module, path)


class _File:
    """The text of a module, and the values of its names."""

    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path
        self.text = path.read_text(encoding="utf-8") + "\n"
        self.annotations: dict[str, str] = {}
        self.imported = {each.bound: each for each in imports(self.text, module, nested=False)}

    def origin(self, node: ast.expr) -> tuple[str, str]:
        """Return the module and name that a dotted name stands for, if it was imported."""
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
        """Return the value of an expression of literals, and of names that stand for such."""
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
        """Return the value of a name at the top of the module."""
        node = assigned(self.text, name)
        if node is not None:
            return self.value(node)
        found = self.imported.get(name)
        if found is None or not found.name or found.module == self.module:
            raise _Unclear
        return _file_of(found.module).named(found.name)


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
    found = definition(file.text, name)
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
