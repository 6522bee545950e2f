"""Derive the portable kernels' arguments from a call: constants, the tensors of masks and biases, lists of tiles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.calls import AnyCall, AttentionCall, BiasCall, Float8Call, GradientCall
from opkit.attn.gpu import blocks, functions, plans, search, tile_lists
from opkit.attn.gpu.blocks import BlockSizes, Rule, TiledKernel
from opkit.attn.gpu.plans import MaskShape
from opkit.attn.gpu.search import Tiles, TileSearch
from opkit.attn.masks import program
from opkit.attn.masks.program import Grid
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity
from opkit.op.kernel_kinds import TunedKernel
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch

Run = Callable[..., Any]
Constants = tuple[tuple[str, Any], ...]
MIN_SCALE = 2.0**-64  #: of kernels that compare products: a sink divided by the scale must be finite
_SHORT = 512  # queries; fewer have a search of their own
TENSORS = (*plans.TENSORS, *functions.TENSORS)
"""The parameters that portable kernels take for tensors of masks and biases; :func:`all_tensors_of` gives their values."""
_NO_TENSORS: list[Tensor | None] = [None] * len(plans.TENSORS)
_NO_CAPTURES: list[Tensor | None] = [None] * len(functions.TENSORS)
Prepare = Callable[..., Callable[..., Any]]


def shape_of(call: AnyCall) -> MaskShape:
    """Return the shape of a call's mask and bias."""
    return plans.shape_of(tuple(call.mask), tuple(call.bias))


def fit_to_slots(call: Any) -> Any:
    """Return the call, with dense tensors for its mask and bias if their programs do not fit a kernel's slots."""
    if shape_of(call).fits:
        return call
    grid = Grid.of(call)
    mask, masks, bias, biases = plans.as_dense(call.mask, call.mask_tensors, call.bias, call.bias_tensors, grid)
    return call._replace(mask=mask, mask_tensors=masks, bias=bias, bias_tensors=biases)


def blocks_of(rules: tuple[Rule, ...], call: AnyCall, shape: MaskShape, tensors: int) -> BlockSizes:
    """Return the tiles of a call; ``tensors`` as for :func:`opkit.attn.gpu.blocks.choose`."""
    q, head, memory = call.q, max(call.q.shape[3], call.v.shape[3]), blocks.shared_memory(call.q.device)
    return blocks.choose(rules, head, q.element_size(), q.shape[2], memory, tensors, _pair(call, shape))


def tiles_of(
    kernel: TiledKernel, call: AnyCall, shape: MaskShape, cut: Callable[[BlockSizes], BlockSizes] | None = None
) -> Tiles[Any, Any]:
    """Return the tiles of calls like this one, by the kernel's table or by search; ``cut`` makes them smaller for the call."""
    kernel = kernel.with_functions if shape.functions else kernel
    rule, queries = blocks_of(kernel.rules, call, shape, kernel.tensors), call.q.shape[2]

    def tiles(config: Config | None) -> BlockSizes:
        found = rule if config is None else blocks.fitted(_blocks(config), queries)
        return found if cut is None else cut(found)

    return Tiles(tile_search_of(kernel, call, shape), tiles)


def tile_search_of(kernel: TiledKernel, call: AnyCall, shape: MaskShape) -> TileSearch | None:
    """Return the search for the fastest tiles of calls like this one; None where the table decides."""
    device, machine = call.q.device, search.machine_for(call.q.device)
    if machine is None:
        return None
    (d, e), pair = (call.q.shape[3], call.v.shape[3]), _pair(call, shape)
    memory = machine.shared(search.number_of(device))
    tried = blocks.candidates(kernel, d, e, call.q.element_size(), memory, pair)
    configs = [
        Config({"ROWS": each.rows, "KEYS": each.keys}, {"num_warps": each.warps, "num_stages": each.stages})
        for each in tried
    ]
    return search.tile_search(kernel.name, kernel.sources, configs, device, machine, _class(call, shape, pair))


def _class(call: AnyCall, shape: MaskShape, pair: int) -> str:
    """Return the class of a call: dtype, padded heads, the kind of its mask, bytes per pair, and two coarse kinds of the rest.

    Biases, softcap and dropout (``extras``) take registers and shared memory, of which the fastest tiles may leave little.
    """
    kind = 2 if shape.mask else int(shape.banded or bool(shape.lengths))
    extras = bool(shape.bias) or call.softcap > 0 or call.dropout_p > 0
    d, e = (sum(blocks.parts(each)) for each in (call.q.shape[3], call.v.shape[3]))
    sizes = {"d": d, "e": e, "extras": extras, "long": call.q.shape[2] > _SHORT, "mask": kind, "pair": pair}
    sizes |= {"functions": True} if shape.functions else {}
    return search.class_of(search.name_of(call.q.dtype), {name: int(size) for name, size in sizes.items()})


