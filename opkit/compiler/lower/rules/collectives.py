"""Collectives of processes: calls that start them, and calls that wait for their results.

A collective may read its inputs, and write its results, until ``opkit.wait`` returns. So that call takes the inputs too: nothing
overwrites them before it, in the arena or in place, and torch's allocator does not get them back.
"""

from __future__ import annotations

from typing import Any

from opkit.compiler.ir.index import contiguous
from opkit.compiler.ir.program import WAIT, Extern, is_collective, reads, writes
from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.tensors import Tensor, whole

TABLE = Table()


@TABLE.rule("_c10d_functional.wait_tensor.default")
def _wait(b: Builder, x: Tensor) -> Tensor:
    result = b.strided(x)
    return b.call(WAIT, (result, *_inputs(b, result.buffer)), [b.extern_buffer(b.result())])[0]


def _inputs(b: Builder, result: str) -> list[Tensor]:
    """Return the buffers that the collective with a result reads; none if another graph started it."""
    calls = [step for step in b.steps if isinstance(step, Extern) and is_collective(step.target)]
    return [whole(b.buffers[name]) for call in calls if result in writes(call) for name in reads(call)]


@TABLE.rule(
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.all_to_all_single.default",
    "_c10d_functional.reduce_scatter_tensor.default",
)
def _of_contiguous(b: Builder, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return b.call(b.node.target, (_contiguous(b, x), *rest), [b.extern_buffer(b.result())], named)[0]


@TABLE.rule(
    "_c10d_functional.all_gather_into_tensor_coalesced.default",
    "_c10d_functional.reduce_scatter_tensor_coalesced.default",
)
def _of_several_contiguous(b: Builder, xs: list[Tensor], *rest: Any, **named: Any) -> tuple[Tensor, ...]:
    kinds: Any = b.node.result
    return tuple(b.call(b.node.target, ([_contiguous(b, x) for x in xs], *rest), [*map(b.extern_buffer, kinds)], named))


def _contiguous(b: Builder, x: Tensor) -> Tensor:
    """Return a tensor as these operators take it: its layout may not be that of eager mode, as a convolution's is not."""
    strided = x.strided()
    if strided is None:
        return b.materialised(x)
    pairs = zip(x.shape, strided.strides, contiguous(x.shape), strict=True)
    return x if all(n == 1 or own == other for n, own, other in pairs) else b.materialised(x)


EXTERNS: dict[str, dict[str, Any]] = {
    **{f"_c10d_functional.{name}.default": {} for name in ("all_reduce", "all_reduce_coalesced", "broadcast")},
    "_dtensor.shard_dim_alltoall.default": {},
}
"""As in ``extern_calls``: they take any layout."""

ALIASING = tuple(
    f"_c10d_functional.{name}.default"
    for name in ("isend", "irecv", "batch_p2p_ops", "all_reduce_", "all_reduce_coalesced_", "broadcast_")
)
"""Calls that return their arguments."""
