"""Build the programs of masks and biases: append opcodes, and check tensors against the sizes of the call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.arguments import check_strided
from opkit.attn.compat.torch_private import causal_bias_of
from opkit.attn.functions.pending import Functions
from opkit.attn.masks import program
from opkit.attn.tensor_cache import get_or_compute
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.op import torch_private as private

_OWN = "opkit.attention"


class CallSizes(NamedTuple):
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
class PackedSequences:
    """The sequences that a ``VarLen`` separates.

    Attributes:
        starts: where each sequence begins and the last ends, in queries and in keys: the mask's own tensors.
        of_queries: each query's sequence number: int32, (1, queries).
        of_keys: each key's sequence number: int32, (1, keys).
    """

    starts: tuple[Tensor, Tensor]
    of_queries: Tensor
    of_keys: Tensor

    @property
    def same(self) -> bool:
        """Whether queries and keys are packed alike, so that distances within a sequence are the packed ones."""
        return self.starts[0] is self.starts[1]

    def offsets(self, align: str) -> Tensor:
        """Return how far the diagonal of each query's sequence is off the packed one: int32, (1, queries)."""
        queries, keys = self.starts

        def compute() -> Tensor:
            edge = self.of_queries.clamp(min=0).long() + (1 if align == "bottom-right" else 0)
            return (keys[edge] - queries[edge]).to(torch.int32)

        return get_or_compute(("offsets", align, self.of_queries.shape[1]), self.starts, compute)

    def beyond(self, lengths: Tensor) -> Tensor:
        """Return 0 for the first ``lengths[s]`` keys of sequence ``s`` (a scalar: of each), else 1: int32, (1, keys)."""
        starts = self.starts[1]

        def compute() -> Tensor:
            each = lengths.reshape(-1).expand(starts.shape[0] - 1)
            sequence = self.of_keys.clamp(min=0).long()
            position = torch.arange(sequence.shape[-1], device=sequence.device) - starts[sequence]
            return (position >= each[sequence]).to(torch.int32)

        return get_or_compute(("beyond", self.of_keys.shape[1]), (starts, lengths), compute)


@dataclasses.dataclass
class ProgramBuilder:
    """A mask's program while it is built, and the tensors that it refers to by number.

    ``functions``: where Dynamo traces, those of the call so far; a program names them by number.
    """

    sizes: CallSizes
    program: list[int] = dataclasses.field(default_factory=list)
    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    functions: Functions | None = None

    def emit(self, *words: int) -> None:
        """Append an opcode and its operands."""
        self.program += words

    def drop_if_all_visible(self, begin: int) -> bool:
        """Remove the program from word ``begin`` on if it hides nothing, and return whether it did.

        That is a band as wide as the logits, such as a decoded query's; symbolic sizes are not compared.
        """
        words, sizes = self.program[begin:], self.sizes
        if words[0] != program.BAND or len(words) != 3 or torch.compiler.is_compiling():
            return False
        numbers = (*words[1:], sizes.queries, sizes.keys)
        hides_nothing = (
            all(type(n) is int for n in numbers) and words[1] <= 1 - sizes.queries and words[2] >= sizes.keys - 1
        )
        if hides_nothing:
            del self.program[begin:]
        return hides_nothing

    def tensor(self, tensor: Tensor) -> int:
        """Return the number of ``tensor`` in the list, to which it is appended if it is not in it."""
        return number_in(self.tensors, tensor)

    def band(self, lower: int, upper: int, align: str, packed: PackedSequences | None) -> None:
        """Emit a band around the diagonal, or around each packed sequence's."""
        if packed is None or packed.same:
            shift = self.sizes.keys - self.sizes.queries if align == "bottom-right" and packed is None else 0
            self.emit(program.BAND, *(x if abs(x) == program.UNLIMITED else x + shift for x in (lower, upper)))
        else:
            self.emit(program.BAND_AT, self.tensor(packed.offsets(align)), lower, upper)

    def lengths(self, mask: str, lengths: Tensor, packed: PackedSequences | None) -> None:
        """Emit that the first keys are visible, of each batch or of each packed sequence; ``mask`` is the name in errors."""
        name = f"{mask}: lengths"
        _check_integers(name, lengths, self.sizes.device)
        if packed is None:
            _check_one_each(name, lengths, self.sizes.batch, "batch")
            self.emit(program.LENGTH, self.tensor(one_each(lengths)))
            return
        _check_one_each(name, lengths, packed.starts[1].shape[0] - 1, "packed sequence")
        flags = packed.beyond(lengths)
        shape = (1, self.sizes.queries)
        zeros = functools.partial(torch.zeros, shape, dtype=torch.int32, device=self.sizes.device)
        self.emit(
            program.SEGMENTS, self.tensor(get_or_compute(("zeros", *shape), (lengths,), zeros)), self.tensor(flags)
        )

    def integers(self, name: str, tensor: Tensor, dims: tuple[str, str]) -> int:
        """Return the number of an int32 tensor (batch or 1, size), made from ``tensor``, which may lack the batch.

        In graphs for GPUs it still does: what is cached is found by the tensor, and a graph would make a new one at each call.
        """
        _check_integers(name, tensor, self.sizes.device)
        full = (self.sizes.batch, getattr(self.sizes, dims[1]))
        shape = (1, *tensor.shape) if tensor.dim() == 1 else tuple(tensor.shape)
        if len(shape) != 2 or not private.or_true(shape[1] == full[1]) or not broadcasts(shape[0], full[0]):
            raise ShapeError(
                f"{_OWN}: {name} of shape {tuple(tensor.shape)} must be ({', '.join(dims)}) = {full}, or {full[1:]}."
            )
        flat = tensor.dtype == torch.int32 and self.sizes.device.type != "cpu" and torch.compiler.is_compiling()
        return self.tensor(tensor if flat else in_rows(tensor))

    def dense(self, name: str, tensor: Tensor, floating: bool) -> int:
        """Return the number of a tensor that broadcasts to the logits, with 4 dimensions."""
        return self.tensor(dense(name, tensor, self.sizes, floating))

    def packed_sequences(self, starts: tuple[Tensor, Tensor]) -> PackedSequences:
        """Return the sequences that begin at ``starts``, in queries and in keys.

        Raises:
            ShapeError: the batch is not 1, or the two tensors have different lengths.
        """
        sizes = self.sizes
        for name, tensor in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True):
            _check_integers(f"VarLen: {name}", tensor, sizes.device)
            if tensor.dim() != 1 or not private.or_true(tensor.shape[0] >= 2) or not _same_shape(tensor, starts[0]):
                raise ShapeError(
                    f"{_OWN}: VarLen: {name} of shape {tuple(tensor.shape)} must be (sequences + 1,), the same for queries and "
                    f"keys; cu_seqlens_q has shape {tuple(starts[0].shape)}."
                )
        if not private.or_true(sizes.batch == 1):
            raise ShapeError(
                f"{_OWN}: VarLen separates the sequences that are packed into one row, but the batch is {sizes.batch}. Use "
                'layout="thd".'
            )
        return PackedSequences(
            starts, _sequence_numbers(starts[0], sizes.queries, -1), _sequence_numbers(starts[1], sizes.keys, -2)
        )


