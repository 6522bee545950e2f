"""Run a body on fake tensors to find out whether it stays in torch.

A body that stays in torch is the operator's reference: rules are derived from it and the compiler sees through it. One
that leaves torch (numpy, ctypes, ``.item()``, branches on values) is opaque; the trace records the first line at which it left,
for error messages.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import linecache
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opkit.op import torch_private as private

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_STRAY_OUTPUT = "it returned a tensor that did not come from torch operations on its arguments"


@dataclasses.dataclass(frozen=True)
class OpaqueReason:
    """The reason and the line for which a body is not a torch program."""

    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.where})" if self.where else self.reason


@dataclasses.dataclass
class ReferenceTrace:
    """The result of one run of a body on fake tensors."""

    outputs: Any = None
    opaque: OpaqueReason | None = None
    mutated: tuple[int, ...] = ()
    random: bool = False
    cuts_gradient: bool = False
    captures: bool = False  # real tensors that are not arguments
    captures_gradient: bool = False  # ... among them one that requires grad


def line_at_fault(error: BaseException, *others: str) -> str:
    """Return ``file:line: source`` of the innermost frame that is neither torch's nor opkit's, nor of one of ``others``."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH, _OWN, *others))
    ]
    if not frames:
        return ""
    last = frames[-1]
    source = (last.line or linecache.getline(last.filename, last.lineno or 0)).strip()
    return f"{last.filename}:{last.lineno}: {source}"


class _Watch(TorchDispatchMode):
    """A mode that records whether a body draws random numbers, cuts parts off from autograd, or captures tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.random = False
        self.cuts_gradient = False
        self.captures = False
        self.captures_gradient = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.cuts_gradient |= func is torch.ops.aten.detach.default or not torch.is_grad_enabled()
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(1.0) calls it on a real tensor
            for leaf in pytree.tree_leaves(args):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                    self.captures = True
                    self.captures_gradient |= leaf.requires_grad
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class _TensorFacts:
    """The data from which a fake tensor is made."""

    sizes: list[int]
    strides: list[int]
    dtype: torch.dtype
    device: torch.device


def fake_like(value: Any, mode: Any) -> Any:
    """Return fake tensors of the sizes, strides, dtypes and devices in ``value``; symbolic numbers become their hints."""
    return pytree.tree_map(lambda leaf: _fake(leaf, mode), _described(value))  # pyright: ignore[reportUnknownLambdaType]


def _described(value: Any) -> Any:
    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return concrete(leaf)
        sizes, strides = [[concrete(number) for number in numbers] for numbers in (leaf.shape, leaf.stride())]
        return _TensorFacts(sizes, strides, leaf.dtype, leaf.device)

    return pytree.tree_map(describe, value)


def _fake(leaf: Any, mode: Any) -> Any:
    if isinstance(leaf, torch.Tensor):  # of a layout that sizes and strides do not describe
        return mode.from_tensor(leaf)
    if not isinstance(leaf, _TensorFacts):
        return leaf
    with mode:
        return torch.empty_strided(leaf.sizes, leaf.strides, dtype=leaf.dtype, device=leaf.device)


def concrete(number: Any) -> Any:
    """Return the hint of a symbolic number, or 2 where it has none; anything else as it is."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    return number.node.pytype(2 if number.node.hint is None else number.node.hint)


def trace(body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> ReferenceTrace:
    """Run ``body`` on fake copies of the arguments and report what it did.

    Exceptions do not escape: a body that raises is opaque as far as this trace can tell, and the trace says why.
    """
    described = _described((tuple(args), kwargs))
    if private.functorch_level() is None:
        return _trace(body, described)
    # within a functorch transform the thread's dispatch state belongs to the transform; a new thread has its own
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_trace, body, described).result()


def _trace(body: Callable[..., Any], described: Any) -> ReferenceTrace:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with private.no_modes(), torch.inference_mode(False), torch.enable_grad():
        shape_env = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=False)
        mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
        fake_args, fake_kwargs = pytree.tree_map(lambda leaf: _fake(leaf, mode), described)  # pyright: ignore[reportUnknownLambdaType]
        leaves = [leaf for leaf in pytree.tree_leaves((fake_args, fake_kwargs)) if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            private.throw_on_data_pointer(leaf)
        versions = [leaf._version for leaf in leaves]  # pyright: ignore[reportPrivateUsage]
        watch = _Watch()
        try:
            with mode, watch:
                outputs = body(*fake_args, **fake_kwargs)
        except Exception as error:  # what the body raised is the reason why it is opaque
            text = str(error).strip().split("\n")[0]
            reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
            return ReferenceTrace(opaque=OpaqueReason(reason, line_at_fault(error)))
    mutated = tuple(i for i, (leaf, v) in enumerate(zip(leaves, versions, strict=True)) if leaf._version != v)  # pyright: ignore[reportPrivateUsage]
    stray = any(isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) for x in pytree.tree_leaves(outputs))
    return ReferenceTrace(
        outputs=outputs,
        opaque=OpaqueReason(_STRAY_OUTPUT) if stray else None,
        mutated=mutated,
        random=watch.random,
        cuts_gradient=watch.cuts_gradient,
        captures=watch.captures,
        captures_gradient=watch.captures_gradient,
    )


def differentiable(body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool] | None:
    """Return for each leaf of ``body``'s outputs whether it depends differentiably on the arguments that require grad."""
    needs = [leaf.requires_grad for leaf in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(leaf, torch.Tensor)]

    def with_gradients(*fake_args: Any, **fake_kwargs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves((fake_args, fake_kwargs)) if isinstance(leaf, torch.Tensor)]
        for leaf, need in zip(leaves, needs, strict=True):
            leaf.requires_grad_(need)
        return body(*fake_args, **fake_kwargs)

    traced = trace(with_gradients, args, kwargs)
    if traced.opaque is not None:
        return None
    return [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(traced.outputs)]
