"""The portable backward kernels, also of the gradients of biases: from the arguments of an operator to launches."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.allocation import allocate_scratch, dense_rows, overwritten, rows
from opkit.attn.calls import BiasCall, GradientCall
from opkit.attn.gpu import arguments, blocks, functions, search
from opkit.attn.gpu.arguments import Launches, Run
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.portable.terms import Term, placed, sums_shape, terms_of
from opkit.attn.masks import program
from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch

_Four = tuple[Tensor, Tensor, Tensor, Tensor]
_ROWS = ("out", "gradient", "of_lse", "delta", "apart")
_TENSORS = ("q", "k", "v", "gradient", "lse", "apart", "delta", "seed", *arguments.TENSORS)
_ELEMENTS = 4096  # of a tile of results
_DELTA = Named("opkit.attn.gpu.portable.device.backward_rows", "attention_delta")
_OF_KEYS, _OF_QUERIES = (
    Named("opkit.attn.gpu.portable.device.backward", name) for name in ("attention_of_keys", "attention_of_queries")
)
_BIAS_TENSORS = ("of_bias", "q", "k", "v", "gradient", "lse", "delta", "sinks", "seed", *arguments.TENSORS)
_OF_BIAS = Named("opkit.attn.gpu.portable.device.bias", "attention_of_bias")
_PROGRAMS = 4  # for each multiprocessor; where tiles are fewer, several share one out among them
_MIN_KEYS = 16  # keys of a tile


@functools.cache
def delta_kernel(columns: int) -> TritonKernel:
    """Return the kernel of delta for values of so many columns."""
    wide, _ = blocks.parts(columns)
    return triton_kernel(
        _DELTA,
        grid=lambda queries, programs, ROWS: (blocks.tiles_in(queries, ROWS), programs),
        E=columns, E0=wide, ROWS=max(16, _ELEMENTS // wide),
    )  # fmt: skip


@functools.cache
def keys_kernel(constants: arguments.Constants) -> TritonKernel:
    """Return the kernel of the gradients of keys and values with its constants settled."""
    return triton_kernel(
        _OF_KEYS, grid=lambda keys, programs, KEYS: (blocks.tiles_in(keys, KEYS), programs), **dict(constants)
    )


@functools.cache
def queries_kernel(constants: arguments.Constants) -> TritonKernel:
    """Return the kernel of the gradient of queries with its constants settled."""
    return triton_kernel(
        _OF_QUERIES,
        grid=lambda queries, programs, ROWS: (blocks.tiles_in(queries, ROWS), programs),
        **dict(constants),
    )


def prepare_backward(example: GradientCall) -> Run:
    """Return the gradients of q, k and v, and delta, for calls like ``example``."""
    q, k, v = example[2:5]
    new = [overwritten(rows(each, each.shape[3], example.out_is_bshd)) for each in (q, k, v)]
    new.append(overwritten(q.new_empty(q.shape[:3], dtype=torch.float32)))
    if 0 in (q.numel(), k.numel(), v.numel()):
        return lambda *args: tuple([make().zero_() for make in new])
    roomy = arguments.fit_to_slots(example)
    fits, launch = roomy is example, _launch(roomy)

    def run(*args: Any) -> _Four:
        call = GradientCall(*args) if fits else arguments.fit_to_slots(GradientCall(*args))
        call = call._replace(
            **{name: dense_rows(getattr(call, name)) for name in ("gradient", "q", "k", "v", "out")},
            lse=call.lse.contiguous(),
        )
        of_q, of_k, of_v, delta = (make() for make in new)
        launch(call, of_q, of_k, of_v, delta)
        return of_q, of_k, of_v, delta

    return run


def _launch(example: GradientCall) -> Run:
    """Return a function of a call and its results, which launches the three kernels."""
    (batch, heads, queries, _), (_, kv_heads, _, columns) = example.q.shape, example.v.shape
    shape, dtype = arguments.shape_of(example), example.q.dtype
    numbers = {**_numbers(example), **arguments.numbers_of(example, shape)}
    sums = {"heads": heads, "queries": queries, "programs": batch * heads}
    of_rows = PreparedLaunch(delta_kernel(columns), _ROWS, sums)
    tiles = arguments.tiles_of(blocks.KEYS_KERNEL, example, shape)
    theirs = {**numbers, "kv_heads": kv_heads, "programs": batch * kv_heads}
    of_keys = arguments.Tiled(
        keys_kernel, tiles, shape, dtype, ("of_k", "of_v", *_TENSORS), theirs, written=slice(2), by_keys=True
    )
    tiles = arguments.tiles_of(blocks.QUERIES_KERNEL, example, shape)
    theirs = {**numbers, "heads": heads, "programs": batch * heads}
    of_queries = arguments.Tiled(
        queries_kernel, tiles, shape, dtype, ("of_q", "sinks", *_TENSORS), theirs, written=slice(1)
    )
    new = overwritten(example.q.new_empty((batch * heads, 2 * example.q.shape[2] + 1), dtype=torch.float32))

    def launch(call: GradientCall, of_q: Tensor, of_k: Tensor, of_v: Tensor, delta: Tensor) -> None:
        apart = new()
        of_rows(call.out, call.gradient, call.of_lse, delta, apart)
        rows, sums = (call.q, call.k, call.v, call.gradient), (call.lse, apart, delta)
        read = (*rows, *sums, call.seed, *arguments.all_tensors_of(call, shape))
        of_queries(call, of_q, call.sinks, *read)
        of_keys(call, of_k, of_v, *read)

    return launch


def _numbers(call: GradientCall) -> dict[str, Any]:
    """Return the numbers that both kernels take."""
    heads, kv_heads = call.q.shape[1], call.v.shape[1]
    return {
        "group": heads // kv_heads, "queries": call.q.shape[2], "keys": call.v.shape[2], "scale": call.scale,
        "softcap": call.softcap, "threshold": math.ceil(call.dropout_p * 2**32), "rescale": arguments.rescale(call.dropout_p),
    }  # fmt: skip


@functools.cache
def bias_kernel(constants: arguments.Constants) -> TritonKernel:
    """Return the kernel with its constants settled."""
    return triton_kernel(_OF_BIAS, grid=lambda own, programs, shares: (own, programs, shares), **dict(constants))


def adds_in_no_order(call: BiasCall) -> bool:
    """Return whether a gradient that is wanted is added to in an order that is another each time."""
    terms = terms_of(call.bias, [tuple(each.shape) for each in call.bias_tensors], call.k.shape[2])
    return any(term.scattered and term.tensor in call.wanted for term in terms)


def prepare_bias_backward(example: BiasCall) -> Run:
    """Return the gradients of the tensors that are wanted, for calls like ``example``."""
    roomy = arguments.fit_to_slots(example)
    fits = roomy is example
    shapes = [tuple(each.shape) for each in example.bias_tensors]
    terms = list(terms_of(example.bias, shapes, example.k.shape[2]))
    shape = arguments.shape_of(roomy)
    makers = [
        [_TermGradient(roomy, term, example.bias_tensors[number]) for term in terms if term.tensor == number]
        for number in example.wanted
    ]
    if 0 in (example.q.numel(), example.k.numel(), example.v.numel()):
        makers = [[] for _ in makers]

    def run(*args: Any) -> list[Tensor]:
        call = BiasCall(*args)
        like = [call.bias_tensors[number] for number in call.wanted]
        call = call if fits else arguments.fit_to_slots(call)
        rows = [dense_rows(each) for each in (call.q, call.k, call.v, call.gradient)]
        sums = call.lse.contiguous(), call.delta.contiguous(), call.sinks
        read = (*rows, *sums, call.seed, *arguments.all_tensors_of(call, shape))
        return [_sum_of_terms([make(call, read) for make in each], x) for each, x in zip(makers, like, strict=True)]

    return run


def _sum_of_terms(found: list[Tensor], like: Tensor) -> Tensor:
    """Return the sum of the gradients that a tensor has from each term that names it."""
    if not found:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return functools.reduce(torch.add, found)


class _TermGradient:
    """Makes the gradient of a tensor as one term has it."""

    def __init__(self, call: BiasCall, term: Term, tensor: Tensor) -> None:
        self.tiles: search.Tiles[BlockSizes, _BiasLaunch] = arguments.tiles_of(
            blocks.BIAS_KERNEL, call, arguments.shape_of(call), functools.partial(_cut, term)
        )
        self.term, self.shape, self.dtype = term, tuple(tensor.shape), tensor.dtype
        self.sizes = (*call.q.shape[:3], call.k.shape[2])

    def __call__(self, call: BiasCall, read: Sequence[Any]) -> Tensor:
        _, launch = self.tiles.chosen or self.tiles.choose(
            functools.partial(_bias_launch, call, self.term, bias_kernel), functools.partial(self._time, call, read)
        )
        made = self._room(launch, read)
        launch.launches(made, *read)
        if self.term.load is None:
            return made.sum(0).to(self.dtype) if launch.shares > 1 else made[0]
        sums = made[0] if launch.shares == 1 or self.term.scattered else made.sum(0)
        if not self.term.scattered:
            function = _function_of(call, self.term).function
            sums = placed(self.term, sums, function, call.bias_tensors, self.sizes)
        return sums.to(self.dtype)

    def _room(self, launch: _BiasLaunch, read: Sequence[Any]) -> Tensor:
        """Room for the shares of the gradient, or of the sums from which a function's is made."""
        if self.term.load is None:
            dtype = torch.float32 if launch.shares > 1 else self.dtype
            return allocate_scratch(read[0], (launch.shares, *self.shape), dtype)
        if self.term.scattered:
            return torch.zeros((1, *self.shape), dtype=torch.float32, device=read[0].device)
        return allocate_scratch(
            read[0], (launch.shares, *sums_shape(self.term, self.sizes, launch.keys)), torch.float32
        )

    def _time(self, call: BiasCall, read: Sequence[Any], size: BlockSizes) -> search.Timed:
        launch = _bias_launch(call, self.term, inspect.unwrap(bias_kernel), size)
        made = self._room(launch, read)
        search.emptied(made)
        return launch.launches.time(made, *read), [made.sum(0).to(self.dtype)]


