"""Modules of a transformer over opkit's operators; each has torch's parameters, initialised, and no other state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opkit.attn.api import attention
from opkit.attn.compat.torch_private import causal_bias_of
from opkit.attn.masks.algebra import And, Dense, Mask, as_mask
from opkit.attn.masks.diagonals import Causal
from opkit.attn.reference import mask_as_tensors, with_probabilities
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.nn import functional


class RMSNorm(nn.Module):
    """:func:`opkit.nn.rms_norm` with its weight, which begins at one.

    Args:
        d: the size of the last dimension of ``x``, which is ``(*batch, d)``, any floating dtype.
        eps: added to the mean square.

    Raises:
        ShapeError, DtypeError: at a call, as :func:`opkit.nn.rms_norm`.

    >>> RMSNorm(4)(torch.full((2, 4), 3.0))[0]
    tensor([1.0000, 1.0000, 1.0000, 1.0000], grad_fn=<SelectBackward0>)
    """

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, ``(*batch, d)``."""
        return functional.rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """The feed-forward layer ``down(swiglu(gate(x), up(x)))``, without biases.

    Args:
        d: the size of the last dimension of ``x``, which is ``(*batch, d)``, and of the result.
        hidden: the number of hidden features.

    Raises:
        RuntimeError: at a call, from ``torch.nn.Linear``: ``x`` has another size or dtype.

    >>> SwiGLU(d=8, hidden=16)(torch.zeros(3, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, hidden, bias=False)
        self.up = nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``x``, ``(*batch, d)``."""
        return self.down(functional.swiglu(self.gate(x), self.up(x)))


# ---- multi-head attention --------------------------------------------------------------------------------------------


