"""Kernels in C and C++ as calls of XLA's foreign functions, on JAX's CPU.

A call's shapes are known when it is traced. So everything that the kernel's trampoline receives is laid out here, in
:func:`_block`, except for the addresses of buffers, which ``handler.c`` fills in. The library is the kernel's own with the
handler as one more unit, in the same build cache. A program names its kernels by hashes, and holds no address.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from opkit.errors import KernelError, NoCompilerWarning, ToolchainError
from opkit.jax import dtypes
from opkit.kernels.cc import compilation
from opkit.kernels.cc.build_plan import Unit
from opkit.kernels.cc.source import INCLUDE, instance_number
from opkit.op.core import Operator
from opkit.op.dispatch import planning
from opkit.op.dispatch.selection import REFERENCE, forced_kernels
from opkit.op.layout import program
from opkit.op.layout.outputs import layout_of, operands, sizes_of
from opkit.op.native.function import NativeFunction

_HANDLER = Path(__file__).with_name("handler.c")
_TORCH_DTYPES = {number: dtype for dtype, number in program.DTYPES.items()}
_lock = threading.Lock()
_loaded: dict[Path, Any] = {}  # libraries stay loaded, since XLA's programs have their handlers' addresses


def choose(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> NativeFunction | None:
    """Return the kernel in C or C++ that runs a call through the schema; None: the reference.

    Raises:
        KernelError: ``opkit.use_kernel`` forces a kernel that JAX cannot run.
    """
    forced = forced_kernels.get().get(operator.name)
    fitting, _ = planning.eligible(operator, args, kwargs)
    for kernel in fitting:
        function = kernel.function
        if isinstance(function, NativeFunction) and not function.native.cuda and not function.native.debug:
            return function
        if forced is not None:
            raise KernelError(
                f"{operator.name}: opkit.use_kernel forces {forced!r}, which JAX cannot run: on its CPU it runs kernels in C and "
                f'C++ that are not built with debug=True. Force one of those or "{REFERENCE}".'
            )
    return None


def results_of(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Return row-major tensors like the results of a call, without data; None where JAX has none such (64-bit ones by default).

    Raises:
        RuleError: the sizes are not known.
    """
    layout = layout_of(operator, args, kwargs)
    found, at = [], 0
    while at < len(layout):
        dtype, rank = layout[at : at + 2]
        found.append(torch.empty(layout[at + 2 : at + 2 + rank], dtype=_TORCH_DTYPES[dtype], device="meta"))
        at += 2 + 2 * rank
    return found if all(dtypes.OF_TORCH[x.dtype] == dtypes.to_jax(x.dtype) for x in found) else None


def call(
    function: NativeFunction, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[torch.Tensor]
) -> Callable[..., list[Any]] | None:
    """Return a function of the call's arrays that runs the kernel, and builds it now; None, with a warning, without a compiler.

    Args:
        function: the kernel.
        args: the call through the schema, with fake tensors for arrays.
        kwargs: its keyword arguments.
        outputs: tensors like its results.
    """
    results = [jax.ShapeDtypeStruct(tuple(x.shape), dtypes.to_jax(x.dtype)) for x in outputs]
    try:
        target = _target(function)
    except ToolchainError as error:
        warnings.warn(
            f"{function.operator.name}: the kernel {function.__name__} is not used, the reference runs in its place. {error}",
            NoCompilerWarning,
            stacklevel=2,
        )
        return None
    words = _block(function, operands(function.operator, args, kwargs), outputs)
    foreign = jax.ffi.ffi_call(target, results, vmap_method="sequential")
    return lambda *arrays: list(foreign(*arrays, call=words))


# ---- libraries -------------------------------------------------------------------------------------------------------


def _target(function: NativeFunction) -> str:
    """Return the name by which XLA knows the kernel; build and register it if it is new."""
    request = function.request()
    text = f'{(INCLUDE / "opkit.h").read_text(encoding="utf-8")}\n#line 1 "<opkit>"\n{_HANDLER.read_text(encoding="utf-8")}'
    unit = Unit("<opkit, for XLA>", text, "c++" if function.native.language == "c++" else "c")
    request = dataclasses.replace(
        request, units=(*request.units, unit), include_dirs=(*request.include_dirs, Path(jax.ffi.include_dir()))
    )
    path = compilation.build(request)
    name = f"{function.operator.name.replace('::', '.')}.{function.__name__}.{compilation.key(request)[:16]}"
    with _lock:
        if path not in _loaded:
            _loaded[path] = _load(path)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(_loaded[path][1].opk_xla), platform="cpu")
    return name


def _load(path: Path) -> Any:
    from opkit import _core

    kernel = _core.KernelLibrary(str(path))  # which finds OpenMP, and checks versions
    library = ctypes.CDLL(str(path))
    library.opk_xla_init.argtypes, library.opk_xla_init.restype = [ctypes.c_void_p], None
    library.opk_xla_init(_core.runtime_address())
    return kernel, library


