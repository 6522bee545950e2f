"""The functions that the Python of a compiled graph calls: torch's operators by name, control flow, and adapters of results.

Control flow operators run over compiled bodies. They take and return flat lists, as in AOTAutograd's graphs. A body takes a list
of its inputs, which it empties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opkit import _core
from opkit.compiler.ir.program import WAIT
from opkit.compiler.run import torch_private as private
from opkit.errors import CompileError

# Python bindings of operators, which are faster than the dispatcher's generic call.
_SHORT: dict[str, Callable[..., Any]] = {
    "aten.mm.default": torch.mm,
    "aten.bmm.default": torch.bmm,
    "aten.addmm.default": torch.addmm,
    "aten.baddbmm.default": torch.baddbmm,
}


def seed(device: torch.device) -> torch.Tensor:
    """Draw a number from the device's default generator, so that ``torch.manual_seed`` decides it."""
    return torch.empty((), dtype=torch.int64, device=device).random_()


def wait(result: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Wait for a result of a collective; the other arguments are what the collective reads, which lives until then."""
    return private.wait_tensor(result)


def winograd(x: torch.Tensor, weight: torch.Tensor, padding: list[int], transposed: bool, *, out: torch.Tensor) -> None:
    """Compute a convolution of 3 x 3 taps, or with ``transposed`` the transposed one, in float32, by Winograd's method.

    Args:
        x: images, (batch, channels, height, width), channels-last.
        weight: (out_channels, channels, 3, 3), of any strides; of a transposed one (channels, out_channels, 3, 3).
        padding: of height and width.
        transposed: whether it is the transposed convolution.
        out: the result, (batch, out_channels, out_height, out_width), channels-last.

    Torch computes it where a profiler or a mode observes operators, and where a weight is so large that a number of Winograd's
    method may not be finite.
    """
    if not private.is_observed():
        (batch, depth, *size), (_, channels, *result) = x.shape, out.shape
        strides, at, pads = weight.stride(), weight.data_ptr(), padding
        if transposed:  # the convolution with the taps in reverse order, and with what the padding leaves of the border
            pads = [2 - n for n in padding]
            at += 4 * 2 * (strides[2] + strides[3])
            strides = (strides[1], strides[0], -strides[2], -strides[3])
        sizes = (batch, depth, *size, channels, *result)
        if _core.winograd(x.data_ptr(), at, out.data_ptr(), sizes, strides, pads):
            return
    function = torch.conv_transpose2d if transposed else torch.conv2d
    out.copy_(function(x, weight, None, 1, padding))


_OWN: dict[str, Callable[..., Any]] = {"opkit.seed": seed, WAIT: wait, "opkit.winograd": winograd}


def function(target: str, targets: Mapping[str, Callable[..., Any]], out: bool = False) -> Callable[..., Any]:
    """Return the function of a target; with ``out``, its variant that writes its result to ``out=``.

    Args:
        target: its name.
        targets: functions by name, in place of torch's operators; those that are no OpOverloads may take ``out=``.
        out: whether the result is written to a tensor.

    Raises:
        CompileError: this process has no operator of that name.
        AttributeError: it has no such variant.
    """
    short = _SHORT.get(target) or _OWN.get(target)
    if short is not None:
        return short
    found = targets.get(target) or _overload(target)
    if out and private.is_overload(found):
        variant = private.out_variant(found)
        if variant is None:
            raise AttributeError(f"{target} has no variant with out=")
        found = variant
    return private.builtin(found) if private.is_overload(found) else found


def _overload(target: str) -> Any:
    try:
        return private.overload_named(target)
    except AttributeError:
        raise CompileError(missing_operator("::".join(target.split(".")[:2]))) from None


def missing_operator(name: str) -> str:
    """Return the message for a compiled function that calls an operator which is not defined."""
    return (
        f"The compiled function calls the operator {name}, which this process does not have. Import the module that defines it "
        "first."
    )


def single(target: str, targets: Mapping[str, Callable[..., Any]]) -> bool:
    """Return whether the result of a target is one tensor, and not a tuple or list of them."""
    if target in _SHORT or target in _OWN:
        return True
    found: Any = targets.get(target) or _overload(target)
    if not private.is_overload(found):
        return False
    returns = private.schema(found).returns
    return len(returns) == 1 and str(returns[0].type) in ("Tensor", "int", "Optional[Tensor]")


def into(operator: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    """Compute a product of ``tensors[1:]`` into ``tensors[0]``."""
    operator(*tensors[1:], out=tensors[0])


def aligned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, whose addresses are those of the allocator."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return the results of an operator as a tuple."""
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def fit(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the strides that the graph was captured with, without conjugate or negative bit."""
    if tensor.stride() == strides and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if tuple(tensor.shape) != shape:
        raise RuntimeError(
            f"an operator gave the sizes {tuple(tensor.shape)} where its fake implementation gives {shape}"
        )
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# ---- control flow ----------------------------------------------------------------------------------------------------

Body = Callable[[list[Any]], Any]


def cond(predicate: Any, when_true: Body, when_false: Body, operands: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the results of one of two bodies."""
    return as_tuple((when_true if predicate else when_false)([*operands]))


def switch(index: Any, branches: Sequence[Body], operands: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the results of one of several bodies, of the nearest one for a number beyond them: torch 2.14's ``switch``."""
    return as_tuple(branches[min(max(int(index), 0), len(branches) - 1)]([*operands]))


def while_loop(condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any] = ()) -> Sequence[Any]:
    """Return the values after calling a body on them while a condition holds."""
    values = _copied(carried)
    while as_tuple(condition([*values, *additional]))[0]:
        values = as_tuple(body([*values, *additional]))
    return values


def while_loop_stack_output(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any] = ()
) -> list[Any]:
    """Return the values after each call of a ``while_loop``'s body, stacked; those it begins with, if it is never called."""
    values, rows = _copied(carried), []
    while as_tuple(condition([*values, *additional]))[0]:
        values = as_tuple(body([*values, *additional]))
        rows.append(values)
    return [torch.stack(column) for column in zip(*(rows or [values]), strict=True)]


def _copied(values: Sequence[Any]) -> Sequence[Any]:
    """Return copies of values: a loop whose body never runs returns them."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def map_impl(body: Body, xs: Sequence[torch.Tensor], additional: Sequence[Any] = ()) -> list[Any]:
    """Return a body's results for each row of tensors, stacked."""
    return list(scan(body, (), xs, additional))


def scan(body: Body, init: Sequence[Any], xs: Sequence[torch.Tensor], additional: Sequence[Any] = ()) -> Sequence[Any]:
    """Return what a body carries from row to row of tensors, and the other results of each call, stacked."""
    if xs[0].shape[0] == 0:  # one call for the shapes, as in torch's own implementation
        results = as_tuple(body([*init, *(x.new_zeros(x.shape[1:]) for x in xs), *additional]))
        return [*_copied(init), *(_stack(each, 0) for each in results[len(init) :])]
    carried: Sequence[Any] = init
    rows: list[list[torch.Tensor] | None] = []
    stacked: list[torch.Tensor | None] = []
    for number, row in enumerate(zip(*(x.unbind(0) for x in xs), strict=True)):
        results = as_tuple(body([*carried, *row, *additional]))
        carried, made = results[: len(init)], results[len(init) :]
        if number == 0:
            stacked = [_stack(each, xs[0].shape[0]) for each in made]
            rows = [None if each is None else list(each.unbind(0)) for each in stacked]
        for row_of, each in zip(rows, made, strict=True):
            if row_of is not None:
                row_of[number].copy_(each)
    return [*carried, *stacked]


def _stack(row: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Return memory for ``count`` rows; None for a result that does not exist."""
    return None if row is None else row.new_empty((count, *row.shape))


def invoke_subgraph(body: Body, name: str | None, *operands: Any) -> tuple[Any, ...]:
    """Return a body's results."""
    return as_tuple(body([*operands]))


CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (cond, switch, while_loop, while_loop_stack_output, map_impl, scan, invoke_subgraph)
}
"""By the name of the higher-order operator."""
