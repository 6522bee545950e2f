"""Hash everything that decides what an operator computes.

torch's compile caches identify a custom operator by its name. An edit of the reference, of a helper in another module,
of a constant in a closure, of a kernel or of a rule would therefore be served from a stale cache (pytorch#187319,
#144344). The contract hash covers the schema and, for every function registered on the operator, its bytecode, constants,
defaults, closure and, recursively, the functions, classes and constants that it names outside torch and the standard
library. What it names of opkit stands for opkit's sources as a whole.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import hashlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from opkit.kernels.triton import parsing
from opkit.op.trace.snapshots import LIBRARIES

_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.Size,
    range,
    slice,
)
_MAX_OBJECTS = 10_000  # a closure over, say, a test framework's objects would lead through all of it
_OWN = Path(__file__).parents[2]
_SLOT = (types.MemberDescriptorType, types.GetSetDescriptorType)
_CLASS_NOISE = {
    "__abstractmethods__",
    "__annotations__",
    "__annotations_cache__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__orig_bases__",
    "__parameters__",
    "__slots__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}


class _Hasher:
    """Feeds values into one digest: atoms and tuples in place, everything else once, breadth first."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.queue: list[object] = []  # in the order of ``seen``; it keeps ids from being reused while hashing

    def finish(self) -> str:
        """Hash the queued objects, and return the digest."""
        for index, value in enumerate(self.queue):  # it grows during the loop
            self.text("object", str(index))
            if index < _MAX_OBJECTS:
                self._object(value)
            else:
                self.text(type(value).__module__, type(value).__qualname__)
        return self.digest.hexdigest()

    def text(self, *parts: str) -> None:
        for part in parts:
            self.digest.update(part.encode("utf-8", "surrogatepass") + b"\0")

    def value(self, value: Any) -> None:
        if isinstance(value, _ATOMS):
            self.text(type(value).__name__, repr(value))
        elif isinstance(value, enum.Enum):
            self.text("enum", type(value).__qualname__, value.name, repr(value.value))
        elif isinstance(value, tuple):  # equal constants may or may not be one object
            self._items(value)
        elif isinstance(value, frozenset):
            self._set(value)
        else:
            if id(value) not in self.seen:
                self.seen[id(value)] = len(self.queue)
                self.queue.append(value)
            self.text("see", str(self.seen[id(value)]))

    def _object(self, value: Any) -> None:
        if hasattr(type(value), "contract_parts"):  # another operator of opkit's
            self._items([item for part in value.contract_parts() for item in part])
            return
        if hasattr(type(value), "cache_key") and hasattr(value, "src"):  # a Triton kernel: its key covers what it calls
            self.text("triton", parsing.cache_key(value))
            return
        for kinds, handle in _HANDLERS:
            if isinstance(value, kinds):
                handle(self, value)
                return
        self._instance(value)

    def _instance(self, value: Any) -> None:
        kind = type(value)
        if _is_own(kind.__module__):  # such as a kernel's class: its object says what is computed
            self.text("class", kind.__module__, kind.__qualname__)
        else:
            self.value(kind)
        if getattr(value, "__wrapped__", None) is not None:  # functools.cache and its like
            self.value(value.__wrapped__)
        elif not _external(kind.__module__) or isinstance(value, torch.nn.Module):
            slots = [name for base in kind.__mro__ for name in vars(base) if isinstance(vars(base)[name], _SLOT)]
            state = {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in slots if hasattr(value, n)}}
            self._mapping({name: state[name] for name in sorted(state)})
        else:
            self._items(_reduced(value))

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self.text("array", str(array.dtype), str(array.shape))
        if array.dtype.hasobject:
            self._items(array.ravel().tolist())
        else:
            self.digest.update(array.tobytes())

    def _items(self, values: Iterable[Any]) -> None:
        self.text("items", type(values).__name__)
        for value in values:
            self.value(value)

    def _set(self, values: Iterable[Any]) -> None:
        self._items(sorted(values, key=repr))

    def _mapping(self, mapping: dict[Any, Any]) -> None:
        self.text("mapping")
        for key, value in mapping.items():
            self.value(key)
            self.value(value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.text("tensor", str(tensor.dtype), str(tuple(tensor.shape)), str(tensor.device))
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            self._items([context, *(getattr(tensor, name) for name in names)])
        elif tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):
            dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
            plain = dense.dequantize() if dense.is_quantized else dense.resolve_conj().resolve_neg()
            flat = plain.cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
            self.digest.update(flat.view(torch.uint8).numpy().tobytes())

    def _class(self, kind: type) -> None:
        self.text("class", kind.__module__, kind.__qualname__)
        if _is_own(kind.__module__):
            self.text(sources_hash(_OWN))
        if _is_own(kind.__module__) or _external(kind.__module__):
            return
        self._items(kind.__bases__)
        for name, member in sorted(vars(kind).items()):
            if name not in _CLASS_NOISE and not isinstance(member, _SLOT):
                self.text(name)
                self.value(member)

    def _enumeration(self, kind: type[enum.Enum]) -> None:
        self._items([(member.name, member.value) for member in kind])
        self._class(kind)

    def _property(self, member: property) -> None:
        self._items((member.fget, member.fset, member.fdel))

    def _method_of_class(self, member: Any) -> None:
        self.text(type(member).__name__)
        self.value(member.__func__)

    def _module(self, module: types.ModuleType) -> None:
        self.text("module", module.__name__)

    def _method(self, method: types.MethodType) -> None:
        self.value(method.__func__)
        self.value(method.__self__)

    def _partial(self, partial: functools.partial[Any]) -> None:
        self.value(partial.func)
        self.value(partial.args)
        self.value(partial.keywords)

    def _function(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if _external(function.__module__) and wrapped is None:
            self.text("function", function.__module__ or "", function.__qualname__)
            return
        if _is_own(function.__module__) and not function.__closure__ and wrapped is None:
            self.text("function", function.__module__, function.__qualname__, sources_hash(_OWN))
            return
        self.text("function", function.__qualname__)
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
        self._code(function.__code__, function.__globals__)
        for cell in function.__closure__ or ():
            self._cell(cell)
        if wrapped is not None:
            self.value(wrapped)

    def _cell(self, cell: types.CellType) -> None:
        try:
            self.value(cell.cell_contents)
        except ValueError:
            self.text("empty cell")

    def _code(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        self.digest.update(code.co_code)
        self._items([const for const in code.co_consts if not isinstance(const, types.CodeType)])
        self.text(*code.co_names, *code.co_varnames)
        for value in (*_referenced(code, scope), *_imported(code, scope)):
            self.value(value)
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._code(const, scope)


def _is_own(module: str | None) -> bool:
    return (module or "").split(".")[0] == __name__.split(".")[0]


@functools.cache
def sources_hash(folder: Path) -> str:
    """Return the hash of the Python sources in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _external(module: str | None) -> bool:
    name = module or ""
    # modules that lowering rules are written with; the keys of the compiler's plans cover its sources, too
    own = name == "opkit.lowering" or name.startswith("opkit.compiler.")
    return own or name.split(".")[0] in LIBRARIES


def _referenced(code: types.CodeType, scope: dict[str, Any]) -> Iterable[Any]:
    """Yield the values of the code's global names, with attributes of the user's own modules resolved."""
    current: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in scope:
            current = scope[instruction.argval]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(current, types.ModuleType):
            current = getattr(current, instruction.argval, None)
        else:
            current = None
        if current is not None and not (isinstance(current, types.ModuleType) and _external(current.__name__)):
            yield current


def _imported(code: types.CodeType, scope: dict[str, Any]) -> Iterable[Any]:
    """Yield the source and the definitions of the user's modules that the code itself imports."""
    instructions = list(dis.get_instructions(code))
    for level, _, instruction in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if instruction.opname != "IMPORT_NAME":
            continue
        package = scope.get("__package__") or ""
        name = "." * (level.argval or 0) + instruction.argval
        try:
            name = importlib.util.resolve_name(name, package)
            if _is_own(name):
                yield sources_hash(_OWN)
                continue
            spec = None if _external(name) else importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            yield Path(spec.origin).read_bytes()
            defined = vars(sys.modules[name]) if name in sys.modules else {}
            yield [v for v in defined.values() if getattr(v, "__module__", None) == name]


def _reduced(value: Any) -> tuple[Any, ...]:
    """Return what ``pickle`` would rebuild an object of a library's class from; nothing where it could not."""
    if isinstance(value, torch.Generator):
        return ()
    try:
        reducer = copyreg.dispatch_table.get(type(value))
        reduced: Any = reducer(value) if reducer else value.__reduce_ex__(2)
    except Exception:  # locks, handles and the like raise as they please
        return ()
    if isinstance(reduced, str):
        return (reduced,)
    return tuple(list(part) if isinstance(part, Iterator) else part for part in reduced)


_HANDLERS: list[tuple[Any, Callable[[_Hasher, Any], None]]] = [
    (torch.Tensor, _Hasher._tensor),  # pyright: ignore[reportPrivateUsage]
    (list, _Hasher._items),  # pyright: ignore[reportPrivateUsage]
    (set, _Hasher._set),  # pyright: ignore[reportPrivateUsage]
    (dict, _Hasher._mapping),  # pyright: ignore[reportPrivateUsage]
    (types.FunctionType, _Hasher._function),  # pyright: ignore[reportPrivateUsage]
    (types.MethodType, _Hasher._method),  # pyright: ignore[reportPrivateUsage]
    (functools.partial, _Hasher._partial),  # pyright: ignore[reportPrivateUsage]
    (types.ModuleType, _Hasher._module),  # pyright: ignore[reportPrivateUsage]
    (property, _Hasher._property),  # pyright: ignore[reportPrivateUsage]
    ((classmethod, staticmethod), _Hasher._method_of_class),  # pyright: ignore[reportPrivateUsage]
    (np.ndarray, _Hasher._array),  # pyright: ignore[reportPrivateUsage]
    (enum.EnumType, _Hasher._enumeration),  # pyright: ignore[reportPrivateUsage]
    (type, _Hasher._class),  # pyright: ignore[reportPrivateUsage]
]


def contract_hash(parts: Iterable[tuple[str, Any]]) -> str:
    """Return the hexadecimal digest of named parts (schema, reference, kernels, rules).

    >>> contract_hash([("schema", "(Tensor x) -> Tensor")]) == contract_hash([("schema", "(Tensor y) -> Tensor")])
    False
    """
    hasher = _Hasher()
    for name, value in parts:
        hasher.text(name)
        hasher.value(value)
    return hasher.finish()
