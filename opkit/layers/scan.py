"""``opkit.scan``: a loop over the rows of tensors, of which a compiled program holds the body once."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opkit.errors import ArgumentError, ArgumentTypeError, OutputError, ShapeError
from opkit.layers.checkpoints import checkpoint
from opkit.layers.leaves import described, path
from opkit.layers.policies import Policy, policy_of
from opkit.layers.torch_private import SCAN_HAS_GRADIENTS, FakeTensorMode, captured_scan, is_transformed


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    policy: str | Policy = "save_all",
) -> tuple[Any, Any]:
    """Call a function for each row of tensors, pass its first result on to the next call, and stack its second results.

    The result is that of this loop, for a single tensor ``xs``::

        carry, ys = init, []
        for x in xs:
            carry, y = fn(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    In eager mode it is this loop, so that whatever works in eager code works in ``fn``. In ``torch.compile`` the program holds
    the body once instead of ``length`` times, so that the time to compile does not depend on ``length``. There ``fn`` must not
    write to tensors that it did not make while gradients are recorded, or torch raises an error: put them into the carry, or
    write the loop in Python, which Dynamo unrolls. Unrolled as well are loops whose ``fn`` is a module with running statistics
    in training mode or a method of one, loops within transforms of ``torch.func``, and, with gradients, loops over complex
    numbers and all loops before torch 2.13.

    Args:
        fn: takes the carry and a row of each tensor in ``xs``, and returns the next carry and ``y``. It may be a module, and may
            use other tensors and modules; they get gradients, too.
        init: the first carry: tensors of any shape and dtype in tuples, lists, dictionaries and other pytrees. Python numbers
            become tensors, None stays. The carry keeps its structure, and its tensors their shapes, dtypes and devices.
        xs: tensors (length, ...) in a pytree. None among them stays None in each row.
        length: the number of calls. Required if ``xs`` has no tensors: then ``fn`` gets ``xs`` as it is.
        reverse: begin at the last row. ``ys`` has the order of ``xs`` either way.
        policy: what each call keeps for the backward, as in :func:`opkit.checkpoint`. In ``torch.compile``, a graph ends at each
            call with :func:`opkit.offload`, so that the loop is unrolled.

    Returns:
        The last carry, and ``y`` of all calls: a pytree whose tensors are (length, ...), and None where ``y`` is None. For
        length 0, the carry is ``init``; ``fn`` runs on fake tensors to find the shapes (length, ...).

    Raises:
        ArgumentError: ``xs`` has no tensors and there is no ``length``, ``length`` is another number than that of rows, or there
            is no such policy.
        ArgumentTypeError: a leaf of ``init`` or ``xs``, or ``length``, is of another type.
        ShapeError: the tensors in ``xs`` have no rows, or not all the same number.
        OutputError: ``fn`` does not return a pair, changes the carry's structure, a shape, dtype or device in it, or returns
            another kind of ``y`` in another call. In ``torch.compile``, torch's own error names it as its cause.

    >>> import opkit, torch
    >>> def decay(carry, x):
    ...     carry = 0.5 * carry + x
    ...     return carry, {"doubled": 2 * carry}
    >>> carry, ys = opkit.scan(decay, torch.zeros(2), torch.ones(3, 2))
    >>> carry, ys["doubled"][:, 0]
    (tensor([1.7500, 1.7500]), tensor([2.0000, 3.0000, 3.5000]))

    Source: ``jax.lax.scan``, https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html.
    """
    leaves, spec = pytree.tree_flatten(init)
    leaves = [_as_tensor(leaf, "init", spec, number) for number, leaf in enumerate(leaves)]
    columns, xs_spec = pytree.tree_flatten(xs)
    count = _count(columns, xs_spec, length)
    chosen = policy_of(policy)
    step = functools.partial(_step, checkpoint(fn, chosen), spec, xs_spec)
    if count == 0:
        ys = _ys_of_no_rows(step, leaves, columns)
    elif is_dynamo_compiling() and not chosen.moved and _can_capture(fn, [*leaves, *columns]):
        leaves, ys = _captured(step, leaves, columns, count, reverse)
    else:
        leaves, ys = _loop(step, leaves, columns, count, reverse)
    return pytree.tree_unflatten(leaves, spec), ys


_Leaves = Sequence[Tensor | None]
_Step = Callable[[_Leaves, _Leaves], tuple[list[Tensor | None], Any]]


def _can_capture(fn: Any, tensors: _Leaves) -> bool:
    """Return whether torch's operator can hold the loop; if not, Dynamo unrolls it.

    It has no derivatives of complex numbers, before torch 2.13 none of some functions either, does not know torch.func's
    transforms, and refuses to write to buffers.
    """
    is_complex = any(leaf is not None and leaf.is_complex() for leaf in tensors)
    lacks_gradients = torch.is_grad_enabled() and (is_complex or not SCAN_HAS_GRADIENTS)
    return not lacks_gradients and not is_transformed() and not _tracks_statistics(fn)


def _tracks_statistics(fn: Any) -> bool:
    module = fn.__self__ if isinstance(fn, types.MethodType) else fn
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return any(each.training and getattr(each, "track_running_stats", False) for each in modules)


def _loop(step: _Step, carry: _Leaves, columns: _Leaves, count: int, reverse: bool) -> tuple[_Leaves, Any]:
    """Run the loop in Python."""
    rows = [[None] * count if column is None else column.unbind(0) for column in columns]  # one gradient for all rows
    spec: Any = None
    ys: list[list[Tensor | None]] = []
    for number in reversed(range(count)) if reverse else range(count):
        carry, y = step(carry, [row[number] for row in rows])
        if spec is None:
            leaves, spec = pytree.tree_flatten(y)
            ys.append([_as_tensor(leaf, "y", spec, place) for place, leaf in enumerate(leaves)])
        else:
            ys.append(_leaves_like("y", spec, ys[0], y))
    ys = ys[::-1] if reverse else ys
    stacks = [None if leaves[0] is None else torch.stack(leaves) for leaves in zip(*ys, strict=True)]
    return carry, pytree.tree_unflatten(stacks, spec)


def _captured(step: _Step, carry: _Leaves, columns: _Leaves, count: int, reverse: bool) -> tuple[_Leaves, Any]:
    """Record the loop as torch's operator ``scan``: all leaves are tensors, and no result shares memory with another tensor."""
    carry_dtypes, row_dtypes = _dtypes(carry), _dtypes(columns)

    def body(carried: list[Tensor], row: list[Tensor]) -> tuple[list[Tensor], Any]:
        after, y = step(_decoded(carry_dtypes, carried), _decoded(row_dtypes, row))
        leaves, spec = pytree.tree_flatten(y)
        y = [_encoded_y(_as_tensor(leaf, "y", spec, number)) for number, leaf in enumerate(leaves)]
        after = [_encoded(leaf) for leaf in after if leaf is not None]
        return after or [carried[0].clone()], pytree.tree_unflatten(y, spec)

    rows = [column.flip(0) if reverse else column for column in columns if column is not None]
    first = [_encoded(leaf) for leaf in carry if leaf is not None]
    first = first or [torch.zeros((), device=rows[0].device if rows else None)]
    last, ys = captured_scan(body, first, rows or [torch.zeros(count, device=first[0].device)])
    leaves, spec = pytree.tree_flatten(ys, is_leaf=_is_encoded_y)
    leaves = [leaf.flip(0) if reverse and leaf is not None else leaf for leaf in map(_decoded_y, leaves)]
    return _decoded(carry_dtypes, last), pytree.tree_unflatten(leaves, spec)


def _ys_of_no_rows(step: _Step, carry: _Leaves, columns: _Leaves) -> Any:
    """Return tensors without rows, whose other sizes are those that a call gives."""
    if is_dynamo_compiling():
        row = [None if column is None else column.new_zeros((1, *column.shape[1:])) for column in columns]
        with torch.enable_grad():  # where torch refuses a body that writes to tensors; nothing uses what this computes
            _, ys = _captured(step, carry, row, 1, False)
        return pytree.tree_map(lambda leaf: None if leaf is None else _empty(leaf, leaf.shape[1:]), ys)
    with FakeTensorMode() as mode, _FakeArguments(mode):
        row = [None if column is None else column.new_zeros(column.shape[1:]) for column in columns]
        _, y = step(carry, row)
        leaves, spec = pytree.tree_flatten(y)
        leaves = [_as_tensor(leaf, "y", spec, number) for number, leaf in enumerate(leaves)]
    return pytree.tree_unflatten([None if leaf is None else _empty(leaf, leaf.shape) for leaf in leaves], spec)


class _FakeArguments(TorchDispatchMode):
    """Makes real tensors that operators read or write fake, so that nothing of the user's is written to."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._mode.from_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _empty(like: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.empty((0, *sizes), dtype=like.dtype, device=like.device)


def _step(fn: Callable[[Any, Any], Any], spec: Any, xs_spec: Any, carry: _Leaves, row: _Leaves) -> Any:
    """Call the user's function on leaves; return those of the next carry, and y."""
    result = fn(pytree.tree_unflatten(carry, spec), pytree.tree_unflatten(row, xs_spec))
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise OutputError(
            f"opkit.scan: fn must return a pair (carry, y), got {described(result)}. Return (carry, None) if there is no y."
        )
    return _leaves_like("carry", spec, carry, result[0]), result[1]


def _leaves_like(name: str, spec: Any, before: _Leaves, after: Any) -> list[Tensor | None]:
    """Return the leaves of what a call returned, which must be as those before."""
    try:
        found = spec.flatten_up_to(after)
    except ValueError as error:
        raise OutputError(f"opkit.scan: fn changed the structure of {name}. {error} {_ADVICE[name]}") from None
    leaves: list[Tensor | None] = []
    for number, (old, new) in enumerate(zip(before, found, strict=True)):
        is_leaf = not isinstance(new, tuple | list | dict)
        leaf = _as_tensor(new, name, spec, number) if is_leaf else None
        if not is_leaf or not _is_alike(old, leaf):
            raise OutputError(
                f"opkit.scan: {path(name, spec, number)} was {described(old)}, became "
                f"{described(leaf if is_leaf else new)} in a call of fn. {_ADVICE[name]}"
            )
        leaves.append(leaf)
    return leaves


def _is_alike(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return old is new
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


_ADVICE = {
    "carry": "The carry keeps its structure, and its tensors their shapes, dtypes and devices: convert init, or what fn returns.",
    "y": "It must be the same in each call, so that it can be stacked.",
}


def _count(columns: Sequence[Any], spec: Any, length: int | None) -> int:
    """Return the number of calls."""
    if length is not None and (isinstance(length, bool) or not isinstance(length, int | torch.SymInt)):
        raise ArgumentTypeError(f"opkit.scan: length must be an int, got {type(length).__name__}: {length!r}.")
    if length is not None and length < 0:
        raise ArgumentError(f"opkit.scan: length must be 0 or more, got {length}.")
    count, first = length, "length"
    for number, column in enumerate(columns):
        if column is None:
            continue
        if not isinstance(column, Tensor):
            raise ArgumentTypeError(
                f"opkit.scan: {path('xs', spec, number)} must be a tensor, got {type(column).__name__}: {column!r}. "
                "What all calls share is the carry's, or fn's own."
            )
        if column.ndim == 0:
            raise ShapeError(
                f"opkit.scan: {path('xs', spec, number)} has no dimension to scan along, it is {described(column)}. Expand it "
                "to (length, ...), or let fn use it directly."
            )
        if count is None:
            count, first = column.shape[0], path("xs", spec, number)
        elif count != column.shape[0]:
            message = (
                f"opkit.scan: {path('xs', spec, number)} is {described(column)}, with {column.shape[0]} rows, but {first} "
                f"{'is' if first == 'length' else 'has'} {count}."
            )
            raise (ArgumentError if first == "length" else ShapeError)(f"{message} Dimension 0 is that of the calls.")
    if count is None:
        raise ArgumentError("opkit.scan: xs has no tensors, whose rows would give the number of calls. Pass length.")
    return count


def _as_tensor(leaf: Any, name: str, spec: Any, number: int) -> Tensor | None:
    """Return a tensor or None as it is, and a number as a tensor."""
    if leaf is None or isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, bool | int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool):
        return torch.as_tensor(leaf)
    raise ArgumentTypeError(
        f"opkit.scan: {path(name, spec, number)} must be a tensor, a number or None, got {type(leaf).__name__}: {leaf!r}."
    )


# ---- what torch's operator takes ----
# A body's results are tensors without None and, where gradients are recorded, of floating point (torch 2.13 and 2.14).

_EXACT = {
    torch.bool: torch.float32,
    torch.uint8: torch.float32,
    torch.int8: torch.float32,
    torch.int16: torch.float32,
    torch.int32: torch.float64,
}


_ENCODED_Y = "opkit.scan: y"


def _dtypes(leaves: _Leaves) -> list[torch.dtype | None]:
    return [None if leaf is None else leaf.dtype for leaf in leaves]


def _encoded(leaf: Tensor) -> Tensor:
    """Return a contiguous tensor of its own, from which :func:`_decoded` gets the leaf back, to the last bit."""
    if torch.is_grad_enabled() and leaf.dtype in _EXACT:
        leaf = leaf.to(_EXACT[leaf.dtype])
    copy = leaf.clone(memory_format=torch.contiguous_format)
    return copy.view(torch.float64) if torch.is_grad_enabled() and leaf.dtype == torch.int64 else copy


def _decoded(dtypes: Sequence[torch.dtype | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return leaves, None where there is none."""
    remaining = iter(tensors)
    return [None if dtype is None else _with_dtype(next(remaining), dtype) for dtype in dtypes]


def _with_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.view(dtype) if dtype == torch.int64 else tensor.to(dtype)


def _encoded_y(leaf: Tensor | None) -> dict[Any, Any]:
    """Return a leaf of y as a pytree of at most one tensor whose structure says what it was, since a body returns no more."""
    return {(_ENCODED_Y, None): ()} if leaf is None else {(_ENCODED_Y, leaf.dtype): _encoded(leaf)}


def _is_encoded_y(node: Any) -> bool:
    return isinstance(node, dict) and any(isinstance(key, tuple) and key[:1] == (_ENCODED_Y,) for key in node)


def _decoded_y(node: dict[Any, Any]) -> Tensor | None:
    (((_, dtype), tensor),) = node.items()
    return None if dtype is None else _with_dtype(tensor, dtype)
