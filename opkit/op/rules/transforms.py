"""The rules for vmap, autocast and FLOP counting.

**vmap** is one call of the kernel for a ``*batch`` operator, the mapped reference, or a loop. An operator whose tensors are
annotated ``*batch ...`` takes a mapped dimension as one more leading size, so one call of the kernel does. That the operator
treats its leading sizes independently is the annotation's promise; the first folded call of each kind is compared with the
reference, and an operator that breaks the promise is never folded again.

**Autocast** casts the arguments by a declared policy, and runs the operator with autocast off whatever the policy, so that eager,
inlined and kernel results have the same dtypes:

=============  ================================================================================================
policy         floating arguments on the autocast device, float64 excepted
=============  ================================================================================================
``None``       stay as they are (the default)
``"low"``      become the autocast dtype, as for matrix products
``"full"``     become float32, as for reductions and losses
``"promote"``  become the widest floating dtype among them
=============  ================================================================================================

**FLOPs** are those that torch's own counter counts in the reference on fake tensors.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import DefinitionError
from opkit.op import torch_private as private
from opkit.op.schema.signature import Signature
from opkit.op.trace.reference_trace import fake_like

# ---- vmap ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FoldRecord:
    """The kinds of folded calls that agreed with the reference, and why the operator is no longer folded, if it is not."""

    agreed: set[Any] = dataclasses.field(default_factory=set)
    broken: str = ""


def fold_refusal(signature: Signature, in_dims: Sequence[Any]) -> str | None:
    """Return why a mapped call cannot be folded into leading sizes; None where it can."""
    names = {p.pattern.leading_batch for p in signature.parameters if p.pattern} - {None}
    if len(names) != 1:
        return "the operator's tensors have no common leading *batch"
    (batch,) = names
    if signature.flattened or any(p.kind == "tensors" for p in signature.parameters):
        return "the operator takes or returns lists or structures"
    outputs = signature.return_patterns
    if not all(pattern is not None and pattern.leading_batch == batch for pattern in outputs):
        return f"an output does not begin with *{batch}"
    for parameter, dim in zip(signature.parameters, in_dims, strict=False):
        if dim is not None and (parameter.pattern is None or parameter.pattern.leading_batch != batch):
            return f"the mapped argument {parameter.name} does not begin with *{batch}"
    return None


def fold_batch(
    op: Callable[..., Any], signature: Signature, info: Any, in_dims: Sequence[Any], args: Sequence[Any], kwargs: Any
) -> tuple[Any, Any]:
    """Call ``op`` once with the mapped dimension as its first size."""
    moved: list[Any] = []
    for parameter, dim, arg in zip(signature.parameters, in_dims, args, strict=False):
        if not isinstance(arg, torch.Tensor):
            moved.append(arg)
        elif dim is not None:
            moved.append(arg.movedim(dim, 0))
        elif parameter.pattern is not None and parameter.pattern.leading_batch:
            moved.append(arg.expand(info.batch_size, *arg.shape))
        else:
            moved.append(arg)
    output = op(*moved, **kwargs)
    return output, pytree.tree_map_only(torch.Tensor, _first, output)


def _first(_: torch.Tensor) -> int:
    return 0


def loop_over_batch(
    op: Callable[..., Any], info: Any, in_dims: Any, args: Sequence[Any], kwargs: Any
) -> tuple[Any, Any]:
    """Call ``op`` once for each index of the mapped dimension and stack the results."""
    results: list[list[Any]] = []
    output_spec: Any = None
    for index in range(info.batch_size):
        flat, output_spec = pytree.tree_flatten(op(*_picked(args, in_dims, index), **kwargs))
        results.append(flat)
    stacked = [torch.stack(column) for column in zip(*results, strict=True)]
    return (
        pytree.tree_unflatten(stacked, output_spec),
        pytree.tree_unflatten([0] * len(stacked), output_spec),
    )


def agrees_with_reference(
    reference: Callable[..., Any], folded: Any, info: Any, in_dims: Any, args: Sequence[Any], kwargs: Any
) -> bool:
    """Return whether a folded result is the reference's, for the first and the last index, up to the rounding of its dtype."""
    with torch.no_grad():
        for index in {0, info.batch_size - 1} if info.batch_size else ():
            expected = pytree.tree_leaves(reference(*_picked(args, in_dims, index), **kwargs))
            got = [leaf.select(0, index) for leaf in pytree.tree_leaves(folded)]
            if not all(_close(a, b) for a, b in zip(got, expected, strict=True)):
                return False
    return True


def _picked(args: Sequence[Any], in_dims: Any, index: int) -> Any:
    leaves, spec = pytree.tree_flatten(list(args))
    dims = pytree.tree_leaves(in_dims, is_leaf=lambda dim: dim is None)
    picked = [
        leaf.select(dim, index) if isinstance(leaf, torch.Tensor) and dim is not None else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return pytree.tree_unflatten(picked, spec)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    tolerance = 64 * torch.finfo(a.dtype).eps ** 0.75
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- autocast --------------------------------------------------------------------------------------------------------


POLICIES = (None, "low", "full", "promote")


def check_policy(operator: str, policy: object) -> None:
    """Raise unless ``policy`` is one of the four."""
    if policy not in POLICIES:
        raise DefinitionError(f'{operator}: autocast={policy!r} is not a policy. Use "low", "full", "promote" or None.')


def cast_arguments(arguments: Any, device: str, policy: str | None, registered: torch.dtype | None) -> Any:
    """Cast ``arguments`` by ``policy``, or to the dtype that the author registered for ``device``."""
    if registered is None and policy is None:
        return arguments

    def eligible(value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == device
        )

    target = registered or _target(policy, device, [x for x in pytree.tree_leaves(arguments) if eligible(x)])

    def convert(value: Any) -> Any:
        return value.to(target) if eligible(value) else value

    return pytree.tree_map(convert, arguments)


def _target(policy: str | None, device: str, tensors: list[torch.Tensor]) -> torch.dtype:
    if policy == "low":
        return torch.get_autocast_dtype(device)
    if policy == "full":
        return torch.float32
    dtypes = [tensor.dtype for tensor in tensors]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def flop_counter_in_use() -> bool:
    """Return whether a FLOP counter may be among the active dispatch modes."""
    return "torch.utils.flop_counter" in sys.modules


def flop_formula(reference: Callable[..., Any]) -> Callable[..., int]:
    """Return a formula for ``torch.utils.flop_counter`` that counts ``reference`` on fake copies of the call's arguments."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils.flop_counter import FlopCounterMode

        with private.no_modes():
            mode = FakeTensorMode()
            fake_args, fake_kwargs = fake_like((args, kwargs), mode)
            counter = FlopCounterMode(display=False)
            with mode, counter:
                reference(*fake_args, **fake_kwargs)
        return counter.get_total_flops()

    return count


def install_flop_formula(packet: Any, counted: Callable[..., int]) -> None:
    """Register ``counted`` with torch's registry and the active counters."""
    from torch.utils import flop_counter

    flop_counter.flop_registry.setdefault(packet, counted)
    for mode in private.current_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry.setdefault(packet, counted)
