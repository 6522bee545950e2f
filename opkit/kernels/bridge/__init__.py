"""The bridge: C++ compiled once for each torch, with which calls of native kernels skip Python.

``bridge.cpp`` puts two kernels in front of an operator's Python ones in torch's dispatcher. They look at a call's keys
and tensors; a call that needs no gradient, mode, transform or profiler runs in C from there, and every other one goes on
to Python. It is the one part of opkit compiled against torch's headers: without it everything works, slower.

The bridge is built by ``opkit bridge`` only, never by a call. It saves a call 1 to 2.4 us and takes 6 to 15 s to compile,
so that a process that built it at first use would need some four million calls to earn that back; most make fewer, and a
container or CI job with an empty cache would wait for it each time. A process that could use the bridge and does not find it
says so once, in the log ``opkit.bridge``, and ``opkit doctor`` says so too. An image is built with ``RUN opkit bridge``.

- :func:`build` builds the bridge into the build cache, :func:`load` loads it from there and never builds it;
- :func:`status` says whether it is there, for ``opkit doctor``.

Nothing here imports torch: ``opkit.op.torch_private`` says where it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Literal

from opkit import config
from opkit.errors import CacheError, KernelError, ToolchainError
from opkit.kernels import build_cache
from opkit.kernels.cc import compilation
from opkit.kernels.cc.build_plan import abi_version
from opkit.kernels.cc.compilation import Request, Unit

_SOURCE = Path(__file__).with_name("bridge.cpp")
_INCLUDE = Path(__file__).parents[1] / "include"
# not the compiler's own C++ runtime, which may be another than torch's, or static: two in one process crash
_FLAGS = ("-std=c++20", "-O2", "-w", "-nodefaultlibs", "-Wl,--no-as-needed")
_LIBRARIES = ("torch_cpu", "c10", "c", "gcc")


@dataclasses.dataclass(frozen=True)
class TorchPaths:
    """One torch: which it is, and where its headers and libraries are."""

    version: str
    git_version: str
    include_dir: Path
    library_dir: Path
    cxx11_abi: bool = True

    @property
    def missing(self) -> str:
        """What a build needs and this torch lacks; "" where it is complete. Some distributions leave out the headers."""
        needed = (self.include_dir / "torch" / "library.h", self.library_dir / "libtorch_cpu.so")
        return "".join(f"torch {self.version} has no {path}. " for path in needed if not path.is_file()).strip()


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the bridge to one torch is ready, and where it is ``absent``, why it cannot be built, if it cannot."""

    state: Literal["built", "absent", "off"]
    reason: str = ""


def request_for(paths: TorchPaths) -> Request:
    """Return the request for the bridge to this torch."""
    # the comment makes the torch part of the cache's key, and stands at the end so that lines keep their numbers
    identity = json.dumps([paths.version, paths.git_version])
    return Request(
        label=f"bridge to torch {paths.version}",
        units=(Unit(_SOURCE.name, f"{_SOURCE.read_text(encoding='utf-8')}\n// {identity}\n", "c++"),),
        flags=(*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(paths.cxx11_abi)}", f"-isystem{paths.include_dir}"),
        include_dirs=(_INCLUDE,),
        library_dirs=(paths.library_dir,),
        libraries=_LIBRARIES,
        isa="baseline",
    )


def cached(paths: TorchPaths) -> Path | None:
    """Return the library if the cache has it and ``OPKIT_BRIDGE`` is on; never build it."""
    if not config.get().bridge:
        return None
    try:
        return compilation.find(request_for(paths))
    except ToolchainError:  # the compiler is part of the key
        return None


def status(paths: TorchPaths) -> Status:
    """Return the state of the bridge to this torch."""
    if not config.get().bridge:
        return Status("off", "OPKIT_BRIDGE=0")
    try:
        found = compilation.find(request_for(paths))
    except ToolchainError as error:
        return Status("absent", str(error))
    return Status("absent", paths.missing) if found is None else Status("built")


def build(paths: TorchPaths) -> Path:
    """Return the library; compile it now unless the cache has it.

    Raises:
        ToolchainError: there is no C++ compiler, or there are no headers.
        CompileError: the compiler refused the source, or did not finish in time.
        CacheError: the cache cannot be written to.
    """
    if paths.missing:
        raise ToolchainError(f"The bridge cannot be built: {paths.missing}")
    path = compilation.build(request_for(paths))
    if not path.is_relative_to(build_cache.root()):
        raise CacheError(f"The bridge was built, but cannot be stored in the build cache {build_cache.root()}.")
    return path


