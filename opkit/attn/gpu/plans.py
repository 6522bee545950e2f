"""Translate the programs of a mask and a bias into arguments of Triton kernels: constants, tensors in slots, and numbers.

Bands and lengths that hold for the whole mask, as in ``Causal() & KeyPadding(lengths)``, become the numbers ``lower`` and
``upper`` and the tensor ``lengths``, from which a kernel computes the tiles it visits. Whatever else a mask says stays a program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.functions.expression import Function
from opkit.attn.gpu import functions
from opkit.attn.gpu.functions import Placed
from opkit.attn.masks import program
from opkit.attn.masks.program import Grid

SLOTS, NUMBERS = functions.OTHER_SLOTS, functions.OTHER_NUMBERS
FAR = 1 << 30  #: an end of a band that hides nothing, in 32 bits
Words = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class MaskShape:
    """The properties that all calls with the same mask and bias programs share.

    Attributes:
        mask: the kernel's program, in which a band names the place of its ends among ``numbers``; empty where bands and
            lengths say all.
        bias: the kernel's program.
        slots: of each slot the tensor's place, "mask" or "bias" and its number, and how its dimensions are those of logits.
        numbers: the ends of bands, and widths.
        lower, upper: the band that holds for the whole mask.
        banded: whether there is one.
        lengths: the numbers of the mask's tensors of lengths that hold for the whole mask.
        functions: those of both programs, whose words have a function's place here.
    """

    mask: Words
    bias: Words
    slots: tuple[tuple[str, int, str], ...]
    numbers: tuple[int, ...]
    lower: int
    upper: int
    banded: bool
    lengths: tuple[int, ...]
    functions: tuple[Placed, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there are enough slots and numbers."""
        enough = len(self.slots) <= SLOTS and len(self.numbers) <= NUMBERS and functions.fit(self.functions)
        return enough and len(self.lengths) <= 1


def live_tiles(shape: MaskShape) -> list[str]:
    """Return where the live tiles of a mask come from, for ``select``; nothing if all tiles are live.

    >>> live_tiles(shape_of((program.BAND, -4, 0), ()))
    ['live tiles: computed from bands and lengths']
    """
    if shape.mask:
        return ["live tiles: a kernel finds them from the mask's tensors and functions"]
    return ["live tiles: computed from bands and lengths"] if shape.banded or shape.lengths else []


_LAYOUTS = {program.SEGMENTS: ("bq", "bk"), program.LENGTH: ("b",), program.DENSE: ("bhqk",), program.BAND_AT: ("bq",)}
_BIASES = {program.BIAS_DENSE: ("bhqk",), program.BIAS_ALIBI: ("bh",), program.BIAS_REL: ("bhqk", "bhqk")}
_DIMENSIONS = "bhqk"


def narrow(end: int) -> int:
    """Return an end of a band in 32 bits.

    >>> narrow(-(2**62)), narrow(-3)
    (-1073741824, -3)
    """
    return max(-FAR, min(FAR, int(end)))


