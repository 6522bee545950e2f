"""Calls between this process and the interpreter's: JSON, and tensors as bytes, each with its length before it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import struct
from typing import IO, Any

import torch

from opkit.errors import ArgumentTypeError

_LENGTH = struct.Struct("<q")


def send(stream: IO[bytes], value: Any) -> None:
    """Write one message."""
    blobs: list[bytes] = []
    header = json.dumps(_encoded(value, blobs)).encode()
    for part in (header, *blobs):
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message.

    Raises:
        EOFError: the other side is gone.
    """
    return _decoded(json.loads(_read(stream)), stream)


def _read(stream: IO[bytes]) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return _exactly(stream, length)


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _encoded(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, blobs)
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_encoded(item, blobs) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(item, blobs)] for key, item in value.items()]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArgumentTypeError(f"{value!r} of type {type(value).__name__} cannot be passed to the interpreter's process.")


def _tensor(value: torch.Tensor, blobs: list[bytes]) -> dict[str, Any]:
    """Return a tensor's elements in order, and how it lies: what is between its elements is not sent."""
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    blobs.append(dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    described = {"shape": list(value.shape), "strides": list(value.stride()), "grad": value.requires_grad}
    return {"tensor": {**described, "dtype": str(value.dtype).removeprefix("torch."), "offset": value.storage_offset()}}


def _decoded(value: Any, stream: IO[bytes]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _restored(content, _read(stream))
    if kind in ("list", "tuple"):
        items = [_decoded(item, stream) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _decoded(item, stream) for key, item in content}
    return getattr(torch, content) if kind == "dtype" else torch.device(content)


def _restored(content: dict[str, Any], data: bytes) -> torch.Tensor:
    dtype, shape, strides, offset = (
        getattr(torch, content["dtype"]),
        content["shape"],
        content["strides"],
        content["offset"],
    )
    extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    storage = torch.empty(max(extent, offset + 1), dtype=dtype)
    result = torch.as_strided(storage, shape, strides, offset)
    once = tuple(slice(0, 1 if stride == 0 else None) for stride in strides)  # of what is expanded, each element
    if data:
        result[once].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)[once])
    return result.requires_grad_(content["grad"])
