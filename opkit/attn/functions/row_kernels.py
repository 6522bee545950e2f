"""Kernels of functions of rows in eager mode: one for all rows of a tensor, and one for their gradients.

A function is traced once, mapped over the rows of a tensor whose numbers of batches and positions are large primes. The function
sees one row: to it these numbers are nothing but sizes of tensors, so that each becomes a symbol, and one kernel serves all
batches and lengths. The backward is the trace of autograd's backward of the same, which computes the row again from its inputs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.functions.captures import Captures, learned
from opkit.attn.tensor_cache import operations_are_observed
from opkit.errors import CompileError, ToolchainError
from opkit.op import torch_private as dispatch

Mapped = Callable[[str, Callable[..., Any], Tensor], Tensor]
"""Returns, in torch operations, what a function makes of each row of a tensor in a layout with a batch."""

Kernel = Callable[[list[Tensor]], Any]
"""Takes the captured numbers, the rows and the captured tensors, and returns the results; a backward takes a gradient first."""

_log = logging.getLogger("opkit.attention")
_PRIMES = {"b": 15473, "s": 1299709}
"""The numbers of batches and positions in a trace."""
_PRIMES_OF_CAPTURED = {"b": 1021, "s": 7919}, {"b": 1019, "s": 7907}
"""The same where the function sees them as sizes of captured tensors: it may compute with them, which a second trace shows."""
_MAX_CACHED, _MAX_OF_FUNCTION = 256, 32
_cache: dict[Any, _Kernels | None] = {}
_built: Counter[Any] = Counter()  # of a function's code


def call(function: Callable[..., Any], x: Tensor, layout: str, mapped: Mapped) -> Tensor | None:
    """Return what a function makes of each row of a tensor, or None where torch operations must compute it.

    Args:
        function: as of :func:`opkit.attn.functions.rows.mapped`.
        x: a tensor in ``layout``, with rows.
        layout: as of :func:`opkit.attention`.
        mapped: computes the same in torch operations.
    """
    if layout == "thd":
        found = call(function, x.unsqueeze(0), "bshd", mapped)
        return None if found is None else found.squeeze(0)
    code = getattr(function, "__code__", None)
    if code is None or _is_observed():
        return None
    captures = Captures.of(function, shapes=False)
    tensors = list({id(each): each for each in captures.tensors}.values())
    if captures.key is None or not all(map(_takes, (x, *tensors))):
        return None
    numbers = [cell.cell_contents for cell in captures.numbers]
    fixed = x.dtype == torch.float64 or learned(code).needs_numbers  # their values are constants of the kernel
    kinds = _kinds(x, tensors, layout)
    settings = layout, x.device, torch.get_default_dtype(), dispatch.deterministic()
    key = (captures.key, tuple(numbers) if fixed else None, settings, kinds)
    cells = [captures.tensors[k] for _, k in captures.tensor_cells]
    if captures.function is not None:  # a later call may capture other values, as in a loop, before the backward
        function = captures.substituted(numbers, cells)
    trace = _Trace(captures, function, tensors, [] if fixed else numbers, kinds, x.device, layout, mapped)
    if key not in _cache:
        if _built[code] >= _MAX_OF_FUNCTION:
            return None
        _built[code] += 1
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        _cache[key] = kernels = _Kernels.of(trace, x)
        if kernels is None and numbers and not fixed:  # perhaps the function needs their values
            learned(code).needs_numbers = True
            return call(function, x, layout, mapped)
    kernels = _cache[key]
    if kernels is None:
        return None
    given = [] if fixed else [torch.full((), n, dtype=_dtype(n), device=x.device) for n in numbers]
    try:
        if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *tensors)):
            return _Differentiable.apply(kernels, trace, given, x, *tensors)
        return kernels.forward([*given, *map(_dense, (x, *tensors))])[0]
    except (CompileError, ToolchainError) as error:  # there is no compiler
        _cache[key] = _refused(error)
        return None


def _is_observed() -> bool:
    """Return whether operators are to be seen one by one: by modes, transforms such as vmap, or forward mode."""
    forward_mode = dispatch.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    return forward_mode or operations_are_observed()


def _refused(error: Exception) -> None:
    _log.debug("A function of rows runs in torch operations: %s: %s", type(error).__name__, error)


def _takes(x: Tensor) -> bool:
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
    return plain and not (x.is_conj() or x.is_neg())


def _dtype(number: float) -> torch.dtype:
    return torch.float32 if isinstance(number, float) else torch.int64


# ---- how tensors are traced --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How a tensor is traced.

    Attributes:
        sizes: each a number, "b" or "s".
        order: of the dimensions in memory, the outermost first.
        dtype: of its elements.
        wanted: whether it needs a gradient.
    """

    sizes: tuple[int | str, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool

    def like(self, primes: dict[str, int], device: torch.device) -> Tensor:
        """Return a tensor of this kind."""
        sizes = [primes[n] if isinstance(n, str) else n for n in self.sizes]
        made = torch.empty([sizes[d] for d in self.order], dtype=self.dtype, device=device)
        return made.permute([self.order.index(d) for d in range(len(sizes))])


def _kinds(x: Tensor, tensors: Sequence[Tensor], layout: str) -> tuple[_Kind, ...]:
    """Return the kinds of the rows and of captured tensors, whose sizes have names where they are those of the rows."""
    own = tuple([d if d in "bs" and n > 1 else n for d, n in zip(layout, x.shape, strict=True)])
    named = dict(zip(x.shape[:-1], own[:-1], strict=True))
    found = [_Kind(own, _order(x), x.dtype, x.requires_grad)]
    for each in tensors:
        last = each.dim() - 1
        sizes = [named.get(n, n) if d < last or n != x.shape[-1] else n for d, n in enumerate(each.shape)]
        found.append(_Kind(tuple(sizes), _order(each), each.dtype, each.requires_grad))
    return tuple(found)


def _order(x: Tensor) -> tuple[int, ...]:
    if x.is_contiguous():
        return tuple(range(x.dim()))
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    return tuple(order if x.permute(order).is_contiguous() else range(x.dim()))


def _dense(x: Tensor) -> Tensor:
    """Return a tensor with nothing between its elements, whatever the order of its dimensions: itself, or a copy."""
    return x if x.is_contiguous() or x.permute(_order(x)).is_contiguous() else x.contiguous()


# ---- kernels -----------------------------------------------------------------------------------------------------------


class _Trace(NamedTuple):
    """What is traced of a call; see :func:`call`."""

    captures: Captures
    function: Callable[..., Any]
    tensors: Sequence[Tensor]
    numbers: Sequence[float]
    kinds: tuple[_Kind, ...]
    device: torch.device
    layout: str
    mapped: Mapped

    def kernel(self, hints: dict[str, int], order: tuple[int, ...] | None = None) -> Kernel | None:
        """Return a kernel: of the results, or with the order of a gradient's dimensions of its backward."""
        from opkit.attn.functions import torch_private as private  # which imports sympy

        try:
            sizes = [n for kind in self.kinds[1:] for n in kind.sizes]
            seen = any(isinstance(n, str) or not all(n % prime for prime in _PRIMES.values()) for n in sizes)
            graphs = [
                private.with_symbols(self._graph(primes, order), {primes[name]: n for name, n in hints.items()})
                for primes in (_PRIMES_OF_CAPTURED if seen else (_PRIMES,))
            ]
            if len({private.text_of(each) for each in graphs}) > 1:
                raise ValueError("it computes with the number of batches or positions")
            return private.compiled(graphs[0])
        except Exception as error:
            return _refused(error)

    def _graph(self, primes: dict[str, int], order: tuple[int, ...] | None) -> torch.fx.GraphModule:
        from opkit.attn.functions import torch_private as private

        count = len(self.numbers)

        def rows(numbers: Sequence[Tensor], x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
            cells = [self.captures.tensors[k] for _, k in self.captures.tensor_cells]
            function = self.captures.substituted(numbers, cells) if numbers else self.function
            with private.Replaced(self.tensors, tensors):
                return self.mapped(self.layout, function, x)

        def forward(*inputs: Tensor) -> Tensor:
            return rows(inputs[:count], inputs[count], inputs[count + 1 :])

        def backward(gradient: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
            with torch.enable_grad():
                pairs = zip(inputs[count:], self.kinds, strict=True)
                leaves = [each.detach().requires_grad_(kind.wanted) for each, kind in pairs]
                out = rows(inputs[:count], leaves[0], leaves[1:])
                wanted = [each for each in leaves if each.requires_grad]
                return torch.autograd.grad(out, wanted, gradient, materialize_grads=True)

        def made() -> list[Tensor]:
            numbers = [torch.empty((), dtype=_dtype(n), device=self.device) for n in self.numbers]
            inputs = [*numbers, *[kind.like(primes, self.device) for kind in self.kinds]]
            if order is None:
                return inputs
            gradient = _Kind(tuple(forward(*inputs).shape), order, self.kinds[0].dtype, False)
            return [gradient.like(primes, self.device), *inputs]

        return private.traced(forward if order is None else backward, made)


@dataclasses.dataclass
class _Kernels:
    """The kernels of a function.

    Attributes:
        hints: the numbers of batches and positions when they were compiled.
        forward: of the results.
        order: of the dimensions of the results, and of the gradient that the backward takes.
        backward: of the gradients; None if there is none, or before it is needed.
    """

    hints: dict[str, int]
    forward: Kernel
    order: tuple[int, ...] | None = None
    backward: Kernel | None = None

    @classmethod
    def of(cls, trace: _Trace, x: Tensor) -> _Kernels | None:
        pairs = zip(trace.kinds[0].sizes, x.shape, strict=True)
        hints = {size: n for size, n in pairs if isinstance(size, str)}
        forward = trace.kernel(hints)
        return None if forward is None else cls(hints, forward)

    def build_backward(self, trace: _Trace, order: tuple[int, ...]) -> None:
        if self.order is None:
            self.order, self.backward = order, trace.kernel(self.hints, order)


class _Differentiable(torch.autograd.Function):
    """Rows by their kernels; a gradient that needs a graph of its own is computed in torch operations."""

    @staticmethod
    def forward(ctx: Any, kernels: _Kernels, trace: _Trace, given: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.kernels, ctx.trace, ctx.given = kernels, trace, given
        ctx.save_for_backward(*inputs)
        out = kernels.forward([*given, *map(_dense, inputs)])[0]
        kernels.build_backward(trace, _order(out))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs = ctx.saved_tensors
        trace: _Trace = ctx.trace
        is_wanted = [kind.wanted for kind in trace.kinds]
        kernels: _Kernels = ctx.kernels
        plain = not (torch.is_grad_enabled() or _is_observed()) and _takes(gradient)
        if plain and kernels.backward is not None and kernels.order is not None:
            ordered = gradient.permute(kernels.order).contiguous()
            back = [kernels.order.index(d) for d in range(gradient.dim())]
            found = kernels.backward([ordered.permute(back), *ctx.given, *map(_dense, inputs)])
        else:
            found = _gradients(trace, is_wanted, inputs, gradient)
        gradients = iter(found)
        return None, None, None, *[next(gradients) if needed else None for needed in is_wanted]


def _gradients(
    trace: _Trace, is_wanted: Sequence[bool], inputs: Sequence[Tensor], gradient: Tensor
) -> Sequence[Tensor]:
    """Return the gradients of the rows and of captured tensors by torch operations, as differentiable functions of these."""
    from opkit.attn.functions import torch_private as private

    if [*map(id, Captures.of(trace.function).tensors)] != [*map(id, trace.captures.tensors)]:
        raise RuntimeError(
            "opkit.attention: a function of rows captures other tensors now than when it was called, so that torch operations "
            "cannot compute its gradients. Define a function for each call, with tensors of its own."
        )

    def results(*wanted: Tensor) -> Tensor:
        given = iter(wanted)
        x, *tensors = [next(given) if needed else each for each, needed in zip(inputs, is_wanted, strict=True)]
        with private.Replaced(trace.tensors, tensors):
            return trace.mapped(trace.layout, trace.function, x)

    pull: Any = torch.func.vjp(results, *[x for x, needed in zip(inputs, is_wanted, strict=True) if needed])[1]
    return pull(gradient)
