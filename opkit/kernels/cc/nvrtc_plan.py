"""Plan builds by NVRTC: its options, and a request for the host's part, which holds what NVRTC makes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from opkit.kernels.cc import device_code, nvrtc
from opkit.kernels.cc.cuda_split import CannotSplit, Split, place_of, split
from opkit.kernels.cc.processes import quoted_file
from opkit.kernels.cc.request import Request, Unit
from opkit.kernels.cc.toolchain import Compiler

_DIALECT = ("-std=c++17", "-default-device")
_OLDEST = "compute_75"  # where no flag names an architecture, as nvcc 13: PTX for it, and for newer ones
_RUNTIME = Path(__file__).parents[1] / "include"

_WITH_VALUE = {"-D", "-U", "-I", "-Xptxas", "-maxrregcount", "-std", "-Xcompiler", "-gencode", "-arch"}
_LONG = {
    "--define-macro": "-D", "--undefine-macro": "-U", "--include-path": "-I", "--ptxas-options": "-Xptxas", "--std": "-std",
    "--maxrregcount": "-maxrregcount", "--compiler-options": "-Xcompiler", "--generate-code": "-gencode",
    "--gpu-architecture": "-arch",
}  # fmt: skip
_OF_DEVICE = re.compile(
    r"--?(?:use_fast_math|fmad|ftz|prec-div|prec-sqrt|extra-device-vectorization|restrict|lineinfo|generate-line-info"
    r"|device-debug|diag-suppress|w)(?:=.*)?|-G"
)
_UNUSED = re.compile(r"-O\d|--?(?:expt-)?(?:relaxed-constexpr|extended-lambda)|-g")
_STANDARD = re.compile(
    r"[a-z_]+|(?:stddef|stdio|stdlib|string|errno|time|inttypes|complex|unistd"
    r"|cuda(?:_runtime(?:_api)?)?|device_launch_parameters)\.h"
)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b.*", re.MULTILINE)
_OF_TOOLKIT = re.compile(r"cuda_(?:fp|bf)16\.h|cuComplex\.h|math_constants\.h")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:[<"]([^>"\n]+)[>"])?[^\n]*', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A shared library in two parts: NVRTC's commands, with their sources, and a request for the host's part."""

    host: Request
    commands: tuple[tuple[str, ...], ...]
    sources: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class _Flags:
    """nvcc's flags, for NVRTC and for the host's compiler; and the architectures that they name, such as "sm_90a"."""

    device: tuple[str, ...]
    host: tuple[str, ...]
    architectures: tuple[str, ...]


def cubin(request: Request, compiler: Compiler, source: str, output: str) -> tuple[str, ...]:
    """Return the command that compiles device code.

    Raises:
        CannotSplit: a flag is nvcc's alone, or names no architecture.
    """
    flags = _flags(request.flags)
    if len(flags.architectures) != 1:
        raise CannotSplit(f"{' '.join(request.flags) or 'no flag'} does not name one architecture")
    return _command(request, compiler, flags, flags.architectures[0], nvrtc.parallel_options(), source, output)


def parts(request: Request, compiler: Compiler) -> Parts:
    """Return the parts of a shared library.

    Raises:
        CannotSplit: the request has something that only nvcc compiles.
    """
    if request.libraries or request.library_dirs or request.kind != "shared":
        raise CannotSplit("it is linked with other libraries")
    flags, folders = _flags(request.flags), _folders(request)
    units, commands, sources = [], [], []
    for number, unit in enumerate(request.units):
        if unit.language != "cuda":
            units.append(unit)
            continue
        found = split(_with_headers(unit.text, unit.name, folders, set()), unit.name)
        device = _device_text(unit, found, compiler)
        images = []
        for architecture in flags.architectures if found.names else ():
            image = f"unit{number}.{architecture}"
            images.append((architecture, image))
            options = (f"--names=unit{number}.names", *(f"--name={name}" for name in found.names))
            commands.append(_command(request, compiler, flags, architecture, options, f"unit{number}.cu", image))
        if images:
            sources.append((f"unit{number}.cu", unit.name, device))
        units.append(Unit(unit.name, _host_text(number, found, images), "c++"))
    host = dataclasses.replace(request, units=tuple(units), flags=flags.host, isa="baseline")
    return Parts(host, tuple(commands), tuple(sources))


def _command(
    request: Request,
    compiler: Compiler,
    flags: _Flags,
    architecture: str,
    options: Sequence[str],
    source: str,
    output: str,
) -> tuple[str, ...]:
    folders = (*map(Path, request.include_dirs), *nvrtc.include_dirs(Path(compiler.arguments[-1])))
    includes = [f"-I{folder.absolute()}" for folder in folders]
    return (
        *compiler.command,
        *options,
        f"-arch={architecture}",
        *_DIALECT,
        *includes,
        *flags.device,
        source,
        "-o",
        output,
    )


# ---- flags -----------------------------------------------------------------------------------------------------------


def _flags(given: Sequence[str]) -> _Flags:
    device, host, architectures = [], [], []
    for name, value in _pairs(given):
        if name in ("-gencode", "-arch"):
            architectures += _architectures(name, value)
        elif name in ("-D", "-U", "-I"):
            device.append(f"{name}{value}")
            host.append(f"{name}{value}")
        elif name == "-std":
            device.append(f"-std={value}")
            host.append(f"-std={value.replace('c++', 'gnu++')}")
        elif name == "-Xcompiler":
            host += value.split(",")
        elif name in ("-Xptxas", "-maxrregcount"):
            device.append({"-Xptxas": f"--ptxas-options={value}"}.get(name, f"--maxrregcount={value}"))
        elif _OF_DEVICE.fullmatch(name):
            device.append(name)
        elif not _UNUSED.fullmatch(name):
            raise CannotSplit(f"the flag {name!r} is nvcc's")
    return _Flags(tuple(device), tuple(host), tuple(dict.fromkeys(architectures)) or (_OLDEST,))


