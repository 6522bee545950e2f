"""The layers that a model repeats: they are called, compiled and given policies together."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from opkit.errors import ArgumentError, OutputError
from opkit.layers import torch_private as private
from opkit.layers.checkpoints import checkpoint
from opkit.layers.leaves import described, is_like
from opkit.layers.leaves import path as path_of
from opkit.layers.policies import Policy, policy_of


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
    layers = repeated(model, "compile_layers", "Compile other models with torch.compile(model, backend='opkit').")
    for layer in layers.values():
        layer.compile(backend=backend, **options)
    return list(layers)


def checkpoint_layers(model: nn.Module, policy: str | Policy | Sequence[str | Policy]) -> list[str]:
    """Give the layers that a model repeats a policy, in place: what each keeps for its backward.

    This is :func:`opkit.checkpoint` around the forward of each layer, also where the model is compiled afterwards. The layers are
    those of :func:`opkit.compile_layers`. State dicts do not change, and copies of the model have the same policies. Later calls
    replace the policies; "save_all" removes them.

    Args:
        model: the model.
        policy: one for all layers, or one for each, in the order of ``model.named_modules()``.

    Returns:
        The names of the layers, as in ``model.named_modules()``.

    Raises:
        ArgumentError: the model repeats no layer, there are more or fewer policies than layers, or there is no such policy.

    >>> import opkit
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])
    >>> opkit.checkpoint_layers(model, ["recompute_all", "recompute_all", "save_all", "save_all"])
    ['0', '1', '2', '3']
    """
    layers = repeated(model, "checkpoint_layers", "Wrap functions of other models in opkit.checkpoint.")
    chosen = _policies("checkpoint_layers", policy, len(layers))
    for layer, each in zip(layers.values(), chosen, strict=True):
        forward = layer.forward
        if isinstance(forward, functools.partial) and forward.func is _with_policy:
            forward = forward.args[1]
        vars(layer).pop("forward", None)
        if each != Policy("nothing"):
            layer.forward = functools.partial(_with_policy, each, forward)
        elif forward != layer.forward:  # a library has put another one there
            layer.forward = forward
    return list(layers)


def _with_policy(policy: Policy, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, policy)(*args, **kwargs)


def scan_layers(
    layers: nn.ModuleList | nn.Sequential | Sequence[nn.Module],
    x: Any,
    *shared: Any,
    policy: str | Policy | Sequence[str | Policy] = "save_all",
    **options: Any,
) -> Any:
    """Call layers of one structure one after the other, each with the result of the one before.

    The result is that of this loop::

        for layer in layers:
            x = layer(x, *shared, **options)
        return x

    Layers have the same structure if they are of one class, and their parameters, buffers and submodules have the same names,
    shapes, dtypes, devices and classes. So ``torch.compile(backend="opkit")`` compiles one of them, and calls it for each.
    Parameters are not stacked or copied, hooks run (also when a layer is computed again), and each layer draws its own random
    numbers.

    Args:
        layers: the layers.
        x: what the first layer gets: a tensor of any shape, or tuples, lists and dicts of them. What a layer returns has the same
            structure, shapes, dtypes and devices.
        shared: what each layer gets as well, such as a mask or the tables of a rotary embedding.
        policy: what each layer keeps for its backward, as in :func:`opkit.checkpoint`: one for all layers, or one for each.
        options: keyword arguments of each layer.

    Returns:
        The result of the last layer; ``x`` if there are no layers.

    Raises:
        ArgumentError: the structure of a layer is another one than that of the first (before torch 2.14, only eager calls check
            it), there are more or fewer policies than layers, or there is no such policy.
        OutputError: a layer returned something else than it got.

    This is ``scan_layers`` of PyTorch/XLA.

    >>> import torch
    >>> import opkit
    >>> layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(6))
    >>> opkit.scan_layers(layers, torch.ones(2, 5, 8), policy="recompute_cheap").shape
    torch.Size([2, 5, 8])
    """
    chosen = _policies("scan_layers", policy, len(layers))
    for number, layer in enumerate(layers):
        _check_structure(layers[0], layer, number)
    for number, (layer, each) in enumerate(zip(layers, chosen, strict=True)):
        result = checkpoint(layer, each)(x, *shared, **options)
        _check_result(number, x, result)
        x = result
    return x


def _check_result(number: int, given: Any, returned: Any) -> None:
    (before, spec), (after, other) = pytree.tree_flatten(given), pytree.tree_flatten(returned)
    if spec != other:
        raise OutputError(
            f"opkit.scan_layers: layers[{number}] returned {_kind(returned)}, but got {_kind(given)}. Each layer gets what the "
            "one before returned. Call layers that return something else in a loop of your own."
        )
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if not is_like(old, new):
            raise OutputError(
                f"opkit.scan_layers: layers[{number}] got {path_of('x', spec, place)} as {described(old)} and returned "
                f"{described(new)}. Each layer gets what the one before returned, which must keep its shape, dtype and device."
            )


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a dict of {', '.join(map(repr, value))}" if isinstance(value, dict) else f"a {type(value).__name__}"


def _policies(name: str, policy: str | Policy | Sequence[str | Policy], count: int) -> list[Policy]:
    """Return a policy for each layer."""
    if isinstance(policy, str) or not isinstance(policy, Sequence):
        return [policy_of(policy)] * count
    if len(policy) != count:
        raise ArgumentError(f"opkit.{name}: got {len(policy)} policies for {count} layers.")
    return [policy_of(each) for each in policy]


_same_as = weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]()
"""The first layer of the stack that a layer was found to be the same as."""


@private.while_tracing
def _check_structure(first: nn.Module, layer: nn.Module, number: int) -> None:
    known = _same_as.get(layer)
    if known is not None and known() is first:
        return
    expected, found = structure(first), structure(layer)
    for name in dict.fromkeys([*expected, *found]):
        if expected.get(name) != found.get(name):
            where = f".{name}" if name else ""
            raise ArgumentError(
                f"opkit.scan_layers: layers[{number}]{where} is {found.get(name, 'missing')}, but layers[0]{where} is "
                f"{expected.get(name, 'missing')}. Layers must have one structure; call others in a loop of your own."
            )
    _same_as[layer] = weakref.ref(first)


def structure(module: nn.Module) -> dict[str, str]:
    """Return a text for each submodule, parameter and buffer, by name."""
    classes = {name: f"a {type(each).__name__}" for name, each in module.named_modules(remove_duplicate=False)}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {**classes, **{name: described(tensor) for name, tensor in tensors}}


def repeated(model: nn.Module, name: str, advice: str) -> dict[str, nn.Module]:
    """Return the repeated layers of a model by name.

    Raises:
        ArgumentError: there are none; ``name`` and ``advice`` are for the message.
    """
    layers = dict(_layers(model, ""))
    if not layers:
        raise ArgumentError(
            f"opkit.{name}: {type(model).__name__} repeats no layer. It looks for an nn.ModuleList or "
            f"nn.Sequential that holds several modules of one class. {advice}"
        )
    return layers


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
