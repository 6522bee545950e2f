"""Find and track what a reference reads in addition to its arguments: globals, closures, attributes, entries, the environment.

A result of running a function once (a traced backward, a compiled program) is valid for these values only. They are found in the
bytecode of the function and of those that it calls: each name, with the attributes and constant keys that follow it, is looked
up again for each comparison. Objects that are passed on are compared by all that they hold, tensors and functions by identity.
torch and the standard library count as constant, and so do the names by which they are imported.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import builtins
import collections
import contextlib
import contextvars
import dis
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Generator, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from opkit.op import torch_private as private
from opkit.op.torch_compile import add_guard, add_test, in_guarded_compilation
from opkit.op.trace.snapshots import (
    ATOMS,
    MISSING,
    Snapshots,
    TooLargeError,
    decides_sizes,
    has_parts,
    is_constant,
    is_operator,
    parts_of,
)

_MAX_CHANGES, _MAX_OWN = 4, 64


class ReferenceState:
    """The values that an operator's reference reads, from call to call.

    ``changes`` counts how often a compiled program met other values than the one before.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self.changes = 0
        self._reads: Reads | None = None
        self._last: dict[bool, tuple[Hashable, ...]] = {}
        self._guarded: tuple[Hashable, ...] | None = None
        self._own: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}

    def current(self, versions: bool = False) -> tuple[Hashable, ...]:
        """Return the values that a call would read now; with ``versions``, a tensor that was written to is another value."""
        reads = self._reads
        if reads is not None and not reads.paths:
            return ()
        try:
            values = None if reads is None else reads.values(versions)
        except TooLargeError:
            values = None
        if values is None or values != self._last.get(versions):
            self._reads = reads = Reads(self.function)  # other functions may be called from now on
            self._last[versions] = values = reads.values(versions)
        return self._own.get(values, values)

    def of_sizes(self) -> tuple[Hashable, ...]:
        """Return the values if some of them may decide sizes; else nothing."""
        values = self.current()
        return values if any(map(decides_sizes, values)) else ()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Ignore what the reference itself writes, such as a cache of its own, while opkit runs it to trace it."""
        before = self.current()
        yield
        after = self.current()
        if after != before:
            if len(self._own) >= _MAX_OWN:
                self._own.clear()
            self._own[after] = before

    @property
    def unknown(self) -> str:
        """The line that reads what cannot be compared from call to call; empty where there is none."""
        self.current()
        return "" if self._reads is None else self._reads.unknown

    @property
    def volatile(self) -> bool:
        """Whether programs were recompiled for other values several times."""
        return self.changes >= _MAX_CHANGES

    def guard(self) -> None:
        """Guard the program that torch.compile is tracing on the present values."""
        if not in_guarded_compilation():
            return
        values = self.current(versions=True)
        if values:
            self.changes += self._guarded is not None and values != self._guarded
            self._guarded = values
            add_guard(self._unchanged)

    @functools.cached_property
    def _unchanged(self) -> Callable[[Any, Any], None]:
        """The function that creates the guard after tracing, because running the reference may have filled its own cache."""

        def create(builder: Any, guard: Any) -> None:
            expected = self.current(versions=True)
            text = f"the reference of {self.name} reads what it read when it was compiled"
            add_test(builder, guard, lambda: self.current(versions=True) == expected, text)

        return create


_MAX_FUNCTIONS = 2000
_CHANGING = {
    "time",
    "random",
    "datetime",
    "secrets",
    "uuid",
    "posix",
    "nt",
    "genericpath",
    "io",
    "_io",
    "socket",
    "_thread",
}
_CHANGING_BUILTINS = {"globals", "locals", "eval", "exec", "open", "input"}
_WRITERS = {"append", "extend", "add", "update", "insert", "clear", "appendleft"}
_WHOLE = (torch.Tensor, contextvars.ContextVar, os._Environ)  # pyright: ignore[reportPrivateUsage]
_SKIPPED = {"PUSH_NULL", "CACHE", "EXTENDED_ARG", "PRECALL", "NOP", "RESUME", "COPY_FREE_VARS", "NOT_TAKEN"}
_GLOBALS, _ATTRIBUTES = {"LOAD_GLOBAL", "LOAD_NAME"}, {"LOAD_ATTR", "LOAD_METHOD"}
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}


class _Path:
    """A name, and the attributes and constant keys that follow it."""

    __slots__ = ("root", "steps")

    def __init__(self, root: Callable[[], Any], steps: tuple[tuple[bool, Any], ...] = ()) -> None:
        self.root, self.steps = root, steps

    def then(self, attribute: bool, key: Any) -> _Path:
        return _Path(self.root, (*self.steps, (attribute, key)))

    def value(self) -> Any:
        value = self.root()
        try:
            for attribute, key in self.steps:
                value = getattr(value, key) if attribute else value[key]
        except Exception:  # a property of the user's raises as it pleases
            return MISSING
        return value


class Reads:
    """The paths that one function reads, found in its bytecode.

    ``unknown`` names the line that reads what cannot be compared; it is empty where there is none.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.paths: dict[Any, _Path] = {}
        self.unknown = ""
        self._seen: dict[int, Any] = {}
        self._work: list[Any] = []
        self._reach(function)
        while self._work:
            if len(self._seen) > _MAX_FUNCTIONS:
                self._note_unknown(getattr(function, "__code__", None), 0, "calls more functions than can be looked at")
                break
            self._look(self._work.pop(0))

    def values(self, versions: bool) -> tuple[Hashable, ...]:
        """Return the values that the paths lead to now; with ``versions``, a tensor that was written to is another value."""
        return tuple([Snapshots(versions).take(path.value()) for path in self.paths.values()])

    def _note_unknown(self, code: types.CodeType | None, line: int | None, what: str) -> None:
        where = "" if code is None else f"{code.co_filename}:{line or code.co_firstlineno}: "
        self.unknown = self.unknown or f"{where}{what}"

    def _reach(self, value: Any) -> None:
        """Queue ``value``, and what it holds, for :meth:`_look`."""
        plain = (*ATOMS, float, complex, torch.Tensor, types.ModuleType)
        if id(value) not in self._seen and not isinstance(value, plain):
            self._seen[id(value)] = value
            self._work.append(value)

    def _look(self, value: Any) -> None:
        if is_operator(value):
            self._reach(getattr(value, "reference", None))
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):  # pyright: ignore[reportPrivateUsage]
            name = value._qualified_op_name if isinstance(value, torch._ops.OpOverloadPacket) else value.name()  # pyright: ignore
            op = private.custom_ops.OPDEFS.get(name.removesuffix(".default"))
            if is_operator(op):
                self._reach(op)
        elif isinstance(value, types.FunctionType):
            if not is_constant(value.__globals__.get("__name__")):
                self._function(value)
            self._reach(getattr(value, "__wrapped__", None))
        elif isinstance(value, type):
            self._class(value)
        elif hasattr(value, "__wrapped__"):  # functools.cache and its like
            self._reach(value.__wrapped__)
        elif has_parts(value):
            self._reach(type(value))
            for part in parts_of(value):
                self._reach(part)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not is_constant(base.__module__):
                for member in vars(base).values():
                    inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                    if isinstance(inner, types.FunctionType):
                        self._reach(inner)

    def _function(self, function: types.FunctionType) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        for part in (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values()):
            self._reach(part)
        if any(has_parts(part) for part in function.__defaults__ or ()):
            self.paths[function, "defaults"] = _Path(lambda: function.__defaults__)
        self._code(function.__code__, function.__globals__, cells)

    # ---- bytecode --------------------------------------------------------------------------------------------------

    def _code(self, code: types.CodeType, scope: dict[str, Any], cells: dict[str, types.CellType]) -> None:
        steps = list(_steps(code))
        stores = collections.Counter(step.value for step in steps if step.op == "STORE_FAST")
        aliases: dict[str, _Path] = {}
        path: _Path | None = None
        imported: _Path | None = None
        constants: list[Any] = []  # the constant after the path, which may be a key
        for number, step in enumerate(steps):
            if path is not None:
                if step.op in _ATTRIBUTES and not constants and self._extends(path, step.value):
                    path = path.then(True, step.value)
                    continue
                if step.op in _CONSTANTS and not constants:
                    constants.append(step.value)
                    continue
                if constants and step.subscripts and not isinstance(path.value(), _WHOLE):
                    path = path.then(False, constants.pop())
                    continue
                if step.op == "STORE_FAST" and not constants and stores[step.value] == 1:
                    aliases[step.value] = path
                elif step.op not in ("IMPORT_FROM", "POP_TOP"):
                    self._end(path, step, constants, code)
                path, constants = None, []
            if step.op in _GLOBALS:
                path = _Path(functools.partial(scope.get, step.value, MISSING))
                if step.value not in scope and step.value in _CHANGING_BUILTINS:
                    self._note_unknown(code, step.line, f"calls {step.value}()")
            elif step.op == "IMPORT_NAME":
                path = imported = _imported(step.value, [before.value for before in steps[number - 2 : number]], scope)
            elif step.op == "IMPORT_FROM" and imported is not None:
                path = imported.then(True, step.value)
            elif step.op in ("STORE_GLOBAL", "DELETE_GLOBAL") or (step.op == "STORE_DEREF" and step.value in cells):
                self._note_unknown(code, step.line, f"writes to {step.value}")
            elif step.op.startswith("LOAD_") and "DEREF" in step.op and step.value in cells:
                path = _Path(functools.partial(_content, cells[step.value]))
            elif step.op.startswith("LOAD_FAST") and step.value in aliases:
                path = aliases[step.value]
            elif step.op == "LOAD_CONST" and isinstance(step.value, types.CodeType):
                self._code(step.value, scope, cells)

    def _extends(self, path: _Path, attribute: str) -> bool:
        """Return whether the path continues with an attribute of its value; attributes of torch's objects are not followed."""
        value = path.value()
        if value is MISSING or isinstance(value, _WHOLE):
            return False
        plain = isinstance(value, (list, dict, set, collections.deque, *ATOMS))
        return not plain or attribute in getattr(value, "__dict__", {})  # which the user set

    def _end(self, path: _Path, after: _Step, constants: list[Any], code: types.CodeType) -> None:
        value, line = path.value(), after.line
        if isinstance(value, os._Environ) or value is os.getenv:  # pyright: ignore[reportPrivateUsage]
            key = constants[0] if constants and isinstance(constants[0], str) else None
            self.paths["environment", key] = _Path(
                functools.partial(os.environ.get, key) if key else functools.partial(dict, os.environ)
            )
            return
        if isinstance(value, types.ModuleType):
            if not is_constant(value.__name__):
                self._note_unknown(code, line, f"passes the module {value.__name__} on")
            return
        if after.op in _ATTRIBUTES and after.value in _WRITERS:
            return
        if _changes(value):
            self._note_unknown(code, line, f"calls {getattr(value, '__qualname__', value)}")
            return
        self._reach(value)
        root: Any = path.root
        names = [a if isinstance(a, str) else id(a) for a in root.args]
        key = (id(getattr(root.func, "__self__", None)), *names, path.steps)
        if not self._fixed(path, value):
            try:
                Snapshots(False).take(value)
            except TooLargeError:
                self._note_unknown(
                    code, line, f"reads an object of the class {type(value).__name__} that holds too much"
                )
                return
            self.paths[key] = path

    def _fixed(self, path: _Path, value: Any) -> bool:
        """Return whether a path always leads to the same object: builtins, and torch's objects under their own names."""
        named = path.steps[-1][1] if path.steps else (getattr(path.root, "args", None) or [None])[0]
        if value is MISSING:
            return not path.steps and hasattr(builtins, str(named))
        if isinstance(path.root(), types.ModuleType) and is_constant(path.root().__name__):
            return True
        own = getattr(value, "__name__", None)
        module = getattr(value, "__module__", None) or type(value).__module__
        return own is not None and own == named and is_constant(module)


