"""Programs with users' functions as the CPU kernels take them: functions become numbers of compiled ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.calls import AnyCall, AttentionCall, PagedCall
from opkit.attn.functions.c import compiled
from opkit.attn.functions.c.compiled import CompiledFunction
from opkit.attn.functions.expression import Function, indexed
from opkit.attn.masks import program
from opkit.attn.masks.program import (
    AND,
    BAND,
    BIAS_DENSE,
    BIAS_FUNCTION,
    BIAS_OPERANDS,
    DENSE,
    FUNCTION,
    MASK_OPERANDS,
    NOT,
    OR,
    UNLIMITED,
    instructions,
)

NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}  #: of the tensors that are added
_MAX_SUMS = 1 << 30  # bytes of the sums of a tensor's gradient


class Programs(NamedTuple):
    """The programs of a mask and a bias, in which ``FUNCTION`` is followed by a number, and the functions of both."""

    mask: Sequence[int]
    mask_functions: list[CompiledFunction]
    bias: Sequence[int]
    bias_functions: list[CompiledFunction]


@functools.lru_cache(256)
def functions_of(mask: tuple[int, ...], bias: tuple[int, ...]) -> tuple[tuple[Function, ...], tuple[Function, ...]]:
    """Return the functions of both programs."""
    of_mask = [Function.of(word[1:]) for word in instructions(mask, MASK_OPERANDS) if word[0] == FUNCTION]
    of_bias = [Function.of(word[1:]) for word in instructions(bias, BIAS_OPERANDS) if word[0] == BIAS_FUNCTION]
    return tuple(of_mask), tuple(of_bias)


def obstacle(call: AnyCall | PagedCall) -> str | None:
    """Return why the kernels do not run a call's functions, or add its tensors; None if they do."""
    if not call.mask_tensors and not call.bias_tensors and len(call.mask) <= 3 and not call.bias:
        return None
    of_mask, of_bias = functions_of(tuple(call.mask), tuple(call.bias))
    if not all(each.dtype in NAMES for each in call.bias_tensors) and not all(
        call.bias_tensors[number].dtype in NAMES for number in _added(call.bias)
    ):
        return "a bias is no floating tensor"
    if program.lengths_are_rows(call.mask, call.mask_tensors):
        return "a tensor is both lengths and the numbers of rows"
    listed = [(each, call.mask_tensors) for each in of_mask] + [(each, call.bias_tensors) for each in of_bias]
    return next(filter(None, (compiled.obstacle(*each) for each in listed)), None)


def _added(bias: Sequence[int]) -> set[int]:
    """Return the numbers of the tensors that are added as they are."""
    words = [word for word in instructions(bias, BIAS_OPERANDS) if word[0] != BIAS_FUNCTION]
    return {number for word in words for number in word[1 : 1 + program.BIAS_TENSORS[word[0]]]}


def programs_of(call: AnyCall | PagedCall, slopes: bool) -> Programs:
    """Return a call's programs, whose functions are built if need be; ``slopes``: with their derivatives."""
    of_mask, of_bias = functions_of(tuple(call.mask), tuple(call.bias))
    return Programs(
        _numbered(call.mask, FUNCTION) if of_mask else call.mask,
        [compiled.compiled(each, "mask", call.mask_tensors, False) for each in of_mask],
        _numbered(call.bias, BIAS_FUNCTION) if of_bias else call.bias,
        [compiled.compiled(each, "score", call.bias_tensors, slopes) for each in of_bias],
    )


def _numbered(words: Sequence[int], opcode: int) -> list[int]:
    """Return a program with the number of a function in place of its words."""
    found: list[int] = []
    count = 0
    for word in instructions(words, MASK_OPERANDS if opcode == FUNCTION else BIAS_OPERANDS):
        found += [opcode, count] if word[0] == opcode else word
        count += word[0] == opcode
    return found


def description(call: AnyCall | PagedCall, slopes: bool) -> dict[str, Any]:
    """Return the programs and the strides of their tensors; ``slopes`` as in :func:`programs_of`."""
    flat = program.flat_rows(call.mask, call.mask_tensors)
    masks = [_strides(x.unsqueeze(0) if number in flat else x) for number, x in enumerate(call.mask_tensors)]
    return {
        **programs_of(call, slopes)._asdict(),
        "mask_tensors": masks,
        "bias_tensors": [(_strides(each), NAMES.get(each.dtype, "float32")) for each in call.bias_tensors],
    }


def _strides(x: Tensor) -> list[int]:
    """Return the strides, 0 for dimensions of size 1, which broadcast; tensors of more than four dimensions are functions'."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:4], x.stride(), strict=False)]


# ---- decoding --------------------------------------------------------------------------------------------------------


def of_few(call: AttentionCall | PagedCall, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return the programs as the decoding kernel takes them; ``sizes`` are those of the logits."""
    batch, heads, queries, keys = sizes
    whole = (batch, heads, 0, queries, keys, 0, 0)
    return {**description(call, False), "sizes": whole, "by_head": _hides_by_head(call)}


