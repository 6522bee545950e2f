"""Find what is wrong with the arguments of a call, once it is known that something is, and raise an error that says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
LAYOUTS = {
    "bhsd": "(batch, heads, sequence, head size)",
    "bshd": "(batch, sequence, heads, head size)",
    "thd": "(total, heads, head size)",
}


def explain(q: Any, k: Any, v: Any, layout: str) -> None:
    """Raise for the first mistake in queries, keys and values in the user's ``layout``.

    Raises:
        ArgumentTypeError: one is not a tensor.
        DtypeError: their dtypes differ, or attention does not support them.
        ArgumentError: they are on different devices.
        ShapeError: their shapes contradict the layout or each other.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, q, layout)
    sizes = {name: dict(zip(_names(layout), tensor.shape, strict=True)) for name, tensor in tensors.items()}
    for left, right, what in (("q", "k", "batch"), ("q", "v", "batch"), ("q", "k", "head size"), ("k", "v", "heads"),
                              ("k", "v", "sequence"), ("k", "v", "total")):  # fmt: skip
        if sizes[left].get(what) != sizes[right].get(what):
            raise ShapeError(
                f"opkit.attention: {left} of shape {tuple(tensors[left].shape)} and {right} of shape "
                f"{tuple(tensors[right].shape)} must agree in {what}: {sizes[left][what]} and {sizes[right][what]}, in the "
                f"layout {layout!r}, {LAYOUTS[layout]}."
            )
    heads, shared = sizes["q"]["heads"], sizes["k"]["heads"]
    if not shared or heads % shared:
        raise ShapeError(
            f"opkit.attention: q has {heads} heads and k {shared}, in the layout {layout!r}, {LAYOUTS[layout]}; q's must be a "
            "multiple of k's."
        )
    if not sizes["q"]["head size"]:
        raise ShapeError(f"opkit.attention: q of shape {tuple(q.shape)} has heads of size 0, expected 1 or more.")


def _names(layout: str) -> list[str]:
    return LAYOUTS[layout].strip("()").split(", ")


def _check_tensor(name: str, tensor: Any, q: Tensor, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"opkit.attention: {name} must be a tensor, got {type(tensor).__name__}: {tensor!r}.")
    check_strided(name, tensor)
    if tensor.dtype not in DTYPES | FLOAT8:
        raise DtypeError(
            f"opkit.attention: {name} has dtype {tensor.dtype}, expected float32, float64, bfloat16, float16, float8_e4m3fn or "
            "float8_e5m2. Convert it with .to(torch.float32)."
        )
    if tensor.dtype != q.dtype:
        raise DtypeError(
            f"opkit.attention: {name} has dtype {tensor.dtype}, q has {q.dtype}. Convert it with .to(q.dtype)."
        )
    if tensor.device != q.device:
        raise ArgumentError(
            f"opkit.attention: {name} is on {tensor.device}, q is on {q.device}. Move it with .to(q.device)."
        )
    if tensor.dim() != len(_names(layout)):
        raise ShapeError(
            f"opkit.attention: {name} of shape {tuple(tensor.shape)} has {tensor.dim()} dimensions; the layout {layout!r} is "
            f"{LAYOUTS[layout]}."
        )


def check_strided(name: str, tensor: Tensor, function: str = "opkit.attention") -> None:
    """Raise for nested and sparse tensors, and others that have no strides."""
    if tensor.is_nested:
        raise ArgumentTypeError(
            f"{function}: {name} is a nested tensor ({type(tensor).__name__}). Give its .values() in layout='thd' with "
            "mask=opkit.masks.VarLen(x.offsets()), or .to_padded_tensor(0.0) with opkit.masks.KeyPadding(lengths)."
        )
    if tensor.layout is not torch.strided:
        raise ArgumentTypeError(
            f"{function}: {name} is a tensor of layout {tensor.layout}, expected torch.strided. Convert it with .to_dense()."
        )


def refuse_context_parallel() -> None:
    """Raise, since each rank holds a part of the keys."""
    raise ArgumentError(
        "opkit.attention: torch.distributed's context parallelism is on, under which each rank holds a part of the sequence: the "
        "result would be of this rank's keys alone. Use opkit.context_parallel, or call "
        "torch.nn.functional.scaled_dot_product_attention, which it distributes."
    )


def check_parallel(layout: Any, descales: Any, kernel: Any) -> None:
    """Raise for what :func:`opkit.attention` does not take within ``context_parallel``."""
    check_layout(layout)
    if layout == "thd" or descales is not None or kernel is not None:
        raise ArgumentError(
            "opkit.attention: where processes divide the sequence, layout is 'bhsd' or 'bshd', without descales= and kernel=; "
            f"got layout={layout!r}, descales={descales!r}, kernel={kernel!r}. Give packed sequences as VarLen with a batch of 1."
        )


def check_layout(layout: Any) -> None:
    """Raise unless ``layout`` exists."""
    if layout not in LAYOUTS:
        known = "; ".join(f"{name!r}: {sizes}" for name, sizes in LAYOUTS.items())
        raise ArgumentError(f"opkit.attention: layout={layout!r} is unknown. There are {known}.")


def check_softcap(
    softcap: Any, name: str = "opkit.attention: softcap", expected: str = "above 0, or None for no bound"
) -> None:
    """Raise unless ``softcap`` is a positive number."""
    try:
        positive = bool(softcap > 0)
    except (RuntimeError, TypeError, ValueError):  # it is no number
        positive = False
    if not positive:
        raise ArgumentError(f"{name}={softcap!r} must be {expected}.")


def check_dropout(dropout_p: float) -> None:
    """Raise unless ``dropout_p`` is between 0 and 1."""
    if not 0 <= dropout_p <= 1:
        raise ArgumentError(f"opkit.attention: dropout_p={dropout_p!r} must be between 0 and 1.")


def check_sinks(sinks: Any, q: Tensor, heads: int) -> None:
    """Raise unless ``sinks`` are one floating number for each head, on the device of ``q``."""
    if not isinstance(sinks, Tensor):
        raise ArgumentTypeError(f"opkit.attention: sinks must be a tensor, got {type(sinks).__name__}: {sinks!r}.")
    if not sinks.is_floating_point():
        raise DtypeError(f"opkit.attention: sinks has dtype {sinks.dtype}, expected a floating one.")
    if sinks.device != q.device:
        raise ArgumentError(
            f"opkit.attention: sinks is on {sinks.device}, q is on {q.device}. Move it with .to(q.device)."
        )
    if tuple(sinks.shape) != (heads,):
        raise ShapeError(
            f"opkit.attention: sinks of shape {tuple(sinks.shape)} must be (heads,) = ({heads},), q's heads."
        )