def _blocks(config: Config) -> BlockSizes:
    sizes, options = config.constexprs, config.options
    return BlockSizes(sizes["ROWS"], sizes["KEYS"], options["num_warps"], options["num_stages"])


def invariant_tiles_of(call: AnyCall, shape: MaskShape) -> Tiles[Any, Any]:
    """Return :func:`invariant_blocks_of` a call, never by search."""
    size = invariant_blocks_of(call, shape)
    return Tiles(None, lambda _: size)


def invariant_blocks_of(call: AnyCall, shape: MaskShape) -> BlockSizes:
    """Return the tiles of a forward call whose results must not depend on the batch."""
    head, memory = max(call.q.shape[3], call.v.shape[3]), blocks.shared_memory(call.q.device)
    return blocks.invariant(head, call.q.element_size(), memory, _pair(call, shape))


def _pair(call: AnyCall, shape: MaskShape) -> int:
    """Return the bytes of masks and biases, and of what functions capture, that are read for each pair of a query and a key."""
    lists = {"mask": call.mask_tensors, "bias": call.bias_tensors}
    of_slots = sum(lists[whose][n].element_size() for whose, n, layout in shape.slots if layout == "bhqk")
    return of_slots + sum(functions.pair_bytes(each, lists[each.whose]) for each in shape.functions)


def constants_of(call: AnyCall, shape: MaskShape, size: BlockSizes) -> Constants:
    """Return the constants of a kernel and its compiler's options."""
    mask = functions.words_of(shape.mask, shape.functions, program.FUNCTION, call.mask_tensors)
    bias = functions.words_of(shape.bias, shape.functions, program.BIAS_FUNCTION, call.bias_tensors)
    head, columns = call.q.shape[3], call.v.shape[3]
    d0, d1 = blocks.parts(head)
    found = {
        "D": head, "D0": d0, "D1": d1, "E": columns, "E0": blocks.parts(columns)[0], "MASK": mask, "BIAS": bias,
        "BANDED": shape.banded, "LISTED": listed(call, shape, size), "CAPPED": call.softcap > 0,
        "FOLDED": call.softcap == 0 and not shape.bias and call.scale > MIN_SCALE, "DROPPED": call.dropout_p > 0,
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
) -> Launches:
    """Return a function that launches the kernel with these constants and numbers on tensors, in the order of ``names``.

    Products of float32 are computed as torch's settings say at the time of a launch: in TF32, or as exactly as float32 allows.
    """
    coarse = PreparedLaunch(kernel((*constants, ("PRECISION", "tf32"))), names, numbers)
    if dtype != torch.float32:
        return coarse
    return _ByPrecision(coarse, PreparedLaunch(kernel((*constants, ("PRECISION", "ieee"))), names, numbers))


class _ByPrecision:
    """Choose one of two launches by torch's settings for products of float32."""

    def __init__(self, coarse: PreparedLaunch, exact: PreparedLaunch) -> None:
        self.coarse, self.exact = coarse, exact

    def __call__(self, *tensors: Tensor | None) -> None:
        (self.coarse if search.rounded() else self.exact)(*tensors)

    def time(self, *tensors: Tensor | None) -> float:
        return (self.coarse if search.rounded() else self.exact).time(*tensors)


Launches = PreparedLaunch | _ByPrecision


def listed(call: AnyCall, shape: MaskShape, size: BlockSizes) -> bool:
    """Return whether the tiles that a kernel visits come from a list."""
    return tile_lists.worth_it(shape, size, call.q.shape[2], call.k.shape[2])


