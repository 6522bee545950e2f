"""Make the build request of a kernel that is bound to an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from opkit.errors import ToolchainError
from opkit.kernels.binding.binding import Bound
from opkit.kernels.cc import isa as isas
from opkit.kernels.cc import runs, source
from opkit.kernels.cc.commands import Request, Unit
from opkit.kernels.cc.native import NativeKernel
from opkit.kernels.sanitize import sanitizer


def request(
    native: NativeKernel, bound: Bound, name: str, isa: str | None = None, flags: Sequence[str] = (), extra: str = ""
) -> Request:
    """Return the build request of ``native``: a shared library, or with ``debug=True`` an executable with sanitizers.

    Args:
        native: the author's kernel.
        bound: the kernel bound to an operator.
        name: the kernel's name among those of its operator.
        isa: the instruction set; by default the widest of the kernel's own that this machine has.
        flags: for the compiler, in addition to the author's.
        extra: C that is added to the description of the kernel.
    """
    *units, last = source.generate(
        bound, native.text, native.variables, name, native.file, native.line, native.language, native.cuda
    )
    extra += runs.EXPORT if native.elementwise else ""
    units.append(dataclasses.replace(last, text=last.text + extra))
    units += [Unit(str(path), path.read_text(encoding="utf-8"), native.language) for path in native.sources]
    if native.debug:
        units.append(Unit("<opkit>", sanitizer.main_unit(), "c"))
    files = [Path(file) for file in (native.file, *native.sources) if Path(file).is_file()]
    return Request(
        label=f"{bound.facts.operator}[{name}]",
        units=tuple(units),
        flags=(*native.flags, *flags),
        include_dirs=(*native.include_dirs, *dict.fromkeys(file.absolute().parent for file in files)),
        library_dirs=native.library_dirs,
        libraries=native.libraries,
        isa=isa or chosen_isa(native.isas),
        kind="executable" if native.debug else "shared",
        debug=native.debug,
    )


def chosen_isa(listed: Sequence[str]) -> str:
    """Return the widest of some instruction sets that this machine has; "native" is always the machine's own.

    Raises:
        ToolchainError: the machine has none of them.
    """
    if "native" in listed:
        return "native"
    order = isas.WIDENING.get(isas.machine(), ("baseline",))
    usable = order[: order.index(isas.host_isa()) + 1]
    fitting = [isa for isa in listed if isa in usable]
    if not fitting:
        raise ToolchainError(f"It is for {', '.join(listed)}, and this processor has {', '.join(usable)}.")
    return max(fitting, key=usable.index)
