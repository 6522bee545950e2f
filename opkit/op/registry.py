"""The registry of this process's operators: define, replace, find and remove them, under one lock."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copyreg
import difflib
import threading
import warnings
from typing import Any

import torch

from opkit.errors import NameClashError, RedefinitionWarning, UnknownOperatorError
from opkit.op import observers
from opkit.op import torch_private as private
from opkit.op.operator import CustomOp

lock = threading.RLock()
_operators: dict[str, CustomOp[Any, Any]] = {}


def operators() -> list[CustomOp[Any, Any]]:
    """Return every operator that opkit defined in this process, sorted by name.

    >>> import opkit, torch
    >>> double = opkit.custom_op("registry_example::double", lambda x: x + x, mutates_args=(), schema="(Tensor x) -> Tensor")
    >>> double in opkit.operators(), opkit.get("registry_example::double") is double
    (True, True)
    >>> opkit.remove("registry_example::double")
    """
    with lock:
        return [_operators[name] for name in sorted(_operators)]


def find(name: str) -> CustomOp[Any, Any] | None:
    """Return the operator called ``name``; None if opkit defined none of that name."""
    with lock:
        return _operators.get(name)


def get(name: str) -> CustomOp[Any, Any]:
    """Return the operator called ``name``, such as "demo::rms_norm".

    Raises:
        UnknownOperatorError: opkit defined none of that name; the message offers the nearest names.
    """
    op = find(name)
    if op is None:
        namespace = name.split("::")[0] + "::"
        same_namespace = [known for known in _operators if known.startswith(namespace)]
        near = difflib.get_close_matches(name, same_namespace or _operators, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else " Import the module that defines it first."
        raise UnknownOperatorError(f"opkit defined no operator named {name!r}.{hint}")
    return op


def _pickled(op: CustomOp[Any, Any]) -> tuple[Any, tuple[str]]:
    return get, (op.name,)


copyreg.pickle(CustomOp, _pickled)  # an operator is pickled as its name


def remove(name: str) -> None:
    """Remove the operator called ``name`` from PyTorch; calls through remaining references to it then fail.

    Raises:
        UnknownOperatorError: opkit defined none of that name.
    """
    with lock:
        get(name)._retire()  # pyright: ignore[reportPrivateUsage]
        del _operators[name]
        private.custom_ops.OPDEFS.pop(name, None)
        private.destroy_library(private.custom_ops.OPDEF_TO_LIB.pop(name))


def install(op: CustomOp[Any, Any], module: str, stacklevel: int) -> None:
    """Register ``op`` with PyTorch, in place of an older definition by the same module.

    Raises:
        NameClashError: another module or library holds the name.
    """
    name = op.name
    with lock:
        older = _operators.get(name)
        if older is not None:
            if (holder := older.reference.__module__) != module:
                raise NameClashError(
                    f"{name} is already defined by the module {holder}; {module} cannot define it too. Choose another name, "
                    f"or call opkit.remove({name!r}) first."
                )
            warnings.warn(
                f"{name} was defined before by {module}; the new definition takes its place.",
                RedefinitionWarning,
                stacklevel=stacklevel,
            )
            older._retire()  # pyright: ignore[reportPrivateUsage]
        elif name in private.custom_ops.OPDEF_TO_LIB:
            foreign = private.custom_ops.OPDEFS.get(name)
            holder = getattr(getattr(foreign, "_init_fn", None), "__module__", None)
            if holder is not None and holder != module:
                raise NameClashError(
                    f"{name} is already defined by torch.library.custom_op in {holder}. Choose another name."
                )
        if name in private.custom_ops.OPDEF_TO_LIB:
            private.destroy_library(private.custom_ops.OPDEF_TO_LIB.pop(name))
        library = torch.library.Library(op.name.split("::")[0], "FRAGMENT")
        try:
            op._register(library)  # pyright: ignore[reportPrivateUsage]
        except BaseException:
            private.destroy_library(library)
            _operators.pop(name, None)
            raise
        private.custom_ops.OPDEF_TO_LIB[name] = library
        private.custom_ops.OPDEFS[name] = op
        _operators[name] = op
        for observer in observers:
            observer(op)
