"""Load and run saved models without torch (``opkit.runtime.load``)."""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from collections.abc import Mapping
from typing import Any

from opkit.errors import ArgumentError, ModelFileError
from opkit.runtime import structure
from opkit.runtime.arrays import Array, Taken
from opkit.runtime.library import ERROR_BYTES, error_buffer, library, message


def load(path: str | os.PathLike[str], *, verify: bool = True) -> Model:
    """Load a model that :func:`opkit.export` wrote for CPUs, and return a function that runs it without torch.

    The model may call what opkit compiled, operators of its own with kernels in C or C++, products of float32 matrices,
    convolutions, and attention. A file contains machine code: load files of people whom you would run a program of.

    Args:
        path: the file.
        verify: compute the sha256 of the weights, which reads all of them.

    Returns:
        A :class:`Model`. Call it with NumPy arrays, or other tensors with DLPack, as the module that was exported. The leaves of
        its result are :class:`Array`.

    Raises:
        ModelFileError: the file is damaged, made for another machine, or calls operators that only torch has; the message says
            which.
    """
    error = error_buffer()
    handle = library().opkit_model_load(os.fsencode(path), int(verify), None, error, ERROR_BYTES)
    if not handle:
        raise ModelFileError(f"opkit.runtime.load: {message(error)}")
    return Model(_Handle(handle))


class _Handle:
    """A model of the library, which is freed once neither the model nor one of its entries is used."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        weakref.finalize(self, library().opkit_model_free, pointer).atexit = False


class Model:
    """A loaded model: call it with the arguments of the module that was exported.

    Attributes:
        entries: its entry points by name; one without a name for a file of one module.

    Raises:
        ArgumentError: at a call: an argument's shape, dtype or value is not as it was exported, or there are several entries.
        RuntimeError: at a call: a kernel failed.
    """

    def __init__(self, handle: _Handle) -> None:
        manifest = json.loads(library().opkit_model_manifest(handle.pointer))
        self.entries = {name: Entry(handle, name, each) for name, each in manifest["entries"].items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with the arguments of the module that was exported.

        Raises:
            ArgumentError: an argument is not as it was exported, or there are several entries.
            RuntimeError: a kernel failed.
        """
        if len(self.entries) != 1:
            raise ArgumentError(
                f"The model has the entries {', '.join(map(repr, self.entries))}: call model.entries[name](...)."
            )
        return next(iter(self.entries.values()))(*args, **kwargs)


class Entry:
    """A function of a loaded model.

    Raises:
        ArgumentError: at a call: an argument's shape, dtype or value is not as it was exported.
        RuntimeError: at a call: a kernel failed.
    """

    def __init__(self, handle: _Handle, name: str, convention: Mapping[str, Any]) -> None:
        self._handle, self._name = handle, name.encode()
        self._arguments: list[Any] = convention["arguments"]
        self._taken, self._returned = convention["taken"], convention["returned"]
        self._results: list[Any] = convention["results"]
        self._outputs = library().opkit_model_output_count(handle.pointer, self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Raises:
            ArgumentError: an argument is not as it was exported.
            RuntimeError: a kernel failed.
        """
        leaves = structure.flatten(self._taken, (args, kwargs), "the arguments")
        taken: list[Taken] = []
        for (name, *fixed), value in zip(self._arguments, leaves, strict=True):
            if not fixed:
                taken.append(Taken(value, name))
            elif type(value) is not type(fixed[0]) or value != fixed[0]:
                raise ArgumentError(f"{name}={value!r}: the model was exported with {fixed[0]!r}, which is part of it.")
        outputs = self._run(taken)
        results = (outputs[each] if isinstance(each, int) else each[0] for each in self._results)
        return structure.unflatten(self._returned, results)

    def _run(self, taken: list[Taken]) -> list[Array | None]:
        addresses = (ctypes.c_void_p * len(taken))(*(each.address for each in taken))
        results, error = (ctypes.c_void_p * self._outputs)(), error_buffer()
        status = library().opkit_model_run(
            self._handle.pointer, self._name, addresses, len(taken), results, self._outputs, error, ERROR_BYTES
        )
        if status:
            kind = ArgumentError if status == 2 else RuntimeError
            raise kind(f"{message(error)}.")
        return [Array(each) if each else None for each in results]
