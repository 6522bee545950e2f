"""Operators whose lowering is a call: torch's libraries compute them best, or their order of evaluation is their point."""

from __future__ import annotations

from typing import Any

from opkit.compiler.lower.registry import overloads

_OUT: dict[str, Any] = {"out": True}
_PLAIN: dict[str, Any] = {}

EXTERNS: dict[str, dict[str, Any]] = {
    **dict.fromkeys([f"aten.{name}.default" for name in ("addmv", "mv", "dot")], _OUT),
    **dict.fromkeys([*overloads("sort", "default", "stable"), *overloads("topk")], _PLAIN),
    **dict.fromkeys([*overloads("_local_scalar_dense"), *overloads("_fft_c2c"), *overloads("_fft_r2c")], _PLAIN),
    **dict.fromkeys([*overloads("_fft_c2r"), *overloads("randperm")], _PLAIN),
}
"""Options of extern calls, by the operator's name: fields of ``Extern``."""

ALIASING = overloads("real") + overloads("imag") + overloads("view_as_real") + overloads("view_as_complex")
ALIASING += overloads("view", "dtype") + overloads("_conj") + overloads("_neg_view") + overloads("conj")

FROM_STORAGE = frozenset(f"aten.as_strided{kind}.default" for kind in ("", "_copy", "_scatter"))
"""Operators whose offset is one into a tensor's storage, wherever in it the tensor begins."""
