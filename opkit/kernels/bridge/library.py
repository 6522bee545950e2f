"""Call the compiled bridge through ctypes."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

from opkit.errors import KernelError
from opkit.kernels.bridge import building
from opkit.kernels.bridge.building import TorchPaths
from opkit.kernels.cc.build_key import abi_version

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
        """Leave the operator as if nothing had been installed; a second time does nothing.

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
    path = building.cached(paths)
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