def _cut(term: Term, size: BlockSizes) -> BlockSizes:
    """Return tiles without more keys than a row has, rounded up; for diagonals as many queries as keys."""
    keys = min(size.keys, max(_MIN_KEYS, 1 << (term.wide - 1).bit_length()))
    if term.diagonal:
        keys = min(keys, size.rows)
        return size._replace(rows=keys, keys=keys)
    return size._replace(keys=keys)


def _function_of(call: BiasCall, term: Term) -> functions.Placed:
    """Return the function that is a term of a call's bias."""
    shape = arguments.shape_of(call)
    return shape.functions[shape.bias[term.at][1]]


class _BiasLaunch(NamedTuple):
    """Among how many programs each tile of the gradient is shared out, what launches them, and the keys of a tile."""

    shares: int
    launches: Launches
    keys: int


def _bias_launch(
    call: BiasCall, term: Term, kernel: Callable[[arguments.Constants], TritonKernel], size: BlockSizes
) -> _BiasLaunch:
    sizes = (call.q.shape[0], call.q.shape[1], call.q.shape[2], term.high, term.wide)
    tiles = (*sizes[:2], blocks.tiles_in(sizes[2], size.rows), term.high, blocks.tiles_in(term.wide, size.keys))
    own = [count for count, depends in zip(tiles, term.depends, strict=True) if depends]
    of_rows = math.prod(n for n, d in zip(tiles[2:], term.depends[2:], strict=True) if d)
    if term.diagonal:
        of_rows = tiles[2] + tiles[4] - 1
        own, tiles = [*own, of_rows], (*tiles[:2], tiles[2], 1, of_rows)
    wanted = max(1, _PROGRAMS * blocks.processors(call.q.device) // math.prod(own))
    shares = min(wanted, math.prod(tiles) // math.prod(own))
    numbers = {
        **_bias_numbers(call), **arguments.numbers_of(call, arguments.shape_of(call)), "high": term.high, "wide": term.wide,
        "shares": shares, "own": of_rows,
        "programs": math.prod(n for n, d in zip(tiles[:2], term.depends[:2], strict=True) if d),
    }  # fmt: skip
    constants = _bias_constants(call, term, size)
    launches = arguments.launcher(bias_kernel, constants, call.q.dtype, _BIAS_TENSORS, numbers)
    return _BiasLaunch(shares, launches, size.keys)


def _bias_constants(call: BiasCall, term: Term, size: BlockSizes) -> arguments.Constants:
    names = ("BY_BATCH", "BY_HEAD", "BY_QUERY", "BY_ROW", "BY_COLUMN")
    found = dict(arguments.constants_of(call, arguments.shape_of(call), size))
    found |= {**dict(zip(names, term.depends, strict=True)), "IMAGE": term.high > 1, "DISTANCES": term.distances}
    found |= {"DIAGONAL": term.diagonal, "TERM": 0, "PART": None, "PLACE": None}
    if program.BIAS_FUNCTION in (word[0] for word in found["BIAS"]):
        found["TERM"] = term.at
    if term.load is not None:
        of, tensors = _function_of(call, term), call.bias_tensors
        assert term.derivative is not None
        found["PART"] = functions.text_of(of, term.derivative, tensors)
        found["PLACE"] = functions.place_of(of, term.load, tensors) if term.scattered else None
    del found["LISTED"]
    return tuple(found.items())


def _bias_numbers(call: BiasCall) -> dict[str, Any]:
    """Return the numbers that the kernel takes whichever tensor it is for."""
    (batch, heads, queries, _), kv_heads = call.q.shape, call.v.shape[1]
    return {
        "batch": batch, "heads": heads, "group": heads // max(kv_heads, 1), "queries": queries, "keys": call.v.shape[2],
        "scale": call.scale, "softcap": call.softcap, "threshold": math.ceil(call.dropout_p * 2**32),
        "rescale": arguments.rescale(call.dropout_p),
    }  # fmt: skip
