"""Check calls: arguments against the annotations, and a kernel's first results against the schema and the reference."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit import config
from opkit.errors import AliasError, ArgumentError, MutationError, OutputError, StrideWarning
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch.selection import REFERENCE, RegisteredKernel
from opkit.op.schema import patterns
from opkit.op.trace.reference_trace import ReferenceTrace


def bound_arguments(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's Python arguments by name, defaults filled in."""
    positional, named = operator.signature.decode(args, kwargs) if operator.signature.flattened else (args, kwargs)
    bound = operator.signature.python.bind(*positional, **named)
    bound.apply_defaults()
    return bound.arguments


def check_arguments(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> patterns.SizeBinding:
    """Check a call against the operator's annotations; the program that traces symbolic sizes checks those itself.

    Raises:
        ShapeError, DtypeError: naming operator, argument, shape, pattern and the conflicting size.
        ArgumentError: a value is none of its annotation's ``Literal``.
    """
    binding = patterns.SizeBinding(operator.name)
    if not (operator.signature.annotated and config.get().check):
        return binding
    values = bound_arguments(operator, args, kwargs)
    for parameter in operator.signature.parameters:
        if parameter.choices and values[parameter.name] not in parameter.choices:
            raise ArgumentError(
                f"{operator.name}: the argument {parameter.name} must be {' or '.join(map(repr, parameter.choices))}, got "
                f"{values[parameter.name]!r}."
            )
        if parameter.pattern is not None:
            for tensor in pytree.tree_leaves(values[parameter.name]):
                if isinstance(tensor, torch.Tensor) and private.sizes_known(tensor):
                    binding.check(f"the argument {parameter.name}", tensor, parameter.pattern)
    return binding


def run_verified(
    operator: Operator,
    kernel: RegisteredKernel | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    binding: patterns.SizeBinding,
    verify: bool = True,
) -> tuple[Any, Callable[..., Any]]:
    """Run a kernel (None: the reference) and check what it did; return its result, and the function for later calls.

    Later calls need another function than ``function`` where its results have to be put into the schema's containers or the
    reference's strides, or where a gradient would be lost.
    """
    name = REFERENCE if kernel is None else kernel.name
    snapshot = None
    fresh = verify and operator.needs_verifying(name, args, kwargs)
    try:
        if fresh:
            mutates = schema_mutates(operator)
            snapshot = snapshot_arguments(operator.name, mutates, _unshared(operator, mutates, args, kwargs))
        output = function(*args, **kwargs)
        if snapshot is not None:
            snapshot.check(f"the kernel {name}" if kernel else "its body")
        _check_form(operator, name, output)
        refuse_aliases(operator, name, args, kwargs, output)
        output, function = _in_containers(operator, output, function)
        _check_patterns(operator, output, binding)
        # other shapes of a verified guard set are trusted, except for kernels whose strides have to be corrected
        compared = kernel is not None and (fresh or name in operator.restrided)
        trace = operator.traced(args, kwargs) if compared and not operator.mutates else None
        layout = _compare(operator, name, output, trace) if trace is not None and trace.opaque is None else None
    except BaseException:
        operator.unverify(name, args, kwargs)
        raise
    if trace is not None and trace.captures_gradient:
        operator.captured.add(name)
    if name in operator.captured:
        if private.grad_enabled():
            raise operator.captured_error()
        function = _refusing_gradient(operator, function)
    if layout is None:
        return output, function
    operator.restrided.add(name)
    return _restride(output, layout), _restriding(function, layout)


def schema_mutates(operator: Operator) -> set[str]:
    """Return the schema arguments that the operator writes to."""
    arguments = operator.schema.arguments
    return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}


