"""``libopkit_model``, and the structures that its functions take (``include/opkit_model.h``)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from opkit.errors import ArgumentError

ERROR_BYTES = 4096


class Device(ctypes.Structure):
    """DLPack's ``DLDevice``."""

    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DataType(ctypes.Structure):
    """DLPack's ``DLDataType``."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    """DLPack's ``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ManagedTensor(ctypes.Structure):
    """DLPack's ``DLManagedTensor``."""

    _fields_ = (
        ("dl_tensor", Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class Argument(ctypes.Structure):
    """``opkit_argument``: ``value`` is the union."""

    _fields_ = (("kind", ctypes.c_int32), ("count", ctypes.c_int64), ("value", ctypes.c_uint64))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "model_load": (
        ctypes.c_void_p,
        (ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t),
    ),
    "model_free": (None, (ctypes.c_void_p,)),
    "model_manifest": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "model_output_count": (ctypes.c_int64, (ctypes.c_void_p, ctypes.c_char_p)),
    "model_run": (
        ctypes.c_int32,
        (
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
            ctypes.c_char_p, ctypes.c_size_t,
        ),
    ),
    "set_threads": (None, (ctypes.c_int64,)),
    "kernel_load": (ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)),
    "kernel_schema": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "kernel_output_count": (ctypes.c_int64, (ctypes.c_void_p,)),
    "kernel_output_alias": (ctypes.c_int64, (ctypes.c_void_p, ctypes.c_int64)),
    "kernel_call": (
        ctypes.c_int32,
        (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p,
            ctypes.c_size_t,
        ),
    ),
    "tensor_share": (ctypes.c_void_p, (ctypes.c_void_p,)),
}  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, with the types of its functions."""
    found = ctypes.CDLL(str(path()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, f"opkit_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def path() -> Path:
    """Return the path of the library."""
    return Path(__file__).with_name("libopkit_model.so")


def error_buffer() -> Any:
    """Return memory for a message."""
    return ctypes.create_string_buffer(ERROR_BYTES)


def message(buffer: Any) -> str:
    """Return the message in the memory."""
    return buffer.value.decode(errors="replace")


def set_threads(count: int) -> None:
    """Set how many threads models and kernels use; 0 for as many as OpenMP says.

    Raises:
        ArgumentError: ``count`` is negative.
    """
    if count < 0:
        raise ArgumentError(f"opkit.runtime.set_threads: count={count} is negative.")
    library().opkit_set_threads(count)
