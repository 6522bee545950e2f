"""Lower masks and biases to the programs that ``opkit::attention`` takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.calls import AttentionCall
from opkit.attn.functions import known
from opkit.attn.functions.pending import SUBSTITUTES, Functions, Pending, with_kernel
from opkit.attn.functions.trace import Traced, score_dtype
from opkit.attn.masks import biases, program
from opkit.attn.masks.algebra import Dense, Mask, as_mask, conjuncts, packed_sequences_of
from opkit.attn.masks.program_builder import CallSizes, ProgramBuilder
from opkit.attn.masks.traced import TracedScore

_MAX_PROGRAMS = 4096  # in the cache of `lower`


class Programs(NamedTuple):
    """The programs of a call's mask and biases, their tensors, and its soft cap, 0 for none."""

    mask: list[int]
    mask_tensors: list[Tensor]
    bias: list[int]
    bias_tensors: list[Tensor]
    softcap: float


MaskLike = Mask | Tensor | Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Bias = Tensor | biases.Bias | Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | list[Any] | tuple[Any, ...]


def programs_of(
    mask: Any, bias: Any, softcap: float | None, sizes: CallSizes, dtype: torch.dtype, functions: Functions | None
) -> Programs:
    """Return the programs of the arguments ``mask``, ``bias`` and ``softcap`` of :func:`opkit.attention`.

    Args:
        mask: a mask, a function, a tensor, or None.
        bias: a bias, a function, a tensor, a list of them, or None.
        softcap: checked.
        sizes: of the call.
        dtype: of the queries.
        functions: where Dynamo traces, the list to which functions are appended, whose numbers are their programs.

    Raises:
        ArgumentTypeError, ArgumentError, ShapeError, DtypeError: one of them does not fit the call.
    """
    lowered = LoweredMask([], []) if mask is None else lower(as_mask(mask), sizes, functions)
    if lowered.moved:
        biases.refuse_moved(bias)
    words, tensors, cap = [], [], 0.0 if softcap is None else float(softcap)
    for tensor in lowered.additive:
        words += biases.lower(tensor, sizes, tensors)
    found = Programs(lowered.program, lowered.tensors, words, tensors, cap)
    for part in biases.listed(bias):
        if biases.is_function(part):
            part = TracedScore.of(part, score_dtype(dtype), sizes.device, functions)
        if isinstance(part, TracedScore) and isinstance(part.traced, Traced):
            found = _with_score(found, part.traced, part.name, sizes)
        else:
            words += biases.lower(part, sizes, tensors)
    return found


def _with_score(programs: Programs, traced: Traced, name: str, sizes: CallSizes) -> Programs:
    """Return the programs with that of a ``score_mod``, which is applied to the logits after the biases so far."""
    capped = bool(programs.bias) or programs.softcap > 0
    parts = known.lower_score(traced, sizes, programs.bias_tensors, capped, name)
    programs.bias.extend(parts.program)
    if parts.softcap is not None:
        programs = programs._replace(softcap=parts.softcap)
    if parts.hidden is None:
        return programs
    builder = ProgramBuilder(sizes, [*programs.mask], [*programs.mask_tensors])
    known.lower_mask(traced, parts.hidden, builder, name)
    if programs.mask:
        builder.emit(program.AND)
    return programs._replace(mask=builder.program, mask_tensors=builder.tensors)


def _with_functions(*arguments: Any, functions: Sequence[Traced]) -> AttentionCall:
    """Return a call of the operator with the programs of functions in place of their numbers."""
    call = AttentionCall(*arguments)
    batch, heads, queries, _ = call.q.shape
    sizes = CallSizes(batch, heads, queries, call.k.shape[2], call.q.device)
    builder = ProgramBuilder(sizes, [], [*call.mask_tensors])
    for opcode, *operands in program.instructions(call.mask, program.MASK_OPERANDS):
        if opcode == program.FUNCTION:
            traced = Pending.of_words(operands).traced(functions)
            known.lower_mask(traced, traced.root, builder, "the mask_mod")
        else:
            builder.emit(opcode, *operands)
    programs = Programs(builder.program, builder.tensors, [], [*call.bias_tensors], call.softcap)
    for opcode, *operands in program.instructions(call.bias, program.BIAS_OPERANDS):
        if opcode == program.BIAS_FUNCTION:
            traced = Pending.of_words(operands).traced(functions)
            programs = _with_score(programs, traced, "the score_mod", sizes)
        else:
            programs.bias.extend((opcode, *operands))
    return call._replace(**programs._asdict())


SUBSTITUTES["opkit.attention.default"] = _with_functions
SUBSTITUTES["opkit.attention_with_kernel.default"] = with_kernel(_with_functions)


@dataclasses.dataclass(frozen=True)
class LoweredMask:
    """A mask as the operator takes it.

    ``additive`` are the floating tensors, which belong to the biases; ``moved`` says that packed sequences of keys lie elsewhere
    than those of queries.
    """

    program: list[int]
    tensors: list[Tensor]
    additive: tuple[Tensor, ...] = ()
    moved: bool = False


_programs: dict[Any, LoweredMask] = {}


def lower(mask: Mask, sizes: CallSizes, functions: Functions | None = None) -> LoweredMask:
    """Return the program of ``mask`` and its tensors; that of a mask without tensors is cached.

    ``functions`` is as in :func:`programs_of`.

    Raises:
        ShapeError, DtypeError, ArgumentError: a tensor of the mask does not fit the call.
    """
    concrete = type(sizes.queries) is int and type(sizes.keys) is int
    if not concrete or not mask.static or torch.compiler.is_compiling():
        return _lower(mask, sizes, functions)
    key = (mask, sizes.queries, sizes.keys)
    lowered = _programs.get(key)
    if lowered is None:
        if len(_programs) >= _MAX_PROGRAMS:
            _programs.clear()
        lowered = _programs[key] = _lower(mask, sizes, None)
    return lowered


def _lower(mask: Mask, sizes: CallSizes, functions: Functions | None) -> LoweredMask:
    parts = conjuncts(mask)
    added = tuple(part.tensor for part in parts if isinstance(part, Dense) and part.additive)
    hiding = [part for part in parts if not (isinstance(part, Dense) and part.additive)]
    builder = ProgramBuilder(sizes, functions=functions)
    packed = packed_sequences_of(hiding, builder)
    for part in hiding:
        begin = len(builder.program)
        part.lower(builder, packed)
        if not builder.drop_if_all_visible(begin) and begin:
            builder.emit(program.AND)
    return LoweredMask(builder.program, builder.tensors, added, packed is not None and not packed.same)
