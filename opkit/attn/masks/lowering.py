"""From a mask and biases to programs, their tensors checked against the call's sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.arguments import check_strided
from opkit.attn.kept import derived
from opkit.attn.masks import program
from opkit.attn.masks.algebra import Dense, Mask, VarLen, causal_bias_of, conjuncts
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.op import torch_private as private

_MOST_PROGRAMS = 4096
_OWN = "opkit.attention"


class Sizes(NamedTuple):
    """The sizes of a call and its device."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """The shape of the logits."""
        return self.batch, self.heads, self.queries, self.keys


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a :class:`VarLen`: each query's and key's number, and where each begins and ends."""

    mask: VarLen
    of_queries: Tensor
    of_keys: Tensor

    @property
    def same(self) -> bool:
        """Whether queries and keys lie in documents of the same places, so that distances within them are the packed ones."""
        return self.mask.of_keys is self.mask.cu_seqlens_q

    def offsets(self, align: str) -> Tensor:
        """By how much the diagonal of each query's document is off the packed one: int32, (1, queries)."""
        starts = self.mask.cu_seqlens_q, self.mask.of_keys
        return derived(("offsets", align, self.of_queries.shape[1]), starts, lambda: self._offsets(align))

    def among_first(self, lengths: Tensor) -> Tensor:
        """0 for the first ``lengths[d]`` keys of document ``d``, or as many of each, and 1 for the others: int32, (1, keys)."""
        sources = self.mask.of_keys, lengths
        return derived(("among_first", self.of_keys.shape[1]), sources, lambda: self._among_first(lengths))

    def _offsets(self, align: str) -> Tensor:
        edge = 1 if align == "bottom-right" else 0
        at = self.of_queries.clamp(min=0).long() + edge
        return (self.mask.of_keys[at] - self.mask.cu_seqlens_q[at]).to(torch.int32)

    def _among_first(self, lengths: Tensor) -> Tensor:
        lengths = lengths.reshape(-1).expand(self.mask.of_keys.shape[0] - 1)
        at = self.of_keys.clamp(min=0).long()
        place = torch.arange(at.shape[-1], device=at.device) - self.mask.of_keys[at]
        return (place >= lengths[at]).to(torch.int32)


