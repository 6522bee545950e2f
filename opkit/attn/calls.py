"""Named tuples of the arguments of attention's operators, in the operators' order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class AttentionCall(NamedTuple):
    """The arguments of :func:`opkit.attn.reference.attention`, which says what they are."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask_tensors: list[Tensor]
    bias_tensors: list[Tensor]
    sinks: Tensor | None
    seed: Tensor | None
    mask: list[int]
    bias: list[int]
    scale: float
    softcap: float
    dropout_p: float
    out_is_bshd: bool


class GradientCall(NamedTuple):
    """The arguments of :func:`opkit.attn.gradients.attention_backward`, which says what they are."""

    gradient: Tensor
    of_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    mask_tensors: list[Tensor]
    bias_tensors: list[Tensor]
    mask: list[int]
    bias: list[int]
    scale: float
    softcap: float
    out_is_bshd: bool
    seed: Tensor | None = None
    dropout_p: float = 0.0
    sinks: Tensor | None = None


class BiasCall(NamedTuple):
    """The arguments of :func:`opkit.attn.gradients.attention_bias_backward`, which says what they are."""

    gradient: Tensor
    delta: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    mask_tensors: list[Tensor]
    bias_tensors: list[Tensor]
    mask: list[int]
    bias: list[int]
    scale: float
    softcap: float
    wanted: list[int]
    seed: Tensor | None = None
    dropout_p: float = 0.0
    sinks: Tensor | None = None


class Float8Call(NamedTuple):
    """The arguments of :func:`opkit.attn.float8.attention_float8`, which says what they are."""

    q: Tensor
    k: Tensor
    v: Tensor
    descales: list[Tensor]
    mask_tensors: list[Tensor]
    bias_tensors: list[Tensor]
    sinks: Tensor | None
    mask: list[int]
    bias: list[int]
    scale: float
    softcap: float
    out_is_bshd: bool

    @property
    def plain(self) -> AttentionCall:
        """The same call of ``opkit::attention``, without descales."""
        return AttentionCall(
            self.q, self.k, self.v, self.mask_tensors, self.bias_tensors, self.sinks, None, self.mask, self.bias, self.scale,
            self.softcap, 0.0, self.out_is_bshd,
        )  # fmt: skip


class AnyCall(Protocol):
    """The fields that all of them share, except :class:`Float8Call`, which has no dropout."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def mask_tensors(self) -> list[Tensor]: ...
    @property
    def bias_tensors(self) -> list[Tensor]: ...
    @property
    def mask(self) -> list[int]: ...
    @property
    def bias(self) -> list[int]: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float: ...
    @property
    def dropout_p(self) -> float: ...


def dtypes_and_shapes(tensors: Iterable[Tensor]) -> str:
    """Return the dtypes and shapes of a call's tensors, for error messages.

    >>> import torch
    >>> dtypes_and_shapes([torch.ones(2, 3), torch.ones(4, dtype=torch.int32)])
    'torch.float32 (2, 3), torch.int32 (4,)'
    """
    return ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in tensors)


def predicate(kind: Any, condition: Callable[..., object], *more: str) -> Callable[..., object]:
    """Turn a predicate of a call into one for ``register_kernel(when=)``, whose parameters are the operator's arguments.

    Args:
        kind: the class of the call, one of the above.
        condition: the predicate of a call.
        more: the operator's arguments that no field of the call has, which ``condition`` takes after the call.

    >>> when = predicate(AttentionCall, lambda call: call.dropout_p == 0)
    >>> list(inspect.signature(when).parameters)[:3]
    ['q', 'k', 'v']
    """

    @functools.wraps(condition)
    def when(**arguments: Any) -> object:
        others = [arguments.pop(name) for name in more]
        return condition(kind(**arguments), *others)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*kind._fields, *more)]
    when.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return when


class PagedCall(NamedTuple):
    """The arguments of :func:`opkit.attn.paged.reference.paged_attention`, which says what they are."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths: Tensor
    starts: Tensor
    lower: int
    upper: int
    scale: float
    softcap: float
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    mask_tensors: list[Tensor]
    bias_tensors: list[Tensor]
    mask: list[int]
    bias: list[int]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of sequences and heads, and those of positions of queries and keys, for which there are pages."""
        positions = self.page_table.shape[1] * self.k_pages.shape[1]
        return self.lengths.shape[0], self.q.shape[1], positions, positions


class AppendCall(NamedTuple):
    """The arguments of :func:`opkit.attn.paged.reference.append_kv`, which says what they are."""

    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths_before: Tensor
    starts: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
