"""Find the compiler of a language, and identify it without starting it."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from opkit import config
from opkit.errors import ToolchainError
from opkit.kernels.cc import nvrtc

_PROBE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Compiler:
    """An executable compiler.

    Attributes:
        path: the program to start.
        family: "gcc", "clang", "nvrtc" or "nvcc".
        language: "c", "c++" or "cuda".
        identity: real paths, sizes and times of change, which change with the compiler. Computed without starting it.
        arguments: the arguments before all flags, as in ``CC="ccache gcc"``.
    """

    path: str
    family: str
    language: str
    identity: str
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The beginning of a command line."""
        return (self.path, *self.arguments)


@dataclasses.dataclass(frozen=True)
class _Language:
    """Where to find a language's compiler (opkit's setting, the usual variable, then names), and how to install one."""

    title: str
    setting: str
    variable: str
    names: tuple[str, ...]
    install: dict[str, str]


_LANGUAGES = {
    "c": _Language(
        "C",
        "cc",
        "CC",
        ("gcc", "clang", "cc"),
        {
            "Debian, Ubuntu": "apt-get install gcc",
            "Fedora": "dnf install gcc",
            "macOS": "xcode-select --install",
            "conda": "conda install -c conda-forge c-compiler",
        },
    ),
    "c++": _Language(
        "C++",
        "cxx",
        "CXX",
        ("g++", "clang++", "c++"),
        {
            "Debian, Ubuntu": "apt-get install g++",
            "Fedora": "dnf install gcc-c++",
            "macOS": "xcode-select --install",
            "conda": "conda install -c conda-forge cxx-compiler",
        },
    ),
    "cuda": _Language(
        "CUDA",
        "nvcc",
        "NVCC",
        ("nvcc",),
        {
            "Debian, Ubuntu": "apt-get install nvidia-cuda-toolkit",
            "Fedora": "dnf install cuda-toolkit    (from NVIDIA's repository)",
            "conda": "conda install -c nvidia cuda-nvcc",
        },
    ),
}

_CUDA_FOLDERS = ("CUDA_HOME", "CUDA_PATH")
_CUDA_DEFAULT = "/usr/local/cuda"


def install_command(language: str) -> str | None:
    """Return the commands that install a compiler on this system; None if no command is known."""
    wanted = {"Linux": ("Debian, Ubuntu", "Fedora", "conda"), "Darwin": ("macOS", "conda")}.get(platform.system(), ())
    commands = _LANGUAGES[language].install
    return "    or: ".join(commands[system] for system in wanted if system in commands) or None


def find(language: str) -> Compiler:
    """Find the compiler for ``language`` ("c", "c++" or "cuda"): opkit's setting, ``$CC`` and the like, then the usual names.

    For CUDA it is NVRTC where torch has it, else nvcc; a setting chooses.

    Raises:
        ToolchainError: there is none, or a setting of opkit names one that cannot be used.
    """
    if language not in _LANGUAGES:
        raise ToolchainError(f"There is no compiler for the language {language!r}: opkit builds c, c++ and cuda.")
    return find_nvrtc() if language == "cuda" and _nvrtc_chosen() else _find(language)


def find_nvcc() -> Compiler:
    """Find nvcc, whatever the CUDA compiler of the settings is.

    Raises:
        ToolchainError: there is none, or a setting of opkit names one that cannot be used.
    """
    return _find("cuda")


def find_nvrtc() -> Compiler:
    """Return the command that compiles by NVRTC.

    Raises:
        ToolchainError: there is none, and why.
    """
    return _nvrtc_at(nvrtc.library())


@functools.lru_cache(maxsize=1)
def _nvrtc_at(library: Path) -> Compiler:
    if not sys.executable:
        raise ToolchainError("NVRTC is run by Python in a process of its own, and sys.executable names no program.")
    files = [library, *nvrtc.OWN_FILES, *sorted(nvrtc.HEADERS.iterdir()), *nvrtc.toolkit_headers(library)]
    identity = " ".join(_stamp(os.fspath(file)) for file in files)
    return Compiler(sys.executable, "nvrtc", "cuda", identity, ("-I", os.fspath(nvrtc.PROGRAM), os.fspath(library)))


def _nvrtc_chosen() -> bool:
    settings = config.get()
    if settings.cuda_compiler is not None or settings.nvcc is not None:
        return settings.cuda_compiler == "nvrtc"
    try:
        nvrtc.library()
    except ToolchainError as error:
        try:
            _find("cuda")
        except ToolchainError as other:
            raise ToolchainError(f"{error} {other}") from None
        return False
    return True


def _find(language: str) -> Compiler:
    found = _search(language, _search_settings(language))
    if not os.path.exists(found.path):  # it was removed after it was found
        _search.cache_clear()
        found = _search(language, _search_settings(language))
    return dataclasses.replace(found, identity=_identity(found.command))


def _search_settings(language: str) -> tuple[str | None, ...]:
    """Return the settings and variables that decide which compiler is found."""
    about = _LANGUAGES[language]
    variables = ("PATH", about.variable, *(_CUDA_FOLDERS if language == "cuda" else ()))
    return getattr(config.get(), about.setting), *(os.environ.get(name) for name in variables)