class _Step(NamedTuple):
    """One instruction."""

    op: str
    value: Any
    line: int | None
    subscripts: bool


def _steps(code: types.CodeType) -> Iterator[_Step]:
    line: int | None = None
    for instruction in dis.get_instructions(code):
        starts: Any = instruction.starts_line
        line = getattr(instruction, "line_number", None if isinstance(starts, bool) else starts) or line
        name, value = instruction.opname, instruction.argval
        if isinstance(value, tuple) and name.count("_FAST") == 2:  # Python 3.13 and newer: two at once
            half = name.index("_FAST") + (12 if "_FAST_BORROW_" in name else 5)
            yield from (
                _Step(each, of, line, False) for each, of in zip((name[:half], name[half + 1 :]), value, strict=True)
            )
        elif name not in _SKIPPED:
            subscripts = name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]")
            yield _Step(name, value, line, subscripts)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _changes(value: Any) -> bool:
    """Return whether each call of ``value`` gives another result."""
    holder = getattr(value, "__self__", None)
    names = [getattr(value, "__module__", None), getattr(holder, "__module__", None), type(holder).__module__]
    modules = [name for name in names if isinstance(name, str)]
    if not callable(value) or isinstance(value, type) or is_operator(value):
        return False
    return any(name.split(".")[0] in _CHANGING or name.startswith("numpy.random") for name in modules)


def _imported(name: str, before: list[Any], scope: dict[str, Any]) -> _Path | None:
    """Return the path to the module that an import statement within a function imports."""
    level, names = before if len(before) == 2 else (0, None)
    try:
        absolute = importlib.util.resolve_name("." * (level or 0) + name, scope.get("__package__") or "")
    except ImportError:  # the function itself raises the same error
        return None
    name = absolute if names else absolute.split(".")[0]
    if is_constant(name) and name not in sys.modules:
        return None
    return _Path(functools.partial(sys.modules.get, name, MISSING))
