"""``opkit explain``: what the built-in compiler makes of a function or a model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from opkit import errors, terminal


def explain(
    target: Annotated[str, typer.Argument(help="A function or a model in a module, as in my_models:block.")],
    args: Annotated[
        str, typer.Option(help='Its arguments, in Python, where torch is known: "torch.randn(4, 8), dim=0".')
    ] = "",
    html: Annotated[Path | None, typer.Option(help="Write every form in full to this file, for a browser.")] = None,
) -> None:
    """Compile with backend="opkit", call it once, and print kernels, calls, what was not fused and why, and memory."""
    with terminal.bad_input(errors.ArgumentError):
        model = _model(target)
        positional, named = _arguments(args)
    from opkit.compiler.explain import explain

    explanation = explain(model, *positional, **named)
    terminal.console().print(str(explanation), markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        explanation.to_html(html)


def _model(target: str) -> Any:
    module, _, name = target.partition(":")
    if not name:
        raise errors.ArgumentError(f"{target}: name a function or a model of the module, as in {module}:function.")
    terminal.import_modules([module])
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise errors.ArgumentError(f"{module} has no function or model called {name}.")
    return found


def _arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    try:
        return eval(f"given({text})", {"torch": torch, "given": given})
    except Exception as error:
        raise errors.ArgumentError(f"--args {text}: {type(error).__name__}: {error}") from error
