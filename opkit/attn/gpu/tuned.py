"""Declare the portable kernels, whose tiles are searched for, to ``opkit tune`` and ``select``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from opkit.attn.calls import BiasCall, Call, Float8Call, GradientCall
from opkit.attn.gpu import candidates, examples, search
from opkit.attn.gpu.candidates import Kernel
from opkit.kernels.tuning.record_format import Identity
from opkit.op.kernel_kinds import TunedKernel

Prepare = Callable[..., Callable[..., Any]]


def _tuned(
    calls: Callable[[], Iterator[Mapping[str, Any]]], call: Callable[..., Any], *kernels: Kernel
) -> Callable[[Prepare], TunedKernel]:
    def decorate(prepare: Prepare) -> TunedKernel:
        notes = functools.partial(_notes, call, kernels)
        return TunedKernel(prepare, tuple(calls()), functools.partial(_identities, kernels), notes)

    return decorate


def _identities(kernels: Sequence[Kernel]) -> list[Identity]:
    return [search.identity(each.name, each.sources) for each in kernels]


def _notes(call: Callable[..., Any], kernels: Sequence[Kernel], *arguments: Any) -> list[str]:
    from opkit.attn.gpu import arguments as gpu_arguments

    fitted = gpu_arguments.fit_to_slots(call(*arguments))
    return [
        gpu_arguments.tiles_of(each, fitted, gpu_arguments.shape_of(fitted)).explained(each.name, "by its table")
        for each in kernels
    ]


def _plain(*arguments: Any) -> Call:
    return Float8Call(*arguments).plain


forward = _tuned(examples.forward, Call, candidates.FORWARD)
backward = _tuned(examples.backward, GradientCall, candidates.OF_KEYS, candidates.OF_QUERIES)
of_biases = _tuned(examples.of_biases, BiasCall, candidates.OF_BIAS)
float8 = _tuned(examples.float8, _plain, candidates.FORWARD)
