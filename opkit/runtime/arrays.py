"""Results of models and kernels, and what they take: tensors by DLPack (https://dmlc.github.io/dlpack)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from opkit.errors import ArgumentError
from opkit.runtime.library import ManagedTensor, Tensor, library

_CPU = (1, 0)
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}


def _capsules(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of Python's C API. Those of ``ctypes.pythonapi`` are shared, and other packages set their types."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new_capsule = _capsules("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_capsule_pointer = _capsules("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_has_name = _capsules("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_NAME = ctypes.c_char_p(b"dltensor")  # a capsule's name must live as long as the capsule


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete_unused(capsule: int) -> None:
    """Delete the tensor of a capsule that nobody took."""
    held = ctypes.cast(capsule, ctypes.py_object)
    if _has_name(held, _NAME):
        delete(_capsule_pointer(held, _NAME))


def delete(pointer: Any) -> None:
    """Delete a ``DLManagedTensor``."""
    ManagedTensor.from_address(pointer).deleter(pointer)


class Array:
    """A result on the CPU: memory that ``numpy.from_dlpack``, ``torch.from_dlpack`` and the like take without a copy.

    Attributes:
        shape: the sizes.
        strides: in elements.
        dtype: the name of the type of its elements, such as "float32".
    """

    def __init__(self, pointer: int) -> None:
        self._pointer, self._delete = pointer, delete
        tensor = ManagedTensor.from_address(pointer).dl_tensor
        self.shape: tuple[int, ...] = tuple(tensor.shape[: tensor.ndim])
        self.strides: tuple[int, ...] = tuple(tensor.strides[: tensor.ndim])
        code, bits = tensor.dtype.code, tensor.dtype.bits
        self.dtype = "bool" if code == 6 else f"{_KINDS[code]}{bits}"

    def __del__(self) -> None:
        if hasattr(self, "_pointer"):
            self._delete(self._pointer)

    def __repr__(self) -> str:
        return f"Array({self.dtype}[{', '.join(map(str, self.shape))}])"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no dimensions has no length")
        return self.shape[0]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(library().opkit_tensor_share(self._pointer), _NAME, _delete_unused)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        found = numpy.from_dlpack(self)
        return found if dtype is None and not copy else found.astype(dtype or found.dtype, copy=bool(copy))


class Taken:
    """A tensor of the caller's, for as long as a call takes.

    Args:
        value: an object with ``__dlpack__``, or an integer.
        name: what it is called in messages.

    Attributes:
        address: that of its ``DLTensor``.

    Raises:
        ArgumentError: it is no tensor on the CPU.
    """

    def __init__(self, value: Any, name: str) -> None:
        if type(value) is int:
            self._held: Any = (ctypes.c_int64(value), Tensor())
            number, tensor = self._held
            tensor.data, tensor.device.device_type = ctypes.addressof(number), _CPU[0]
            tensor.dtype.bits, tensor.dtype.lanes = 64, 1
            self.address: int = ctypes.addressof(tensor)
            return
        if not hasattr(value, "__dlpack__"):
            raise ArgumentError(
                f"{name} is a {type(value).__name__}; pass a NumPy array, or another tensor with __dlpack__."
            )
        if next(iter(value.__dlpack_device__())) != _CPU[0]:
            raise ArgumentError(f"{name} is not on the CPU.")
        try:
            self._held = value.__dlpack__()
        except (BufferError, TypeError) as error:
            raise ArgumentError(f"{name} cannot be passed: {error}") from error
        self.address = _capsule_pointer(self._held, _NAME)
