"""The CPU kernels of ``opkit::attention`` (``cpp_ext/attention``): which calls they support, and how they are called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn import cpu_programs, cpu_tiles, gradients
from opkit.attn.allocation import address, addresses, dense_rows, overwritten, rows
from opkit.attn.calls import AnyCall, AttentionCall, BiasCall, GradientCall, dtypes_and_shapes, predicate
from opkit.attn.cpu_programs import BiasSums
from opkit.attn.masks.program import bias_fits, mask_fits, results_fit, shapes_fit, sinks_fit
from opkit.attn.paged import cpu as paged_cpu
from opkit.errors import KernelError
from opkit.op.dispatch.selection import Refused
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAMES = {dtype: name for dtype, name in cpu_programs.NAMES.items() if dtype != torch.float64}
DECODED = ((16, 16, 256),)
"""The most queries, the most rows per head of keys, and the fewest keys: such calls go to `decode`."""
_SHORT = ((8, 8, 1), (4, 32, 1))  # `tiles` computes a whole tile of queries for each head
DECODED_BY_ISA = {
    "avx2": (*_SHORT, (32, 32, 256)),
    **dict.fromkeys(("avx512", "avx512_bf16"), (*_SHORT, (32, 32, 256), (64, 64, 4096))),
}
"""The same for instruction sets of the tiles kernel with which both kernels were measured."""
Run = Callable[..., Any]


def live_tiles(call: Sequence[Any]) -> cpu_tiles.LiveTiles:
    """Return which tiles of queries and keys :func:`forward` computes of a call, the arguments of ``opkit::attention``.

    Raises:
        KernelError: it does not take the call.

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
    _check_supported(takes(made), "tiles", made)
    out = made.q.new_empty((*made.q.shape[:3], made.v.shape[3]))
    kernel = _core.AttentionForward(None, **description(made, [made.q, made.k, made.v, out]))
    return cpu_tiles.tiles_of(made, kernel.states(addresses(made.mask_tensors)))


def _notes(*call: Any) -> list[str]:
    """Return what is known of the tiles of a call with a mask, whose tensors hold values."""
    made = AttentionCall(*call)
    return str(live_tiles(call)).splitlines() if made.mask and type(made.q) is Tensor else []