def _hides_by_head(call: AttentionCall | PagedCall) -> bool:
    """Return whether heads may see different keys."""
    for opcode, *operands in instructions(call.mask, MASK_OPERANDS):
        if opcode == DENSE and call.mask_tensors[operands[0]].shape[1] > 1:
            return True
        if opcode == FUNCTION and any(
            node.data == "h" for node in Function.of(operands).root.walk() if node.op == "var"
        ):
            return True
    return False


def split_bands(mask: Sequence[int]) -> tuple[int, int, list[int]]:
    """Return the ends of a band, and a program: a query sees what both let it see.

    >>> split_bands([BAND, -UNLIMITED, 0, DENSE, 0, BAND, -9, UNLIMITED, AND, AND])
    (-9, 0, [6, 0])
    """
    lower, upper = -UNLIMITED, UNLIMITED
    rest: list[list[int]] = []
    for part in _conjuncts(mask):
        if part[0] == BAND and len(part) == 3:
            lower, upper = max(lower, part[1]), min(upper, part[2])
        else:
            rest.append(part)
    return lower, upper, _conjunction(rest)


def _conjuncts(mask: Sequence[int]) -> list[list[int]]:
    """Return the programs of which a mask is the conjunction."""
    stack: list[list[list[int]]] = []
    for opcode, *operands in instructions(mask, MASK_OPERANDS):
        if opcode == AND:
            second = stack.pop()
            stack[-1] += second
        elif opcode in (OR, NOT):
            parts = [_conjunction(stack.pop()) for _ in range(2 if opcode == OR else 1)]
            stack.append([[*(word for part in reversed(parts) for word in part), opcode]])
        else:
            stack.append([[opcode, *operands]])
    return stack[0] if stack else []


def _conjunction(parts: Sequence[Sequence[int]]) -> list[int]:
    return [word for n, part in enumerate(parts) for word in (*part, *([AND] if n else []))]


# ---- gradients of biases ---------------------------------------------------------------------------------------------


class GradientPlace(NamedTuple):
    """How the gradient of a bias's tensor is added up.

    Attributes:
        strides: of the gradient, contiguous, by batch, head, query and key, for a tensor that is added.
        by_batch, by_head, by_key: whether other sequences, heads and keys read other elements.
    """

    strides: tuple[int, ...]
    by_batch: bool
    by_head: bool
    by_key: bool


def gradient_place(call: AnyCall, number: int) -> GradientPlace | None:
    """Return how a tensor's gradient is added up; None if the kernel has no gradient of it."""
    tensor = call.bias_tensors[number]
    axes: list[set[str]] = []
    strides: tuple[int, ...] = (0, 0, 0, 0)
    for opcode, *operands in instructions(call.bias, BIAS_OPERANDS):
        if opcode == BIAS_FUNCTION:
            function = Function.of(operands)
            for load, at in indexed(function.root):
                if function.tensors[int(load.data[0][1:])] == number:
                    axes.append({axis for axis in at if axis is not None})
        elif number in operands[: program.BIAS_TENSORS[opcode]]:
            if opcode != BIAS_DENSE:
                return None
            whole = [tensor[0].numel() if tensor.shape[0] else 0, *(0, 0, 0)]
            for dim in (1, 2, 3):
                whole[dim] = whole[dim - 1] // max(tensor.shape[dim], 1)
            strides = tuple(0 if n == 1 else s for n, s in zip(tensor.shape, whole, strict=True))
            axes.append({axis for axis, size in zip("bhij", tensor.shape, strict=True) if size > 1})
    if tensor.dtype not in NAMES:
        return None
    shared = set("bhij").intersection(*axes) if axes else set("bhij")
    place = GradientPlace(strides, "b" in shared, "h" in shared, "j" in shared)
    copies = (1 if place.by_batch else call.q.shape[0]) * (1 if place.by_head else call.k.shape[1])
    copies *= 1 if place.by_key else 16
    return place if copies * tensor.numel() * 8 <= _MAX_SUMS or copies == 1 else None


class BiasSums:
    """The sums of the gradients of some tensors of a bias, in float64, as the kernels take them.

    Args:
        call: the first of calls of the same shapes, of which :func:`gradient_place` returned how each is added up.
        wanted: the numbers of the tensors.
    """

    def __init__(self, call: AnyCall, wanted: Sequence[int]) -> None:
        self.wanted = wanted
        self.places = [gradient_place(call, number) for number in wanted]

    def new(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Return zeros for each, and what the kernel needs to know of all tensors."""
        sums = [torch.zeros(tensors[number].shape, dtype=torch.float64) for number in self.wanted]
        described: list[Any] = [(0, 0, (0, 0, 0, 0), False, False, False)] * len(tensors)
        for number, place, each in zip(self.wanted, self.places, sums, strict=True):
            assert place is not None
            described[number] = (each.data_ptr(), each.numel(), *place)
        return sums, described

    def rounded(self, sums: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums in the dtypes of their tensors."""
        return [each.to(tensors[number].dtype) for number, each in zip(self.wanted, sums, strict=True)]

    def zeros(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients in calls without queries or keys."""
        return [torch.zeros_like(tensors[number]) for number in self.wanted]