@dataclasses.dataclass
class Lowering:
    """A mask's program in the making."""

    sizes: Sizes
    program: list[int] = dataclasses.field(default_factory=list)
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    def emit(self, *words: int) -> None:
        """Append an opcode and its operands."""
        self.program += words

    def tensor(self, tensor: Tensor) -> int:
        """The number of ``tensor`` in the list, to which it is appended if it is not there."""
        return numbered(self.tensors, tensor)

    def band(self, lower: int, upper: int, align: str, documents: Documents | None) -> None:
        """Emit a band around the diagonal, or around each document's."""
        if documents is None or documents.same:
            shift = self.sizes.keys - self.sizes.queries if align == "bottom-right" and documents is None else 0
            self.emit(program.BAND, *(x if abs(x) == program.UNLIMITED else x + shift for x in (lower, upper)))
        else:
            self.emit(program.BAND_AT, self.tensor(documents.offsets(align)), lower, upper)

    def lengths(self, mask: Mask, lengths: Tensor, documents: Documents | None) -> None:
        """Emit that the first keys are seen, of each batch or of each document."""
        name = f"{type(mask).__name__}: lengths"
        _check_integers(name, lengths, self.sizes.device)
        if documents is None:
            _check_one_each(name, lengths, self.sizes.batch, "batch")
            self.emit(program.LENGTH, self.tensor(_one_each(lengths)))
            return
        _check_one_each(name, lengths, documents.mask.of_keys.shape[0] - 1, "document")
        flags = documents.among_first(lengths)
        self.emit(program.SEGMENTS, self.tensor(self._zeros(lengths)), self.tensor(flags))

    def _zeros(self, beside: Tensor) -> Tensor:
        """int32, (1, queries), kept as long as the tensor beside it."""
        shape = (1, self.sizes.queries)
        zeros = functools.partial(torch.zeros, shape, dtype=torch.int32, device=self.sizes.device)
        return derived(("zeros", *shape), (beside,), zeros)

    def integers(self, mask: Mask, name: str, tensor: Tensor, dims: tuple[str, str]) -> int:
        """The number of an int32 tensor (batch or 1, size) made of one that may lack the batch."""
        name = f"{type(mask).__name__}: {name}"
        _check_integers(name, tensor, self.sizes.device)
        full = (self.sizes.batch, getattr(self.sizes, dims[1]))
        shape = (1, *tensor.shape) if tensor.dim() == 1 else tuple(tensor.shape)
        if len(shape) != 2 or not private.or_true(shape[1] == full[1]) or not fits(shape[0], full[0]):
            raise ShapeError(
                f"{_OWN}: {name} of shape {tuple(tensor.shape)} must be ({', '.join(dims)}) = {full}, or {full[1:]}."
            )
        return self.tensor(_in_rows(tensor))

    def dense(self, name: str, tensor: Tensor, floating: bool) -> int:
        """The number of a tensor that broadcasts to the logits, with 4 dimensions."""
        return self.tensor(dense(name, tensor, self.sizes, floating))

    def documents(self, mask: VarLen) -> Documents:
        """The documents that ``mask`` tells apart.

        Raises:
            ShapeError: the batch is not 1, or the two are not of one length.
        """
        sizes, starts = self.sizes, (mask.cu_seqlens_q, mask.of_keys)
        for name, tensor in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True):
            _check_integers(f"VarLen: {name}", tensor, sizes.device)
            if tensor.dim() != 1 or not private.or_true(tensor.shape[0] >= 2) or not same_shape(tensor, starts[0]):
                raise ShapeError(
                    f"{_OWN}: VarLen: {name} of shape {tuple(tensor.shape)} must be (documents + 1,), the same for queries and "
                    f"keys; cu_seqlens_q has shape {tuple(starts[0].shape)}."
                )
        if not private.or_true(sizes.batch == 1):
            raise ShapeError(
                f'{_OWN}: VarLen packs documents into one sequence, but the batch is {sizes.batch}. Use layout="thd".'
            )
        return Documents(mask, _numbers(starts[0], sizes.queries, -1), _numbers(starts[1], sizes.keys, -2))

    def documents_among(self, masks: Sequence[Mask]) -> Documents | None:
        """Those of the VarLen among the parts of a conjunction.

        Raises:
            ArgumentError: there are several.
        """
        found = list({id(mask): mask for mask in masks if isinstance(mask, VarLen)}.values())
        if len(found) > 1:
            raise ArgumentError(
                f"{_OWN}: a conjunction holds {len(found)} VarLen masks, one is allowed. Use Segments for the others."
            )
        return self.documents(found[0]) if found else None


def numbered(tensors: list[Tensor], tensor: Tensor) -> int:
    """The number of ``tensor`` in ``tensors``, to which it is appended if it is not there."""
    for number, known in enumerate(tensors):
        if known is tensor:
            return number
    tensors.append(tensor)
    return len(tensors) - 1


def _numbers(starts: Tensor, count: int, outside: int) -> Tensor:
    """The number of each row's document, ``outside`` for rows after the last one: int32, (1, count)."""
    return derived(("numbers", count, outside), (starts,), lambda: _numbered(starts, count, outside))


def _numbered(starts: Tensor, count: int, outside: int) -> Tensor:
    at = torch.arange(count, device=starts.device, dtype=starts.dtype)
    found = torch.searchsorted(starts[1:].contiguous(), at, right=True)
    return torch.where(found < starts.shape[0] - 1, found, outside).to(torch.int32).unsqueeze(0)


def fits(size: int, full: int) -> bool:
    """Whether ``size`` broadcasts to ``full``; of sizes that depend on data, whether it may."""
    return private.or_false(size == 1) or private.or_true(size == full)


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may have the same shape."""
    return one.dim() == other.dim() and all(
        private.or_true(a == b) for a, b in zip(one.shape, other.shape, strict=True)
    )


def check_device(name: str, tensor: Any, device: torch.device) -> None:
    """Raise unless ``tensor`` is a tensor on ``device`` whose elements lie in memory by strides."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{_OWN}: {name} must be a tensor, got {type(tensor).__name__}: {tensor!r}.")
    check_strided(name, tensor)
    if causal_bias_of(tensor) is not None:
        raise ArgumentTypeError(
            f"{_OWN}: {name} is a CausalBias of torch, whose elements were never written. Give it as mask=, or combined with "
            "other masks by & and |."
        )
    if tensor.device != device:
        raise ArgumentError(f"{_OWN}: {name} is on {tensor.device}, q is on {device}. Move it with .to(q.device).")


def _check_integers(name: str, tensor: Any, device: torch.device) -> None:
    check_device(name, tensor, device)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DtypeError(f"{_OWN}: {name} has dtype {tensor.dtype}, expected integers. Convert it with .int().")


