"""PyTorch's own OpInfo database as operators to check: each function of it, with arguments made from one of its samples.

A sample is a call with tensors of fixed sizes. :func:`entry` turns it into specs: a size becomes a name where the function takes
other sizes too, bounds are read from the sample's numbers, all else stays as it is. :func:`wrapped` is the function as an
operator of ``torch.library``'s; what it computes, what it says of fake tensors and its gradients are all the function's own, so
whatever a check reports of it is a fault of the check, or of ATen.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from database_names import EXCLUDED, FIXED, UNLIKE
from database_specs import Plan
from torch._guards import detect_fake_mode  # read in torch 2.13
from torch.utils import _pytree as pytree

import opkit

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WHOLE = (torch.int64, torch.int32)
_KINDS = {bool: "bool", int: "int", float: "float"}
_MOST = 2**12  # elements of a sample's tensor


class UnfitError(Exception):
    """A function that cannot be wrapped; the message says why."""


def _full_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


@functools.cache
def infos() -> dict[str, Any]:
    """The database, by name and variant; importing it takes a second."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports, such as numba
        from torch.testing._internal.common_methods_invocations import op_db
    return {_full_name(info): info for info in op_db}


def names() -> list[str]:
    """Functions that take tensors and are the same on every call; those that do not fit are listed with the reason."""
    return [name for name in infos() if not any(name == each or name.startswith(f"{each}.") for each in EXCLUDED)]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A function of the database, and what it is called with.

    Attributes:
        name: the database's.
        function: takes the arguments that ``args`` describes, in order, and returns tensors that share memory with nothing.
        args: specs and numbers.
        schema: the schema for ``torch.library``.
        differentiable: whether the database says so.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    schema: str
    differentiable: bool


@functools.cache
def entry(name: str) -> Entry:
    """The function called ``name`` with arguments made from its sample.

    Raises:
        UnfitError: no sample of it can be turned into specs.
    """
    info = infos()[name]
    dtype = torch.float32 if torch.float32 in info.dtypes else torch.int64
    if dtype not in info.dtypes:
        raise UnfitError("it takes neither float32 nor int64")
    reasons = []
    for sample in _samples(info, dtype):
        try:
            return _entry(name, info, sample, dtype)
        except UnfitError as error:
            reasons.append(str(error))
    raise UnfitError(reasons[0] if reasons else "it has no sample")


def _samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The database's samples, those that say the most first."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = list(info.sample_inputs("cpu", dtype, requires_grad=False))[:40]
    yield from sorted(found, key=lambda sample: -_worth(sample))[:3]


def _worth(sample: Any) -> int:
    leaves = [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]
    if not leaves or any(t.numel() == 0 or t.numel() > _MOST for t in leaves):
        return -1
    return len({size for t in leaves for size in t.shape if size > 1}) + (leaves[0].dim() > 0)


def _entry(name: str, info: Any, sample: Any, dtype: torch.dtype) -> Entry:
    flat, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    varying = [at for at, leaf in enumerate(flat) if _varies(name, leaf)]
    if not any(isinstance(flat[at], torch.Tensor) for at in varying):
        raise UnfitError("its sample has no tensor")

    def function(*given: Any) -> Any:
        leaves = _as_fake_as(given, flat)
        for at, value in zip(varying, given, strict=True):
            leaves[at] = value
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return _own(info.op(*args, **kwargs), given)

    plain = [flat[at] for at in varying]
    outputs = _outputs(function(*plain))
    dtypes = tuple(each for each in (_FLOATING if dtype.is_floating_point else _WHOLE) if each in info.dtypes)
    args = Plan(function, plain, info, fixed=name in FIXED).specs(dtypes)
    kinds = ["Tensor" if isinstance(value, torch.Tensor) else _KINDS[type(value)] for value in plain]
    parameters = ", ".join(f"{kind} a{number}" for number, kind in enumerate(kinds))
    differentiable = bool(info.supports_autograd) and dtype.is_floating_point
    return Entry(name, function, args, f"({parameters}) -> {outputs}", differentiable)


def _as_fake_as(given: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The leaves, with fake tensors for those that stay as they are where the others are fake."""
    mode = detect_fake_mode([value for value in given if isinstance(value, torch.Tensor)])
    return [leaf if mode is None or not isinstance(leaf, torch.Tensor) else mode.from_tensor(leaf) for leaf in leaves]


def _varies(name: str, leaf: Any) -> bool:
    """Whether a leaf of the sample becomes an argument; indices that must be unlike one another stay as they are."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout == torch.strided and not (name in UNLIKE and not leaf.is_floating_point())
    return type(leaf) in _KINDS and math.isfinite(leaf)


def _own(returned: Any, given: Sequence[Any]) -> Any:
    """What the function returned, with copies of tensors that share memory with an argument or with one another."""
    seen = {_memory(value) for value in given if isinstance(value, torch.Tensor)}
    leaves, _ = pytree.tree_flatten(returned)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            shared = _memory(leaf) in seen or leaf.is_neg() or leaf.is_conj()
            leaves[at] = leaf.clone() if shared else leaf
            seen.add(_memory(leaves[at]))
    if isinstance(returned, torch.Tensor):
        return leaves[0]
    several = isinstance(returned, list) or type(returned) is tuple  # as many as there are, such as chunk's
    return leaves if several else tuple(leaves)


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # functorch's wrappers have none: all are copied
        return None


def _outputs(returned: Any) -> str:
    leaves = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    if not leaves or not all(isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided for leaf in leaves):
        raise UnfitError("it returns what is no tensor")
    if isinstance(returned, list):
        return "Tensor[]"
    return "Tensor" if isinstance(returned, torch.Tensor) else f"({', '.join(['Tensor'] * len(leaves))})"


@functools.cache
def wrapped(name: str) -> Any:
    """The function as an operator of ``torch.library``'s: its fake implementation and its gradients are its own."""
    found = entry(name)
    op = torch.library.custom_op(
        f"database::{''.join(c if c.isalnum() else '_' for c in name)}",
        found.function,
        mutates_args=(),
        schema=found.schema,
    )
    op.register_fake(found.function)
    if found.differentiable:
        op.register_autograd(functools.partial(_backward, found.function), setup_context=_save)
    return op


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.plain = [None if isinstance(value, torch.Tensor) else value for value in inputs]
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))


def _backward(function: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) if value is None else value for value in ctx.plain]
    at = [n for n, value in enumerate(inputs) if isinstance(value, torch.Tensor) and _differentiable(value)]

    def of(*varying: torch.Tensor) -> Any:
        full = list(inputs)
        for n, value in zip(at, varying, strict=True):
            full[n] = value
        returned = function(*full)
        leaves = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        return tuple(leaf for leaf in leaves if _differentiable(leaf))

    outputs, pull = torch.func.vjp(of, *(inputs[n] for n in at))
    given = [grad for grad in pytree.tree_leaves(grads) if grad is None or _differentiable(grad)]
    found = pull(tuple(_grad(output, grad) for output, grad in zip(outputs, given, strict=True)))
    result: list[Any] = [None] * len(inputs)
    for n, grad in zip(at, found, strict=True):
        result[n] = grad
    return tuple(result)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _grad(output: torch.Tensor, grad: Any) -> torch.Tensor:
    return torch.zeros_like(output) if grad is None else grad


def report(name: str, *, plain: bool = False, **how: Any) -> Any:
    """:func:`opkit.check` of one function, against itself; ``plain`` checks it without an operator around it."""
    found = entry(name)
    op = found.function if plain else wrapped(name)
    return opkit.check(op, args=found.args, reference=found.function, database=False, **how)
