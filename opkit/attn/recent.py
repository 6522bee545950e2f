"""What is known about recent calls of ``opkit.attention``: their programs, and the function that runs calls like them.

To lower a mask and a bias takes longer than a short call. Calls with the same functions or masks, whose tensors have the same
sizes, strides and dtypes, have the same programs; the tensors of these are found from those that the functions capture.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from opkit.attn import autocast
from opkit.attn.functions.captures import ROOT, Captures, Step, learned
from opkit.attn.functions.readers import Reader, reader
from opkit.attn.masks.algebra import Mask
from opkit.attn.masks.program_builder import in_rows, one_each
from opkit.attn.tensor_cache import operations_are_observed
from opkit.op import torch_private as private
from opkit.op.dispatch.fastcall import PLAIN_TYPES, GuardedCache, GuardedResult, bind


class Asked(NamedTuple):
    """What decides a call's programs apart from q, k and v.

    Attributes:
        flags: the descriptions of the mask and of the bias, and the call's other options.
        tensors: those that functions capture, each once.
        steps: of both descriptions.
        places: the number of each tensor that steps find.
    """

    flags: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    steps: tuple[list[Step], ...]
    places: list[int]


class _View(NamedTuple):
    """A view of a captured tensor: ``offset`` is from the tensor's first element."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


_Source = tuple[int, Callable[[Tensor], Tensor] | None]


@dataclasses.dataclass
class Lowered:
    """The operator's arguments but for q, k and v; of each of its tensors the captured one that it is made of, and how."""

    sources: tuple[tuple[_Source, ...], ...]
    mask: list[int]
    bias: list[int]
    numbers: tuple[Any, ...]
    options: tuple[Any, ...]
    steps: tuple[list[Step], ...]
    places: list[int]

    @functools.cached_property
    def read(self) -> Reader:
        """What finds the tensors that a mask and a bias capture; it is compiled when calls have come often."""
        return reader(self.steps, self.places)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the operator's arguments after q, k and v."""
        masks, biases = [
            [tensors[at] if how is None else how(tensors[at]) for at, how in sources] for sources in self.sources
        ]
        return masks, biases, None, None, self.mask[:], self.bias[:], *self.numbers


Known = GuardedResult[Lowered]
_RECENT: GuardedCache[Lowered] = GuardedCache()


@private.untraced  # as `remember` is, since all are called where compilers give up on one of the user's functions
def find(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, options: tuple[Any, ...]
) -> tuple[Known, tuple[Tensor, ...]] | None:
    """Return what is known about calls like this one, and the tensors that its functions capture, each once."""
    for known in _RECENT.entries:
        tensors = known.result.read(mask, bias) if known.result.options == options else None
        if tensors is not None and known.check(q, k, v, *tensors):
            return known, tensors
    return None


@private.untraced
def asked_of(mask: Any, bias: Any, options: tuple[Any, ...]) -> Asked | None:
    """Return what decides the programs of a call; None if tensors' values do, or what cannot be compared."""
    tensors: list[Tensor] = []
    places: list[int] = []
    described = [_described(each, tensors, places) for each in (mask, bias)]
    if None in described:
        return None
    keys, steps = zip(*filter(None, described), strict=True)
    return Asked((*keys, *options), tuple(tensors), steps, places)


def _described(value: Any, tensors: list[Tensor], places: list[int]) -> tuple[Any, list[Step]] | None:
    """Return what decides the program of a mask or a bias, and the steps of it; append what it captures to ``tensors``."""
    if value is None or (isinstance(value, Mask) and value.static):
        return value, [(ROOT, "same" if value is None else "mask", value)]
    if not isinstance(value, types.FunctionType) or learned(value.__code__).reads_values:
        return None
    captures = Captures.of(value)
    numbers = [cell.cell_contents for cell in captures.numbers]
    if captures.key is None or not all(type(x) in (int, float) for x in numbers):
        return None
    of_function: list[int] = []
    for tensor in captures.tensors:
        place = next((at for at, known in enumerate(tensors) if known is tensor), len(tensors))
        if place == len(tensors):
            tensors.append(tensor)
        of_function.append(place)
    places += of_function
    return (captures.key, tuple(numbers), tuple(of_function)), captures.steps


@private.untraced
def remember(
    operator: Any, q: Tensor, k: Tensor, v: Tensor, asked: Asked | None, known: Known | None, call: tuple[Any, ...]
) -> None:
    """Record for the next calls like this one the operator's arguments ``call``, and later the function that it runs.

    ``asked`` has the scale and the soft cap after its descriptions; it is None for a call that is known.
    """
    if known is not None and known.fn is None:
        bind(operator, known, *call)
    if asked is None:
        return
    plain = all(x is None or type(x) is float for x in asked.flags[2:4]) and not operations_are_observed()
    if not plain or autocast.is_on(q.device.type) or any(type(x) not in PLAIN_TYPES for x in (q, *asked.tensors)):
        return
    masks, biases = ([_source_of(x, asked.tensors) for x in tensors] for tensors in call[3:5])
    if None not in masks and None not in biases:
        sources = tuple(filter(None, masks)), tuple(filter(None, biases))
        lowered = Lowered(sources, call[7], call[8], call[9:], asked.flags[2:], asked.steps, asked.places)
        _RECENT.store((q, k, v, *asked.tensors), asked.flags, lowered)


def _source_of(tensor: Tensor, captured: Sequence[Tensor]) -> _Source | None:
    """Return the captured tensor that a program's is made of, and how; None if that is not known."""
    for at, each in enumerate(captured):
        if tensor is each:
            return at, None
        for how in (in_rows, one_each):  # their results are cached, and lists of tiles with these
            if not each.is_floating_point() and each.dim() <= 2 and how(each) is tensor:
                return at, how
    storage = tensor.untyped_storage().data_ptr()
    owners = [at for at, each in enumerate(captured) if each.untyped_storage().data_ptr() == storage]
    base = captured[owners[0]] if len(owners) == 1 and not tensor.requires_grad else None
    if base is None or base.dtype != tensor.dtype or not base.is_floating_point():
        return None
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    return owners[0], _View(tuple(tensor.shape), tensor.stride(), offset)