def _check_one_each(name: str, tensor: Tensor, count: int, of: str) -> None:
    if tensor.dim() > 1 or (tensor.dim() == 1 and not fits(tensor.shape[0], count)):
        raise ShapeError(
            f"{_OWN}: {name} of shape {tuple(tensor.shape)} must be one for each {of}, ({count},), or a scalar."
        )


def _one_each(tensor: Tensor) -> Tensor:
    """``tensor`` as int32 (count,) or (1,)."""
    if tensor.dim() == 1 and tensor.dtype == torch.int32:
        return tensor
    return derived("one each", (tensor,), lambda: tensor.reshape(-1).to(torch.int32))


def _in_rows(tensor: Tensor) -> Tensor:
    """``tensor`` as int32 (batch or 1, size)."""
    if tensor.dim() == 2 and tensor.dtype == torch.int32:
        return tensor
    return derived("rows", (tensor,), lambda: (tensor.unsqueeze(0) if tensor.dim() == 1 else tensor).to(torch.int32))


def dense(name: str, tensor: Tensor, sizes: Sizes, floating: bool) -> Tensor:
    """``tensor`` with 4 dimensions, each of size 1 or that of the logits.

    Raises:
        DtypeError: it is neither bool, nor floating where ``floating`` says so.
        ShapeError: it does not broadcast.
    """
    check_device(name, tensor, sizes.device)
    if not (tensor.is_floating_point() if floating else tensor.dtype == torch.bool):
        expected, how = ("floating", ".float()") if floating else ("bool", ".bool()")
        raise DtypeError(f"{_OWN}: {name} has dtype {tensor.dtype}, expected {expected}. Convert it with {how}.")
    if tensor.dim() > 4 or not all(map(fits, reversed(tensor.shape), reversed(sizes.grid))):
        raise ShapeError(
            f"{_OWN}: {name} of shape {tuple(tensor.shape)} does not broadcast to (batch, heads, queries, keys) = {sizes.grid}: "
            "each of its sizes must be 1 or that."
        )
    if tensor.dim() == 4:
        return tensor
    missing = (None,) * (4 - tensor.dim())
    return tensor[missing] if floating else derived("dense", (tensor,), lambda: tensor[missing])


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A mask as the operator takes it.

    ``additive`` are the floating tensors, which belong to the biases; ``moved`` says that documents of keys lie elsewhere
    than those of queries.
    """

    program: list[int]
    tensors: list[Tensor]
    additive: tuple[Tensor, ...] = ()
    moved: bool = False


_programs: dict[Any, Lowered] = {}


def lower(mask: Mask, sizes: Sizes) -> Lowered:
    """The program of ``mask`` and its tensors.

    Raises:
        ShapeError, DtypeError, ArgumentError: a tensor of the mask does not fit the call.
    """
    if (
        not mask.static
        or torch.compiler.is_compiling()
        or type(sizes.queries) is not int
        or type(sizes.keys) is not int
    ):
        return _lower(mask, sizes)
    key = (mask, sizes.queries, sizes.keys)
    found = _programs.get(key)
    if found is None:
        if len(_programs) >= _MOST_PROGRAMS:
            _programs.clear()
        found = _programs[key] = _lower(mask, sizes)
    return found


def _lower(mask: Mask, sizes: Sizes) -> Lowered:
    parts = conjuncts(mask)
    added = tuple(part.tensor for part in parts if isinstance(part, Dense) and part.additive)
    hiding = [part for part in parts if not (isinstance(part, Dense) and part.additive)]
    to = Lowering(sizes)
    documents = to.documents_among(hiding)
    for part in hiding:
        before = len(to.program)
        part.lower(to, documents)
        if _hides_nothing(to.program[before:], sizes):
            del to.program[before:]
        elif before:
            to.emit(program.AND)
    moved = documents is not None and not documents.same
    return Lowered(to.program, to.tensors, added, moved)


def _hides_nothing(words: list[int], sizes: Sizes) -> bool:
    """Whether a program is a band as wide as the logits, such as a decoded query's; symbolic sizes are not asked."""
    if words[0] != program.BAND or len(words) != 3 or torch.compiler.is_compiling():
        return False
    numbers = (*words[1:], sizes.queries, sizes.keys)
    return all(type(n) is int for n in numbers) and words[1] <= 1 - sizes.queries and words[2] >= sizes.keys - 1
