"""Find NVRTC, the compiler of CUDA C++ that a torch with CUDA brings along: a library, which compiles device code alone.

Neither torch nor NVRTC is loaded here: builds run it in a process of their own, by :mod:`opkit.kernels.cc.nvrtc_compiler`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from opkit.errors import ToolchainError

PROGRAM = Path(__file__).with_name("nvrtc_compiler.py")
HEADERS = Path(__file__).parents[1] / "include" / "nvrtc"
"""Headers in place of the standard library's and of the toolkit's, which NVRTC has none of."""


OWN_FILES = (
    PROGRAM,
    *(PROGRAM.with_name(f"{name}.py") for name in ("cuda_split", "device_code", "nvrtc_plan")),
    HEADERS.parent / "opkit_cuda.h",
)
"""Files that decide what becomes of a source, in addition to it and to NVRTC."""


def library() -> Path:
    """Return the library that comes with torch.

    Raises:
        ToolchainError: there is none, and why.
    """
    folder = _torch()
    cuda = _cuda_of(folder) if folder is not None else None
    if folder is None:
        raise ToolchainError("NVRTC was not found: it comes with torch, which is not installed.")
    if cuda is None:
        raise ToolchainError("NVRTC was not found: it comes with a torch that is built for CUDA, and this one is not.")
    found = _library(folder, cuda)
    if found is None or not found.exists():
        _library.cache_clear()
        raise ToolchainError(
            f"NVRTC was not found: this torch is built for CUDA {cuda}, and there is no libnvrtc.so.{cuda.partition('.')[0]} "
            f"in {', '.join(str(each) for each in dict.fromkeys(_folders(folder)))}. Install nvidia-cuda-nvrtc."
        )
    return found


def include_dirs(found: Path) -> tuple[Path, ...]:
    """Return the folders of headers for a library: opkit's own, then the toolkit's, if they came with it."""
    return (HEADERS, *[file.parent for file in toolkit_headers(found)][:1])


def toolkit_headers(found: Path) -> tuple[Path, ...]:
    """Return the headers for kernels of float16 and bfloat16, ``cuda_fp16.h`` and ``cuda_bf16.h``, if they came with a library.

    Wheels for CUDA 12 have a folder for each part of the toolkit, those from CUDA 13 on share one.
    """
    places = (found.parent.parent / "include", found.parents[2] / "cuda_runtime" / "include")
    folder = next((each for each in places if (each / "cuda_fp16.h").is_file()), None)
    return () if folder is None else (folder / "cuda_fp16.h", folder / "cuda_bf16.h")


def major_architectures() -> tuple[str, ...]:
    """Return what nvcc's ``-arch=all-major`` names, of what torch runs on: code for each generation, and PTX for later ones."""
    majors = _MAJORS if _is_12_8() else _MAJORS[:-2]
    return (*(f"sm_{each}" for each in majors), f"compute_{majors[-1]}")


def parallel_options() -> tuple[str, ...]:
    """Return the options by which all cores optimise the kernels of a source, where they are known to be there."""
    return ("--split-compile=0",) if _is_12_8() else ()


_MAJORS = (75, 80, 90, 100, 120)  # CUDA 12.8 is the first that has the last two


def _is_12_8() -> bool:
    """Return whether torch's CUDA is 12.8 or newer."""
    folder = _torch()
    version = (_cuda_of(folder) if folder is not None else None) or ""
    return tuple(map(int, re.findall(r"\d+", version))) >= (12, 8)


@functools.cache
def _torch() -> Path | None:
    """Return torch's folder, without importing it."""
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None else Path(found.origin).parent


@functools.cache
def _cuda_of(torch: Path) -> str | None:
    """Return the version of CUDA that a torch is built for, such as "12.8"; None for a torch without CUDA."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"""^cuda\b.*=\s*['"]([\d.]+)['"]""", text, re.MULTILINE)
    return None if found is None else found[1]


@functools.lru_cache(maxsize=1)
def _library(torch: Path, cuda: str) -> Path | None:
    major = cuda.partition(".")[0]
    pattern = re.compile(
        rf"libnvrtc(-(?!builtins)\w+)?\.so\.{major}(\.[\d.]+)?"
    )  # "-a1b2": in wheels that hold all of CUDA
    for folder in _folders(torch):
        names = sorted(name for name in _names(folder) if pattern.fullmatch(name))
        if names:
            return folder / names[0]
    return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _folders(torch: Path) -> Iterator[Path]:
    """Yield the folders where torch finds it: the wheels of NVIDIA, its own folder, then CUDA's."""
    for site in dict.fromkeys([torch.parent, *map(Path, _nvidia())]):
        yield from (folder / "lib" for folder in sorted((site / "nvidia").glob("cu[0-9]*")))
        yield site / "nvidia" / "cuda_nvrtc" / "lib"
    yield torch / "lib"
    for variable in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        if os.environ.get(variable):
            yield from (Path(os.environ[variable]) / name for name in ("lib64", "lib"))
    yield Path("/usr/local/cuda/lib64")


def _nvidia() -> list[str]:
    """Return the folders that hold NVIDIA's wheels."""
    found = importlib.util.find_spec("nvidia")
    places = [] if found is None else found.submodule_search_locations or []
    return [os.path.dirname(each) for each in places]