@functools.lru_cache(maxsize=64)
def _search(language: str, settings: tuple[str | None, ...]) -> Compiler:
    """Search the candidates; exceptions are not cached, so a compiler that is installed later is found."""
    about, chosen = _LANGUAGES[language], settings[0]
    if chosen is not None:
        return _from_setting(chosen, language)
    candidates = (_compiler(command, language) for command in _candidates(language))
    compiler = next((each for each in candidates if each is not None), None)
    if compiler is None:
        commands = "\n".join(f"  {system}: {command}" for system, command in about.install.items())
        raise ToolchainError(
            f"No {about.title} compiler was found: none of {', '.join(about.names)} is on PATH. Install one, or name one in "
            f"OPKIT_{about.setting.upper()}:\n{commands}"
        )
    return compiler


def _candidates(language: str) -> Iterator[tuple[str, ...]]:
    about = _LANGUAGES[language]
    yield from filter(None, [_resolve(os.environ.get(about.variable) or "")])
    if language == "cuda":
        yield from (_in_toolkit(os.environ[name]) for name in _CUDA_FOLDERS if os.environ.get(name))
    yield from filter(None, map(_resolve, about.names))
    if language == "cuda":
        yield _in_toolkit(_CUDA_DEFAULT)


def _in_toolkit(folder: str) -> tuple[str, ...]:
    return (os.path.join(folder, "bin", "nvcc"),)


def _resolve(text: str) -> tuple[str, ...] | None:
    """Return the program that a setting names, with its arguments if it has any ("ccache gcc"); None if it is missing."""
    whole = shutil.which(text)
    if whole is not None:
        return (os.path.abspath(whole),)
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    path = shutil.which(words[0]) if words else None
    return None if path is None else (os.path.abspath(path), *words[1:])


def _compiler(command: tuple[str, ...], language: str) -> Compiler | None:
    """Return the compiler that a command starts; None if it cannot be run or its family is unknown."""
    if not os.access(command[0], os.X_OK):
        return None
    family = _family(command)
    if family is None or (family == "nvcc") != (language == "cuda"):
        return None
    return Compiler(command[0], family, language, "", command[1:])


def _from_setting(text: str, language: str) -> Compiler:
    about = _LANGUAGES[language]
    command = _resolve(text)
    setting = f"OPKIT_{about.setting.upper()}={text!r}"
    if command is None:
        raise ToolchainError(f"{setting} names no program that can be run. Correct it, or unset it to have one found.")
    compiler = _compiler(command, language)
    if compiler is None:
        kinds = "nvcc" if language == "cuda" else "gcc or clang"
        raise ToolchainError(
            f"{setting} is not {kinds}: {command[0]} --version does not say so. Correct it, or unset it."
        )
    return compiler


# ---- identification ---------------------------------------------------------------------------------------------------

_NAMES = ((re.compile(r"nvcc"), "nvcc"), (re.compile(r"clang(\+\+)?"), "clang"), (re.compile(r"gcc|g\+\+"), "gcc"))
_VERSION_WORDS = (("Cuda compilation tools", "nvcc"), ("clang version", "clang"), ("Free Software Foundation", "gcc"))


def _family(command: tuple[str, ...]) -> str | None:
    """Return the family by the program's name, that of the file it links to, or the output of ``--version``."""
    names = [] if command[1:] else [command[0], os.path.realpath(command[0])]
    for name in names:
        family = _by_name(os.path.basename(name))
        if family is not None:
            return family
    text = _version_output(command, _identity(command))
    return next((family for words, family in _VERSION_WORDS if words in text), None)


def _by_name(name: str) -> str | None:
    """Return the family that a name implies: "gcc-12" is gcc, "x86_64-linux-gnu-gcc" too, but "gcc" on macOS is a clang.

    >>> _by_name("x86_64-linux-gnu-g++-12"), _by_name("clang-19"), _by_name("cc")
    ('gcc', 'clang', None)
    """
    plain = re.sub(r"-[\d.]+$", "", name).rpartition("-")[2]
    if platform.system() == "Darwin" and name in ("gcc", "g++"):
        return None
    return next((family for pattern, family in _NAMES if pattern.fullmatch(plain)), None)


def _identity(command: tuple[str, ...]) -> str:
    """Return the files that a command starts, with their sizes and times of change."""
    programs = [command[0], *filter(None, map(shutil.which, command[1:]))]
    return " ".join(map(_stamp, programs))


def _stamp(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ToolchainError(f"The compiler {path} was found and cannot be used: {error.strerror}.") from error
    return f"{os.path.realpath(path)}:{status.st_size}:{status.st_mtime_ns}"


@functools.lru_cache(maxsize=64)
def _version_output(command: tuple[str, ...], identity: str) -> str:
    """Return the output of ``--version``; "" if it fails. A changed ``identity`` runs it again: it is part of the cache key."""
    try:
        run = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.decode("utf-8", "replace")


def version(compiler: Compiler) -> str:
    """Return the compiler's version, from its own output; it is started once.

    >>> version(Compiler("/nonexistent/gcc", "gcc", "c", ""))
    'gcc of unknown version'
    """
    lines = [line.strip() for line in _version_output(compiler.command, compiler.identity).splitlines() if line.strip()]
    if compiler.family == "nvcc":
        lines = [line for line in lines if "release" in line]
    return lines[0] if lines else f"{compiler.family} of unknown version"
