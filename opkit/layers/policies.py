"""Policies: which values a layer's forward keeps for its backward, where, and which ones the backward recomputes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from opkit.errors import ArgumentError

_NAMED: dict[str, Literal["nothing", "cheap", "all"]] = {
    "save_all": "nothing",
    "recompute_cheap": "cheap",
    "recompute_all": "all",
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a forward keeps for its backward; made by :func:`keep`, :func:`offload` or from one of the names there.

    Attributes:
        recomputed: what the backward computes again: nothing, operators that are cheap, or all of them.
        names: the values that are kept although operators are recomputed, by their names in ``opkit.checkpoint_name``.
        moved: whether what is kept lies in host memory until the backward.
    """

    recomputed: Literal["nothing", "cheap", "all"]
    names: tuple[str, ...] = ()
    moved: bool = False

    def __str__(self) -> str:
        """Return the call that makes this policy."""
        named = f"keep({', '.join(map(repr, self.names))})"
        kept = named if self.names else next(name for name, each in _NAMED.items() if each == self.recomputed)
        if not self.moved:
            return kept
        return "offload()" if kept == "save_all" else f"offload({kept if self.names else repr(kept)})"


def policy_of(value: str | Policy) -> Policy:
    """Return a policy from what users write.

    Raises:
        ArgumentError: there is no such policy.
    """
    if isinstance(value, Policy):
        return value
    if not isinstance(value, str) or value not in _NAMED:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"there is no policy {value!r}; expected {', '.join(map(repr, _NAMED))}, opkit.keep(...) or opkit.offload(...)."
        )
    return Policy(_NAMED[value])


def keep(*names: str) -> Policy:
    """Return the policy that keeps named values for the backward, which computes the others again.

    A kept value costs its memory, and neither it nor what only it needs is computed again. Give a name to what takes long to
    compute and is small, best to the result of an operator itself: attention, whose backward reads its result, or a product
    before a sum. A value that a view or an in-place write made belongs to the operator before.

    Args:
        names: names that layers give to values by :func:`checkpoint_name`.

    Raises:
        ArgumentError: there is no name, or one is not a string.

    This is JAX's ``save_only_these_names``.

    >>> import opkit
    >>> print(opkit.keep("attention", "up"))
    keep('attention', 'up')
    """
    if not names or not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"opkit.keep: expected the names of values, as in opkit.keep('attention'); got {names!r}.")
    return Policy("all", names)


def offload(policy: str | Policy = "save_all") -> Policy:
    """Return the policy that keeps what another policy keeps, in host memory until the backward.

    While a layer runs on a GPU, what the layer before keeps is copied to pinned memory on a stream of its own. A layer's backward
    first starts the copies that the next one needs, and then computes. A step takes no longer than without if the copies take
    less time than the kernels: the bytes of a layer over the bandwidth of the link, against the time of its forward.

    Parameters are not copied, nor tensors under 64 KiB, nor arguments of layers that need no gradients, such as masks. Where
    tensors are not on a GPU, nothing is copied, which the log says once.

    Args:
        policy: what is kept: "save_all", "recompute_all" (the inputs of layers), "recompute_cheap" or :func:`keep`.

    Raises:
        ArgumentError: there is no such policy.

    Under ``torch.compile``, layers with this policy are graphs of their own, between which the copies start. torch's
    ``save_on_cpu`` copies without overlap; the policies of ``jax.checkpoint`` have offloading to the host as well.

    >>> import opkit
    >>> print(opkit.offload(opkit.keep("attention")))
    offload(keep('attention'))
    """
    return dataclasses.replace(policy_of(policy), moved=True)
