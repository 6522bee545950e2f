"""``opkit.optimize`` and ``opkit.restore``: faster forwards for the modules of a model, in place, and the way back."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from opkit.attn.compat.hugging_face import register_transformers, sdpa_configs
from opkit.errors import ArgumentError, ArgumentTypeError
from opkit.nn import torch_private as private
from opkit.nn.recognized import DESCRIPTIONS, find

_REPORT = "_opkit_report"
"""The attribute of an optimized model that holds its :class:`Report`: copies of the model have copies of it."""


@dataclass(frozen=True)
class Entry:
    """What happened to one module: ``became`` is None if it was left alone, and ``reason`` says why."""

    path: str
    module: str
    became: str | None
    reason: str = ""


@dataclass
class Report:
    """What :func:`optimize` did to a model; as a string, one line for modules whose paths differ in numbers alone."""

    model: str
    entries: list[Entry]
    configs: list[Any] = field(repr=False)
    """The configurations of transformers whose attention is opkit's."""
    compiled: bool = False

    @property
    def changed(self) -> list[Entry]:
        """Return the entries of modules that were changed."""
        return [entry for entry in self.entries if entry.became is not None]

    @property
    def left_alone(self) -> list[Entry]:
        """Return the entries of modules that were recognized and left alone."""
        return [entry for entry in self.entries if entry.became is None]

    def __str__(self) -> str:
        lines = [f"opkit.optimize({self.model})"]
        for title, entries in (("changed", self.changed), ("left alone", self.left_alone)):
            groups: dict[tuple[str, str, str], int] = {}
            for entry in entries:
                path = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.path) or "the model"
                key = (path, entry.module, entry.became or entry.reason)
                groups[key] = groups.get(key, 0) + 1
            lines.append(f"{title}:" if groups else f"{title}: nothing")
            for (path, module, text), count in groups.items():
                lines.append(f"  {path} ({module}{f', {count} modules' if count > 1 else ''}): {text}")
        return "\n".join(lines)


def optimize(model: nn.Module, *, compile: bool = True, verbose: bool = True) -> Report:
    """Make a model faster in place: its attention by :func:`opkit.attention`, and the model compiled by opkit's compiler.

    A module is changed where its result stays the same to rounding, and where that was measured to be faster:

    - Models of transformers that use "sdpa" attention get "opkit".
    - Modules that call ``torch.nn.functional.scaled_dot_product_attention`` run in :class:`opkit.sdpa_override`. A query that
      sees no key gives zeros, and dropout draws other random numbers.
    - With ``compile=False``, RMS norms that are written by hand become one call of ``torch.nn.functional.rms_norm`` in
      inference; the compiler fuses norms as they are. Norms are recognized by their results on random input.
    - The model is compiled by ``model.compile(backend="opkit")``.

    Modules, parameters, buffers, hooks and state dicts stay what they are: a module gets another ``forward`` as an attribute of
    the instance. Copies and pickles have these forwards too, but PyTorch leaves compiled code out of them: call ``optimize`` on
    a copy to compile it. A second call changes nothing more. If anything fails, the model is left as it was.

    Args:
        model: the model. A configuration of transformers that it shares with other models changes for them, too.
        compile: also compile the model, unless it is compiled already.
        verbose: print the report.

    Returns:
        What was changed, and what was left alone and why.

    Raises:
        ArgumentTypeError: ``model`` is no ``nn.Module``.

    >>> import opkit
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    >>> print(opkit.optimize(model, compile=False, verbose=False))
    opkit.optimize(Sequential)
    changed: nothing
    left alone:
      * (RMSNorm): one call of torch's
    >>> opkit.restore(model)
    """
    _check("optimize", model)
    report = vars(model).get(_REPORT)
    is_new = report is None
    try:
        if report is None:
            report = _replace(model, compile)
        if compile and not report.compiled and private.is_compiled(model):
            report.entries.append(Entry("", report.model, None, "it is compiled already"))
        elif compile and not private.is_compiled(model):
            model.compile(backend="opkit")
            if not report.compiled:
                report.entries.append(Entry("", report.model, 'compiled with backend="opkit"'))
            report.compiled = True
    except BaseException:
        if is_new and _REPORT in vars(model):
            restore(model)
        raise
    if verbose:
        print(report)
    return report


def _replace(model: nn.Module, compiled: bool) -> Report:
    """Find everything first, then change it."""
    report = Report(type(model).__name__, [], sdpa_configs(model))
    forwards: list[tuple[nn.Module, Any]] = []
    for path, module in model.named_modules():
        found = find(module, compiled)
        if isinstance(found, str):
            report.entries.append(Entry(path, type(module).__name__, None, found))
        elif found is not None:
            forward = functools.partial(found, module)
            forwards.append((module, functools.update_wrapper(forward, module.forward)))  # for inspect.signature
            report.entries.append(Entry(path, type(module).__name__, DESCRIPTIONS[found]))
    setattr(model, _REPORT, report)
    if report.configs:
        register_transformers()
        report.entries.insert(0, Entry("", report.model, 'attn_implementation="opkit" in place of "sdpa"'))
    for config in report.configs:
        config._attn_implementation_internal = "opkit"
    for module, forward in forwards:
        module.forward = forward
    return report


def restore(model: nn.Module) -> None:
    """Undo :func:`optimize`: every module runs its own forward again, and compiled code is dropped.

    A model that was not optimized stays as it is.

    Args:
        model: what :func:`optimize` was called with, or a copy of it.

    Raises:
        ArgumentTypeError: ``model`` is no ``nn.Module``.
        ArgumentError: the model is part of one that was optimized, or a forward was replaced again since.

    >>> import opkit
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    >>> opkit.optimize(model, verbose=False).compiled
    True
    >>> opkit.restore(model)
    """
    _check("restore", model)
    report: Report | None = vars(model).get(_REPORT)
    modules = dict(model.named_modules())
    if report is None:
        if any(map(_is_ours, modules.values())) and not any(_REPORT in vars(module) for module in modules.values()):
            raise ArgumentError(
                f"opkit.restore: {type(model).__name__} was optimized as a part of another model. Restore that model."
            )
        return
    changed = [modules[entry.path] for entry in report.changed if entry.path and entry.path in modules]
    for module in changed:
        if "forward" in vars(module) and not _is_ours(module):
            raise ArgumentError(
                f"opkit.restore: the forward of a {type(module).__name__} was replaced after opkit.optimize. Undo that first."
            )
    for module in [*changed, model]:
        if _is_ours(module):
            del module.forward
    for config in report.configs:
        config._attn_implementation_internal = "sdpa"
    if report.compiled:
        private.drop_compiled(model)
    delattr(model, _REPORT)


def _is_ours(module: nn.Module) -> bool:
    """Return whether a module's forward is a replacement."""
    return getattr(vars(module).get("forward"), "func", None) in DESCRIPTIONS


def _check(name: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"opkit.{name}: model is {model!r}, no nn.Module. Compile functions with torch.compile(f, backend='opkit')."
        )
