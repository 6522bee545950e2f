"""Define the programs of masks and biases, integers over lists of tensors; interpret them in torch; check their tensors.

A mask's program is in postfix: a leaf pushes which keys each query sees, and ``AND``, ``OR`` and ``NOT`` combine what was
pushed. An empty program hides nothing. A bias's program is a list of terms, which are added. Each opcode is followed by
its operands:

=============================  ========================================================================================
mask                           query ``i`` of batch ``b`` and head ``h`` sees key ``j`` if and only if
=============================  ========================================================================================
``BAND lower upper``           ``lower <= j - i <= upper``; ``-UNLIMITED`` and ``UNLIMITED`` are no limits
``SEGMENTS tq tk``             ``tensors[tq][b, i] == tensors[tk][b, j]``: int32, (batch or 1, queries) and (.., keys), or
                               (queries,) and (keys,)
``LENGTH t``                   ``j < tensors[t][b]``: int32, (batch or 1,)
``DENSE t``                    ``tensors[t][b, h, i, j]``: bool, 4 dimensions, each of size 1 or full
``BAND_AT t lower upper``      ``lower <= j - i - tensors[t][b, i] <= upper``: int32, (batch or 1, queries) or (queries,)
``FUNCTION n ...``             the expression holds that the ``n`` words hold (:mod:`opkit.attn.functions.expression`)
=============================  ========================================================================================

=============================  ========================================================================================
bias                           is added to the logit of query ``i`` and key ``j``
=============================  ========================================================================================
``BIAS_DENSE t``               ``tensors[t][b, h, i, j]``: floating, 4 dimensions, each of size 1 or full
``BIAS_ALIBI t``               ``-tensors[t][b, h] * |i + (keys - queries) - j|``: float32, (batch or 1, heads)
``BIAS_REL th tw kw``          ``tensors[th][b, h, i, j // kw] + tensors[tw][b, h, i, j % kw]``: floating
``BIAS_FUNCTION n ...``        not added: the logit becomes the value of the expression that the ``n`` words hold
=============================  ========================================================================================

Programs exist since evaluated masks and compiled ones cost more: eight packed causal sequences of 1024 tokens (8 heads of 64,
two CPU cores) take 1.0 s with the program, whose lowering takes 0.1 ms, but 2.8 s with the same mask as a tensor of bools, which
takes 7 s and 64 MB to compute on the host; C for one mask takes a run of the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from opkit.attn.calls import AnyCall, GradientCall
from opkit.attn.functions.expression import Function, indexed, torch_dtype

AND, OR, NOT, BAND, SEGMENTS, LENGTH, DENSE, BAND_AT, FUNCTION = range(9)
BIAS_DENSE, BIAS_ALIBI, BIAS_REL, BIAS_FUNCTION = range(4)
UNLIMITED = 2**62

_COUNTED = -1  # the first operand says how many follow
MASK_OPERANDS = {AND: 0, OR: 0, NOT: 0, BAND: 2, SEGMENTS: 2, LENGTH: 1, DENSE: 1, BAND_AT: 3, FUNCTION: _COUNTED}
BIAS_OPERANDS = {BIAS_DENSE: 1, BIAS_ALIBI: 1, BIAS_REL: 3, BIAS_FUNCTION: _COUNTED}
_MASK_TENSORS = {
    SEGMENTS: 2,
    LENGTH: 1,
    DENSE: 1,
    BAND_AT: 1,
}  # how many operands, the first ones, are numbers of tensors
BIAS_TENSORS = {BIAS_DENSE: 1, BIAS_ALIBI: 1, BIAS_REL: 2}

Tensors = Sequence[Tensor]
GridSizes = tuple[int, int, int, int]  # batch, heads, queries, keys


def instructions(program: Sequence[int], operands: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return the opcodes of a program, each with its operands; ``operands`` says how many there are.

    >>> instructions([BAND, -1, 0, LENGTH, 0, AND], MASK_OPERANDS)
    [(3, -1, 0), (5, 0), (0,)]
    """
    found: list[tuple[int, ...]] = []
    at = 0
    while at < len(program):
        count = operands[int(program[at])]
        end = at + 1 + (count if count != _COUNTED else 1 + program[at + 1])
        found.append((int(program[at]), *program[at + 1 : end]))
        at = end
    return found


