"""The private torch name that this folder relies on, as of torch 2.14.1; 2.11 has it too."""

# pyright: reportPrivateUsage=false

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile`` was called."""
    return module._compiled_call_impl is not None


def drop_compiled(module: nn.Module) -> None:
    """Undo ``module.compile``."""
    vars(module).pop("_compiled_call_impl", None)
