"""Infer which arguments an operator writes to when it is defined, and verify that at run time.

At definition the body is traced on small tensors made from its annotations, once for each combination of its flags; a
fake tensor's version counter shows writes through helpers, views and ``out=``. Without annotations, or where the trace
leaves torch, the source is read instead, which counts only if every statement in it is understood. Where neither proves
anything the definition raises. At run time the first call of each guard set compares version counters and bytes, which
also catches writes through pointers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import MutationError, MutationUnknownError
from opkit.op.schema import patterns
from opkit.op.schema.signature import OperatorParameter, Signature
from opkit.op.trace import mutation_source, reference_trace

_MAX_COMBINATIONS = 32
_VALUE_KINDS = ("int", "float", "str", "dtype", "device", "other")
_DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_",
    "poisson", "dropout", "dropout_", "alpha_dropout",
})  # fmt: skip
_EXAMPLES: dict[str, tuple[Any, ...]] = {
    "bool": (False, True),
    "int": (2,),
    "float": (0.5,),
    "dtype": (torch.float32,),
    "device": (torch.device("cpu"),),
}


@dataclasses.dataclass(frozen=True)
class Inference:
    """The arguments written to, and the origin of that knowledge."""

    mutates: tuple[str, ...]
    origin: str
    random: bool = False


def infer(operator: str, function: Callable[..., Any], signature: Signature, opaque: bool) -> Inference:
    """Infer which arguments ``function`` writes to.

    Raises:
        MutationUnknownError: neither a trace nor the source proves it.
    """
    reasons: list[str] = []
    if not opaque:
        traced = _by_tracing(function, signature, reasons)
        if traced is not None:
            return traced
    else:
        reasons.append("the operator is opaque")
    read = mutation_source.read(function, [p.name for p in signature.parameters])
    if read.proved:
        return Inference(tuple(read.mutates), "its source")
    reasons.append(f"its source does not prove it: {read.reason}")
    raise MutationUnknownError(
        f"{operator}: which arguments the function writes to could not be established ({'; '.join(reasons)}). "
        "Pass mutates_args=() if it writes to none of them, or their names, such as mutates_args=('x',)."
    )


def names_random(function: Callable[..., Any]) -> bool:
    """Return whether the function's own code names a torch function that draws random numbers.

    A hint for functions that are not traced at definition: the tag it leads to only keeps compilers from merging calls.
    """
    code = getattr(function, "__code__", None)
    return code is not None and not _DRAWS.isdisjoint(code.co_names)


def _by_tracing(function: Callable[..., Any], signature: Signature, reasons: list[str]) -> Inference | None:
    for choices in patterns.EXAMPLE_SIZES:
        combinations = _example_calls(signature, choices)
        if combinations is None:
            reasons.append("its annotations do not give every tensor's sizes and every argument an example value")
            return None
        inference = _trace_all(function, signature, combinations, reasons)
        if inference is not None:
            return inference
    return None


def _trace_all(
    function: Callable[..., Any], signature: Signature, combinations: list[Any], reasons: list[str]
) -> Inference | None:
    mutated: set[str] = set()
    random = False
    for args, kwargs in combinations:
        trace = reference_trace.trace(function, args, kwargs)
        if trace.opaque is not None:
            reasons.append(f"tracing it failed: {trace.opaque}")
            return None
        random |= trace.random
        owners = list(owners_of(signature, args, kwargs))
        mutated |= {owners[i] for i in trace.mutated}
    unseen = mutation_source.branches_on(function, [p.name for p in signature.parameters if p.kind in _VALUE_KINDS])
    if unseen:
        read = mutation_source.read(function, [p.name for p in signature.parameters])
        if not read.proved:
            reasons.append(f"it branches on {unseen}, and not every branch was traced")
            return None
        mutated |= set(read.mutates)
    ordered = tuple(p.name for p in signature.parameters if p.name in mutated)
    return Inference(ordered, "a trace of the reference", random)


def _example_calls(signature: Signature, sizes_from: Sequence[int]) -> list[tuple[list[Any], dict[str, Any]]] | None:
    sizes: dict[str, Any] = {}
    choices = [_choices(parameter, sizes, sizes_from) for parameter in signature.parameters]
    if any(choice is None for choice in choices):
        return None
    named = itertools.islice(itertools.product(*[c for c in choices if c is not None]), _MAX_COMBINATIONS)
    return [_split(signature, values) for values in named]


def _split(signature: Signature, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    pairs = list(zip(signature.parameters, values, strict=True))
    return [v for p, v in pairs if not p.keyword_only], {p.name: v for p, v in pairs if p.keyword_only}


def _choices(parameter: OperatorParameter, sizes: dict[str, Any], sizes_from: Sequence[int]) -> Sequence[Any] | None:
    nothing = (None,) if parameter.optional else ()
    if parameter.kind in ("tensor", "tensors"):
        if parameter.pattern is None:
            return None
        shape = patterns.example_shape(parameter.pattern, sizes, sizes_from)
        tensor = torch.zeros(shape, dtype=parameter.pattern.example_dtype())
        return ([tensor, tensor.clone()] if parameter.kind == "tensors" else tensor, *nothing)
    if parameter.kind == "bool":
        return (*_EXAMPLES["bool"], *nothing)
    if not parameter.required:
        return (parameter.default,)
    if parameter.choices:
        return parameter.choices
    if parameter.codec is not None:
        return None
    return (*_EXAMPLES[parameter.kind], *nothing) if parameter.kind in _EXAMPLES else nothing or None


def owners_of(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield the parameter of each tensor of a call, in flattened order."""
    positional = [p.name for p in signature.parameters if not p.keyword_only]
    for name, value in [*zip(positional, args, strict=False), *kwargs.items()]:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield name


@dataclasses.dataclass
class ArgumentSnapshot:
    """The versions and bytes, before a call, of the tensors that the operator must not write to."""

    operator: str
    tensors: list[tuple[str, torch.Tensor, int | None, torch.Tensor]]

    def check(self, kernel: str) -> None:
        """Compare with the tensors now.

        Raises:
            MutationError: an argument that is not in ``mutates_args`` was written to.
        """
        for name, tensor, version, before in self.tensors:
            if _version(tensor) != version or not _same_bytes(tensor.detach(), before):
                raise MutationError(
                    f"{self.operator}: {kernel} wrote to the argument {name!r} of shape {tuple(tensor.shape)}, which is not "
                    f"in mutates_args. Declare it (mutates_args=({name!r},)) or write to a copy ({name}.clone())."
                )


def snapshot(operator: str, mutates: Iterable[str], named: Iterable[tuple[str, torch.Tensor]]) -> ArgumentSnapshot:
    """Return the versions and the bytes of every tensor not in ``mutates``."""
    declared = set(mutates)
    tensors = [
        (name, tensor, _version(tensor), tensor.detach().clone())
        for name, tensor in named
        if name not in declared and tensor.device.type != "meta" and tensor.layout is torch.strided
    ]
    return ArgumentSnapshot(operator, tensors)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride
