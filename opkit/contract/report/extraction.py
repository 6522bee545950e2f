"""This module copies a function out of source files with all the names that it uses, so that the copy runs on its own."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_REGISTERS = ("impl", "define", "register", "def_")
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclasses.dataclass
class Extraction:
    """The statements that one script copies, out of any number of files. A name has one meaning in it.

    Attributes:
        unknown: names that nothing defines, for the reader to fill in.
    """

    chosen: dict[tuple[str, int, int], str] = dataclasses.field(default_factory=dict)
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: dict[str, None] = dataclasses.field(default_factory=dict)
    known: dict[str, Any] = dataclasses.field(default_factory=dict)
    _trees: dict[str, ast.Module] = dataclasses.field(default_factory=dict)
    _resolved: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def lines(self) -> list[str]:
        """Return the statements: imports, values, then each file's in their order."""
        first = [text for key, text in sorted(self.chosen.items()) if text.startswith("from __future__")]
        rest = [text for key, text in sorted(self.chosen.items()) if not text.startswith("from __future__")]
        imports = [text for text in rest if text.startswith(("import ", "from "))]
        others = [text for text in rest if not text.startswith(("import ", "from "))]
        values = [f"{name} = {text}" for name, text in self.values.items()]
        return [*dict.fromkeys(first), *dict.fromkeys(imports), *values, *others]

    def local(self, file: str, line: int) -> bool:
        """Whether a line is inside a function."""
        return len(_scopes(self._tree(file), line)) > 1

    def function(self, function: types.FunctionType, target: Any) -> str | None:
        """Copy a function and its registrations. Return the expression for it in the copy, or None without source."""
        code = function.__code__
        tree = self._tree(code.co_filename)
        scopes = _scopes(tree, code.co_firstlineno)
        node = _node(tree, code)
        if node is None:
            return None
        scopes = [scope for scope in scopes if scope is not node]
        self._remember(function, scopes, code.co_filename)
        if isinstance(node, ast.Lambda):
            self._needs(node, scopes, code.co_filename)
            return f"({ast.unparse(node)})"
        if not any(node in _flat(scope.body) for scope in scopes):
            return None
        name = self._bound(node, scopes, target)
        self._copy(node, scopes, code.co_filename)
        self._resolve(name, scopes, code.co_filename)
        self._registrations(name, getattr(target, "_qualname", ""), scopes, code.co_filename)
        return name

    def around(self, file: str, line: int, name: str) -> bool:
        """Copy what defines and registers an operator called ``name`` next to a line. Return whether anything was copied."""
        scopes = _scopes(self._tree(file), line)
        self._frame(scopes, file)
        before = len(self.chosen)
        for statement in _flat(scopes[-1].body):
            if _says(statement, name) and _registers(statement):
                self._copy(statement, scopes, file)
        return len(self.chosen) > before

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            text = "".join(linecache.getlines(file))
            try:
                self._trees[file] = ast.parse(text)
            except SyntaxError:
                self._trees[file] = ast.parse("")
        return self._trees[file]

    def _remember(self, function: types.FunctionType, scopes: list[Scope], file: str) -> None:
        """Record the values of names that no statement assigns: those of a closure, and of functions that still run."""
        self._frame(scopes, file)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.known[name] = cell.cell_contents
            except ValueError:  # not yet assigned
                continue

    def _frame(self, scopes: list[Scope], file: str) -> None:
        frame = sys._getframe()
        starts = {_first(scope) for scope in scopes if not isinstance(scope, ast.Module)}
        while frame is not None:
            if frame.f_code.co_filename == file and frame.f_code.co_firstlineno in starts:
                for name, value in frame.f_locals.items():
                    self.known.setdefault(name, value)
            frame = frame.f_back

    def _bound(self, node: Any, scopes: list[Scope], target: Any) -> str:
        """Return the name of the operator: that of the decorated function, or of a later assignment that uses it."""
        if not callable(target) or isinstance(target, types.FunctionType) or node.decorator_list:
            return node.name
        names = [name for name, value in self.known.items() if value is target]
        for statement in _flat(scopes[-1].body):
            if isinstance(statement, ast.Assign) and node.name in _names(statement.value):
                names += [each.id for each in statement.targets if isinstance(each, ast.Name)]
        return names[0] if names else node.name

    def _registrations(self, name: str, qualified: str, scopes: list[Scope], file: str) -> None:
        for statement in _flat(scopes[-1].body):
            mentions = name in _names(statement, deep=False) or (qualified and _says(statement, qualified))
            if mentions and _registers(statement):
                self._copy(statement, scopes, file)

    def _copy(self, statement: ast.stmt, scopes: list[Scope], file: str) -> None:
        key = (file, _first(statement), statement.col_offset)
        if key in self.chosen:
            return
        text = "\n".join(linecache.getlines(file)[_first(statement) - 1 : statement.end_lineno]) and _text(
            file, statement
        )
        self.chosen[key] = text
        self._needs(statement, scopes, file)

    def _needs(self, node: ast.AST, scopes: list[Scope], file: str) -> None:
        for name in sorted(_names(node)):
            self._resolve(name, scopes, file)

    def _resolve(self, name: str, scopes: list[Scope], file: str) -> None:
        if (file, name) in self._resolved:
            return
        self._resolved.add((file, name))
        for depth in range(len(scopes), 0, -1):
            scope = scopes[depth - 1]
            found = [s for s in _flat(scope.body) if name in _binds(s)]
            for statement in found:
                self._copy(statement, scopes[:depth], file)
            if found:
                return
            if not isinstance(scope, ast.Module) and name in _parameters(scope):
                self._value(name)
                return
        if name not in ("torch", "__name__", "__file__") and not hasattr(builtins, name):
            self._value(name)

    def _value(self, name: str) -> None:
        """Write out the value of a name that is a parameter, or that no statement binds, if it is known."""
        if name in self.values:
            return
        text = literal(self.known[name]) if name in self.known else None
        if text is None and name in self.known:
            text = self._object(self.known[name])
        if text is None:
            self.unknown[name] = None
        elif text != name:
            self.values[name] = text

    def _object(self, value: Any) -> str | None:
        if isinstance(value, types.ModuleType):
            return f"__import__('importlib').import_module({value.__name__!r})"
        function = getattr(value, "_init_fn", value)
        return self.function(function, value) if isinstance(function, types.FunctionType) else None


def literal(value: Any) -> str | None:
    """Write a value as an expression, if it is plain data or a small tensor; return None otherwise."""
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f"float('{value}')"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value) if type(value).__module__ in ("builtins", "torch") else None
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, torch.Tensor) and value.numel() <= 64 and value.layout == torch.strided:
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})".replace("nan", "float('nan')")
    if type(value) in (list, tuple, dict, set):
        return _container(value)
    return None


def _container(value: Any) -> str | None:
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]
    texts = [literal(item) for item in items]
    if None in texts or not items:
        return repr(value) if not items else None
    joined = ", ".join(str(text) for text in texts)
    if isinstance(value, dict):
        half = len(texts) // 2
        return "{" + ", ".join(f"{k}: {v}" for k, v in zip(texts[:half], texts[half:], strict=True)) + "}"
    return {list: f"[{joined}]", tuple: f"({joined},)", set: f"{{{joined}}}"}[type(value)]


def _text(file: str, statement: ast.stmt) -> str:
    lines = [line.rstrip("\n") for line in linecache.getlines(file)[_first(statement) - 1 : statement.end_lineno]]
    if lines and lines[0][: statement.col_offset].strip():
        return ast.unparse(statement)  # something else stands before it on the line
    return inspect.cleandoc("\n" + "\n".join(lines)) if _one_line_strings(statement) else ast.unparse(statement)


def _one_line_strings(statement: ast.stmt) -> bool:
    """Return whether no string goes over several lines: removing indentation would change it."""
    strings = (n for n in ast.walk(statement) if isinstance(n, (ast.Constant, ast.JoinedStr)))
    return not any(node.lineno != node.end_lineno for node in strings)


def _first(node: Any) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _scopes(tree: ast.Module, line: int) -> list[Scope]:
    """Return the module, and the functions around a line, the outermost first."""
    around = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = [n for n in around if _first(n) < line <= (n.end_lineno or 0) or (n.lineno < line <= (n.end_lineno or 0))]
    return [tree, *sorted(inside, key=_first)]


def _node(tree: ast.Module, code: types.CodeType) -> Any:
    """Return the definition that a code object was compiled from."""
    if code.co_name == "<lambda>":
        lambdas = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
        return next((n for n in lambdas if len(lambdas) == 1 or _covers(n, code)), None)
    defs = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return next((n for n in defs if n.name == code.co_name and code.co_firstlineno in (n.lineno, _first(n))), None)


def _covers(node: ast.Lambda, code: types.CodeType) -> bool:
    """Return whether every instruction of the code is in the body of this lambda, and not in that of a lambda within it."""
    body = node.body
    starts = [p for p in code.co_positions() if (p[0] is not None and p[2] is not None and p[1] != p[0]) or p[3]]
    spans = {(p[0], p[2]) for p in starts} | {(p[1], p[3]) for p in starts}
    low, high = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    return (low in spans and high in spans) and all(low <= span <= high for span in spans)  # type: ignore[operator]


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope one by one, those inside with, if, for and try too."""
    for statement in body:
        yield statement
        if not isinstance(statement, _DEFS):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, []))


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names that a simple statement or a definition binds."""
    if isinstance(statement, _DEFS):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return set()


def _names(node: ast.AST, deep: bool = True) -> set[str]:
    """Return the names that code reads; unless ``deep``, those of the decorators of a definition alone."""
    if not deep and isinstance(node, _DEFS):
        return {name for each in node.decorator_list for name in _names(each)}
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    own = {p for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.Lambda)) for p in _parameters(n)}
    inner = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    return read - own - (inner if isinstance(node, _DEFS) else set())


def _parameters(node: Any) -> set[str]:
    a = node.args
    rest = [each for each in (a.vararg, a.kwarg) if each is not None]
    return {each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs, *rest)}


def _says(statement: ast.stmt, text: str) -> bool:
    """Return whether a string in the statement is an operator's name, or begins with it as a schema does."""
    where = statement.decorator_list if isinstance(statement, _DEFS) else [statement]
    strings = [n.value for w in where for n in ast.walk(w) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    short = text.split("::")[-1]
    return any(each.split("::")[-1].split("(")[0].split(".")[0].strip() == short for each in strings)


def _registers(statement: ast.stmt) -> bool:
    """Return whether a statement is a registration: a decorated definition, or a call such as ``op.register_fake(...)``."""
    if isinstance(statement, _DEFS):
        return bool(statement.decorator_list)
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function: ast.expr = statement.value.func
    if isinstance(function, ast.Call):  # lib.impl(...)(kernel)
        function = function.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name.startswith(_REGISTERS)
