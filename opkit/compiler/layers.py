"""``opkit.compile_layers``: the layers that a model repeats are compiled, instead of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opkit.errors import ArgumentError


def compile_layers(model: nn.Module, *, backend: str | Callable[..., Any] = "opkit", **options: Any) -> list[str]:
    """Compile the layers that a model repeats, in place: one is captured and compiled, and its code runs for all.

    ``torch.compile(model, backend="opkit")`` also compiles a repeated layer once, but Dynamo still captures all of them, and
    fusion is better where a model is compiled as a whole. Here, first calls take the same time whatever the number of layers,
    and what is outside of the layers runs in eager mode. This is PyTorch's regional compilation (``nn.Module.compile`` of each
    layer).

    Layers are the modules in an ``nn.ModuleList`` or ``nn.Sequential`` that holds several of one class; those within other
    layers are compiled with them. State dicts do not change, and hooks run outside of the compiled code. Dynamo compiles again
    for a layer that differs in what it reads: other sizes, another dtype, an attribute with another number; up to
    ``torch._dynamo.config.recompile_limit`` times.

    Args:
        model: the model. It must not be compiled as well.
        backend: the backend, as in ``torch.compile``.
        options: the other arguments of ``torch.compile``, such as ``dynamic`` and ``options``.

    Returns:
        The names of the layers, as in ``model.named_modules()``.

    Raises:
        ArgumentError: the model repeats no layer.

    >>> import opkit
    >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    >>> opkit.compile_layers(model)[:2]
    ['0', '1']
    """
    layers = dict(_layers(model, ""))
    if not layers:
        raise ArgumentError(
            f"opkit.compile_layers: {type(model).__name__} repeats no layer. It looks for an nn.ModuleList or "
            "nn.Sequential that holds several modules of one class. Compile other models with "
            "torch.compile(model, backend='opkit')."
        )
    for layer in layers.values():
        layer.compile(backend=backend, **options)
    return list(layers)


def _layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Return the repeated layers of a module by name, without those in other layers."""
    children = {f"{name}{child}": each for child, each in module.named_children()}
    holds_layers = isinstance(module, nn.ModuleList | nn.Sequential)
    classes = Counter(type(each) for each in children.values()) if holds_layers else Counter[type[nn.Module]]()
    for path, child in children.items():
        if classes[type(child)] > 1 and any(True for _ in child.parameters()):
            yield path, child
        else:
            yield from _layers(child, f"{path}.")