def used_tensors(program: Sequence[int], operands: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """Return the numbers of the tensors that functions of a program name, and of those that other opcodes do."""
    by_functions: set[int] = set()
    by_others: set[int] = set()
    counts = _MASK_TENSORS if operands is MASK_OPERANDS else BIAS_TENSORS
    for opcode, *numbers in instructions(program, operands):
        if operands[opcode] == _COUNTED:
            by_functions |= set(Function.of(numbers).tensors)
        else:
            by_others |= set(numbers[: counts.get(opcode, 0)])
    return by_functions, by_others


def flat_rows(program: Sequence[int], tensors: Tensors) -> set[int]:
    """Return the numbers of the tensors with one dimension that hold a number for each query or key of every batch."""
    steps = instructions(program, MASK_OPERANDS)
    rows = {n for opcode, *at in steps if opcode in (SEGMENTS, BAND_AT) for n in at[: _MASK_TENSORS[opcode]]}
    return {n for n in rows if tensors[n].dim() == 1}


def lengths_are_rows(program: Sequence[int], tensors: Tensors) -> bool:
    """Return whether one tensor is both lengths and :func:`flat_rows`, so that its dimension is of batches and of rows."""
    flat, steps = flat_rows(program, tensors), instructions(program, MASK_OPERANDS)
    return any(opcode == LENGTH and at[0] in flat for opcode, *at in steps)


def with_functions(
    program: Sequence[int], operands: Mapping[int, int], change: Callable[[Function], Function]
) -> list[int]:
    """Return a program with other functions in place of its functions."""
    found: list[int] = []
    for opcode, *numbers in instructions(program, operands):
        counted = operands[opcode] == _COUNTED
        found += [opcode, *(change(Function.of(numbers)).words() if counted else numbers)]
    return found


# ---- interpretation --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of a call's logits: the numbers of queries and keys, the device, and for functions those of batches and heads."""

    queries: int
    keys: int
    device: torch.device
    batch: int = 1
    heads: int = 1

    @classmethod
    def of(cls, call: AnyCall) -> Grid:
        """Return the grid of a call."""
        batch, heads, queries, _ = call.q.shape
        return cls(queries, call.k.shape[2], call.q.device, batch, heads)

    @property
    def variables(self) -> dict[str, Tensor]:
        """The variables of functions, which broadcast to each other."""
        counts = zip("bhij", (self.batch, self.heads, self.queries, self.keys), strict=True)
        numbers = [(name, torch.arange(count, dtype=torch.int32, device=self.device)) for name, count in counts]
        return {name: x.reshape(-1, *[1] * (3 - axis)) for axis, (name, x) in enumerate(numbers)}

    @property
    def rows(self) -> Tensor:
        """The numbers of the queries, (queries, 1)."""
        return torch.arange(self.queries, device=self.device).unsqueeze(-1)

    @property
    def columns(self) -> Tensor:
        """The numbers of the keys, (keys,)."""
        return torch.arange(self.keys, device=self.device)


def visible(program: Sequence[int], tensors: Tensors, grid: Grid) -> Tensor | None:
    """Return which keys each query sees: bool, (batch or 1, heads or 1, queries, keys); None where nothing is hidden."""
    stack: list[Tensor] = []
    for opcode, *operands in instructions(program, MASK_OPERANDS):
        if opcode == AND:
            stack.append(stack.pop() & stack.pop())
        elif opcode == OR:
            stack.append(stack.pop() | stack.pop())
        elif opcode == NOT:
            stack.append(~stack.pop())
        else:
            stack.append(_visible_by(opcode, operands, tensors, grid))
    if not stack:
        return None
    (result,) = stack
    return result.expand(*result.shape[:2], grid.queries, grid.keys)


def _visible_by(opcode: int, operands: Sequence[int], tensors: Tensors, grid: Grid) -> Tensor:
    """Return what a leaf of a mask's program pushes."""
    if opcode == BAND:
        return _between(grid.columns - grid.rows, *operands)[None, None]
    if opcode == FUNCTION:
        seen = Function.of(operands).evaluate(grid.variables, tensors)
        return seen.reshape(*[1] * (4 - seen.dim()), *seen.shape)
    first = tensors[operands[0]]
    if opcode == SEGMENTS:
        rows, columns = torch.atleast_2d(first, tensors[operands[1]])
        return (rows.unsqueeze(-1) == columns.unsqueeze(-2)).unsqueeze(1)
    if opcode == LENGTH:
        return (grid.columns < first.unsqueeze(-1))[:, None, None]
    if opcode == BAND_AT:
        offsets = torch.atleast_2d(first).long().unsqueeze(-1)
        return _between(grid.columns - grid.rows - offsets, *operands[1:]).unsqueeze(1)
    return first  # DENSE


def _between(distances: Tensor, lower: int, upper: int) -> Tensor:
    return (distances >= lower) & (distances <= upper)


def biased(logits: Tensor, program: Sequence[int], tensors: Tensors, grid: Grid) -> Tensor:
    """Return ``logits``, (batch, heads, queries, keys), with each term of a bias's program added in their dtype."""
    for opcode, *operands in instructions(program, BIAS_OPERANDS):
        logits = _with_term(logits, opcode, operands, tensors, grid)
    return logits


def _with_term(logits: Tensor, opcode: int, operands: Sequence[int], tensors: Tensors, grid: Grid) -> Tensor:
    if opcode == BIAS_FUNCTION:
        found = Function.of(operands).evaluate({"score": logits, **grid.variables}, tensors)
        return found.to(logits.dtype).expand_as(logits)
    first = tensors[operands[0]].to(logits.dtype)
    if opcode == BIAS_DENSE:
        return logits + first
    if opcode == BIAS_ALIBI:
        return logits + -first[..., None, None] * _alibi_distances(grid).to(logits.dtype)
    columns = tensors[operands[1]].to(logits.dtype)
    return logits + (first.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)[..., : grid.keys]


def _alibi_distances(grid: Grid) -> Tensor:
    """Return the distances of keys and queries where the last query is at the last key, (queries, keys)."""
    return (grid.rows + (grid.keys - grid.queries) - grid.columns).abs()


def bias_gradients(
    of_logits: Tensor, seen: Tensor, logits: Tensor, program: Sequence[int], tensors: Tensors, grid: Grid
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of the logits before a bias's program, and of the program's tensors, in their dtypes.

    Args:
        of_logits: the gradient of :func:`biased` logits, (batch, heads, queries, keys).
        seen: which logits are not hidden; of others nothing reaches a tensor.
        logits: those before.
        program: the bias.
        tensors: its tensors; None is returned for one that no term names, or whose elements are no floats.
        grid: of the call.
    """
    gradients: list[Tensor | None] = [None] * len(tensors)
    steps = instructions(program, BIAS_OPERANDS)
    before = [logits]
    for opcode, *operands in steps[:-1]:
        before.append(_with_term(before[-1], opcode, operands, tensors, grid))
    for logits, (opcode, *operands) in zip(reversed(before), reversed(steps), strict=False):
        if opcode == BIAS_FUNCTION:
            function = Function.of(operands)
            variables = {"score": logits, **grid.variables}
            numbers: Sequence[int] = function.tensors
            of_logits, parts = function.gradients(of_logits, seen, variables, tensors)
        else:
            numbers = operands[: BIAS_TENSORS[opcode]]
            whole = _term_gradients(opcode, numbers, of_logits, tensors)
            parts = [part.sum_to_size(tensors[n].shape) for n, part in zip(numbers, whole, strict=True)]
        for number, part in zip(numbers, parts, strict=True):
            if part is not None:
                part, earlier = part.to(tensors[number].dtype), gradients[number]
                gradients[number] = part if earlier is None else earlier + part
    return of_logits, gradients


def _term_gradients(opcode: int, numbers: Sequence[int], of_logits: Tensor, tensors: Tensors) -> list[Tensor]:
    """Return the gradients of the tensors of one term, before they are summed to the tensors' sizes."""
    if opcode == BIAS_DENSE:
        return [of_logits]
    if opcode == BIAS_ALIBI:
        grid = Grid(of_logits.shape[-2], of_logits.shape[-1], of_logits.device)
        return [-(of_logits * _alibi_distances(grid).to(of_logits.dtype)).sum((-1, -2))]
    rows, columns = (tensors[number].shape[-1] for number in numbers)
    missing = rows * columns - of_logits.shape[-1]
    image = torch.nn.functional.pad(of_logits, (0, missing)).unflatten(-1, (rows, columns))
    return [image.sum(-1), image.sum(-2)]


# ---- checks: kernels read memory as programs say ---------------------------------------------------------------------


def shapes_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether queries, keys and values have four dimensions, one dtype, and sizes that agree."""
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    heads = q.shape[1] % k.shape[1] == 0 if k.shape[1] else q.shape[1] == 0
    return heads and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]


def sinks_fit(sinks: Tensor | None, q: Tensor) -> bool:
    """Return whether there is one sink for each head, or no sinks."""
    return sinks is None or tuple(sinks.shape) == (q.shape[1],)


def results_fit(call: GradientCall) -> bool:
    """Return whether the results of the forward and their gradients have the shapes and dtypes that they must have."""
    results = [each.shape == (*call.q.shape[:3], call.v.shape[3]) for each in (call.out, call.gradient)]
    sums = [call.lse] if call.of_lse is None else [call.lse, call.of_lse]
    same = call.out.dtype == call.gradient.dtype == call.q.dtype
    return same and all(results) and all(x.shape == call.q.shape[:3] and x.dtype == torch.float32 for x in sums)


def mask_fits(call: AnyCall, functions: bool = False) -> bool:
    """Return whether each tensor that a mask's program names has the right shape and dtype.

    Without ``functions`` a program that has some does not fit.
    """
    return mask_words_fit(call.mask, call.mask_tensors, _logits(call), functions)


def mask_words_fit(words: Sequence[int], tensors: Tensors, sizes: GridSizes, functions: bool = True) -> bool:
    """Return :func:`mask_fits` of a program, its tensors, and the sizes of the logits."""
    return _fits(words, tensors, sizes, MASK_OPERANDS, _MASK_TENSORS, _mask_tensors_fit, functions)


def bias_fits(call: AnyCall, functions: bool = False) -> bool:
    """Return the same for a bias's program."""
    return bias_words_fit(call.bias, call.bias_tensors, _logits(call), functions)


def bias_words_fit(words: Sequence[int], tensors: Tensors, sizes: GridSizes, functions: bool = True) -> bool:
    """Return :func:`bias_fits` of the same."""
    return _fits(words, tensors, sizes, BIAS_OPERANDS, BIAS_TENSORS, _bias_tensors_fit, functions)


def _logits(call: AnyCall) -> GridSizes:
    return call.q.shape[0], call.q.shape[1], call.q.shape[2], call.k.shape[2]


def _fits(
    words: Sequence[int],
    tensors: Tensors,
    sizes: GridSizes,
    operands: Mapping[int, int],
    named: Mapping[int, int],
    check: Callable[[int, Sequence[int], Tensors, GridSizes], bool],
    functions: bool,
) -> bool:
    at = 0
    while at < len(words):
        opcode = words[at]
        if opcode not in operands:
            return False
        if operands[opcode] == _COUNTED:
            end = at + 2 + (words[at + 1] if at + 1 < len(words) else 0)
            if not functions or end > len(words) or not function_fits(words[at + 1 : end], tensors, sizes):
                return False
            at = end
            continue
        count, numbers = operands[opcode], words[at + 1 : at + 1 + named.get(opcode, 0)]
        if len(words) < at + 1 + count or not all(0 <= n < len(tensors) for n in numbers):
            return False
        if numbers and not check(opcode, words[at + 1 : at + 1 + count], [tensors[n] for n in numbers], sizes):
            return False
        at += 1 + count
    return True


def function_fits(operands: Sequence[int], tensors: Tensors, sizes: GridSizes) -> bool:
    """Return whether the tensors of a function have its dtypes and dimensions, and variables that index them stay within them.

    Coordinates that are computed may be anything: who reads an element there wraps and limits them.
    """
    try:
        function, extents = Function.of(operands), dict(zip("bhij", sizes, strict=True))
    except (IndexError, KeyError, TypeError, ValueError):  # the words hold no expression
        return False
    if not all(0 <= number < len(tensors) for number in function.tensors):
        return False
    for node, at in indexed(function.root):
        tensor = tensors[function.tensors[int(node.data[0][1:])]]
        if tensor.dim() != len(at) or tensor.dtype != torch_dtype(node.dtype) or 0 in tensor.shape:
            return False
        if any(axis is not None and extents[axis] > size for axis, size in zip(at, tensor.shape, strict=True)):
            return False
    return True


def _mask_tensors_fit(opcode: int, operands: Sequence[int], tensors: Tensors, sizes: GridSizes) -> bool:
    """Return whether the tensors of a leaf of a mask's program have the shapes and dtypes of the table above."""
    batch, _, queries, keys = sizes
    if opcode == DENSE:
        return tensors[0].dtype == torch.bool and _broadcasts(tensors[0], *sizes)
    if any(x.dtype != torch.int32 for x in tensors):
        return False
    if opcode == LENGTH:
        return _broadcasts(tensors[0], batch)
    counts = (queries,) if opcode == BAND_AT else (queries, keys)
    return all(_broadcasts(x, count) or _broadcasts(x, batch, count) for x, count in zip(tensors, counts, strict=True))


def _bias_tensors_fit(opcode: int, operands: Sequence[int], tensors: Tensors, sizes: GridSizes) -> bool:
    """Return whether the tensors of a term of a bias have the shapes of the table above."""
    if opcode == BIAS_DENSE:
        return _broadcasts(tensors[0], *sizes)
    if opcode == BIAS_ALIBI:
        return _broadcasts(tensors[0], *sizes[:2])
    (rows, columns), width = tensors, operands[2]
    if rows.dim() != 4 or columns.dim() != 4 or width < 1 or columns.shape[3] != width:
        return False
    return all(_broadcasts(x[..., 0], *sizes[:3]) for x in tensors) and rows.shape[3] * width >= sizes[3]


def _broadcasts(tensor: Tensor, *sizes: int) -> bool:
    return tensor.dim() == len(sizes) and all(mine in (1, full) for mine, full in zip(tensor.shape, sizes, strict=True))
