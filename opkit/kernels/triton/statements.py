"""Single statements of a Python file, read without importing it: definitions, assignments, and what is imported.

A file is not parsed as a whole, which takes milliseconds: a statement at its top ends where the next line is not indented.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from opkit.kernels.triton import parsing

_CONTINUES = re.compile(r"[^\n]*\n(?:(?:[ \t)\]}#][^\n]*)?\n)*")
_ENDS = re.compile(r"^(?:(?:async )?def [^\n]*|\)[^\n]*):[ \t]*(?:#[^\n]*)?\n", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\((?:[^()#]|#[^\n]*)*\)|[^\n]+)|import[ \t]+([\w.]+[^\n]*))$",
    re.MULTILINE,
)
_COMMENT = re.compile(r"#[^\n]*")


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
        source, names, modules = match.groups()
        if match[0][0] in " \t" and not nested:
            continue
        for name in _COMMENT.sub("", names or modules).strip(" \t()\n\\").split(","):
            words = name.split()
            if words and source is not None:
                yield Imported(_absolute(source, module), words[0], words[-1])
            elif words:
                yield Imported(words[0], "", words[2] if len(words) == 3 else words[0].partition(".")[0])


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
    """Return the one function of this name at the top of a file; None where there is not one.

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
    """Return what the one assignment to this name at the top of a file gives it; None where there is not one."""
    found = [each for ends in (" =", "=", ":", " :") for each in _starting(text, name + ends)]
    node = _parsed(_statement(text, found[0])) if len(found) == 1 else None
    return node.value if isinstance(node, ast.Assign) and len(node.targets) == 1 else None


def _parsed(text: str) -> ast.stmt | None:
    """Return the last statement of a text; None of what is no Python."""
    try:
        with parsing.ALONE:
            statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    return statements[-1] if statements else None
