"""The options of ``torch.compile(backend="opkit")``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from opkit import config
from opkit.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """The options of ``torch.compile(..., options={...})``.

    Attributes:
        strict: raise an error if a graph, or the body of a control flow operator, cannot be compiled, instead of running it in
            eager mode.
        inline: True: trace through opkit operators, also through those with a kernel; False: call them; None: treat each
            operator as it is defined, and use its ``register_lowering`` rule if it has one.
        cuda_graphs: True: record calls as CUDA graphs where that is possible, for each set of sizes; None: where it is also safe
            and faster; False: never. The log shows the reasons.
        repeated_blocks: True: compile a block that the graph repeats with other parameters once; None: do so on CPUs, and on
            GPUs if there are many; False: never.
    """

    strict: bool = False
    inline: bool | None = None
    cuda_graphs: bool | None = None
    repeated_blocks: bool | None = None


DEFAULT = CompileOptions()

_MODES = {"default": None, "reduce-overhead": True, "max-autotune": True, "max-autotune-no-cudagraphs": False}
"""The value of ``cuda_graphs`` for each of torch's modes."""


def compile_options(values: Mapping[str, Any] | None, mode: str | None = None) -> CompileOptions:
    """Return the options of a call of torch.compile.

    Raises:
        ArgumentError: an option or the mode does not exist, or has the wrong type.
    """
    if mode is not None and mode not in _MODES:
        raise ArgumentError(f"backend='opkit' has no mode {mode!r}; it has {', '.join(map(repr, _MODES))}.")
    known = [field.name for field in dataclasses.fields(CompileOptions)]
    for name, value in (values or {}).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(f"backend='opkit' has no option {name!r}; it has {', '.join(map(repr, known))}.{hint}")
        if not isinstance(value, bool) and not (name != "strict" and value is None):
            raise ArgumentError(f"backend='opkit': options[{name!r}]={value!r} must be True or False.")
    chosen = {"strict": config.get().strict, "cuda_graphs": _MODES[mode or "default"]}
    return CompileOptions(**{**chosen, **(values or {})})