_NAME = "opkit.nn.MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` over :func:`opkit.attention`: the same arguments, parameter names and results.

    Weights go both ways with ``load_state_dict``, and :meth:`from_torch` takes a module as it is. What differs:

    - ``need_weights=False`` runs :func:`opkit.attention`, which allocates no matrix of queries times keys, also not for masks of
      :mod:`opkit.masks`. With ``need_weights=True``, torch's default, the probabilities are computed in torch
      operations.
    - For a query that sees no key the result is the bias of the output projection, and the probabilities are zero; in torch they
      are NaN.
    - ``attn_mask`` may be a mask of :mod:`opkit.masks`; ``is_causal=True`` needs no ``attn_mask``.
    - Masks of bool and of floating dtype can be combined.
    - Dropout draws other numbers than torch's from the same generator, and nested tensors are refused.

    In inference torch's ``nn.TransformerEncoderLayer`` does not call its attention module, but reads the module's parameters;
    after ``torch.backends.mha.set_fastpath_enabled(False)`` it calls the module.

    >>> from opkit.masks import Causal
    >>> layer = MultiheadAttention(16, 4, batch_first=True)
    >>> x = torch.ones(2, 5, 16)
    >>> out, _ = layer(x, x, x, attn_mask=Causal(), need_weights=False)
    >>> out.shape
    torch.Size([2, 5, 16])
    """

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiheadAttention:
        """Return a module that shares the parameters of ``module``, and has its mode.

        >>> theirs = nn.MultiheadAttention(16, 4)
        >>> MultiheadAttention.from_torch(theirs).in_proj_weight is theirs.in_proj_weight
        True
        """
        converted = cls(
            module.embed_dim, module.num_heads, module.dropout, add_zero_attn=module.add_zero_attn, kdim=module.kdim,
            vdim=module.vdim, batch_first=module.batch_first, device="meta",
        )  # fmt: skip
        for name in (
            "in_proj_weight",
            "q_proj_weight",
            "k_proj_weight",
            "v_proj_weight",
            "in_proj_bias",
            "bias_k",
            "bias_v",
        ):
            setattr(converted, name, getattr(module, name))
        converted.out_proj = module.out_proj
        return converted.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of projected queries to projected keys and values.

        Args:
            query: (queries, batch, embed_dim); (batch, queries, embed_dim) with ``batch_first``; or (queries, embed_dim).
            key: the same with keys and ``kdim``.
            value: the same with keys and ``vdim``.
            key_padding_mask: (batch, keys), or (keys,) without a batch: bool, True for keys that no query sees, or
                floating, which is added to the logits.
            need_weights: also return the probabilities.
            attn_mask: (queries, keys) or (batch * heads, queries, keys): bool, True for keys that a query does not see, or
                floating, which is added; or a mask of :mod:`opkit.masks`.
            average_attn_weights: return the mean of the probabilities over heads.
            is_causal: query ``i`` sees the keys up to ``i``. An ``attn_mask`` that is a tensor is assumed to mean the
                same, as in torch, and is not read.

        Returns:
            The result, of ``query``'s shape, and the probabilities, or None: (batch, queries, keys), or (batch, heads,
            queries, keys) with ``average_attn_weights=False``, without the batch where ``query`` has none. ``add_bias_kv`` and
            ``add_zero_attn`` add one key each.

        Raises:
            ShapeError, DtypeError, ArgumentTypeError, ArgumentError: an argument does not fit; the message names it.
        """
        self._check(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = _with_batch(key_padding_mask)
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        mask = self._mask(q, k, key_padding_mask, attn_mask, is_causal)
        more = (self.bias_k is not None) + self.add_zero_attn
        if more:
            mask = _extended_mask(mask, q, k, more)
            k, v = self._extended(k, v)
        out, weights = self._attend(q, k, v, mask, need_weights)
        out = self.out_proj(self._batch_first(out.flatten(2)))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if batched:
            return out, weights
        return out.squeeze(0 if self.batch_first else 1), None if weights is None else weights.squeeze(0)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result, (batch, queries, heads, head size), and the probabilities."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return attention(q, k, v, mask=mask, dropout_p=dropout, layout="bshd"), None
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out, weights = with_probabilities(*heads_first, mask=mask, dropout_p=dropout)
        return out.transpose(1, 2), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all heads; inputs that are the same tensor are projected together."""
        bias, size = self.in_proj_bias, self.embed_dim
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            parts = (None, None, None) if bias is None else bias.chunk(3)
            rows = zip((query, key, value), weights, parts, strict=True)
            return tuple(F.linear(x, weight, part) for x, weight, part in rows)
        if query is key and key is value:
            return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        ends = ((query, 0, 1), (key, 1, 3)) if key is value else ((query, 0, 1), (key, 1, 2), (value, 2, 3))
        rows = [(x, slice(first * size, last * size)) for x, first, last in ends]
        projected = [F.linear(x, self.in_proj_weight[at], None if bias is None else bias[at]) for x, at in rows]
        return tuple(part for each in projected for part in each.split(size, -1))

    def _heads(self, x: Tensor) -> Tensor:
        """Split the last dimension: return (batch, sequence, heads, head size)."""
        return self._batch_first(x.unflatten(-1, (self.num_heads, self.head_dim)))

    def _batch_first(self, x: Tensor) -> Tensor:
        """Exchange batch and sequence unless ``batch_first``, from the caller's order to (batch, sequence) or back."""
        return x if self.batch_first else x.transpose(0, 1)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to keys and values those of ``add_bias_kv`` and the zeros of ``add_zero_attn``."""
        extended: list[Tensor] = []
        for x, bias in ((k, self.bias_k), (v, self.bias_v)):
            more = [] if bias is None else [bias.to(x.dtype).view(1, 1, self.num_heads, -1).expand_as(x[:, :1])]
            zeros = [x.new_zeros((x.shape[0], 1, *x.shape[2:]))] if self.add_zero_attn else []
            extended.append(torch.cat([x, *more, *zeros], 1))
        return extended[0], extended[1]

    def _mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | Mask | None, is_causal: bool
    ) -> Mask | None:
        """Return one mask from the three arguments that mask."""
        parts: list[Mask] = []
        if isinstance(attn_mask, Mask) or causal_bias_of(attn_mask) is not None:
            parts.append(as_mask(attn_mask))
        elif attn_mask is not None and not is_causal:
            parts.append(self._mask_of_tensor(attn_mask, q.shape[0], q.shape[1], k.shape[1]))
        if is_causal:
            parts.append(Causal())
        if padding is not None:
            parts.append(_mask_of_padding(padding, k))
        return And(tuple(parts)) if parts else None

    def _mask_of_tensor(self, mask: Tensor, batch: int, queries: int, keys: int) -> Mask:
        _check_mask("attn_mask", mask)
        flat, full = (queries, keys), (batch * self.num_heads, queries, keys)
        if tuple(mask.shape) not in (flat, full):
            raise ShapeError(
                f"{_NAME}: attn_mask of shape {tuple(mask.shape)} must be (queries, keys) = {flat} or (batch * heads, queries, "
                f"keys) = {full}."
            )
        return _dense(mask if mask.dim() == 2 else mask.unflatten(0, (batch, self.num_heads)))

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        for name, (x, size) in inputs.items():
            if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ArgumentTypeError(f"{_NAME}: {name} must be a tensor, got {type(x).__name__}.")
            if x.is_nested:
                raise ArgumentError(
                    f"{_NAME}: {name} is a nested tensor. Pass .to_padded_tensor(0.0) with a key_padding_mask, or pack sequences "
                    "with opkit.attention and opkit.masks.VarLen."
                )
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
                order = "batch, sequence" if self.batch_first else "sequence, batch"
                raise ShapeError(
                    f"{_NAME}: {name} of shape {tuple(x.shape)} must be ({order}, {size}), or (sequence, {size}) without a "
                    f"batch; query has shape {tuple(query.shape)}."
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"{_NAME}: key of shape {tuple(key.shape)} and value of {tuple(value.shape)} must be of one length."
            )
        if query.dim() == 3 and self._batch_first(query).shape[0] != self._batch_first(key).shape[0]:
            raise ShapeError(
                f"{_NAME}: query of shape {tuple(query.shape)} and key of {tuple(key.shape)} must be of one batch; "
                f"batch_first is {self.batch_first}."
            )


def _with_batch(padding: Tensor | None) -> Tensor | None:
    return padding.unsqueeze(0) if isinstance(padding, Tensor) and padding.dim() == 1 else padding


def _mask_of_padding(padding: Tensor, k: Tensor) -> Mask:
    _check_mask("key_padding_mask", padding)
    if tuple(padding.shape) != tuple(k.shape[:2]):
        raise ShapeError(
            f"{_NAME}: key_padding_mask of shape {tuple(padding.shape)} must be (batch, keys) = {tuple(k.shape[:2])}."
        )
    return _dense(padding[:, None, None])


def _dense(mask: Tensor) -> Mask:
    """Return the mask of a tensor in torch's meaning, where True is hidden."""
    return Dense(mask if mask.is_floating_point() else ~mask)


def _check_mask(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(f"{_NAME}: {name} must be a tensor, got {type(mask).__name__}: {mask!r}.")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(
            f"{_NAME}: {name} has dtype {mask.dtype}, expected bool (True: hidden) or floating (is added). Convert it with "
            ".bool()."
        )


def _extended_mask(mask: Mask | None, q: Tensor, k: Tensor, more: int) -> Mask | None:
    """Return ``mask`` with ``more`` keys at the end that every query sees."""
    if mask is None:
        return None
    seen, added = mask_as_tensors(mask, q.transpose(1, 2), k.transpose(1, 2))
    filled = ((seen, True), (added, 0.0))
    parts = [Dense(F.pad(each, (0, more), value=fill)) for each, fill in filled if each is not None]
    return And(tuple(parts)) if parts else None
