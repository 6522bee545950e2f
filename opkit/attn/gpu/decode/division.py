"""How calls of the decoding kernel are divided: by the rules, or on GPUs that these were not made on by a change of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkit.attn.gpu import search
from opkit.attn.gpu.decode import plan
from opkit.attn.gpu.decode.plan import CHANGES, Change, DecodeBlocks, DecodeShape, Device
from opkit.attn.gpu.search import Question, Tiles
from opkit.kernels.tuning.configs import Config

if TYPE_CHECKING:
    from opkit.attn.gpu.decode.launches import DecodeLaunches

KERNEL = "decode"
SOURCES = ("device/tile.py", "decode/device/decode.py", "decode/device/merge.py", "decode/plan.py")
Divide = Callable[..., DecodeBlocks]

# Relative to what the rules say, since these give other numbers to calls of one class.
_CONFIGS = tuple(
    Config({"BLOCK_TIMES": each.block, "STAGES_MORE": each.stages, "WARPS_TIMES": each.warps}) for each in CHANGES
)


def divided(
    question: Question | None, divide: Divide, make: Callable[[DecodeBlocks], DecodeLaunches]
) -> DecodeLaunches | Divided:
    """Launches of calls of some shapes.

    Args:
        question: which change of the rules is the fastest; None where they are not changed.
        divide: the rules for these calls, of a change.
        make: the launches of a division.
    """
    return make(divide()) if question is None else Divided(question, divide, make)


class Divided:
    """Launches of calls by that change of the rules which a search finds; see :func:`divided`."""

    def __init__(self, question: Question, divide: Divide, make: Callable[[DecodeBlocks], DecodeLaunches]) -> None:
        self._make = make
        self._tiles: Tiles[DecodeBlocks, DecodeLaunches] = Tiles(question, functools.partial(_divided, divide))

    def run(self, *given: Any) -> None:
        """As :meth:`opkit.attn.gpu.decode.launches.DecodeLaunches.run`."""
        _, launches = self._tiles.chosen or self._tiles.choose(self._make, functools.partial(self._time, given))
        launches.run(*given)

    def series(
        self, names: Sequence[str], results: Mapping[str, Callable[[], Tensor]]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """As :meth:`opkit.attn.gpu.decode.launches.DecodeLaunches.series`."""

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            there, made = dict(zip(names, tensors, strict=True)), {name: make() for name, make in results.items()}
            pages = tuple([there.get(name) for name in ("table", "lengths", "starts", "k_scale", "v_scale")])
            self.run(made["out"], made["lse"], there.get("sinks"), [there[name] for name in "qkv"], pages)
            return tuple(made.values())

        return run

    def _time(self, given: tuple[Any, ...], blocks: DecodeBlocks) -> search.Timed:
        out, lse = given[:2]
        search.emptied(out, lse)
        return self._make(blocks).time(*given), (out, lse)


def explained(question: Question | None, divide: Divide) -> str:
    """How calls are divided, and why."""
    tiles: Tiles[DecodeBlocks, DecodeLaunches] = Tiles(question, functools.partial(_divided, divide))
    return tiles.explained(KERNEL, "by rule")


def _divided(divide: Divide, config: Config | None) -> DecodeBlocks:
    return divide() if config is None else divide(change_of(config))


def change_of(config: Config) -> Change:
    """The change that a configuration stands for.

    >>> change_of(Config({"BLOCK_TIMES": 2, "STAGES_MORE": 0, "WARPS_TIMES": 1}))
    Change(block=2, stages=0, warps=1)
    """
    said = config.constexprs
    return Change(said["BLOCK_TIMES"], said["STAGES_MORE"], said["WARPS_TIMES"])


def question_of(shape: DecodeShape, gpu: Device, device: torch.device, compute: torch.dtype) -> Question | None:
    """Which change of the rules is the fastest for calls of a shape; None on GPUs that the rules were made on."""
    machine = search.machine_for(device)
    if machine is None:
        return None
    name = search.class_of(search.name_of(compute), plan.class_of(shape, plan.blocks_of(shape, gpu)))
    return search.question(KERNEL, SOURCES, _CONFIGS, device, machine, name)