def architectures_in(given: Sequence[str]) -> list[str]:
    """Return the architectures that flags of nvcc's name, as in "sm_90"; empty for "all-major" and the like."""
    named = [(name, value) for name, value in _pairs(given) if name in ("-gencode", "-arch")]
    if any(value == "all-major" for _, value in named):
        return []
    try:
        return [each for name, value in named for each in _architectures(name, value)]
    except CannotSplit:
        return []


def _pairs(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag's short name and its value; flags without one whole."""
    flags = iter(given)
    for flag in flags:
        name, equals, value = flag.partition("=")
        name = _LONG.get(name, name)
        joined = next((each for each in ("-D", "-U", "-I") if flag.startswith(each) and len(flag) > 2), None)
        if joined is not None:
            yield joined, flag[2:]
        elif name in _WITH_VALUE:
            yield name, value if equals else next(flags, "")
        else:
            yield flag, ""


def _architectures(name: str, value: str) -> list[str]:
    """Return what a flag asks for: ``-arch=sm_90`` both code and PTX."""
    if (name, value) == ("-arch", "all-major"):
        return list(nvrtc.major_architectures())
    if name == "-arch":
        value = f"code={value},{value.replace('sm_', 'compute_')}"
    found = re.findall(r"\b(?:sm|compute)_\d+[af]?", value.partition("code=")[2])
    if not found:
        raise CannotSplit(f"the flag {name}={value} names no architecture that is known")
    return found


# ---- headers ---------------------------------------------------------------------------------------------------------


def _folders(request: Request) -> list[Path]:
    flags = (flag[2:] for flag in request.flags if flag.startswith("-I") and len(flag) > 2)
    return [Path(folder).absolute() for folder in (*request.include_dirs, *flags)]


def _with_headers(text: str, name: str, folders: Sequence[Path], seen: set[Path], above: tuple[Path, ...] = ()) -> str:
    """Return a text with the headers of its author's folders in place of their includes, since these have two parts too."""

    def inserted(include: re.Match[str]) -> str:
        near = [above[-1].parent, *folders] if above else folders
        path = next((each / include[1] for each in near if include[1] and (each / include[1]).is_file()), None)
        if path is None:
            return include[0]
        if path in above or path in seen:
            return ""
        content = path.read_text(encoding="utf-8", errors="surrogateescape")
        if _ONCE.search(content):
            seen.add(path)
        content = _with_headers(_ONCE.sub("", content), str(path), folders, seen, (*above, path))
        file, _, line = place_of(text, include.start(), name).rpartition(":")
        return f"#line 1 {quoted_file(str(path))}\n{content}\n#line {int(line) + 1} {quoted_file(file)}"

    return _INCLUDE.sub(inserted, text)


def _device_text(unit: Unit, found: Split, compiler: Compiler) -> str:
    """Return the device's part without the headers that NVRTC lacks: they are for the host's."""
    toolkit = bool(nvrtc.toolkit_headers(Path(compiler.arguments[-1])))

    def kept(include: re.Match[str]) -> str:
        name, of_toolkit = include[1] or "", bool(_OF_TOOLKIT.fullmatch(include[1] or ""))
        if not name or (nvrtc.HEADERS / name).is_file() or (toolkit and of_toolkit):
            return include[0]
        if _STANDARD.fullmatch(name):
            return ""
        missing = (
            "which did not come with NVRTC: install nvidia-cuda-runtime" if of_toolkit else "of which NVRTC has none"
        )
        raise CannotSplit(f"{place_of(found.device, include.start(), unit.name)}: it includes {name}, {missing}")

    # opkit.h takes types from the compiler, which has none
    return f"#include <stdint.h>\n{_INCLUDE.sub(kept, found.device)}"


# ---- the host's part -------------------------------------------------------------------------------------------------


def _host_text(number: int, found: Split, images: Sequence[tuple[str, str]]) -> str:
    """Return the host's part, with the images of its kernels and their names."""
    heads = "".join(
        f'#line 1 "{name}"\n{(_RUNTIME / name).read_text(encoding="utf-8")}\n'
        for name in ("opkit.h", "opkit_types.h", "opkit_cuda.h")
    )
    return f'#define OPK_CUDA_UNIT opk_cuda_unit_{number}\n{heads}#line 1 "<opkit>"\n{found.host}\n{_images(number, images)}'


def _images(number: int, images: Sequence[tuple[str, str]]) -> str:
    labels = [f"opk_image_{number}_{place}" for place in range(len(images))]
    rows = [
        f"{{{', '.join(map(str, device_code.image(name)))}, {label}}},"
        for label, (name, _) in zip(labels, images, strict=True)
    ]
    contents = "".join(
        f'asm(".pushsection .rodata\\n.balign 64\\n{label}: .incbin \\"{file}\\"\\n.popsection");\n'
        f'extern "C" __attribute__((visibility("hidden"))) const char {label}[];\n'
        for label, (_, file) in zip(labels, images, strict=True)
    )
    return f"""#line 1 "<opkit>"
{contents}static const opk_cuda_image opk_images_{number}[] = {{{" ".join(rows) or "{}"}}};
static const char* const opk_names_{number}[] = {{
{f'#include "unit{number}.names"' if images else ""}
nullptr}};
static void* opk_libraries_{number}[{max(1, len(images))}];
extern "C" __attribute__((visibility("hidden"))) const opk_cuda_unit opk_cuda_unit_{number} = {{
    opk_images_{number}, {len(images)}, opk_libraries_{number}, opk_names_{number}
}};
"""
