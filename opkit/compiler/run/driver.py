"""This module passes torch's C shim to the driver, ``cpp_ext/runtime/driver.c``, which runs compiled graphs.

In place of the driver, plain Python with torch's fastest private functions took 7 to 16% longer for the forward of
``benchmarks/compile_calls.py``, 2 to 9% longer for its training step, and 4 to 11% less for a graph of one kernel (torch 2.13).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opkit import _core
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.run import torch_private as private
from opkit.compiler.run.driver_program import PRODUCTS
from opkit.op.triton.variants import driver_library

_SHIM = (
    "aoti_torch_empty_strided", "aoti_torch__reinterpret_tensor", "aoti_torch_get_data_ptr",
    "aoti_torch_new_tensor_handle", "aoti_torch_delete_tensor_object",
)  # fmt: skip

_CPU = torch.device("cpu")

Boxed = Callable[[list[Any]], list[Any]]


class DriverFrame(ctypes.Structure):
    """``struct frame``."""

    _fields_ = (
        ("program", ctypes.c_void_p),
        ("shim", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_count", ctypes.c_int64),
        ("fixed", ctypes.c_void_p),
        ("fixed_count", ctypes.c_int64),
        ("taken", ctypes.c_void_p),
        ("input_count", ctypes.c_int64),
        ("pointers", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("runtime", ctypes.c_void_p),
        ("device_type", ctypes.c_int64),
        ("device_index", ctypes.c_int64),
        ("launch", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("error", ctypes.c_int64),
        ("by_python", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("owned", "handles_of", "tensors_of", "failed", "finished", "functions")),
        ("thread", ctypes.c_void_p),
    )


def function(
    words: Sequence[int],
    slots: int,
    taken: Sequence[int],
    fixed: list[torch.Tensor],
    tables: Mapping[str, Any],
    calls: Mapping[str, Any],
    device: torch.device = _CPU,
) -> tuple[Boxed, DriverFrame]:
    """Return the function of a frame, and its state.

    Args:
        words: the program, all numbers.
        slots, taken: as in ``DriverProgram``.
        fixed: the frame's own tensors.
        tables: ``pointers``, ``sizes`` and ``runtime``, as ctypes objects.
        calls: ``failed``, which takes the position of a step that failed, and raises; ``finished`` or None; ``functions``.
        device: where tensors are allocated, and kernels launched.
    """
    arrays = {
        "program": _numbers(words),
        "shim": _shim(),
        "slots": (ctypes.c_void_p * max(1, slots))(),
        "fixed": (ctypes.c_void_p * max(1, len(fixed)))(),
        "taken": _numbers(taken),
        **tables,
    }
    called = {"handles_of": private.handles_of, "tensors_of": private.tensors_of, **calls}
    state = DriverFrame(
        **{name: ctypes.addressof(array) for name, array in arrays.items()},
        **{name: None if each is None else id(each) for name, each in called.items()},
        slot_count=slots,
        fixed_count=len(fixed),
        input_count=len(taken),
        device_type=_device_type(device.type),
        device_index=device.index or 0,
        launch=None if device.type == "cpu" else launch_address(),
    )
    owned = (state, arrays, called)
    state.owned = id(owned)
    return library().opkit_function(ctypes.addressof(state), fixed), state


def _numbers(of: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(1, len(of)))(*of)


# ---- torch's C shim --------------------------------------------------------------------------------------------------


@functools.cache
def _torch() -> ctypes.CDLL:
    return ctypes.CDLL(torch._C.__file__)  # its symbols are found in what it needs: libtorch_cpu


def _address(name: str) -> int:
    """Return the address of a function of torch, or 0 if it has none of that name."""
    found = getattr(_torch(), name, None)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0


@functools.cache
def _shim() -> ctypes.Array[ctypes.c_void_p]:
    addresses = [_address(name) for name in _SHIM]
    if not all(addresses):
        raise AttributeError(f"torch {torch.__version__} lacks one of {', '.join(_SHIM)}")
    return (ctypes.c_void_p * len(_SHIM))(*addresses)


def products(device: str) -> dict[str, int]:
    """Return the addresses of the functions of ``PRODUCTS`` for a kind of device; 0 for one that this torch does not have."""
    found = {target: _address(f"aoti_torch_{device}_{target.split('.')[1]}_out") for target in PRODUCTS}
    if device == "cpu" and has_own_products():
        found |= zip(("aten.mm.default", "aten.bmm.default"), _core.product_functions(), strict=True)
    return found


def has_own_products() -> bool:
    """Return whether products of float32 on the CPU are opkit's own, of 64 rows, columns and numbers to sum or more.

    They are on AMD's processors, where MKL, which torch calls, does not use AVX-512, and AVX2 to 0.8 of its peak. With fewer rows
    MKL's are as fast, since opkit packs the right operand in each call.
    """
    if _core.x86_vendor() not in ("AuthenticAMD", "HygonGenuine") or not torch.backends.mkl.is_available():
        return False
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    return precision in ("none", "ieee")  # else torch may round to bfloat16


@functools.cache
def _device_type(name: str) -> int:
    return int(getattr(_torch(), f"aoti_torch_device_type_{name}")())


@functools.cache
def launch_address() -> int:
    """Return the address of the driver's function that launches kernels."""
    name = "cuLaunchKernel" if torch.version.hip is None else "hipModuleLaunchKernel"
    return ctypes.cast(getattr(ctypes.CDLL(driver_library()), name), ctypes.c_void_p).value or 0


@functools.cache
def dtype(name: str) -> int:
    """Return the shim's number of a dtype."""
    return int(getattr(_torch(), f"aoti_torch_dtype_{name}")())


@functools.cache
def dtype_numbered(number: int) -> torch.dtype:
    """Return the dtype of one of the shim's numbers."""
    return next(getattr(torch, row.torch) for row in DTYPES.values() if dtype(row.torch) == number)


# ---- the library -----------------------------------------------------------------------------------------------------


@functools.cache
def library() -> ctypes.PyDLL:
    """Return the driver."""
    loaded = ctypes.PyDLL(_core.__file__)
    loaded.opkit_function.argtypes = (ctypes.c_void_p, ctypes.py_object)
    loaded.opkit_function.restype = ctypes.py_object
    return loaded