@functools.partial(PreparedKernel, notes=_notes)
def forward(*arguments: Any) -> Run:
    """Compute the operator's result and log-sum-exp, for the calls that :func:`takes` accepts.

    The numbers do not depend on the number of threads.
    """
    from opkit import _core

    call = AttentionCall(*arguments)
    _check_supported(takes(call), "tiles", call)
    out = rows(call.q, call.v.shape[3], call.out_is_bshd)
    new = overwritten(out), overwritten(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    if call.k.shape[2] == 0:
        return lambda *arguments: (new[0]().zero_(), _of_sinks(new[1](), arguments[5]))
    inputs = [dense_rows(each) for each in call[:3]]
    kernel = _core.AttentionForward(None, **description(call, [*inputs, out]))
    plain = _same(inputs, call[:3]) and call.sinks is None and not (call.mask_tensors or call.bias_tensors)
    return (_run_plain if plain else _run_general)(kernel, *new)


def _run_plain(kernel: Run, new_out: Run, new_lse: Run) -> Run:
    """Return a function for calls with no tensors but q, k and v, which are read in place."""

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        kernel(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        return out, lse

    return run


def _run_general(kernel: Run, new_out: Run, new_lse: Run) -> Run:
    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        call = AttentionCall(*arguments)
        out, lse = results = new_out(), new_lse()
        sinks = _in_float32(call.sinks)
        tensors = (
            dense_rows(call.q),
            dense_rows(call.k),
            dense_rows(call.v),
            out,
            lse,
        )  # alive until the kernel has read them
        kernel(*addresses(tensors), address(sinks), addresses(call.mask_tensors), addresses(call.bias_tensors))
        return results

    return run


@PreparedKernel
def backward(*arguments: Any) -> Run:
    """Compute the gradients of q, k and v, and delta: each row's sum of result * gradient, minus the gradient of its lse.

    The arguments are a :class:`GradientCall`; ``out`` and ``lse`` are the results of :func:`forward`.
    """
    return _prepared_backward(GradientCall(*arguments), [])


@PreparedKernel
def whole_backward(*arguments: Any) -> Run:
    """Compute them, and the gradients of some of the tensors of a bias, whose numbers follow a :class:`GradientCall`."""
    *call, wanted = arguments
    run = _prepared_backward(GradientCall(*call), list(wanted))
    return lambda *arguments: list(run(*arguments))


def _prepared_backward(call: GradientCall, wanted: list[int]) -> Run:
    from opkit import _core

    _check_supported(takes_whole(call, wanted), "tiles", call)
    results = [rows(each, each.shape[3], call.out_is_bshd) for each in (call.q, call.k, call.v)]
    new = [overwritten(each) for each in (*results, call.q.new_empty(call.q.shape[:3], dtype=torch.float32))]
    sums = BiasSums(call, wanted)
    if 0 in (call.q.numel(), call.k.numel(), call.v.numel()):
        return lambda *arguments: (*[make().zero_() for make in new], *sums.zeros(arguments[8]))
    tensors = call.q, call.k, call.v, call.out, call.gradient
    inputs = [dense_rows(each) for each in tensors]
    kernel = _core.AttentionBackward(None, **description(call, [*inputs, *results], True))
    in_place = _same(inputs, tensors) and all(x is None or x.is_contiguous() for x in (call.lse, call.of_lse))
    return _run_backward(kernel, new, not in_place, sums if wanted else None)


def _run_backward(kernel: Run, new: list[Run], copied: bool, sums: BiasSums | None) -> Run:
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        gradient, of_lse, q, k, v, out, lse, mask_tensors, bias_tensors, *rest = arguments
        sinks = _in_float32(rest[7] if len(rest) > 7 else None)
        if copied:
            gradient, q, k, v, out = (dense_rows(each) for each in (gradient, q, k, v, out))
            lse, of_lse = lse.contiguous(), None if of_lse is None else of_lse.contiguous()
        results = tuple([make() for make in new])
        tensors = (q, k, v, out, lse, *results)
        of_masks, of_biases = addresses(mask_tensors), addresses(bias_tensors)
        added, wanted = ([], []) if sums is None else sums.new(bias_tensors)
        kernel(address(gradient), address(of_lse), *addresses(tensors), address(sinks), of_masks, of_biases, wanted)
        return results if sums is None else (*results, *sums.rounded(added, bias_tensors))

    return run


@PreparedKernel
def bias_backward(*arguments: Any) -> Callable[..., list[Tensor]]:
    """Compute the gradients of some of the tensors of a bias; the arguments are a :class:`BiasCall`."""
    from opkit import _core

    call = BiasCall(*arguments)
    _check_supported(takes_bias_gradients(call), "tiles", call)
    sums = BiasSums(call, list(call.wanted))
    if 0 in (call.q.numel(), call.k.numel(), call.v.numel()):
        return lambda *arguments: sums.zeros(arguments[7])
    inputs = [dense_rows(each) for each in (call.q, call.k, call.v, call.gradient)]
    kernel = _core.AttentionBiasBackward(None, **description(call, inputs, True))

    def run(*arguments: Any) -> list[Tensor]:
        call = BiasCall(*arguments)
        q, k, v, gradient = (dense_rows(each) for each in (call.q, call.k, call.v, call.gradient))
        lse, delta, sinks = call.lse.contiguous(), call.delta.contiguous(), _in_float32(call.sinks)
        added, wanted = sums.new(call.bias_tensors)
        of_masks, of_biases = addresses(call.mask_tensors), addresses(call.bias_tensors)
        rows = gradient.data_ptr(), delta.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), lse.data_ptr()
        kernel(*rows, of_masks, of_biases, address(sinks), wanted)
        return sums.rounded(added, call.bias_tensors)

    return run


def register(op: CustomOp[Any, Any]) -> None:
    """Register the CPU kernels of ``opkit::attention`` and of its gradients."""
    op.register_kernel("cpu", forward, when=predicate(AttentionCall, takes), name="tiles", trusted=True)
    op.register_kernel("cpu", decode, when=predicate(AttentionCall, takes_few), name="decode", priority=1, trusted=True)
    when = predicate(GradientCall, takes_gradients)
    gradients.backward_operator().register_kernel("cpu", backward, when=when, name="tiles", trusted=True)
    when = predicate(GradientCall, takes_whole, "wanted")
    gradients.whole_backward_operator().register_kernel("cpu", whole_backward, when=when, name="tiles", trusted=True)
    when = predicate(BiasCall, takes_bias_gradients)
    gradients.bias_backward_operator().register_kernel("cpu", bias_backward, when=when, name="tiles", trusted=True)


def takes(call: AttentionCall) -> bool | Refused:
    """Return whether :func:`forward` supports a call.

    That are float32 and narrower types, no dropout, tensors as its programs say, and functions where there is a C compiler.
    """
    return call.dropout_p == 0 and sinks_fit(call.sinks, call.q) and _tensors_fit(call)


def takes_gradients(call: GradientCall) -> bool | Refused:
    """Return whether :func:`backward` supports a call."""
    return call.dropout_p == 0 and sinks_fit(call.sinks, call.q) and results_fit(call) and _tensors_fit(call)


def takes_whole(call: GradientCall, wanted: Sequence[int]) -> bool | Refused:
    """Return whether :func:`whole_backward` supports a call."""
    supported = takes_gradients(call)
    return supported and all(cpu_programs.gradient_place(call, number) is not None for number in wanted)


def takes_bias_gradients(call: BiasCall) -> bool | Refused:
    """Return whether :func:`bias_backward` supports a call: of tensors that are added, or that functions read."""
    (batch, heads, queries, _), columns = call.q.shape, call.v.shape[-1]
    fits = call.gradient.shape == (batch, heads, queries, columns) and call.gradient.dtype == call.q.dtype
    rows = all(x.shape == (batch, heads, queries) and x.dtype == torch.float32 for x in (call.lse, call.delta))
    if not (fits and rows and call.dropout_p == 0 and sinks_fit(call.sinks, call.q)):
        return False
    supported = _tensors_fit(call)
    return supported and all(cpu_programs.gradient_place(call, number) is not None for number in call.wanted)


def _tensors_fit(call: AnyCall) -> bool | Refused:
    if call.q.dtype not in NAMES or not shapes_fit(call.q, call.k, call.v) or not paged_cpu.available():
        return False
    if not bias_fits(call, functions=True) or not mask_fits(call, functions=True):
        return False
    obstacle = cpu_programs.obstacle(call)
    return True if obstacle is None else Refused(obstacle)


def takes_few(call: AttentionCall) -> bool | Refused:
    """Return whether a call is for :func:`decode`: so few rows per head of keys that reading the keys takes the time."""
    supported = _decodes(call)
    if not supported:
        return supported
    (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    rows = queries * heads // max(kv_heads, 1)
    limits = _decoded(call.q.dtype)
    return any(queries <= most and rows <= most_rows and keys >= least for most, most_rows, least in limits)


def _decoded(dtype: torch.dtype) -> tuple[tuple[int, int, int], ...]:
    from opkit import _core

    tiles = _core.isa_table()["attention_bf16" if dtype == torch.bfloat16 else "attention_f32"]
    return DECODED_BY_ISA.get(tiles, DECODED)


def _decodes(call: AttentionCall) -> bool | Refused:
    return paged_cpu.takes(*call[:3]) and takes(call)


def _check_supported(supported: bool | Refused, name: str, call: AnyCall) -> None:
    """Raise for a call that a forced kernel does not support: nothing checked this before."""
    if supported:
        return
    details = ", ".join(
        f"{each}={getattr(call, each)}" for each in ("dropout_p", "mask", "bias") if getattr(call, each, None)
    )
    if isinstance(supported, Refused):
        details = supported.reason
    shapes = dtypes_and_shapes((call.q, call.k, call.v))
    raise KernelError(
        f"opkit::attention: kernel {name!r} does not take q, k, v of {shapes}{', ' + details if details else ''}. Leave the "
        "choice to opkit, which opkit.attn.api.select explains, or force kernel='reference'."
    )


@PreparedKernel
def decode(*arguments: Any) -> Run:
    """Compute attention of few queries: keys and values are read in place, once for all heads that share them."""
    call = AttentionCall(*arguments)
    _check_supported(_decodes(call), "decode", call)
    out = rows(call.q, call.v.shape[3], call.out_is_bshd)
    lower, upper, mask = cpu_programs.split_bands(call.mask)
    sizes = call.q.shape[0], call.q.shape[1], call.q.shape[2], call.k.shape[2]
    programs = cpu_programs.of_few(call._replace(mask=mask), sizes) if mask or call.bias else None
    run = paged_cpu.contiguous(call.q, call.k, call.v, out, lower, upper, call.scale, call.softcap, programs)
    return lambda q, k, v, mask_tensors, bias_tensors, sinks, *_: run(q, k, v, sinks, mask_tensors, bias_tensors)


def _same(inputs: Sequence[Tensor], tensors: Sequence[Any]) -> bool:
    return all(one is other for one, other in zip(inputs, tensors, strict=True))


def description(call: AnyCall, tensors: list[Tensor], slopes: bool = False) -> dict[str, Any]:
    """Return what calls of the same shapes share.

    Args:
        call: the call.
        tensors: those that the kernel reads and writes.
        slopes: whether it reads the derivatives of functions.
    """
    (batch, heads, queries, head), (_, kv_heads, keys, columns) = call.q.shape, call.v.shape
    return {
        "dtype": NAMES[call.q.dtype],
        "sizes": (batch, heads, kv_heads, queries, keys, head, columns),
        "strides": [each.stride()[:3] for each in tensors],
        **cpu_programs.description(call, slopes),
        "scale": call.scale,
        "softcap": call.softcap,
    }


def _in_float32(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.to(torch.float32).contiguous()


def _of_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Fill the log-sum-exp of a call without keys."""
    return lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None].expand_as(lse))
