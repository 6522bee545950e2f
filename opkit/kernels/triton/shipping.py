"""The binaries of Triton kernels as a package's manifest lists them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from opkit.kernels.triton.binaries import Binary
from opkit.kernels.triton.forms import Form

FOLDER = "triton"
_FILE = re.compile(rf"{FOLDER}/[\w.-]+\.(cubin|hsaco)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class TritonBinary:
    """One binary of a package.

    Attributes:
        operator: "demo::rms_norm".
        kernel: the kernel's name among those of its operator.
        triton: the release of Triton that compiled it.
        form: what it is for.
        launch: all that a launch must know (:meth:`opkit.kernels.triton.binaries.Binary.to_json`).
        file: its path in the folder of the manifest; "" before it is put there.
        sha256: of the file.
        size: of the file, in bytes.
    """

    operator: str
    kernel: str
    triton: str
    form: Form
    launch: Mapping[str, Any]
    file: str = ""
    sha256: str = ""
    size: int = 0

    def placed(self, image: bytes) -> TritonBinary:
        """Return the same with the file that is to hold ``image``; equal images of a kernel have one file."""
        sha256 = hashlib.sha256(image).hexdigest()
        parts = (*self.operator.split("::"), self.kernel, self.form.target, sha256[:8])
        name = ".".join(re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in parts)
        return dataclasses.replace(self, file=f"{FOLDER}/{name}.{self.launch['form']}", sha256=sha256, size=len(image))

    def binary(self, image: bytes) -> Binary:
        """Return what to launch.

        Raises:
            KeyError, TypeError, ValueError: the manifest is not what was written.
        """
        return Binary.from_json(self.launch, image)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        return {**dataclasses.asdict(self), "launch": dict(self.launch)}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> TritonBinary:
        """Return what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it did not write this.
        """
        form = Form(**{**item["form"], "divisible": tuple(item["form"]["divisible"])})
        binary = cls(**{**item, "form": form})
        if not _FILE.fullmatch(binary.file):
            raise ValueError(f"{binary.file!r} is not the name of a binary")
        return binary