def _unshared(
    operator: Operator, mutates: set[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a call by name, without those that share memory with a tensor that the operator writes to."""
    named = list(operator.named_tensors(args, kwargs))
    written = [tensor for name, tensor in named if name in mutates]
    return [
        (name, tensor)
        for name, tensor in named
        if name in mutates or not any(private.shares_memory(tensor, w) for w in written)
    ]


def _refusing_gradient(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``, whose reference captures a tensor that requires grad, to refuse calls that record gradients."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if private.grad_enabled():
            raise operator.captured_error()
        return function(*args, **kwargs)

    return run


def _in_containers(operator: Operator, output: Any, function: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Put several results into a tuple and a list of results into a list, as the dispatcher returns them."""
    returns = operator.schema.returns
    container: Any = (
        tuple if len(returns) > 1 else list if returns and str(returns[0].type).startswith("List") else None
    )
    if container is None or type(output) is container:
        return output, function
    return container(output), lambda *args, **kwargs: container(function(*args, **kwargs))


def refuse_aliases(operator: Operator, kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Raise if a result that the schema declares as new shares memory with an argument or another result."""
    returns_arguments = any(r.alias_info is not None and r.alias_info.is_write for r in operator.schema.returns)
    if operator.schema._is_view_op() or returns_arguments:
        return
    results = output if isinstance(output, tuple) else (output,)
    if torch._C._any_output_is_alias_to_input_or_output(args, kwargs, results):
        raise AliasError(
            f"{operator.name} (kernel {kernel}): an output of a custom operator must not be one of its inputs and may not "
            "alias an input or another output. Return a copy, for example x.clone()."
        )


def _check_form(operator: Operator, kernel: str, output: Any) -> None:
    """Raise unless the result has the number and types of values that the schema declares."""
    returns = operator.schema.returns
    count = len(returns)
    if count == 0:
        wrong = output is not None
    elif count == 1:
        wrong = not _fits(output, returns[0])
    else:
        items = output if isinstance(output, (tuple, list)) else ()
        wrong = len(items) != count or not all(
            _fits(i, r) for i, r in zip(items, returns, strict=True) if i is not None
        )
    if wrong:
        declared = ", ".join(str(r.type) for r in returns) or "nothing"
        raise OutputError(
            f"{operator.name}: {'its body' if kernel == REFERENCE else 'the kernel ' + kernel} returned {_described(output)}, "
            f"but the schema declares {declared}."
        )


def _fits(value: Any, declared: Any) -> bool:
    kind = str(declared.type)
    if kind == "Tensor":
        return isinstance(value, torch.Tensor)
    return isinstance(value, (list, tuple)) if kind.startswith("List") else value is not None


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values ({', '.join(type(item).__name__ for item in value)})"
    return "nothing" if value is None else type(value).__name__


def _check_patterns(operator: Operator, output: Any, binding: patterns.SizeBinding) -> None:
    """Check the outputs against the return annotation, with the sizes that the arguments bound."""
    declared = operator.signature.return_patterns
    if not any(declared) or operator.signature.returns is not None or not config.get().check:
        return
    outputs = output if isinstance(output, (tuple, list)) and len(declared) > 1 else (output,)
    for i, (value, pattern) in enumerate(zip(outputs, declared, strict=False)):
        if pattern is not None and isinstance(value, torch.Tensor):
            binding.check("the output" if len(declared) == 1 else f"the output {i}", value, pattern)


# ---- comparison with the reference -----------------------------------------------------------------------------------


def _compare(operator: Operator, kernel: str, output: Any, trace: ReferenceTrace) -> list[Any] | None:
    """Raise where shapes, dtypes or devices differ from the reference's; where only strides do, return those to restore."""
    layout: list[Any] = []
    expected = pytree.tree_leaves(trace.outputs)
    for i, (value, fake) in enumerate(zip(pytree.tree_leaves(output), expected, strict=False)):
        if not isinstance(value, torch.Tensor) or not isinstance(fake, torch.Tensor):
            layout.append(None)
            continue
        known = private.sizes_known(fake)
        if value.dtype != fake.dtype or value.device.type != fake.device.type or (known and value.shape != fake.shape):
            raise OutputError(
                f"{operator.name}: output {i} of the kernel {kernel} is {tuple(value.shape)} {value.dtype} on {value.device}, "
                f"but the reference gives {tuple(fake.shape)} {fake.dtype} on {fake.device}."
            )
        layout.append(fake.stride() if known and _strides_differ(value, fake) else None)
    if not any(strides is not None for strides in layout):
        return None
    if kernel not in operator.restrided:
        warnings.warn(
            f"{operator.name}: the kernel {kernel} returns other strides than the reference, which compiled programs rely on. "
            "Its results are copied into the reference's layout; allocate outputs with that layout to save the copy.",
            StrideWarning,
            stacklevel=4,
        )
    return layout


def _strides_differ(value: torch.Tensor, fake: torch.Tensor) -> bool:
    if value.numel() == 0:
        return False
    pairs = zip(value.shape, value.stride(), fake.stride(), strict=True)
    return any(size > 1 and a != b for size, a, b in pairs)


def _restride(output: Any, layout: list[Any]) -> Any:
    leaves, spec = pytree.tree_flatten(output)
    for i, strides in enumerate(layout):
        if strides is not None:
            leaves[i] = torch.empty_strided(
                leaves[i].shape, strides, dtype=leaves[i].dtype, device=leaves[i].device
            ).copy_(leaves[i])
    return pytree.tree_unflatten(leaves, spec)


def _restriding(function: Callable[..., Any], layout: list[Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _restride(function(*args, **kwargs), layout)

    return run


# ---- writes to arguments --------------------------------------------------------------------------------------------


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


def snapshot_arguments(
    operator: str, mutates: Iterable[str], named: Iterable[tuple[str, torch.Tensor]]
) -> ArgumentSnapshot:
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