def number_in(tensors: list[Tensor], tensor: Tensor) -> int:
    """Return the number of ``tensor`` in ``tensors``, to which it is appended if it is not in it."""
    for number, known in enumerate(tensors):
        if known is tensor:
            return number
    tensors.append(tensor)
    return len(tensors) - 1


def _sequence_numbers(starts: Tensor, count: int, outside: int) -> Tensor:
    """Return each token's sequence number, ``outside`` for tokens after the last sequence: int32, (1, count)."""

    def compute() -> Tensor:
        tokens = torch.arange(count, device=starts.device, dtype=starts.dtype)
        numbers = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
        return torch.where(numbers < starts.shape[0] - 1, numbers, outside).to(torch.int32).unsqueeze(0)

    return get_or_compute(("sequence numbers", count, outside), (starts,), compute)


def broadcasts(size: int, full: int) -> bool:
    """Return whether ``size`` broadcasts to ``full``; for sizes that depend on data, whether it may."""
    return private.or_false(size == 1) or private.or_true(size == full)


def _same_shape(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors may have the same shape."""
    return one.dim() == other.dim() and all(
        private.or_true(a == b) for a, b in zip(one.shape, other.shape, strict=True)
    )


def check_tensor(name: str, tensor: Any, device: torch.device) -> None:
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
    check_tensor(name, tensor, device)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DtypeError(f"{_OWN}: {name} has dtype {tensor.dtype}, expected integers. Convert it with .int().")


def _check_one_each(name: str, tensor: Tensor, count: int, of: str) -> None:
    if tensor.dim() > 1 or (tensor.dim() == 1 and not broadcasts(tensor.shape[0], count)):
        raise ShapeError(
            f"{_OWN}: {name} of shape {tuple(tensor.shape)} must be one for each {of}, ({count},), or a scalar."
        )


def one_each(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as int32 (count,) or (1,)."""
    if tensor.dim() == 1 and tensor.dtype == torch.int32:
        return tensor
    return get_or_compute("one each", (tensor,), lambda: tensor.reshape(-1).to(torch.int32))


def in_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as int32 (batch or 1, size)."""
    if tensor.dim() == 2 and tensor.dtype == torch.int32:
        return tensor
    return get_or_compute(
        "rows", (tensor,), lambda: (tensor.unsqueeze(0) if tensor.dim() == 1 else tensor).to(torch.int32)
    )


def dense(name: str, tensor: Tensor, sizes: CallSizes, floating: bool) -> Tensor:
    """Return ``tensor`` with 4 dimensions, each of size 1 or that of the logits.

    Raises:
        DtypeError: it is not floating if ``floating``, or else not bool.
        ShapeError: it does not broadcast.
    """
    check_tensor(name, tensor, sizes.device)
    if not (tensor.is_floating_point() if floating else tensor.dtype == torch.bool):
        expected, how = ("floating", ".float()") if floating else ("bool", ".bool()")
        raise DtypeError(f"{_OWN}: {name} has dtype {tensor.dtype}, expected {expected}. Convert it with {how}.")
    if tensor.dim() > 4 or not all(map(broadcasts, reversed(tensor.shape), reversed(sizes.grid))):
        raise ShapeError(
            f"{_OWN}: {name} of shape {tuple(tensor.shape)} does not broadcast to (batch, heads, queries, keys) = {sizes.grid}: "
            "each of its sizes must be 1 or that."
        )
    if tensor.dim() == 4:
        return tensor
    missing = (None,) * (4 - tensor.dim())
    return tensor[missing] if floating else get_or_compute("dense", (tensor,), lambda: tensor[missing])