def lists_of(
    call: AnyCall, shape: MaskShape, size: BlockSizes, *, by_keys: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tiles that a kernel visits and their counts; None where the kernel computes them."""
    return tile_lists.lists_of(call, shape, size, by_keys) if listed(call, shape, size) else (None, None)


def tensors_of(call: AnyCall, shape: MaskShape) -> list[Tensor | None]:
    """Return the tensors of a mask and a bias, for the parameters ``plans.TENSORS``."""
    if not shape.slots and not shape.lengths:
        return _NO_TENSORS
    sizes = (*call.q.shape[:3], call.k.shape[2])
    slots = plans.slots_of(shape, call.mask_tensors, call.bias_tensors, sizes)
    return plans.tensors_of(shape, call.mask_tensors, slots, sizes[0])


def all_tensors_of(call: AnyCall, shape: MaskShape) -> list[Tensor | None]:
    """Return these, and those that functions capture, for the parameters ``TENSORS``."""
    captured = _NO_CAPTURES
    if shape.functions:
        captured = functions.tensors_of(shape.functions, call.mask_tensors, call.bias_tensors)
    return [*tensors_of(call, shape), *captured]


def numbers_of(call: AnyCall, shape: MaskShape) -> dict[str, int | None]:
    """Return the numbers that portable kernels take for a mask and a bias, by their parameters' names."""
    captured = functions.numbers_of(shape.functions, call.mask_tensors, call.bias_tensors)
    return {**plans.numbers_of(shape), **captured}


def rescale(dropout_p: float) -> float:
    """Return the factor of the probabilities that dropout retains."""
    return 0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)


class Tiled:
    """Launches a kernel on a call's tensors and its lists of tiles, with the tiles that a table has or a search finds.

    Args:
        kernel: makes the kernel for constants, and is cached.
        tiles: of :func:`tiles_of`.
        shape: of the calls' masks and biases.
        dtype: of queries.
        names: of the tensors that are passed.
        numbers: what else the kernel takes, by name.
        written: which of the tensors are results.
        by_keys: whether its programs have tiles of keys.
        constants: in addition to those of :func:`constants_of`.
    """

    def __init__(
        self, kernel: Callable[[Constants], TritonKernel], tiles: Tiles[BlockSizes, Launches], shape: MaskShape,
        dtype: torch.dtype, names: Sequence[str], numbers: dict[str, Any], *, written: slice, by_keys: bool = False,
        constants: Constants = (),
    ) -> None:  # fmt: skip
        self._kernel, self._tiles, self._shape, self._dtype = kernel, tiles, shape, dtype
        self._names, self._numbers = (*names, "tiles", "counts"), numbers
        self._written, self._by_keys, self._constants = written, by_keys, constants

    def __call__(self, call: AnyCall, *tensors: Tensor | None) -> None:
        """Launch; where the tiles are not known yet, they are chosen first."""
        size, launch = self._tiles.chosen or self._tiles.choose(
            functools.partial(self._made, call, self._kernel), functools.partial(self._time, call, tensors)
        )
        launch(*tensors, *lists_of(call, self._shape, size, by_keys=self._by_keys))

    def _made(self, call: AnyCall, kernel: Callable[[Constants], TritonKernel], size: BlockSizes) -> Launches:
        constants = (*constants_of(call, self._shape, size), *self._constants)
        return launcher(kernel, constants, self._dtype, self._names, self._numbers)

    def _time(self, call: AnyCall, tensors: Sequence[Tensor | None], size: BlockSizes) -> search.Timed:
        launch = self._made(call, inspect.unwrap(self._kernel), size)  # candidates are not cached
        results = [each for each in tensors[self._written] if each is not None]
        search.emptied(*results)
        return launch.time(*tensors, *lists_of(call, self._shape, size, by_keys=self._by_keys)), results


def _tuned(
    calls: Callable[[], Iterator[Mapping[str, Any]]], call: Callable[..., Any], *kernels: TiledKernel
) -> Callable[[Prepare], TunedKernel]:
    def decorate(prepare: Prepare) -> TunedKernel:
        notes = functools.partial(_notes, call, kernels)
        return TunedKernel(prepare, tuple(calls()), functools.partial(_identities, kernels), notes)

    return decorate


def _identities(kernels: Sequence[TiledKernel]) -> list[Identity]:
    return [search.identity(each.name, each.sources) for each in kernels]


def _notes(call: Callable[..., Any], kernels: Sequence[TiledKernel], *arguments: Any) -> list[str]:
    fitted = fit_to_slots(call(*arguments))
    shape = shape_of(fitted)
    chosen = [tiles_of(each, fitted, shape).explained(each.name, "by its table") for each in kernels]
    return [*chosen, *plans.live_tiles(shape)]


def _without_descales(*arguments: Any) -> AttentionCall:
    return Float8Call(*arguments).plain


tuned_forward = _tuned(search.forward_examples, AttentionCall, blocks.FORWARD_KERNEL)
tuned_backward = _tuned(search.backward_examples, GradientCall, blocks.KEYS_KERNEL, blocks.QUERIES_KERNEL)
tuned_bias_backward = _tuned(search.bias_examples, BiasCall, blocks.BIAS_KERNEL)
tuned_float8 = _tuned(search.float8_examples, _without_descales, blocks.FORWARD_KERNEL)
