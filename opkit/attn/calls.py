"""Calls of ``opkit::attention`` and of the operators of its gradients: their arguments, in the operators' order."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Call(NamedTuple):
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
    heads_inside: bool


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
    heads_inside: bool
    seed: Tensor | None = None
    dropout_p: float = 0.0


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
