"""From a call to the arguments of the portable kernels: constants, the tensors of masks and biases, lists of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.calls import BiasCall, Call, GradientCall
from opkit.attn.gpu import blocks, plans, tile_lists
from opkit.attn.gpu.blocks import Blocks, Rule
from opkit.attn.gpu.plans import Shape
from opkit.attn.program import Grid
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch

AnyCall = Call | GradientCall | BiasCall
Run = Callable[..., Any]
Constants = tuple[tuple[str, Any], ...]
_NO_TENSORS: list[Tensor | None] = [None] * len(plans.TENSORS)


def shape_of(call: AnyCall) -> Shape:
    """The shape of a call's mask and bias."""
    return plans.shape_of(tuple(call.mask), tuple(call.bias))


def with_room(call: Any) -> Any:
    """The call, its mask and bias written out where they have no room in a kernel."""
    if shape_of(call).fits:
        return call
    grid = Grid(call.q.shape[2], call.k.shape[2], call.q.device)
    mask, masks, bias, biases = plans.written_out(call.mask, call.mask_tensors, call.bias, call.bias_tensors, grid)
    return call._replace(mask=mask, mask_tensors=masks, bias=bias, bias_tensors=biases)


def blocks_of(rules: tuple[Rule, ...], call: AnyCall, shape: Shape, tensors: int) -> Blocks:
    """The tiles of a call; ``tensors`` as for :func:`opkit.attn.gpu.blocks.choose`."""
    q, head, memory = call.q, max(call.q.shape[3], call.v.shape[3]), blocks.shared_memory(call.q.device)
    return blocks.choose(rules, head, q.element_size(), q.shape[2], memory, tensors, _pair(call, shape))


def invariant_blocks_of(call: AnyCall, shape: Shape) -> Blocks:
    """The tiles of a forward call whose results are not to depend on the batch."""
    head, memory = max(call.q.shape[3], call.v.shape[3]), blocks.shared_memory(call.q.device)
    return blocks.invariant(head, call.q.element_size(), memory, _pair(call, shape))


def _pair(call: AnyCall, shape: Shape) -> int:
    """The bytes of masks and biases that are read for each pair of a query and a key."""
    lists = {"mask": call.mask_tensors, "bias": call.bias_tensors}
    return sum(lists[whose][n].element_size() for whose, n, layout in shape.slots if layout == "bhqk")


def constants_of(call: AnyCall, shape: Shape, size: Blocks) -> Constants:
    """The constants of a kernel and its compiler's options."""
    head, columns = call.q.shape[3], call.v.shape[3]
    d0, d1 = blocks.parts(head)
    found = {
        "D": head, "D0": d0, "D1": d1, "E": columns, "E0": blocks.parts(columns)[0], "MASK": shape.mask, "BIAS": shape.bias,
        "BANDED": shape.banded, "LISTED": listed(call, shape, size), "CAPPED": call.softcap > 0,
        "FOLDED": call.softcap == 0 and not shape.bias and call.scale > 0, "DROPPED": call.dropout_p > 0,
        "ROWS": size.rows, "KEYS": size.keys,
        "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    return tuple(found.items())


def launcher(
    kernel: Callable[[Constants], TritonKernel],
    constants: Constants,
    dtype: torch.dtype,
    names: Sequence[str],
    numbers: dict[str, Any],
) -> Run:
    """A function of tensors, in the order of ``names``, that launches the kernel with these constants and numbers.

    Products of float32 are computed as torch's settings say at the time of a launch: in TF32, or as exactly as float32 allows.
    """
    coarse = PreparedLaunch(kernel((*constants, ("PRECISION", "tf32"))), names, numbers)
    if dtype != torch.float32:
        return coarse
    exact = PreparedLaunch(kernel((*constants, ("PRECISION", "ieee"))), names, numbers)
    settings = torch.backends.cuda.matmul
    return lambda *tensors: (coarse if settings.fp32_precision == "tf32" else exact)(*tensors)


def listed(call: AnyCall, shape: Shape, size: Blocks) -> bool:
    """Whether the tiles that a kernel visits come from a list."""
    return tile_lists.worth_it(shape, size, call.q.shape[2], call.k.shape[2])


def lists_of(call: AnyCall, shape: Shape, size: Blocks, *, by_keys: bool) -> tuple[Tensor | None, Tensor | None]:
    """The tiles that a kernel visits and how many they are; None where it reckons them."""
    return tile_lists.lists_of(call, shape, size, by_keys) if listed(call, shape, size) else (None, None)


def tensors_of(call: AnyCall, shape: Shape) -> list[Tensor | None]:
    """The tensors of a mask and a bias, for the parameters ``plans.TENSORS``."""
    if not shape.slots and not shape.lengths:
        return _NO_TENSORS
    sizes = (*call.q.shape[:3], call.k.shape[2])
    slots = plans.slots_of(shape, call.mask_tensors, call.bias_tensors, sizes)
    return plans.tensors_of(shape, call.mask_tensors, slots, sizes[0])


def rescale(dropout_p: float) -> float:
    """What the probabilities that dropout keeps are times."""
    return 0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)
