"""Find, check and load Triton kernels that were compiled ahead of time, in the package of their operator.

Neither a compiler nor ptxas is needed for what is found here.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from opkit.errors import PackageError
from opkit.kernels.aot import package, portable
from opkit.kernels.triton import forms, targets
from opkit.kernels.triton.binaries import Binary
from opkit.kernels.triton.compiling import CompileRequest
from opkit.kernels.triton.forms import Form
from opkit.kernels.triton.shipping import TritonBinary


class Wanted(NamedTuple):
    """A kernel of an operator of ``module``, for a call on a device whose blocks have ``shared`` bytes of memory."""

    module: str
    operator: str
    kernel: str
    shared: int


_loaded: dict[Path, Binary] = {}
_loading = threading.Lock()


def find(wanted: Wanted, request: CompileRequest) -> Binary | None:
    """Return the binary that was built for calls like this; None where it is to be compiled. It is one object for each file.

    Where the package has the kernel, and nothing that can be used for this call, a warning says why, once for a kernel.
    """
    for folder in portable.places(wanted.module, package.FOLDER):
        try:
            listed = _listed(folder, wanted)
            if listed:
                return _opened(folder, _chosen(listed, wanted, forms.form_of(request)))
        except PackageError as error:
            package.warn(folder, wanted.module, str(error), f"{wanted.operator} {wanted.kernel}")
            return None
    return None


def _listed(folder: Path, wanted: Wanted) -> list[TritonBinary]:
    manifest = package.read(folder)
    listed = () if manifest is None else manifest.binaries
    return [each for each in listed if (each.operator, each.kernel) == (wanted.operator, wanted.kernel)]


def _chosen(listed: Sequence[TritonBinary], wanted: Wanted, form: Form) -> TritonBinary:
    """Return the binary that was compiled with the most facts of such a call."""
    usable = [each for each in listed if forms.serves(each.form, form) and each.launch["shared"] <= wanted.shared]
    if not usable:
        raise PackageError(f"{wanted.operator}, kernel {wanted.kernel!r}, {_missing(listed, form)}")
    return max(usable, key=lambda each: forms.specificity(each.form, form))


def _missing(listed: Sequence[TritonBinary], form: Form) -> str:
    """Return why none of a kernel's binaries serves a call."""
    same = [each for each in listed if each.form.source == form.source]
    if not same:
        return "was edited since it was built: the source of its Triton function differs"
    built_for = sorted({each.form.target for each in same})
    if not any(targets.runs(target, form.target) for target in built_for):
        return f"was built for {', '.join(built_for)}, and this GPU is {form.target}"
    return f"was not built for a call like this one ({form}), which an entry of its examples= would cover"


def _opened(folder: Path, chosen: TritonBinary) -> Binary:
    path = folder / chosen.file
    with _loading:
        if path not in _loaded:
            _loaded[path] = _read(path, chosen)
        return _loaded[path]


def _read(path: Path, chosen: TritonBinary) -> Binary:
    label = f"{chosen.operator}, kernel {chosen.kernel!r},"
    try:
        image = path.read_bytes()
    except OSError as error:
        raise PackageError(f"{label}: {path}: {error.strerror}") from error
    if len(image) != chosen.size or hashlib.sha256(image).hexdigest() != chosen.sha256:
        raise PackageError(f"{label}: {path} is not what was built: its sha256 differs")
    try:
        return chosen.binary(image)
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(
            f"{label}: {path.parent.parent / package.MANIFEST} does not say how it is launched: {error}"
        ) from error
