"""Tiles by search: where no table is shipped for a GPU, the fastest candidates are found by timing a call, and kept.

It is the tuning of Triton kernels that have ``configs=`` (:mod:`opkit.kernels.tuning.tuning`), asked before a launch is
prepared, since lists of tiles and constants follow from the tiles. A search is of a class of calls, which lengths and batches
do not make (but for calls of few queries), and of a GPU model, a release of Triton and the kernel's source.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from opkit import config
from opkit.attn.masks import program
from opkit.errors import CompileError
from opkit.kernels.tuning import records, skipping, tuning
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.observation import Choice, add_launcher
from opkit.kernels.tuning.record_format import Identity, bucket_of
from opkit.op import torch_private as private
from opkit.op.dispatch import selection
from opkit.op.trace.contract_hash import contract_hash
from opkit.op.triton.launch import is_recorded
from opkit.op.triton.variants import Machine, machine_of

OPERATOR = "opkit::attention"  #: under which results are recorded, those of gradients too
SHIPPED = ("sm_90",)  #: the architectures that tables and rules were made on: nothing is searched for there
_HERE = Path(__file__).parent
_REASONS = {
    "tuned": "the fastest by search",
    "record": "the fastest by search",
    "only": "the only ones that have room",
    "rank": "chosen by another process of the job",
    "nearest": "not searched for yet, so the fastest of similar calls",
    "first": "not searched for yet, so by rule",
}

_APART = 0.05  # of the largest number: what rounding may make of results, in bfloat16 and of gradients too

Timed = tuple[float, Sequence[Tensor]]  #: milliseconds, and what was computed
B = TypeVar("B")
L = TypeVar("L")
_DTYPES, _HEAD_SIZES = ("bf16", "fp16"), (64, 128, 256)
_CAUSAL: tuple[list[int], ...] = ([], [program.BAND, -program.UNLIMITED, 0])
_EXAMPLE_SIZES, _BIAS_SIZES, _DECODED_SIZES = (2, 16, 4096), (1, 16, 2048), (8, 8, 8192)  # batch, heads, sequence
_GROUP = 4  # query heads to one of keys, where queries are decoded


def machine_for(device: torch.device) -> Machine | None:
    """Return the machine of a GPU that is to be searched on; None of others, and of what is no GPU."""
    machine = machine_of(device.type)
    return None if machine is None or machine.target(number_of(device)) in SHIPPED else machine


def number_of(device: torch.device) -> int:
    """Return the number of a GPU, that of the current one where none is said."""
    return torch.cuda.current_device() if device.index is None and device.type == "cuda" else device.index or 0


@functools.cache
def identity(kernel: str, sources: tuple[str, ...]) -> Identity:
    """Return a kernel as its results are recorded; the files are in this folder."""
    return Identity(OPERATOR, kernel, contract_hash((name, (_HERE / name).read_bytes()) for name in sources))


class TileSearch(NamedTuple):
    """Which configuration is the fastest for a class of calls on a GPU.

    Attributes:
        identity: of the kernel.
        configs: the candidates, first what runs where nothing is known.
        model: the GPU's name.
        bucket: the class.
    """

    identity: Identity
    configs: tuple[Config, ...]
    model: str
    bucket: str

    def decide(self, measure: tuning.Measure) -> Choice:
        """Return the answer, from what is known or by measuring now; not while launches are recorded, traced or captured.

        Raises:
            KernelError: no candidate can run.
        """
        if is_recorded() or private.dispatch_modes():
            return self.known()
        return tuning.decide(*self, measure, selection.capturing(), _folders())

    def known(self) -> Choice:
        """Return the answer without measuring."""
        return tuning.known(*self, _folders())


def tile_search(
    kernel: str,
    sources: tuple[str, ...],
    configs: Sequence[Config],
    device: torch.device,
    machine: Machine,
    bucket: str,
) -> TileSearch:
    """Return the tile_search of a kernel's tiles on a device."""
    return TileSearch(identity(kernel, sources), tuple(configs), machine.model(number_of(device)), bucket)


def class_of(dtype: str, sizes: Mapping[str, int]) -> str:
    """Return a class of calls, named as buckets of other kernels are.

    >>> class_of("bfloat16", {"d": 128, "e": 128, "extras": 0, "long": 1, "mask": 1, "pair": 0})
    'bfloat16 | d=128 e=128 extras=0 long=1 mask=1 pair=0'
    """
    return bucket_of(sizes, [dtype])


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype in the name of a class: float32 has two, by how products are rounded now.

    >>> name_of(torch.bfloat16)
    'bfloat16'
    """
    return "tf32" if dtype == torch.float32 and rounded() else str(dtype).removeprefix("torch.")


def rounded() -> bool:
    """Return whether torch's settings say that products of float32 on GPUs may be rounded to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _folders() -> tuple[Path, ...]:
    """Return where opkit's own package may have results."""
    return records.packaged(__name__)


