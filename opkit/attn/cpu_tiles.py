"""Which tiles of a call's queries and keys the CPU kernels compute, and what they know of its mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn import cpu
from opkit.attn.calls import AttentionCall
from opkit.attn.functions.expression import Function
from opkit.attn.masks import program
from opkit.errors import KernelError

ROWS, KEYS = 96, 64  # kBackwardRows and kKeys of cpp_ext/attention/block.hpp
_LEAVES = {
    program.SEGMENTS: "segments",
    program.LENGTH: "lengths",
    program.DENSE: "bools",
    program.BAND_AT: "band at offsets",
}


@dataclasses.dataclass(frozen=True)
class LiveTiles:
    """What is seen of the tiles of a call.

    Attributes:
        states: of each tile of 96 queries and 64 keys 0 if it is hidden, 1 if all of it is seen, 2 if a part is;
            uint8, (batch, heads, blocks of queries, blocks of keys).
        leaves: the parts of the mask's program, in words.
    """

    states: Tensor
    leaves: tuple[str, ...]

    def count(self, state: int) -> int:
        """Return how many tiles have a state."""
        return int((self.states == state).sum())

    def __str__(self) -> str:
        hidden, full, part = map(self.count, range(3))
        tiles = f"{self.states.numel()} tiles of {ROWS} queries and {KEYS} keys: {hidden} hidden, {full} full, {part} in part"
        return "\n".join([tiles, *(f"  {leaf}" for leaf in self.leaves)])


def live_tiles(call: Sequence[Any]) -> LiveTiles:
    """Return which tiles the CPU kernels compute of a call, the arguments of ``opkit::attention``.

    Raises:
        KernelError: they do not take the call.

    >>> from opkit.attn.api import lowered
    >>> q = torch.ones(1, 1, 192, 4)
    >>> near = lambda b, h, i, j: (i >= j) & (i - j < 70) & ((i + j) % 2 == 0)
    >>> print(live_tiles(lowered(q, q, q, near, None, None, None, None, 0.0, "bhsd")))
    6 tiles of 96 queries and 64 keys: 1 hidden, 0 full, 5 in part
      band of j - i from any to 0
      band of j - i from -69 to any
      function eq(rem(add(i, j), 2), 0)
    """
    from opkit import _core

    made = AttentionCall(*call)
    if not cpu.takes(made):
        raise KernelError("opkit::attention: the CPU kernels do not take this call; opkit.attn.api.select says why.")
    out = made.q.new_empty((*made.q.shape[:3], made.v.shape[3]))
    kernel = _core.AttentionForward(None, **cpu.description(made, [made.q, made.k, made.v, out]))
    states = bytearray(kernel.states([each.data_ptr() for each in made.mask_tensors]))
    sizes = (*made.q.shape[:2], -(-made.q.shape[2] // ROWS), -(-made.k.shape[2] // KEYS))
    found = torch.frombuffer(states, dtype=torch.uint8) if states else torch.empty(0, dtype=torch.uint8)
    steps = program.instructions(made.mask, program.MASK_OPERANDS)
    return LiveTiles(found.reshape(sizes), tuple(_described(*step) for step in steps if step[0] >= program.BAND))


def _described(opcode: int, *operands: int) -> str:
    if opcode == program.FUNCTION:
        return f"function {Function.of(operands).root}"
    if opcode == program.BAND:
        lower, upper = ("any" if abs(end) == program.UNLIMITED else str(end) for end in operands)
        return f"band of j - i from {lower} to {upper}"
    return f"{_LEAVES[opcode]}, of tensors {', '.join(map(str, operands))}"
