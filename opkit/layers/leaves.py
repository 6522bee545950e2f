"""The leaves of pytrees in messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def path(name: str, spec: Any, number: int) -> str:
    """Return the expression of a leaf, such as ``carry['h'][0]``."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    found = next(path for path, leaf in pytree.tree_flatten_with_path(numbered)[0] if leaf == number)
    return name + pytree.keystr(found)


def described(value: Any) -> str:
    """Return the dtype, the shape and the device of a tensor, or the type of another value."""
    if value is None or isinstance(value, tuple | list | dict):
        return "None" if value is None else f"a {type(value).__name__}"
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}: {value!r}"
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{device}"


def is_like(value: Any, other: Any) -> bool:
    """Return whether two leaves are tensors of one dtype, shape and device, or equal."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and value.device == other.device
    return type(value) is type(other) and (isinstance(value, Tensor) or value == other)
