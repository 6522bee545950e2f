"""The container of a saved model: a zip file with a manifest, the members that it names, and weights as safetensors.

The manifest lists the size and sha256 of each member (of weights: of each 16 MiB), and the archive's comment has the manifest's.
Weights are aligned and not compressed, so that they are mapped into memory where they are. The format is described in
``docs/models.md``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import secrets
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from opkit.errors import ModelFileError

FORMAT = 4
"""The number of the format; a reader refuses others."""

WEIGHTS = "weights.safetensors"

_MANIFEST = "manifest.json"
_COMMENT = re.compile(rb"opkit model, sha256 ([0-9a-f]{64})")
_ALIGNMENT = 64
_MAX_HEADER = 100 << 20  # bytes, as in safetensors
_CHUNK = 1 << 24  # bytes of weights that have a sha256 of their own

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64",
}  # fmt: skip
_NAMES = {value: key for key, value in _DTYPES.items()}


def write(
    path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes], weights: Mapping[str, torch.Tensor]
) -> None:
    """Write a file, which appears whole or not at all.

    Args:
        path: where.
        manifest: what the file says of itself, as JSON; the list of members is added.
        members: the contents by name, weights apart.
        weights: contiguous tensors on the CPU.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name[:20]}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "x+b") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            listed = {WEIGHTS: _write_weights(archive, weights)}
            for name, content in members.items():
                listed[name] = [len(content), hashlib.sha256(content).hexdigest()]
                archive.writestr(name, content)
            text = json.dumps({"format": FORMAT, **manifest, "members": listed}, indent=1).encode()
            archive.writestr(_MANIFEST, text)
            archive.comment = f"opkit model, sha256 {hashlib.sha256(text).hexdigest()}".encode()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_weights(archive: zipfile.ZipFile, weights: Mapping[str, torch.Tensor]) -> list[Any]:
    """Write the weights, aligned in the file, and return the size and sha256 of the member."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if begin > end:  # safetensors allows no holes
            header[f"padding.{len(header)}"] = {"dtype": "U8", "shape": [begin - end], "data_offsets": [end, begin]}
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _dtype_name(tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    with archive.open(WEIGHTS, "w", force_zip64=True) as member:
        assert archive.fp is not None
        text = json.dumps(header).encode()
        text += b" " * (-(archive.fp.tell() + 8 + len(text)) % _ALIGNMENT)
        sums = _ChunkSums()
        for part in _parts(text, header, weights):
            member.write(part)
            sums.update(part)
    return [sums.size, *sums.done()]


class _ChunkSums:
    """The sha256 of each chunk of what passes by."""

    def __init__(self) -> None:
        self.size = 0
        self._sums: list[str] = []
        self._digest = hashlib.sha256()

    def update(self, part: Any) -> None:
        view = memoryview(part)
        while len(view):
            room = _CHUNK - self.size % _CHUNK
            self._digest.update(view[:room])
            self.size += len(view[:room])
            view = view[room:]
            if self.size % _CHUNK == 0:
                self._sums.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()

    def done(self) -> list[str]:
        return [*self._sums, *([self._digest.hexdigest()] if self.size % _CHUNK else [])]


def _are_right(content: memoryview, sums: Sequence[str]) -> bool:
    """Return whether the chunks have these sums; threads compute them."""
    chunks = [content[begin : begin + _CHUNK] for begin in range(0, len(content), _CHUNK)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(lambda chunk: hashlib.sha256(chunk).hexdigest(), chunks)) == list(sums)


def _parts(text: bytes, header: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    yield struct.pack("<Q", len(text)) + text
    for name, entry in header.items():
        if name in weights:
            array: Any = weights[name].reshape(-1).view(torch.uint8).numpy()
            content = memoryview(array)
            yield from (content[begin : begin + _CHUNK] for begin in range(0, len(content), _CHUNK))
        else:
            yield bytes(entry["shape"][0])


def _dtype_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _NAMES:
        raise TypeError(f"a weight of {tensor.dtype} cannot be saved")
    return _NAMES[name]


# ---- reading ---------------------------------------------------------------------------------------------------------


class Archive:
    """An open file.

    Args:
        path: the file.

    Attributes:
        manifest: what the file says of itself.

    Raises:
        OSError: it cannot be read.
        ModelFileError: it is no such file, damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb")  # noqa: SIM115
        try:
            self._zip = zipfile.ZipFile(self._file)
            self.manifest = self._read_manifest()
        except Exception as error:
            self._file.close()
            raise self._refusal(error) from error

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _refusal(self, error: Exception) -> ModelFileError:
        if isinstance(error, ModelFileError):
            return error
        kind = "is not a saved model" if isinstance(error, zipfile.BadZipFile) else "is damaged"
        return ModelFileError(
            f"opkit.load: {self.path} {kind} ({type(error).__name__}: {error}). Export the model again."
        )

    def damaged(self, what: str) -> ModelFileError:
        """Return the error for a damaged file."""
        return ModelFileError(f"opkit.load: {self.path} is damaged: {what}. Export the model again.")

    def _read_manifest(self) -> Any:
        found = _COMMENT.fullmatch(self._zip.comment)
        if found is None:
            raise ModelFileError(
                f"opkit.load: {self.path} is not a saved model: it is a zip file without opkit's comment."
            )
        text = self._content(_MANIFEST, None)
        if hashlib.sha256(text).hexdigest().encode() != found[1]:
            raise self.damaged("the manifest has another sha256 than the file says")
        manifest = json.loads(text)
        if manifest.get("format") != FORMAT:
            raise ModelFileError(
                f"opkit.load: {self.path} has the format {manifest.get('format')!r}, and this opkit reads {FORMAT}. Export the "
                "model again, or load it with the opkit that wrote it."
            )
        return manifest

    def _content(self, name: str, size: int | None) -> bytes:
        info = self._zip.getinfo(name)
        if info.file_size > _MAX_HEADER or (size is not None and info.file_size != size):
            raise self.damaged(f"{name} has {info.file_size:,} bytes")
        with self._zip.open(info) as member:
            content = member.read(info.file_size + 1)
        if len(content) != info.file_size:
            raise self.damaged(f"{name} has another size than the archive says")
        return content

    def read(self, name: str) -> bytes:
        """Return a member's content.

        Raises:
            ModelFileError: it does not exist, or is not what the manifest says.
        """
        try:
            size, checksum = self.manifest["members"][name]
            content = self._content(name, size)
        except ModelFileError:
            raise
        except Exception as error:
            raise self._refusal(error) from error
        if hashlib.sha256(content).hexdigest() != checksum:
            raise self.damaged(f"{name} has another sha256 than the manifest says")
        return content

    def weights(self, verify: bool) -> dict[str, torch.Tensor]:
        """Return the weights as tensors over the file's pages, which are read when they are used; writes to them are private.

        Args:
            verify: whether to compute their sha256, which reads all of them.

        Raises:
            ModelFileError: they are not what the manifest says.
        """
        try:
            return self._weights(verify)
        except ModelFileError:
            raise
        except Exception as error:
            raise self._refusal(error) from error

    def _weights(self, verify: bool) -> dict[str, torch.Tensor]:
        info = self._zip.getinfo(WEIGHTS)
        size, *sums = self.manifest["members"][WEIGHTS]
        self._file.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", self._file.read(4))
        begin = info.header_offset + 30 + name + extra
        whole = os.fstat(self._file.fileno()).st_size
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != size or not 8 <= size <= whole - begin:
            raise self.damaged("the weights are not where the archive says")
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        with memoryview(mapped) as view:
            if verify and not _are_right(view[begin : begin + size], sums):
                raise self.damaged("the weights have another sha256 than the manifest says")
            (length,) = struct.unpack_from("<Q", view, begin)
            if length > min(_MAX_HEADER, size - 8):
                raise self.damaged(f"the weights have a header of {length:,} bytes")
            header = json.loads(bytes(view[begin + 8 : begin + 8 + length]))
        data, room = begin + 8 + length, size - 8 - length
        return {name: self._tensor(mapped, data, room, name, entry) for name, entry in header.items()}

    def _tensor(self, mapped: Any, data: int, room: int, name: str, entry: Any) -> torch.Tensor:
        dtype, shape, (first, last) = getattr(torch, _DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise self.damaged(f"the weight {name} has the sizes {shape}")
        count = 1
        for n in shape:
            count *= n
        if last > room or last - first != count * dtype.itemsize or (data + first) % dtype.itemsize:
            raise self.damaged(f"the weight {name} is not within the file")
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=data + first).reshape(shape)