# ---- what a call passes ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Block:
    """Words and the patches of those that are addresses: see ``handler.c``."""

    words: list[int]
    patches: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def append(self, words: Sequence[int]) -> int:
        """Append words; return the number of the first."""
        self.words.extend(words or [0])
        return len(self.words) - max(len(words), 1)

    def append_bytes(self, data: bytes) -> int:
        """Append bytes, filled up with zeros."""
        data += bytes(-len(data) % 8)
        return self.append(struct.unpack(f"<{len(data) // 8}q", data))

    def point(self, at: int, word: int) -> None:
        """Make a word the address of another."""
        self.patches.append((at, 1, word))

    def array(self, instance: int) -> np.ndarray:
        """Return all of it."""
        patches = [number for patch in self.patches for number in patch]
        return np.array([instance, len(self.words), *self.words, *patches], np.int64)


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _block(function: NativeFunction, values: Sequence[Any], outputs: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the attribute of a call."""
    bound = function.bound
    tensors = [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]
    buffers = {id(tensor): number for number, tensor in enumerate([*tensors, *outputs])}
    block = _Block([0] * len(bound.slots))
    chosen: dict[str, str] = {}
    for number, slot in enumerate(bound.slots):
        output = slot.argument - len(values)
        value = outputs[output] if output >= 0 else values[slot.argument]
        if slot.source in ("DATA", "TENSOR", "DATA_LIST", "TENSOR_LIST") and slot.dtype < -1:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if tensor is not None:
                    chosen.setdefault(bound.variables[-2 - slot.dtype], str(tensor.dtype).removeprefix("torch."))
        _Parameter(block, number, slot, buffers, values, function).fill(value)
    native = function.native
    instance = instance_number(bound, native.text, native.variables, function.__name__, chosen)
    return block.array(instance)


@dataclasses.dataclass
class _Parameter:
    """One parameter of the C function, whose word is ``at``."""

    block: _Block
    at: int
    slot: Any
    buffers: dict[int, int]
    values: Sequence[Any]
    function: NativeFunction

    def fill(self, value: Any) -> None:
        """Lay the parameter out for an argument or output."""
        source, facts = self.slot.source, self.function.facts
        if source in ("INT_CONSTANT", "FLOAT_CONSTANT"):
            self._set(self.slot.constant)
        elif source == "NAMED_SIZE":
            self._set(sizes_of(facts, self.values).get(facts.sizes[self.slot.detail], 0))
        elif value is None:
            return  # a null pointer, or a length of 0
        elif source == "SCALAR":
            self._set(self._number(value))
        elif source == "SCALAR_POINTER":
            number = self._number(value)
            self.block.point(self.at, self.block.append([_bits(number) if isinstance(number, float) else number]))
        elif source == "LENGTH":
            self._set(len(value.encode() if isinstance(value, str) else value))
        elif source == "STRING":
            self.block.point(self.at, self.block.append_bytes(value.encode() + b"\0"))
        elif source == "VALUES":
            form = {"ints": "q", "floats": "d", "bools": "?"}[facts.arguments[self.slot.argument].kind]
            self.block.point(self.at, self.block.append_bytes(struct.pack(f"<{len(value)}{form}", *value)))
        elif source in ("NUMEL", "RANK", "SIZE", "STRIDE"):
            self._set(self._dimension(value))
        else:
            self._tensors(value, source)

    def _set(self, number: float) -> None:
        self.block.words[self.at] = _bits(number) if isinstance(number, float) else int(number)

    def _number(self, value: Any) -> float:
        kind = self.function.facts.arguments[self.slot.argument].kind
        if kind == "float":
            return float(value)
        return program.DTYPES[value] if isinstance(value, torch.dtype) else int(value)

    def _dimension(self, tensor: torch.Tensor) -> int:
        source, dim = self.slot.source, self.slot.detail
        if source in ("NUMEL", "RANK"):
            return tensor.numel() if source == "NUMEL" else tensor.ndim
        if dim < -tensor.ndim:  # a leading dimension is missing
            return int(source == "SIZE")
        if dim >= tensor.ndim:
            raise KernelError(
                f"{self.function.operator.name}: the parameter {self.slot.name} of the kernel {self.function.__name__} asks for "
                f"dimension {dim} of a tensor that has {tensor.ndim}."
            )
        return tensor.shape[dim] if source == "SIZE" else _strides(tensor)[dim]

    def _tensors(self, value: Any, source: str) -> None:
        if source == "DATA":
            self.block.patches.append((self.at, 0, self.buffers[id(value)]))
            return
        tensors = [value] if isinstance(value, torch.Tensor) else list(value)
        size = 1 if source == "DATA_LIST" else 5
        first = self.block.append([0] * size * len(tensors))
        self.block.point(self.at, first)
        for number, tensor in enumerate(tensors):
            if tensor is None:
                continue
            at = first + size * number
            self.block.patches.append((at, 0, self.buffers[id(tensor)]))
            if size > 1:  # an opk_tensor; its device is -1, the CPU
                self.block.point(at + 1, self.block.append(tensor.shape))
                self.block.point(at + 2, self.block.append(_strides(tensor)))
                self.block.words[at + 3] = tensor.ndim
                self.block.words[at + 4] = program.DTYPES[tensor.dtype] - 2**32


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of JAX's arrays, which are row-major."""
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return strides[-tensor.ndim :] if tensor.ndim else []