class Tiles(Generic[B, L]):
    """What launches calls of one kind, made for the tiles that a rule or a search has for them.

    Args:
        tile_search: None where the rule decides.
        tiles: those of a configuration; of None, the rule's.

    Attributes:
        chosen: tiles and what launches with them; None while that is to be asked.
    """

    def __init__(self, tile_search: TileSearch | None, tiles: Callable[[Config | None], B]) -> None:
        self._search, self._tiles = tile_search, tiles
        self._made: dict[B, L] = {}
        self.chosen: tuple[B, L] | None = None
        if tile_search is not None:
            add_launcher(self)

    def clear(self) -> None:
        """Ask again at the next call."""
        self.chosen = None

    def choose(self, make: Callable[[B], L], time: Callable[[B], Timed]) -> tuple[B, L]:
        """Return the tiles for a call, and what launches with them.

        Args:
            make: makes it.
            time: of some tiles, how long the call takes, and what it computes; asked where a search is made.
        """
        choice = None if self._search is None else self._search.decide(self._measure(time))
        size = self._tiles(None if choice is None else choice.config)
        launch = self._made[size] = self._made.get(size) or make(size)
        if choice is None or choice.settled or not config.get().tune:
            self.chosen, self._made = (size, launch), {}
        return size, launch

    def explained(self, kernel: str, by_rule: str) -> str:
        """Return which tiles a call would have as things are, and why: by search, or ``by_rule``."""
        choice = None if self._search is None else self._search.known()
        size: Any = self._tiles(None if choice is None else choice.config)
        label = ", ".join(f"{name}={value}" for name, value in size._asdict().items())
        reason = by_rule if choice is None else _reason(choice)
        return f"{kernel}: {label} ({reason})"

    def _measure(self, time: Callable[[B], Timed]) -> tuning.Measure:
        took: dict[B, float] = {}
        expected: list[Tensor] = []

        def measure(tried: Config) -> float:
            size = self._tiles(tried)
            if size not in took:  # tiles that are cut to a call's sizes may come out alike
                took[size] = _timed(size, time, expected)
            return took[size]

        return measure


def _reason(choice: Choice) -> str:
    took = "" if choice.ms is None else f" in {choice.ms:.4g} ms"
    return f"{_REASONS[choice.source]}{took}, for {choice.bucket} on {choice.device}"


def _timed(size: B, time: Callable[[B], Timed], expected: list[Tensor]) -> float:
    """Return the milliseconds of a candidate that compiles, and computes what the first one did: nobody promised either."""
    try:
        ms, results = time(size)
    except CompileError as error:
        raise skipping.Unfit(f"it does not compile: {error}") from error
    if not expected:
        expected += [each.clone() for each in results]
    if not all(_alike(mine, other) for mine, other in zip(results, expected, strict=True)):
        raise skipping.Unfit("it computes something else than the first candidate")
    return ms


def _alike(x: Tensor, y: Tensor) -> bool:
    """Return whether they differ in rounding alone."""
    largest = torch.where(y.isfinite(), y, 0).abs().amax().item() if y.numel() else 0.0
    return bool(torch.isclose(x, y, rtol=_APART, atol=_APART * largest, equal_nan=True).all())


def emptied(*tensors: Tensor) -> None:
    """Fill with NaN what a candidate is to write, so that it shows where it does not."""
    for each in tensors:
        each.fill_(torch.nan)


def _tensor(dtype: str, *sizes: int) -> str:
    return f"{dtype}[{', '.join(map(str, sizes))}]"


def _example_numbers(d: int, mask: list[int]) -> dict[str, Any]:
    """Return the arguments that are not tensors."""
    return {"mask_tensors": [], "bias_tensors": [], "mask": mask, "bias": [], "scale": d**-0.5, "softcap": 0.0}


def _forward_example(q: str, k: str, d: int, mask: list[int]) -> dict[str, Any]:
    rest = {"sinks": None, "seed": None, "dropout_p": 0.0, "out_is_bshd": False}
    return {"q": q, "k": k, "v": k, **_example_numbers(d, mask), **rest}


def forward_examples() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention``, with as many queries as keys."""
    for dtype, d, mask in itertools.product(_DTYPES, _HEAD_SIZES, _CAUSAL):
        x = _tensor(dtype, *_EXAMPLE_SIZES, d)
        yield _forward_example(x, x, d, mask)


def decoding_examples() -> Iterator[dict[str, Any]]:
    """Of the same, with one query."""
    for dtype, d in itertools.product(_DTYPES, _HEAD_SIZES):
        batch, heads, keys = _DECODED_SIZES
        yield _forward_example(
            _tensor(dtype, batch, _GROUP * heads, 1, d), _tensor(dtype, batch, heads, keys, d), d, []
        )


def backward_examples() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention_backward``."""
    for dtype, d, mask in itertools.product(_DTYPES, _HEAD_SIZES, _CAUSAL):
        tensors = dict.fromkeys(("gradient", "q", "k", "v", "out"), _tensor(dtype, *_EXAMPLE_SIZES, d))
        yield {
            **tensors,
            "of_lse": None,
            "lse": _tensor("fp32", *_EXAMPLE_SIZES),
            **_example_numbers(d, mask),
            "out_is_bshd": False,
        }


def bias_examples() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention_bias_backward``: of one dense bias."""
    batch, heads, queries = _BIAS_SIZES
    for dtype, d in itertools.product(_DTYPES, _HEAD_SIZES[:2]):
        tensors = dict.fromkeys(("gradient", "q", "k", "v"), _tensor(dtype, *_BIAS_SIZES, d))
        sums = dict.fromkeys(("delta", "lse"), _tensor("fp32", *_BIAS_SIZES))
        bias = {"bias_tensors": [_tensor(dtype, batch, heads, queries, queries)], "bias": [program.BIAS_DENSE, 0]}
        yield {**tensors, **sums, **_example_numbers(d, []), **bias, "wanted": [0]}


def float8_examples() -> Iterator[dict[str, Any]]:
    """Of ``opkit::attention_float8``."""
    for d, mask in itertools.product(_HEAD_SIZES[:2], _CAUSAL):
        tensors = dict.fromkeys(("q", "k", "v"), _tensor("fp8e4m3", *_EXAMPLE_SIZES, d))
        rest = {"descales": [_tensor("fp32", *_EXAMPLE_SIZES[:2])] * 3, "sinks": None, "out_is_bshd": False}
        yield {**tensors, **_example_numbers(d, mask), **rest}