# ---- calls -----------------------------------------------------------------------------------------------------------


_logger = logging.getLogger("opkit.bridge")

DEVICES = {"cpu": 0, "cuda": 1}
"""The devices that the bridge has dispatch keys for."""


class Installed:
    """A kernel in front of an operator's Python kernels, until :meth:`remove`."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library = library
        self._handle: int | None = handle
        self._enabled = True

    @property
    def enabled(self) -> bool:
        """Whether calls may run in C. Setting it takes effect at once, in every thread, whoever is calling."""
        return self._enabled and self._handle is not None

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value
        if self._handle is not None:
            self._library.opkit_bridge_enable(self._handle, int(value))

    def remove(self) -> None:
        """Restore the operator to its state before the installation; a second call does nothing.

        As with anything in torch's dispatcher, no other thread may be calling the operator meanwhile.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.opkit_bridge_uninstall(handle)


class Bridge:
    """The bridge to the running torch, which must be loaded.

    Args:
        path: the library that :func:`opkit.kernels.bridge.build` made.
        runtime_address: of the ``opk_runtime`` whose ``execute`` runs the kernels.

    Raises:
        OSError: the library cannot be loaded, or is not for this opkit.
    """

    def __init__(self, path: Path, runtime_address: int) -> None:
        self.path = path
        self._runtime = runtime_address
        self._library = _opened(path)
        version = ctypes.c_char_p()
        abi = self._library.opkit_bridge_abi(ctypes.byref(version))
        self.torch_version = (version.value or b"").decode()  # of the headers
        if abi != abi_version():
            raise OSError(f"{path} is of ABI {abi}; this opkit needs {abi_version()}")

    def install(self, name: str, overload: str, device: str, kernel_address: int) -> Installed:
        """Run calls of an operator on ``device`` in C wherever they are plain and the runtime does not refuse them.

        Every other call goes to the kernels that the operator has in the dispatcher now, so register those first, and
        remove this before the operator is removed.

        Args:
            name: "namespace::name" of an operator whose Python kernels are registered already.
            overload: "" for the default one.
            device: "cpu" or "cuda".
            kernel_address: of the ``opk_kernel``, which must live until :meth:`Installed.remove`.

        Raises:
            KernelError: the operator or device is unknown, has a bridge already, or is not what the kernel was made for.
        """
        if device not in DEVICES:
            raise KernelError(f"{name}: the bridge has no kernels for {device!r}, only for {', '.join(DEVICES)}.")
        error = ctypes.create_string_buffer(2048)
        handle = self._library.opkit_bridge_install(
            name.encode(), overload.encode(), DEVICES[device], kernel_address, self._runtime, error, len(error)
        )
        if not handle:
            raise KernelError(
                f"{name}: the bridge cannot take its {device} calls: {error.value.decode(errors='replace')}"
            )
        return Installed(self._library, handle)


def load(paths: TorchPaths, runtime_address: int) -> Bridge | None:
    """Return the bridge to this very torch if the cache has it; None, with a line in the log, if it is absent or damaged."""
    path = cached(paths)
    if path is None:
        _logger.info(
            "There is no bridge to torch %s, so calls go through Python. Run `opkit bridge` once.", paths.version
        )
        return None
    try:
        bridge = Bridge(path, runtime_address)
        if not paths.version.startswith(bridge.torch_version):
            raise OSError(f"{paths.include_dir} has the headers of torch {bridge.torch_version}, not {paths.version}")
    except OSError as error:
        _logger.warning("The bridge to torch %s cannot be used: %s", paths.version, error)
        return None
    return bridge


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    text, pointer, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("abi", number, [ctypes.POINTER(text)]),
        ("install", pointer, [text, text, number, pointer, pointer, text, ctypes.c_size_t]),
        ("uninstall", None, [pointer]),
        ("enable", None, [pointer, number]),
    ):
        function = getattr(library, f"opkit_bridge_{name}")
        function.restype, function.argtypes = result, arguments
    return library
