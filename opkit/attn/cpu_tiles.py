"""Which tiles of a call's queries and keys the CPU kernels compute, and what they know of its mask."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from opkit.attn.calls import AttentionCall
from opkit.attn.functions.expression import Function
from opkit.attn.masks import program

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


def tiles_of(call: AttentionCall, states: bytes) -> LiveTiles:
    """Return the tiles of a call, whose states the kernel found."""
    sizes = (*call.q.shape[:2], -(-call.q.shape[2] // ROWS), -(-call.k.shape[2] // KEYS))
    found = torch.frombuffer(bytearray(states), dtype=torch.uint8) if states else torch.empty(0, dtype=torch.uint8)
    steps = program.instructions(call.mask, program.MASK_OPERANDS)
    return LiveTiles(found.reshape(sizes), tuple(_described(*step) for step in steps if step[0] >= program.BAND))


def _described(opcode: int, *operands: int) -> str:
    if opcode == program.FUNCTION:
        return f"function {Function.of(operands).root}"
    if opcode == program.BAND:
        lower, upper = ("any" if abs(end) == program.UNLIMITED else str(end) for end in operands)
        return f"band of j - i from {lower} to {upper}"
    return f"{_LEAVES[opcode]}, of tensors {', '.join(map(str, operands))}"
