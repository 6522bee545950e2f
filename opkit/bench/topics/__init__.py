"""Topics of ``opkit bench run``: opkit and its peers, timed in turn.

A topic is a module here with a function ``cases(setting)``, which yields a :class:`Case` for each thing that is measured.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Ways = Mapping[str, Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """How cases are run: ``device`` is "cpu", "cuda", ...; ``quick`` asks for small sizes, whose times say little."""

    device: str = "cpu"
    quick: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that is measured in several ways.

    Attributes:
        name: unique in its topic.
        make: prepares the ways, and returns a function without arguments for each. The first is "opkit", and the second what it
            is compared with.
        calls: what a function does that many times, so that its time is divided by them.
    """

    name: str
    make: Callable[[], Ways]
    calls: int = 1


@dataclasses.dataclass(frozen=True)
class Topic:
    """A topic: what it measures, the peers, and the modules of those peers that torch does not bring."""

    name: str
    about: str
    peers: str
    packages: tuple[str, ...] = ()

    def cases(self, setting: Setting) -> Iterator[Case]:
        """Yield the cases."""
        yield from importlib.import_module(f"{__name__}.{self.name}").cases(setting)

    def missing(self) -> list[str]:
        """Return the packages of peers that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


TOPICS = {
    topic.name: topic
    for topic in (
        Topic("dispatch", "what a call of an operator costs, for the calls that users make", "torch.library.custom_op"),
        Topic("attention", "opkit.attention, forward and backward, with masks", "SDPA, FlexAttention"),
        Topic("decode", "attention of one query to a cache, contiguous and in pages", "SDPA, on gathered pages"),
        Topic("functions", "opkit.nn.functional, forward and backward", "torch, Inductor, Liger", ("liger_kernel",)),
        Topic("compiler", 'torch.compile(backend="opkit"), inference and training', "Inductor, eager mode"),
        Topic("gradients", "derived gradients of operators with kernels", "the reference's own gradients"),
        Topic("optimize", "opkit.optimize on small models", "the models as they are", ("transformers",)),
        Topic("start", "import opkit, in processes of their own", "import torch"),
    )
}