def conjunction(listed: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return the parts whose conjunction a program is, each a program of its own.

    >>> conjunction([(3, -1, 0), (5, 0), (0,), (4, 1, 2), (2,), (0,)])
    [[(3, -1, 0)], [(5, 0)], [(4, 1, 2), (2,)]]
    """
    stack: list[list[list[tuple[int, ...]]]] = []
    for word in listed:
        if word[0] == program.AND:
            right, left = stack.pop(), stack.pop()
            stack.append(left + right)
        elif word[0] == program.OR:
            right, left = stack.pop(), stack.pop()
            stack.append([[*_joined(left), *_joined(right), word]])
        elif word[0] == program.NOT:
            stack.append([[*_joined(stack.pop()), word]])
        else:
            stack.append([[word]])
    return stack[0] if stack else []


def _joined(parts: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the program of a conjunction."""
    return [word for part in parts for word in part] + [(program.AND,)] * (len(parts) - 1)


@functools.lru_cache(maxsize=1024)
def shape_of(mask: tuple[int, ...], bias: tuple[int, ...]) -> MaskShape:
    """Return the shape of a mask's and a bias's programs.

    >>> shape_of((program.BAND, -(2**62), 0), ()).upper
    0
    """
    building = _Building()
    rest: list[list[tuple[int, ...]]] = []
    lower, upper = -FAR, FAR
    lengths: list[int] = []
    for part in conjunction(program.instructions(mask, program.MASK_OPERANDS)):
        if len(part) == 1 and part[0][0] == program.BAND:
            lower, upper = max(lower, narrow(part[0][1])), min(upper, narrow(part[0][2]))
        elif len(part) == 1 and part[0][0] == program.LENGTH and not lengths:
            lengths.append(part[0][1])
        else:
            rest.append(part)
    words = tuple(building.mask(word) for word in _joined(rest)) if rest else ()
    terms = building.biases(bias)
    banded = lower > -FAR or upper < FAR
    return MaskShape(
        words, terms, tuple(building.slots), tuple(building.numbers), lower, upper, banded, tuple(lengths),
        tuple(building.functions),
    )  # fmt: skip


class _Building:
    """Collects slots and numbers while programs are read."""

    def __init__(self) -> None:
        self.slots: list[tuple[str, int, str]] = []
        self.numbers: list[int] = []
        self.functions: list[Placed] = []

    def slot(self, whose: str, number: int, layout: str) -> int:
        key = (whose, number, layout)
        if key not in self.slots:
            self.slots.append(key)
        return self.slots.index(key)

    def number(self, *values: int) -> int:
        self.numbers += values
        return len(self.numbers) - len(values)

    def function(self, whose: str, operands: Sequence[int]) -> int:
        self.functions.append(
            Placed(whose, Function.of(operands), *(self.functions[-1].end if self.functions else (0, 0)))
        )
        return len(self.functions) - 1

    def mask(self, word: tuple[int, ...]) -> tuple[int, ...]:
        opcode, *operands = word
        if opcode == program.FUNCTION:
            return opcode, self.function("mask", operands)
        layouts = _LAYOUTS.get(opcode, ())
        slots = [self.slot("mask", n, layout) for n, layout in zip(operands, layouts, strict=False)]
        ends = operands[len(layouts) :]
        return (opcode, *slots, self.number(*map(narrow, ends))) if ends else (opcode, *slots)

    def biases(self, words: Sequence[int]) -> Words:
        found: list[tuple[int, ...]] = []
        for opcode, *operands in program.instructions(words, program.BIAS_OPERANDS):
            if opcode == program.BIAS_FUNCTION:
                found.append((opcode, self.function("bias", operands)))
                continue
            slots = [self.slot("bias", n, layout) for n, layout in zip(operands, _BIASES[opcode], strict=False)]
            width = (self.number(operands[2]),) if opcode == program.BIAS_REL else ()
            found.append((opcode, *slots, *width))
        return tuple(found)


def slots_of(
    shape: MaskShape, masks: Sequence[Tensor], biases: Sequence[Tensor], sizes: Sequence[int], of_biases: bool = True
) -> list[Any]:
    """Return the tensors in slots, viewed with four dimensions of strides by batch, head, query and key.

    ``sizes`` are those of the logits; a dimension that a tensor does not depend on has the stride 0. Without ``of_biases``
    the slots of biases are None.
    """
    lists = {"mask": masks, "bias": biases}
    return [
        _spread(lists[whose][number], layout, sizes) if of_biases or whose == "mask" else None
        for whose, number, layout in shape.slots
    ]


def _spread(x: Tensor, layout: str, sizes: Sequence[int]) -> Tensor:
    layout = layout[-x.dim() :]  # numbers of rows may lack the batch
    strides = dict(zip(layout, (0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)), strict=True))
    wide = [strides.get(each, 0) for each in _DIMENSIONS]
    full = [size if stride else 1 for size, stride in zip((*sizes[:3], x.shape[-1]), wide, strict=True)]
    return x.as_strided(full, wide)


def as_dense(
    mask: Sequence[int], masks: Sequence[Tensor], bias: Sequence[int], biases: Sequence[Tensor], grid: Grid
) -> tuple[list[int], list[Tensor], list[int], list[Tensor]]:
    """Return the mask as one tensor of bools and the bias as one of floats, for programs that do not fit a kernel."""
    seen = program.visible(mask, masks, grid)
    words, tensors = ([], []) if seen is None else ([program.DENSE, 0], [seen])
    if not bias:
        return words, tensors, [], []
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.float32, device=grid.device)
    return words, tensors, [program.BIAS_DENSE, 0], [program.biased(zero, bias, biases, grid)]


TENSORS = ("lengths", *(f"t{i}" for i in range(SLOTS)))
"""The parameters that a kernel takes for the tensors of a mask and a bias; :func:`tensors_of` gives their values."""


def tensors_of(
    shape: MaskShape, masks: Sequence[Tensor], slots: Sequence[Tensor | None], batch: int
) -> list[Tensor | None]:
    """Return the lengths, (batch,), and the tensors in slots; None for those that do not exist."""
    lengths = masks[shape.lengths[0]].expand(batch) if shape.lengths else None
    return [lengths, *slots, *[None] * (SLOTS - len(slots))]


def numbers_of(shape: MaskShape) -> dict[str, int | None]:
    """Return the numbers that a kernel takes for a mask and a bias, by its parameters' names."""
    found: dict[str, int | None] = {
        f"n{i}": shape.numbers[i] if i < len(shape.numbers) else None for i in range(NUMBERS)
    }
    return {**found, "lower": shape.lower, "upper": shape.upper}
