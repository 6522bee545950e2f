"""``opkit::attention_backward`` by the kernel for sm_90 on the CPU: Gluon in Python, what is in Triton in its interpreter.

Run as a program it reads lines, each the name of a call and whether programs take turns, and prints what came of them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gluon_in_python

with gluon_in_python.installed():
    from opkit.attn.gpu.hopper.device import backward as device
    from opkit.attn.gpu.hopper.device import backward_wide as wide_device
    from opkit.attn.gpu.hopper.device import masks

from cuda_on_cpu import turns_of
from hopper_backward_calls import (
    CALLS,
    HIDING,
    LARGE,
    QUERY_HIDING,
    ROWS_HIDING,
    called,
    compared,
    compared_where_a_query_is_hidden,
    compared_where_hidden,
    compared_where_rows_are_hidden,
    large,
)
from hopper_calls import FP16, shaped

from opkit.attn.gpu import plans
from opkit.attn.gpu.device import tile
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.gpu.hopper.backward import BackwardTile

_PROGRAMS = 3
_HALF, _WIDE = 64, 32
_FUNCTIONS = {128: device.hopper_backward, 64: wide_device.hopper_backward_wide}


class Launch:
    """Launches of the kernel that multiplies."""

    def __init__(
        self, tile: BackwardTile, ordered: bool, banded: bool, mask: plans.Words, names: tuple[str, ...],
        numbers: dict[str, float],
    ) -> None:  # fmt: skip
        self.tile, self.ordered, self.banded, self.mask, self.names, self.numbers = (
            tile,
            ordered,
            banded,
            mask,
            names,
            numbers,
        )

    def repeated(self, *_):
        return None, []

    def __call__(self, q, k, v, gradient, sums, total, of_k, of_v, turns, counter, *of_mask):
        of, point, whole = gluon_in_python.Descriptor, gluon_in_python.Pointer, gluon_in_python.Int
        wide = hopper_backward.padded(max(q.shape[3], v.shape[3]))
        rows, keys = (1, 1, self.tile.rows, wide), (1, 1, _HALF, wide)
        numbers = {name: value for name, value in self.numbers.items() if name != "processors"}
        numbers = {name: whole(value) if isinstance(value, int) else value for name, value in numbers.items()}
        sizes = {
            "queries": q.shape[2], "keys": k.shape[2], "heads": q.shape[1], "key_heads": k.shape[1], "section": 2,
            "tiles": k.shape[0] * k.shape[1] * -(-k.shape[2] // self.tile.keys), "ROWS": self.tile.rows,
        }  # fmt: skip
        gluon_in_python.run(
            _FUNCTIONS[self.tile.keys], min(_PROGRAMS, sizes["tiles"]), q_desc=of(q, rows), k_desc=of(k, keys),
            v_desc=of(v, keys), gradient_desc=of(gradient, rows), sums_desc=of(sums, (_HALF,)),
            sum_desc=of(total, (_HALF * _HALF // _WIDE, _WIDE)), of_k_desc=of(of_k, keys), of_v_desc=of(of_v, keys),
            turns=None if turns is None else point(turns), counter=point(counter),
            **{name: whole(size) for name, size in sizes.items()}, **numbers, **read_number(*of_mask), MASK=self.mask,
            BANDED=self.banded, ORDERED=self.ordered, GROUPED=self.tile.grouped, APART=self.tile.apart, REGISTERS=0,
            OTHER_REGISTERS=0,
        )  # fmt: skip
        assert not counter[:2].any()  # they are left as they were found


_STRIDES = {"listed": 3, "listed_turns": 0, "counts": 3, "lengths": 1}  # how many are passed; of other tensors four


def read_number(*of_mask):
    """The arguments that a mask is."""
    found: dict[str, object] = {}
    for name, x in zip(hopper_backward._OF_MASKS, of_mask, strict=True):
        found[name] = None if x is None else gluon_in_python.pointer(x)
        for i in range(_STRIDES.get(name, 4)):
            found[f"{name}_stride_{i}"] = None if x is None else gluon_in_python.Int(x.stride(i))
    if of_mask[1] is not None:
        check_turns(*of_mask[:3])
    return found


def check_turns(listed, turns, counts):
    """They are how many later tiles of keys see the same queries, and lie as the lists do."""
    expected = turns_of(listed, counts)
    assert torch.equal(turns[expected >= 0], expected[expected >= 0])
    assert turns.stride() == listed.stride()


def emulate():
    """From now on ``hopper_backward.backward`` launches the kernel that multiplies in Python."""
    of_slots = {name: gluon_in_python.plain(getattr(tile, name)) for name in ("element", "number", "_between")}
    masks._visible = gluon_in_python.plain(tile.visible, **of_slots)
    masks._of_queries = gluon_in_python.plain(tile.of_queries, **of_slots)
    masks._of_keys = gluon_in_python.plain(tile.of_keys, **of_slots)
    for add in (device.add, wide_device.add):
        sys.modules[add.__module__].reduce_add = gluon_in_python.reduce_add
    prepared = hopper_backward.PreparedLaunch
    hopper_backward._kernel = lambda *settled: settled
    hopper_backward.PreparedLaunch = lambda kernel, names, numbers: (
        Launch(*kernel, names, numbers) if isinstance(kernel, tuple) else prepared(kernel, names, numbers)
    )


def tensors(batch, heads, queries, keys, head, columns, out_is_bshd):
    """Normal ones."""
    made = shaped(heads, queries, keys, head, columns, FP16, "cpu", batch)
    made = [x.transpose(1, 2).contiguous().transpose(1, 2) if out_is_bshd else x for x in made]
    return [x.normal_() for x in made]


def answer(case, ordered=False):
    """Compare the gradients of a call with the reference's; where programs take turns they must be the same twice."""
    torch.manual_seed(0)
    if case in HIDING:
        head, what = HIDING[case]
        return compared_where_hidden(tensors(1, (2, 1), 300, 300, head, head, False), what)
    if case in ROWS_HIDING:
        head, what = ROWS_HIDING[case]
        return compared_where_rows_are_hidden(tensors(1, (2, 1), 300, 300, head, head, False), what)
    if case in QUERY_HIDING:
        head = QUERY_HIDING[case]
        return compared_where_a_query_is_hidden(tensors(1, (2, 1), 300, 300, head, head, False))
    sizes, what = (CALLS | LARGE)[case]
    made = tensors(*sizes, what.get("out_is_bshd", False))
    given = called(large(made, "some" in case) if case in LARGE else made, **what)
    torch.use_deterministic_algorithms(ordered)
    first = compared(given)
    assert not ordered or all(map(torch.equal, first, hopper_backward.backward(*given)))
    return None


def main():
    emulate()
    for line in sys.stdin:
        try:
            answer(*json.loads(line))
            print("right", flush=True)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
