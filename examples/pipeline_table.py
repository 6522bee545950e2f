"""Times and errors of one computation in eager mode, by Inductor and by opkit: the table that the pipelines print.

The first variant is the one that the others are compared with; all are timed in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from opkit.bench.accuracy import floating_leaves, worst_error
from opkit.bench.timing import in_turn, timed


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant.

    Attributes:
        name: of the variant.
        first: seconds of its first call, which compiles.
        seconds: the median of later calls.
        ratio: how many times as fast as the first variant, the median over rounds.
        error: the largest relative error of its tensors, in the Euclidean norm, against the exact result; None without one.
    """

    name: str
    first: float
    seconds: float
    ratio: float
    error: float | None


def compiled(function: Callable[..., Any], backend: str, fullgraph: bool = False) -> Callable[..., Any]:
    """Return what ``torch.compile`` makes of a function or module; "inductor-graphs" is Inductor with CUDA graphs."""
    if backend == "inductor-graphs":
        return torch.compile(function, mode="reduce-overhead", fullgraph=fullgraph)
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


def measured(variants: Mapping[str, Callable[[], Any]], device: str, exact: Any = None) -> list[Row]:
    """Call each variant once, compare its result with ``exact``, then time all in turn.

    Args:
        variants: functions without arguments, by name; each returns a tensor, or tensors in containers.
        device: "cpu" or "cuda".
        exact: the same result in float64, or in another dtype that is exact enough.

    >>> import torch
    >>> x = torch.randn(1000)
    >>> rows = measured({"eager": x.exp, "log": lambda: x.exp().log().exp()}, "cpu", x.double().exp())
    >>> [row.name for row in rows if row.error < 1e-6]
    ['eager', 'log']
    """
    first: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    for name, call in variants.items():
        result, first[name] = timed(call, device)
        errors[name] = None if exact is None else worst_error(floating_leaves(result), floating_leaves(exact))
    for call in variants.values():
        call()  # code may be compiled again at the second call, for sizes that vary
    found = in_turn([*variants.values()], device)
    return [
        Row(name, first[name], each.compiled, each.ratio, errors[name])
        for name, each in zip(variants, found, strict=True)
    ]


def table(rows: Sequence[Row], work: float | None = None, unit: str = "tokens") -> str:
    """Return the rows as a table in Markdown; ``work`` is how many units one call does."""
    headings = ["variant", "first call, s", "later, ms", f"{unit}/s", "times as fast", "error"]
    cells = [
        [
            row.name,
            f"{row.first:.2f}",
            f"{1e3 * row.seconds:.4g}",
            f"{work / row.seconds:,.0f}" if work else "",
            f"{row.ratio:.2f}",
            "" if row.error is None else f"{row.error:.1e}",
        ]
        for row in rows
    ]
    shown = [i for i in range(len(headings)) if i == 0 or any(row[i] for row in cells)]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *cells]
    return "\n".join("| " + " | ".join(line[i] for i in shown) + " |" for line in lines)


def parser(
    description: str | None,
    sizes: Iterable[str],
    backends: str = "inductor,opkit",
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
) -> argparse.ArgumentParser:
    """Return a parser of the options that pipelines share; ``backends`` is a default, empty where there is no such option."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", choices=sizes, default="tiny")
    made.add_argument("--dtype", choices=dtypes, default="float32", help="of the model, or of autocast in training")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--threads", type=int, help="of torch on the CPU")
    if backends:
        made.add_argument("--backends", default=backends, help="names, separated by commas")
    return made


def parsed(command: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, after setting the number of torch's threads."""
    options = command.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return options
