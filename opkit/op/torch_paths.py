"""Where the running torch has its headers and libraries, and which torch it is, for what is compiled against it."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path

import torch

from opkit.kernels.bridge import TorchPaths


def torch_paths() -> TorchPaths:
    """The running torch, as :mod:`opkit.kernels.bridge` asks for it."""
    folder = Path(torch.__file__).resolve().parent
    return TorchPaths(
        version=str(torch.__version__),
        git_version=str(torch.version.git_version),
        include_dir=folder / "include",
        library_dir=folder / "lib",
        cxx11_abi=torch.compiled_with_cxx11_abi(),
    )
